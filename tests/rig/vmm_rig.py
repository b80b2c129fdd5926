"""Cloud Hypervisor by its API: the program (the stand-in, or the real one where it and KVM are), calls on its socket byte by byte, its events,
and bodies held against the description of its API."""
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess

import wait

TOP = pathlib.Path(__file__).resolve().parents[2]
PORT = 1024
# What QEMU needs in a jail; the stand-in itself needs nothing.
QEMU_FILES = ("/usr/bin/qemu-system-x86_64", "/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/lib64", "/usr/share/qemu", "/usr/share/seabios",
              "/etc/ld.so.cache")
BESIDE = ("private-memory.so", "faults", "log.sock")
OVERHEAD_MIB = 384


def copied(folder):
    """A copy of the stand-in with what it finds beside itself."""
    folder = pathlib.Path(folder)
    shutil.copy(stand_in().parent / "private-memory.so", folder)
    return pathlib.Path(shutil.copy(stand_in(), folder / "cloud-hypervisor"))


def stand_in():
    return pathlib.Path(os.environ.get("EPHEMERAL_BIN", str(TOP / "build" / "asan" / "bin"))).parent / "tests" / "rig" / "cloud-hypervisor"


def kvm():
    """KVM that boots an ordinary guest: the node, and a CPU that says it can."""
    flags = re.search(r"^flags\s*:(.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return os.access("/dev/kvm", os.R_OK | os.W_OK) and bool(flags) and bool({"vmx", "svm"} & set(flags[1].split()))


def real():
    """The real program, where it can run; else None."""
    found = os.environ.get("EPHEMERAL_CLOUD_HYPERVISOR") or shutil.which("cloud-hypervisor")
    return pathlib.Path(found) if found and kvm() else None


def node_config(folder=None, faults=None):
    """Configuration of a node that runs its VMs with Cloud Hypervisor. With a folder: a copy of the stand-in of its own there, and what the
    faults say; requests can be read from Log(folder)."""
    program = real()
    if program and not folder:
        return {"vmm": "cloud-hypervisor", "cloud_hypervisor": str(program)}
    program, files = stand_in(), [name for name in QEMU_FILES if os.path.exists(name)]
    if folder:
        program = copied(folder)
        (pathlib.Path(folder) / "faults").write_text("".join(f"{name} = {value}\n" for name, value in (faults or {}).items()))
    files += [str(program.parent / name) for name in BESIDE if (program.parent / name).exists()]
    return {"vmm": "cloud-hypervisor", "cloud_hypervisor": str(program), "vmm_files": ",".join(files), "vmm_overhead_mib": OVERHEAD_MIB}


def own_program(folder, vmm=None):
    """(path, configuration) of a copy of the VMM's program for one node alone, which a test may take away."""
    if (vmm or os.environ.get("EPHEMERAL_VMM")) == "cloud-hypervisor":
        if not real():
            return pathlib.Path(folder) / "cloud-hypervisor", node_config(folder)
        path = pathlib.Path(shutil.copy(real(), pathlib.Path(folder) / "cloud-hypervisor"))
        return path, {"vmm": "cloud-hypervisor", "cloud_hypervisor": str(path)}
    path = pathlib.Path(shutil.copy(shutil.which("qemu-system-x86_64"), folder))
    return path, {"qemu": str(path)}


class Log:
    """The copy of every request that a stand-in in this folder gets."""

    def __init__(self, folder):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self.socket.bind(f"{folder}/log.sock")
        os.chmod(f"{folder}/log.sock", 0o666)
        self.socket.setblocking(False)

    def requests(self):
        """(method, path, body) of those that came since the last call."""
        found = []
        while True:
            try:
                data = self.socket.recv(1 << 18)
            except BlockingIOError:
                return found
            line, _, body = data.partition(b"\n")
            method, path = line.decode().split(" ", 1)
            found.append((method, path, body))

    def close(self):
        self.socket.close()


class Answer:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self):
        return json.loads(self.body)

    def __repr__(self):
        return f"{self.status} {self.body[:500]!r}"


class Connection:
    """One connection to the API; requests as bytes, so that bad ones can be sent too."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(path)
        self.bytes = b""

    def send(self, data):
        self.socket.sendall(data)

    def more(self):
        data = self.socket.recv(65536)
        if not data:
            raise EOFError(f"connection closed after {self.bytes!r}")
        self.bytes += data

    def answer(self):
        while b"\r\n\r\n" not in self.bytes:
            self.more()
        head, _, self.bytes = self.bytes.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        version, status, *_ = first.split(" ")
        assert version == "HTTP/1.1", first
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", "0"))
        while len(self.bytes) < length:
            self.more()
        body, self.bytes = self.bytes[:length], self.bytes[length:]
        return Answer(int(status), headers, body)

    def call(self, method, name, body=None):
        self.send(request(method, name, body))
        return self.answer()


def request(method, name, body=None):
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    head = f"{method} /api/v1/{name} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n"
    if data:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"\r\n" + data


class Vmm:
    """One process with a folder of its own."""

    def __init__(self, program, folder, *flags, faults=None, uid=None, inherit=()):
        """uid: as that user, who may write to no file (as in a jail). inherit: descriptors that it gets under their numbers."""
        self.folder = pathlib.Path(folder)
        self.is_real = program == real()
        if (faults or uid) and not self.is_real:
            program = copied(self.folder)
            (self.folder / "faults").write_text("".join(f"{name} = {value}\n" for name, value in (faults or {}).items()))
        self.api, self.vsock = str(self.folder / "api"), str(self.folder / "vsock")
        self.host = socket.socket(socket.AF_UNIX)
        self.host.bind(f"{self.vsock}_{PORT}")
        self.host.listen(8)
        self.host.settimeout(60)
        self._events, write = os.pipe()
        os.set_blocking(self._events, False)
        self._text = ""
        self.log = open(self.folder / "log", "wb")
        command, user = [program, "--api-socket", self.api, "--event-monitor", f"fd={write}", *flags], {}
        if uid:
            command, user = ["prlimit", "--fsize=0:0", *command], {"user": uid, "group": uid, "extra_groups": []}
            os.chown(self.folder, uid, uid)
            os.chmod(f"{self.vsock}_{PORT}", 0o666)
        self.process = subprocess.Popen(command, pass_fds=[write, *inherit], stdout=subprocess.DEVNULL if uid else self.log,
                                        stderr=subprocess.DEVNULL if uid else self.log, stdin=subprocess.DEVNULL, **user)
        os.close(write)
        self.connection = wait.until(self._connect, 20, "the API's socket")

    def _connect(self):
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            return Connection(self.api)
        except (FileNotFoundError, ConnectionRefusedError):
            return None

    def get(self, name):
        return self.connection.call("GET", name)

    def put(self, name, body=None):
        return self.connection.call("PUT", name, body)

    def raw_events(self):
        try:
            while data := os.read(self._events, 65536):
                self._text += data.decode(errors="replace")
        except BlockingIOError:
            pass
        return self._text

    def events(self):
        """`source/event` of every record so far; each is JSON, and a blank line ends it."""
        *records, rest = self.raw_events().split("\n\n")
        assert rest == "", f"a record is cut: {rest!r}"
        found = []
        for record in map(json.loads, records):
            assert set(record) == {"timestamp", "source", "event", "properties"}, record
            assert set(record["timestamp"]) == {"secs", "nanos"}, record
            assert record["properties"] is None or all(isinstance(v, str) for v in record["properties"].values()), record
            found.append(f"{record['source']}/{record['event']}")
        return found

    def guest(self):
        """Waits for the guest's connection."""
        connection, _ = self.host.accept()
        return connection

    def config(self, image=None, **changes):
        """A configuration such as ours; without an image one that is created and not booted."""
        image = image or self.folder
        config = {
            "cpus": {"boot_vcpus": 1, "max_vcpus": 1, "nested": False},
            "memory": {"size": 256 << 20, "thp": False},
            "payload": {"kernel": f"{image}/vmlinux", "initramfs": f"{image}/initramfs.cpio",
                        "cmdline": f"quiet console=hvc0 panic=-1 reboot=k random.trust_cpu=on mitigations=off cryptomgr.notests eph.bus=pci eph.channel=vsock:{PORT}"},
            "disks": [{"id": "root", "path": f"{image}/rootfs.sqfs", "readonly": True, "image_type": "Raw"}],
            "vsock": {"id": "vsock0", "cid": 3, "socket": self.vsock},
            "rng": {"src": "/dev/urandom"},
            "serial": {"mode": "Null"},
            "console": {"mode": "File", "file": str(self.folder / "console")},
        }
        return {**config, **changes}

    def ended(self, seconds=20):
        return self.process.wait(seconds)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)
        self.log.close()
        self.host.close()
        os.close(self._events)


# --- description of the API ----------------------------------------------------------------------------------------------------

def description():
    """The published description of the API, where this machine has a copy; else None."""
    import yaml  # pylint: disable=import-outside-toplevel
    path = pathlib.Path(os.environ.get("EPHEMERAL_SHARED", "/nowhere")) / "reference" / "cloud-hypervisor.yaml"
    return yaml.safe_load(path.read_text()) if path.exists() else None


def schema_of(spec, name):
    return spec["components"]["schemas"][name]


TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": (int, float)}


def breaches(spec, schema, value, at="", closed=True):
    """What of the value the schema does not allow. closed: fields that the description does not name count too."""
    if "$ref" in schema:
        return breaches(spec, schema_of(spec, schema["$ref"].rsplit("/", 1)[1]), value, at, closed)
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or kind == "integer" and isinstance(value, bool)):
        return [f"{at}: {value!r} is no {kind}"]
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{at}: {value!r} is not of {schema['enum']}")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{at}: {value} is below {schema['minimum']}")
    for i, entry in enumerate(value if kind == "array" else ()):
        found += breaches(spec, schema["items"], entry, f"{at}/{i}", closed)
    if kind == "object":
        found += [f"{at}: {name} is missing" for name in schema.get("required", ()) if name not in value]
        for name, inner in value.items():
            known = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if known:
                found += breaches(spec, known, inner, f"{at}/{name}", closed)
            elif closed:
                found.append(f"{at}: {name} is not a field")
    return found


def body_breaches(spec, method, path, body):
    """Of a whole request."""
    call = spec["paths"].get(path.removeprefix("/api/v1"), {}).get(method.lower())
    if not call:
        return [f"{method} {path} is no call"]
    content = call.get("requestBody", {}).get("content", {}).get("application/json")
    if not content:
        return [f"{method} {path} takes no body"] if body else []
    return breaches(spec, content["schema"], json.loads(body))
