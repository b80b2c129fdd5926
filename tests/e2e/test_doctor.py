"""`noded doctor` on a good host and on hosts that each lack one thing: what fails is named with how to mend it, nothing else fails, and what
it says stands in transcripts/doctor-*.txt, where it does not depend on the machine."""
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import types

import control as control_rig
import pytest
import wait
from cli_rig import Transcripts
from room import Room

# What another machine says of these is right as well.
OF_THE_MACHINE = ("isolation", "cgroups", "vmm", "memory", "kvm", "landlock", "clock")
CHANGES = ((r"\b[0-9a-f]{12}, intact", "HASH, intact"), (r"\b3\d{5}\b", "ID"), (r"more than \d+ MiB", "more than N MiB"), (r"/run/eph-\S+", "RUN_DIR"))
ITEMS = {"config", "root", "boot id", "namespaces", "cgroups", "vmm", "isolation", "image", "memory", "kvm", "kill", "filters", "seccomp", "landlock", "processes",
         "descriptors", "sysctl", "state_dir", "run_dir", "user ids", "clock", "enrolment", "controld"}


@pytest.fixture(scope="module")
def plane(cluster, bin_dir):
    """A control plane that a test may stop, with its address kept."""
    with control_rig.Control(cluster, bin_dir) as made:
        made.keep_addresses()
        yield made


@pytest.fixture
def host(plane, bin_dir, image):
    import node as node_rig
    made = node_rig.Node(plane, bin_dir, image)
    made.write_config(state_dir=f"{made.home}/state")
    pathlib.Path(made.state_dir).mkdir(mode=0o700)
    made.log.touch()
    yield made
    made.close()


@pytest.fixture
def transcripts():
    made = Transcripts()
    yield made
    made.check()


class Doctor:
    """doctor(name, *arguments): runs it, records it, and returns the report: items by name, and its exit status."""

    def __init__(self, host, transcripts, name, temporary):
        self.host, self.transcripts, self.name, self.temporary = host, transcripts, name, temporary

    def run(self, *arguments, prefix=(), clock=None, **kwargs):
        env = dict(os.environ, ASAN_OPTIONS="detect_leaks=0:abort_on_error=1", UBSAN_OPTIONS="halt_on_error=1")
        if clock is not None:
            env["EPHEMERAL_CLOCK_FILE"] = str(clock)
        return subprocess.run([*prefix, f"{self.host.bin_dir}/noded", "doctor", "--config", str(self.host.file), *arguments], capture_output=True,
                              timeout=60, check=False, env=env, **kwargs)

    def __call__(self, name, *arguments, record=True, **kwargs):
        done = self.run(*arguments, "--json", **kwargs)
        assert done.stdout, done.stderr
        report = json.loads(done.stdout)
        assert report["ok"] == (done.returncode == 0) == all(item["state"] != "fail" for item in report["items"])
        assert all(item["mend"] for item in report["items"] if item["state"] != "ok"), "what is not good says how to mend it"
        assert done.returncode in (0, 1) and not done.stderr, done.stderr
        if record:
            text = self.run(*arguments, **kwargs)
            assert text.returncode == done.returncode and not text.stderr, text.stderr
            lines = [line for line in text.stdout.decode().splitlines() if not self.of_the_machine(line)]
            out = "\n".join(lines[:-1]) + "\n"
            for pattern, mask in CHANGES:
                out = re.sub(pattern, mask, out)
            shown = types.SimpleNamespace(stdout=out.encode(), stderr=b"", returncode=text.returncode)
            self.transcripts.add(self.name, f"noded doctor   ({name})", shown, (self.host.home, "HOME"), (self.temporary, "TMP"))
        found = {}
        for item in report["items"]:
            found.setdefault(item["item"], []).append(item)
        return found

    def of_the_machine(self, line):
        """Also the line below, that says how to mend it."""
        if line[6:].strip().startswith("mend: "):
            return self.skipped
        self.skipped = any(line[6:].startswith(name) for name in OF_THE_MACHINE)
        return self.skipped


@pytest.fixture
def doctor(host, transcripts, request, tmp_path):
    return Doctor(host, transcripts, request.node.name.replace("test_", "doctor-").replace("_", "-"), tmp_path)


def link_of(control):
    return "tls+tcp://" + control.addresses["link"].rpartition("//")[2]


def fails(report):
    """{item: found} of what fails."""
    return {name: item["found"] for name, items in report.items() for item in items if item["state"] == "fail"}


def only(report, name, *words):
    """Just this fails, and says so in these words."""
    found = fails(report)
    assert set(found) == {name}, (name, found)
    assert all(word in found[name] for word in words), found
    return found[name]


def test_a_good_host(host, doctor):
    report = doctor("a good host, before it is enrolled")
    assert not fails(report) and set(report) == ITEMS, set(report) ^ ITEMS
    assert "token" in report["enrolment"][0]["found"] and report["controld"][0]["state"] == "ok"
    assert not os.listdir(host.state_dir), "it changes nothing"
    host.start()
    report = doctor("beside a noded that works", record=False)
    assert not fails(report) and set(report) == ITEMS | {"noded"}
    assert f"process {host.process.pid} works on" in report["noded"][0]["found"] and "enrolled as node_" in report["enrolment"][0]["found"]
    assert host.process.poll() is None and host.control.node_live(host.name)


def test_wrong_use(host, doctor):
    for arguments in (["now"], ["-t"], ["--jsno"]):
        done = doctor.run(*arguments)
        assert done.returncode == 2 and not done.stdout and b"noded --help" in done.stderr, (arguments, done)
    assert subprocess.run([f"{host.bin_dir}/noded", "--json"], capture_output=True, check=False).returncode == 2


def test_a_configuration_that_is_none(host, doctor):
    host.file.write_text("max_vms = many\n")
    report = doctor("max_vms = many")
    only(report, "config", "max_vms")
    assert len(report) == 1


def program(path, text):
    """A program that answers --version, and everything else, with this; without a text it says nothing."""
    source = f'#include <stdio.h>\nint main(void) {{ puts("{text}"); return 0; }}\n' if text else "#include <unistd.h>\nint main(void) { pause(); }\n"
    subprocess.run(["cc", "-x", "c", "-", "-o", path], input=source.encode(), check=True)
    return path


def test_binaries_that_are_no_vmm(host, doctor, tmp_path):
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\nexec qemu-system-x86_64 \"$@\"\n")
    script.chmod(0o755)
    silent, old = program(tmp_path / "silent", ""), program(tmp_path / "qemu-old", "QEMU emulator version 6.2.0")
    old_other = program(tmp_path / "cloud-hypervisor-old", "cloud-hypervisor v40.0")
    for driver, key in (("qemu", "qemu"), ("cloud-hypervisor", "cloud_hypervisor")):
        for path, word in ((f"{tmp_path}/none", "No such file"), (script, "is no program"), ("/bin/true", "does not begin with"),
                           (silent, "does not begin with"), (old if key == "qemu" else old_other, "is too old")):
            said = only(doctor("", "--set", f"vmm={driver}", "--set", f"{key}={path}", record=False), "vmm", word)
            assert str(path) in said or word == "is too old", said
    host.write_config(vmm="qemu", qemu=str(old))
    assert "install" in doctor("a VMM that is too old")["vmm"][0]["mend"]


def test_an_image_that_is_altered_or_not_there(host, image, doctor, tmp_path):
    copy = tmp_path / "image"
    copy.mkdir()
    for name in ("vmlinux", "initramfs.cpio", "rootfs.sqfs"):
        (copy / name).symlink_to(f"{image}/{name}")
    shutil.copy(f"{image}/image.json", copy)
    host.write_config(image_dir=str(copy))
    assert not fails(doctor("", record=False))
    data = bytearray(pathlib.Path(image, "initramfs.cpio").read_bytes())
    data[len(data) // 2] ^= 1
    (copy / "initramfs.cpio").unlink()
    (copy / "initramfs.cpio").write_bytes(data)
    only(doctor("", record=False), "image", "initramfs.cpio is not what image.json describes")
    (copy / "initramfs.cpio").write_bytes(data[:1000])
    only(doctor("", record=False), "image", "initramfs.cpio is not what image.json describes")
    (copy / "initramfs.cpio").unlink()
    only(doctor("", record=False), "image", "initramfs.cpio", "No such file")
    (copy / "image.json").unlink()
    host.write_config(image_dir="/nonexistent")
    only(doctor("no image"), "image", "/nonexistent/image.json is not there")
    host.write_config(image_dir=None)
    report = doctor("images come from controld, and none has", record=False)
    assert not fails(report) and report["image"][0]["state"] == "warn" and "none yet" in report["image"][0]["found"]


def test_a_controld_that_is_not_there(host, plane, cluster, bin_dir, doctor):
    """Refused, silent, another one at its address, a name that nobody knows."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        host.write_config(controld=f"tls+tcp://127.0.0.1:{deaf.getsockname()[1]}")
        only(doctor("", record=False), "controld", "no answer within")
    only(doctor("controld does not run"), "controld", "no connection: Connection refused")
    with control_rig.Control(cluster, bin_dir) as other:
        host.write_config(controld=link_of(other))
        only(doctor("another controld at its address"), "controld", "is not the controld that this host knows")
    host.write_config(controld=f"tls+tcp://no-such-host.invalid:1,{link_of(plane)}")
    report = doctor("", record=False)
    assert [item["state"] for item in report["controld"]] == ["fail", "ok"]
    assert "no-such-host.invalid" in only(report, "controld")


def test_a_host_that_is_not_enrolled(host, doctor, tmp_path):
    host.write_config(join_token_file=None)
    only(doctor("no token"), "enrolment", "no join token")
    (tmp_path / "token").write_text("ephnt_nonsense\n")
    host.write_config(join_token_file=f"{tmp_path}/token")
    only(doctor("", record=False), "enrolment", "not enrolled")
    host.write_config(join_token_file=f"{tmp_path}/none")
    only(doctor("", record=False), "enrolment", "not enrolled")


def test_a_disk_that_is_full(host, doctor):
    room = Room(host.state_dir, "size=96m")
    try:
        report = doctor("", record=False)
        assert not fails(report) and report["state_dir"][0]["state"] == "warn" and "in memory" in report["state_dir"][0]["found"]
        room.fill(0)
        only(doctor("a full disk"), "state_dir", "cannot be written and synced: No space left")
        room.empty()
        room.fill(10 << 20)
        only(doctor("", record=False), "state_dir", "MiB free, at least")
    finally:
        room.close()


def test_user_ids_that_others_use(host, doctor):
    host.write_config(max_vms=2)
    others = [subprocess.Popen(["sleep", "60"], user=host.uid_base + 3 * slot + 1, group=host.uid_base, extra_groups=[]) for slot in range(2)]
    try:
        # A child has its ids only when it is past its exec.
        wait.until(lambda: all(os.readlink(f"/proc/{o.pid}/exe").endswith("sleep") for o in others), 10, "the processes")
        said = only(doctor("", record=False), "user ids", "have ids of 2 of 2 VMs")
        assert str(host.uid_base) in said
        others[1].kill()
        others[1].wait()
        report = doctor("", record=False)
        assert not fails(report) and report["user ids"][0]["state"] == "warn"
    finally:
        for process in others:
            process.kill()
            process.wait()


# What runs sees the control groups read only, in a mount namespace of its own.
READ_ONLY = ("unshare", "-m", "sh", "-c", "awk '$3 ~ /^cgroup/ { print $2 }' /proc/mounts | while read -r m; do mount -o remount,bind,ro \"$m\" || exit 9; done; exec \"$@\"", "sh")


def test_groups_that_cannot_be_made(host, doctor):
    found = fails(doctor("control groups that are read only", prefix=READ_ONLY))
    assert set(found) == {"cgroups"} and "Read-only file system" in found["cgroups"], found


def test_not_root(host, doctor, tmp_path):
    with open(f"{host.bin_dir}/noded", "rb") as program, open(host.file, "rb") as config:
        pass_on = ["--config", f"/proc/self/fd/{config.fileno()}"]
        done = subprocess.run([f"/proc/self/fd/{program.fileno()}", "doctor", *pass_on, "--json"], user=65534, group=65534, extra_groups=[],
                              pass_fds=[program.fileno(), config.fileno()], capture_output=True, timeout=60, check=False, cwd="/",
                              env={"PATH": "/usr/bin:/bin", "ASAN_OPTIONS": "detect_leaks=0"})
    assert done.returncode == 1, done
    found = {item["item"]: item for item in json.loads(done.stdout)["items"] if item["state"] == "fail"}
    assert "root" in found and found["root"]["mend"] == "start noded as root"


def test_a_clock_that_is_an_hour_wrong(host, doctor, tmp_path):
    """Told, and not a failure: only what people see depends on it."""
    clock = tmp_path / "clock"
    host.start()
    for offset, word in ((3600_000, "behind"), (-3600_000, "ahead")):
        clock.write_text(f"{offset} 0\n")
        report = doctor("", record=False, clock=clock)
        found = report["controld"][0]
        assert not fails(report) and found["state"] == "warn", report
        seconds = int(re.search(rf"its clock is (\d+) s {word} of this host's", found["found"])[1])
        assert 3590 <= seconds <= 3610


def test_limits_that_are_too_low(host, doctor):
    report = doctor("", record=False, prefix=("prlimit", "--nofile=300:300"))
    only(report, "descriptors", "a process may have 300")
    host.write_config(kvm="off", emulation="off")
    report = doctor("no KVM, and none allowed to be emulated")
    if host.vmm == "cloud-hypervisor":  # it can do nothing without KVM, and that is said of it as well
        report["vmm"] = [item for item in report["vmm"] if "cannot boot a guest here" not in item["found"]]
        assert not report["vmm"]
    only(report, "isolation", "KVM is not used")
