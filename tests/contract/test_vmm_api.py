"""Cloud Hypervisor's contract without a guest: flags, HTTP on the unix socket, what a configuration may hold and what is filled in, states, and what
a boot refuses. A failed call leaves the process alive."""
import fcntl
import json
import os
import signal
import struct
import subprocess

import pytest
import vmm_rig
import wait

PROGRAMS = {"stand-in": vmm_rig.stand_in(), **({"real": vmm_rig.real()} if vmm_rig.real() else {})}


@pytest.fixture(params=PROGRAMS)
def program(request):
    return PROGRAMS[request.param]


@pytest.fixture
def vmm(program, tmp_path):
    made = vmm_rig.Vmm(program, tmp_path)
    yield made
    made.close()


@pytest.fixture
def strict(tmp_path):
    """The stand-in alone: what it refuses and the real one ignores."""
    made = vmm_rig.Vmm(PROGRAMS["stand-in"], tmp_path)
    yield made
    made.close()


def run(program, *flags):
    return subprocess.run([program, *flags], capture_output=True, text=True, timeout=20, check=False)


def test_version_and_flags(program, tmp_path):
    version = run(program, "--version")
    assert version.returncode == 0 and version.stdout.startswith("cloud-hypervisor v53."), version
    api = f"path={tmp_path}/api"
    for flags in (["--no-such-flag"], ["--api-socket", api, "--landlock"], ["--api-socket", api, "--seccomp", "perhaps"], ["--api-socket", api, "stray"],
                  ["--api-socket", api, "--event-monitor", "nonsense=1"]):
        assert run(program, *flags).returncode not in (0, None), flags
    for flags in (["--no-such-flag"], ["--api-socket", api, "--landlock"], ["--api-socket", api, "stray"]):
        assert run(program, *flags).returncode == 2, flags


def test_inherited_socket(program, tmp_path):
    """--api-socket fd=N is a listening socket; there is no path and no lock."""
    listener = vmm_rig.socket.socket(vmm_rig.socket.AF_UNIX)
    listener.bind(str(tmp_path / "api"))
    listener.listen(8)
    process = subprocess.Popen([program, "--api-socket", f"fd={listener.fileno()}", "--seccomp=true", "-v"], pass_fds=[listener.fileno()], stderr=subprocess.DEVNULL,
                               stdin=subprocess.DEVNULL)
    try:
        connection = vmm_rig.Connection(str(tmp_path / "api"))
        assert connection.call("GET", "vmm.ping").status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert os.listdir(tmp_path) == ["api"]
    finally:
        process.kill()
        process.wait()
        listener.close()


def test_socket_path_and_lock(vmm, program):
    """A second process at the same path is refused; a path that a killed one left is taken over."""
    second = run(program, "--api-socket", vmm.api)
    assert second.returncode == 1, second
    vmm.process.kill()
    vmm.process.wait(20)
    assert os.path.exists(vmm.api) and os.path.exists(vmm.api + ".lock")
    third = subprocess.Popen([program, "--api-socket", vmm.api], stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    try:
        vmm.process = third
        connection = wait.until(vmm._connect, 20, "the taken-over socket")
        assert connection.call("PUT", "vmm.shutdown").status == 200
        assert third.wait(20) == 0 and not os.path.exists(vmm.api)
    finally:
        third.kill()


def test_ping_and_shutdown(vmm):
    ping = vmm.get("vmm.ping")
    assert ping.status == 200 and ping.headers["content-type"] == "application/json"
    assert ping.json["build_version"].startswith("v53.") and ping.json["version"] and ping.json["pid"] > 0
    # 200, although its description says 204.
    assert vmm.put("vmm.shutdown").status == 200
    assert vmm.ended() == 0
    assert vmm.events()[0] == "vmm/starting"
    assert not os.path.exists(vmm.api)


def test_http(vmm):
    for method, name, body, status in (("PUT", "vmm.ping", None, 400), ("GET", "vm.create", None, 400), ("GET", "vm.no-such-call", None, 404), ("PUT", "", None, 404),
                                       ("PUT", "vm.create", b"{", 400), ("PUT", "vm.create", b"[]", 400), ("PUT", "vm.create", b"{} trailing", 400)):
        answer = vmm.connection.call(method, name, body)
        assert answer.status == status, (method, name, body, answer)
        assert isinstance(answer.json, list) and all(isinstance(text, str) for text in answer.json), answer
    # Several at once on one connection, in order; one in pieces; a second connection beside the first.
    vmm.connection.send(vmm_rig.request("GET", "vmm.ping") + vmm_rig.request("GET", "vm.info") + vmm_rig.request("GET", "vmm.ping"))
    assert [vmm.connection.answer().status for _ in range(3)] == [200, 404, 200]
    whole = vmm_rig.request("PUT", "vm.create", b"{}")
    for i, byte in enumerate(whole):
        vmm.connection.send(bytes([byte]))
        if i == len(whole) // 2:
            other = vmm_rig.Connection(vmm.api)
            assert other.call("GET", "vmm.ping").status == 200
    assert vmm.connection.answer().status == 400


def test_http_that_is_refused(vmm):
    """Bad bytes are answered 400; the process goes on."""
    for data in (b"GET /api/v1/vmm.ping\r\n\r\n", b"BREW /api/v1/vmm.ping HTTP/1.1\r\n\r\n", b"GET /api/v1/vmm.ping HTTP/3.0\r\n\r\n",
                 b"PUT /api/v1/vm.create HTTP/1.1\r\nContent-Length: many\r\n\r\n", b"PUT /api/v1/vm.create HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"):
        connection = vmm_rig.Connection(vmm.api)
        connection.send(data)
        assert connection.answer().status == 400, data
    assert vmm.get("vmm.ping").status == 200


def test_body_limit(vmm):
    """51,200 bytes are the most, in v53.0."""
    small = json.dumps({"payload": {"cmdline": ""}})
    fits = json.dumps({"payload": {"cmdline": "x" * (51200 - len(small))}}).encode()
    assert len(fits) == 51200
    config = vmm.connection.call("PUT", "vm.create", fits.replace(b'"cmdline"', b'"cmdlinx"'))
    assert config.status in (204, 400)  # read whole: refused for its field, or taken by who ignores the field
    connection = vmm_rig.Connection(vmm.api)
    connection.send(vmm_rig.request("PUT", "vm.create", fits + b" "))
    assert connection.answer().status == 400
    assert vmm.get("vmm.ping").status == 200


DEFAULTS = {
    "cpus": {"boot_vcpus": 1, "max_vcpus": 1, "nested": True, "core_scheduling": "Vm", "max_phys_bits": 46},
    "memory": {"size": 512 << 20, "shared": False, "hugepages": False, "mergeable": False, "prefault": False, "reserve": False, "thp": True, "zones": None},
    "rng": {"src": "/dev/urandom"}, "serial": {"mode": "Null"}, "balloon": None, "disks": None, "net": None, "vsock": None, "watchdog": False, "pvpanic": False,
    "landlock_enable": False,
}


def subset(wanted, found, at=""):
    if isinstance(wanted, dict):
        return [line for name, value in wanted.items() for line in subset(value, (found or {}).get(name), f"{at}/{name}")]
    return [] if wanted == found else [f"{at}: {found!r} is not {wanted!r}"]


def test_defaults(vmm):
    assert vmm.put("vm.create", {"payload": {"kernel": "/nowhere/vmlinux"}, "console": {"mode": "Null"}}).status == 204
    info = vmm.get("vm.info").json
    assert info["state"] == "Created" and not subset(DEFAULTS, info["config"]), subset(DEFAULTS, info["config"])


def test_what_was_asked_is_read_back(vmm):
    config = vmm.config(balloon={"size": 0, "deflate_on_oom": True, "free_page_reporting": True}, pvpanic=True)
    config["disks"][0]["rate_limiter_config"] = {"bandwidth": {"size": 104857600, "one_time_burst": 0, "refill_time": 1000},
                                                 "ops": {"size": 5000, "refill_time": 1000}}
    assert vmm.put("vm.create", config).status == 204
    found = vmm.get("vm.info").json["config"]
    disks = subset(dict(enumerate(config.pop("disks"))), dict(enumerate(found["disks"])))
    assert not disks + subset(config, found), disks + subset(config, found)


def test_types_and_bounds(vmm):
    """400, and no VM: what is no configuration by its shape."""
    config = vmm.config()
    for section, name, value in (("cpus", "boot_vcpus", "1"), ("cpus", "boot_vcpus", -1), ("cpus", "nested", 1), ("cpus", "core_scheduling", "vm"), ("memory", "size", "256M"),
                                 ("memory", "size", 1.5), ("vsock", "cid", 1 << 32), ("vsock", "socket", None), ("console", "mode", "file"), ("payload", "cmdline", 7)):
        answer = vmm.put("vm.create", {**config, section: {**config[section], name: value}})
        assert answer.status == 400, (section, name, value, answer)
    for section, name in (("cpus", "boot_vcpus"), ("cpus", "max_vcpus"), ("memory", "size"), ("vsock", "cid"), ("vsock", "socket"), ("rng", "src"), ("console", "mode")):
        answer = vmm.put("vm.create", {**config, section: {k: v for k, v in config[section].items() if k != name}})
        assert answer.status == 400, (section, name, answer)
    assert vmm.put("vm.create", {**config, "payload": None}).status == 400
    assert vmm.get("vm.info").status == 404


def test_unknown_fields(strict):
    """The real one ignores them, so that a typo disables something without an error. The stand-in does not."""
    config = strict.config()
    for changed in ({**config, "landlock_enabled": True}, {**config, "cpus": {**config["cpus"], "Nested": False}}, {**config, "disks": [{**config["disks"][0], "read_only": True}]},
                    {**config, "net": [{"tap": "tap0"}]}, {**config, "devices": [{"path": "/sys/bus/pci"}]}):
        assert strict.put("vm.create", changed).status == 400, changed
    for mode in ("Tty", "Pty", "Socket"):
        assert strict.put("vm.create", {**config, "console": {"mode": mode}}).status == 500
    assert strict.put("vm.create", config).status == 204


def test_states(vmm):
    """Calls in the wrong state: 404 when there is no VM for boot and info, 500 for all else."""
    assert vmm.put("vm.boot").status == 404 and vmm.get("vm.info").status == 404
    for name in ("vm.pause", "vm.resume", "vm.shutdown", "vm.reboot"):
        assert vmm.put(name).status in (404, 500), name
    assert vmm.put("vm.create", vmm.config()).status == 204
    assert vmm.put("vm.create", vmm.config()).status == 500
    for name in ("vm.pause", "vm.resume", "vm.shutdown"):
        assert vmm.put(name).status in (404, 500), name
    (vmm.folder / "snap").mkdir()
    assert vmm.put("vm.snapshot", {"destination_url": f"file://{vmm.folder}/snap"}).status in (404, 500)
    assert vmm.put("vm.restore", {"source_url": f"file://{vmm.folder}/snap"}).status == 500
    assert vmm.get("vm.info").json["state"] == "Created"
    assert vmm.put("vm.delete").status == 204 and vmm.get("vm.info").status == 404
    assert vmm.put("vm.delete").status == 204
    assert vmm.put("vm.restore", {"source_url": f"file://{vmm.folder}/snap"}).status == 500
    assert vmm.put("vm.create", vmm.config()).status == 204
    assert "vm/deleted" in vmm.events()


def test_console_file_is_made_anew(vmm):
    """File::create: made or emptied when the VM is created, not when it boots."""
    console = vmm.folder / "console"
    console.write_text("old")
    assert vmm.put("vm.create", vmm.config()).status == 204
    assert console.read_text() == ""
    assert vmm.put("vm.delete").status == 204
    assert vmm.put("vm.create", vmm.config(console={"mode": "File", "file": "/nowhere/console"})).status == 500


def test_what_a_boot_refuses(vmm, image):
    """500 with the reasons; the process lives, its configuration too, and another VM can be made in it."""
    folder, good = vmm.folder, vmm.config(image)
    (folder / "text").write_text("no kernel\n" * 100)
    (folder / "small").write_bytes(b"\0" * 4096)
    payload, disk = good["payload"], good["disks"][0]
    zone = {"id": "m0", "size": 256 << 20, "file": str(folder / "small"), "shared": True}
    cases = {
        "no kernel": {"payload": {**payload, "kernel": "/nowhere/vmlinux"}},
        "no kernel in it": {"payload": {**payload, "kernel": str(folder / "text")}},
        "no initramfs": {"payload": {**payload, "initramfs": "/nowhere/initramfs"}},
        "no disk": {"disks": [{**disk, "path": "/nowhere/disk"}]},
        "more vcpus than may be": {"cpus": {"boot_vcpus": 2, "max_vcpus": 1}},
        "no vcpu": {"cpus": {"boot_vcpus": 0, "max_vcpus": 1}},
        "the host's cid": {"vsock": {**good["vsock"], "cid": 2}},
        "no directory": {"vsock": {**good["vsock"], "socket": "/nowhere/vsock"}},
        "balloon": {"balloon": {"size": 256 << 20}},
        "size beside zones": {"memory": {"size": 1 << 28, "zones": [{**zone, "file": None}]}},
        "a zone beyond its file": {"memory": {"size": 0, "zones": [zone]}},
    }
    for name, changes in cases.items():
        made = vmm.put("vm.create", {**good, **changes})
        if made.status == 204:
            answer = vmm.put("vm.boot")
            assert answer.status == 500 and len(answer.json) >= 2, (name, answer)
            assert vmm.get("vm.info").json["state"] == "Created", name
        else:
            assert made.status in (400, 500), (name, made)
        assert vmm.put("vm.delete").status == 204, name
    assert vmm.process.poll() is None and "vm/booted" not in vmm.events()


def test_files_that_stand_in_the_way(vmm, image):
    """A socket's path that is taken, and a disk that another writes to."""
    disk = vmm.folder / "disk"
    disk.write_bytes(b"\0" * (1 << 20))
    config = vmm.config(image)
    config["disks"] = [{**config["disks"][0], "path": str(disk)}]
    with open(disk, "r+b") as writer:
        fcntl.fcntl(writer, 37, struct.pack("hhqqiq", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0, 0))  # F_OFD_SETLK: held by the file, not by this process
        assert vmm.put("vm.create", config).status == 204
        assert vmm.put("vm.boot").status == 500
        assert vmm.put("vm.delete").status == 204
    (vmm.folder / "vsock").write_text("")
    assert vmm.put("vm.create", vmm.config(image)).status == 204
    assert vmm.put("vm.boot").status == 500


def test_description(strict):
    """Answers as the published description of the API has them, and every field of it is known here: taken, or refused by name."""
    spec = vmm_rig.description()
    if not spec:
        pytest.skip("there is no copy of the API's description here (EPHEMERAL_SHARED)")
    assert strict.put("vm.create", strict.config()).status == 204
    info, ping = strict.get("vm.info").json, strict.get("vmm.ping").json
    assert not vmm_rig.breaches(spec, vmm_rig.schema_of(spec, "VmmPingResponse"), ping)
    bare = json.loads(json.dumps(info), object_pairs_hook=lambda pairs: {k: v for k, v in pairs if v is not None})
    # The two that are for tests alone are not described.
    for disk in bare["config"]["disks"]:
        del disk["disable_io_uring"], disk["disable_aio"]
    assert not vmm_rig.breaches(spec, vmm_rig.schema_of(spec, "VmInfo"), bare)
    sections = {"cpus": "CpusConfig", "memory": "MemoryConfig", "payload": "PayloadConfig", "vsock": "VsockConfig", "rng": "RngConfig", "serial": "SerialConfig",
                "console": "ConsoleConfig", "balloon": "BalloonConfig", "": "VmConfig"}
    found = []
    for section, name in sections.items():
        shown = info["config"] if not section else info["config"][section]
        if shown is not None:
            found += [f"{name}: {field}" for field in vmm_rig.schema_of(spec, name)["properties"] if field not in shown]
    # After v53.0, or of machines that are not ours.
    assert set(found) <= {"VmConfig: rtc", "PayloadConfig: igvm", "PayloadConfig: host_data"}, found
