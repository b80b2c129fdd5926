"""Cloud Hypervisor's contract with a guest in it: who connects to whom, what events come in which order, and what of it outlives what."""
import json
import os
import pathlib
import shutil
import signal
import socket
import tempfile

import pytest
import vmm_rig
import wait

PROGRAMS = {"stand-in": vmm_rig.stand_in(), **({"real": vmm_rig.real()} if vmm_rig.real() else {})}


@pytest.fixture(params=PROGRAMS)
def vmm(request, tmp_path):
    made = vmm_rig.Vmm(PROGRAMS[request.param], tmp_path)
    yield made
    made.close()


def in_order(events, *wanted):
    """The wanted ones among the events, in this order."""
    rest = iter(events)
    return all(name in rest for name in wanted)


def hung_up(connection):
    connection.settimeout(20)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # what was sent was not all read
        return True


@pytest.mark.guest
def test_a_life(vmm, image):
    """Boot, pause, snapshot, reboot in place, shutdown, restore in the same process, end."""
    assert vmm.put("vm.create", vmm.config(image)).status == 204
    assert vmm.put("vm.boot").status == 204
    assert vmm.get("vm.info").json["state"] == "Running" and vmm.put("vm.boot").status == 500
    guest = vmm.guest()
    wait.until(lambda: "virtio-device/activated" in vmm.events(), 10, "the guest's drivers")
    assert in_order(vmm.events(), "vmm/starting", "vm/booting", "vm/booted"), vmm.events()
    # Nothing in the guest listens: who connects from here and asks for a port reads the end.
    for line in (b"CONNECT 1024\n", b"connect 1024\n", b"nonsense\n", b"CONNECT " + b"1" * 40):
        asking = socket.socket(socket.AF_UNIX)
        asking.connect(vmm.vsock)
        asking.sendall(line)
        assert hung_up(asking), line

    assert vmm.put("vm.resume").status == 500
    assert vmm.put("vm.pause").status == 204 and vmm.get("vm.info").json["state"] == "Paused" and vmm.put("vm.pause").status == 500
    assert vmm.get("vm.counters").json["root"]["read_bytes"] > 0
    snap = vmm.folder / "snap"
    url = {"destination_url": f"file://{snap}"}
    assert vmm.put("vm.snapshot", url).status == 500  # no directory
    snap.mkdir()
    assert vmm.put("vm.snapshot", url).status == 204
    assert {"config.json", "state.json", "memory-ranges"} == {p.name for p in snap.iterdir()}
    assert vmm.put("vm.snapshot", url).status == 500  # its files are there
    assert vmm.put("vm.resume").status == 204 and vmm.get("vm.info").json["state"] == "Running"
    assert in_order(vmm.events(), "vm/pausing", "vm/paused", "vm/snapshotting", "vm/snapshotted", "vm/resuming", "vm/resumed"), vmm.events()

    assert vmm.put("vm.reboot").status == 204
    assert hung_up(guest)
    guest = vmm.guest()
    assert in_order(vmm.events(), "vm/rebooting", "vm/rebooted"), vmm.events()

    assert vmm.put("vm.shutdown").status == 204
    assert hung_up(guest) and vmm.get("vm.info").json["state"] == "Created" and not os.path.exists(vmm.vsock)
    assert vmm.put("vm.restore", {"source_url": f"file://{snap}"}).status == 500  # there is a VM
    assert vmm.put("vm.delete").status == 204
    assert in_order(vmm.events(), "vm/rebooted", "vm/shutdown", "vm/deleted"), vmm.events()
    pathlib.Path(vmm.vsock).write_text("in the way")
    restore = {"source_url": f"file://{snap}", "memory_restore_mode": "Copy", "resume": True}
    assert vmm.put("vm.restore", restore).status == 500 and vmm.get("vm.info").status == 404
    os.unlink(vmm.vsock)
    assert vmm.put("vm.restore", restore).status == 204
    assert vmm.get("vm.info").json["state"] == "Running"
    guest = vmm.guest()
    assert in_order(vmm.events(), "vm/restoring", "vm/restored", "vm/resuming", "vm/resumed"), vmm.events()
    assert vmm.put("vmm.shutdown").status == 200
    assert vmm.ended() == 0 and hung_up(guest)
    assert vmm.events()[-1] == "vmm/shutdown" and not os.path.exists(vmm.vsock)


NOBODY = 65534


@pytest.fixture
def folders():
    """Folders that another user may reach."""
    made = []

    def make():
        made.append(pathlib.Path(tempfile.mkdtemp(prefix="eph-vmm-", dir="/tmp")))
        made[-1].chmod(0o755)
        return made[-1]

    yield make
    for folder in made:
        shutil.rmtree(folder)


@pytest.mark.guest
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_clones_of_a_file_of_memory(program, image, folders):
    """Memory in a file that is shared while the template runs, and mapped privately by what is restored from it: snapshots hold no memory, clones
    may not write to any file, do not see each other, and the file stays as it was."""
    base = folders()
    memory, snap = base / "memory", base / "snap"
    with open(memory, "wb") as file:
        file.truncate(256 << 20)
    snap.mkdir()
    files = {name: os.open(f"{image}/{name}", os.O_RDONLY) for name in ("vmlinux", "initramfs.cpio", "rootfs.sqfs")}
    zone = {"id": "m0", "size": 256 << 20, "file": str(memory), "shared": True}
    template = vmm_rig.Vmm(program, base, inherit=files.values())
    try:
        config = template.config(image, memory={"size": 0, "thp": False, "zones": [zone]}, console={"mode": "File", "file": "/dev/null"})
        config["payload"].update(kernel=f"/proc/self/fd/{files['vmlinux']}", initramfs=f"/proc/self/fd/{files['initramfs.cpio']}")
        config["disks"][0]["path"] = f"/proc/self/fd/{files['rootfs.sqfs']}"
        assert template.put("vm.create", config).status == 204
        assert template.put("vm.boot").status == 204
        template.guest()
        assert template.put("vm.pause").status == 204
        assert template.put("vm.snapshot", {"destination_url": f"file://{snap}"}).status == 204
        assert {"config.json", "state.json"} == {p.name for p in snap.iterdir()}
        assert sum(p.stat().st_size for p in snap.iterdir()) < 4 << 20
        assert template.put("vmm.shutdown").status == 200 and template.ended() == 0
    finally:
        template.close()
    memory.chmod(0o444)
    before = memory.stat().st_mtime_ns
    clones = []
    try:
        for _ in range(2):
            folder = folders()
            config = json.loads((snap / "config.json").read_text())
            config["memory"]["zones"][0]["shared"] = False
            config["vsock"]["socket"] = str(folder / "vsock")
            (folder / "snap").mkdir()
            (folder / "snap" / "config.json").write_text(json.dumps(config))
            (folder / "snap" / "state.json").write_text((snap / "state.json").read_text())
            clones.append(vmm_rig.Vmm(program, folder, uid=NOBODY, inherit=files.values()))
            assert clones[-1].put("vm.restore", {"source_url": f"file://{folder}/snap", "resume": True}).status == 204
        for clone in clones:
            clone.guest()
            assert clone.get("vm.info").json["config"]["memory"]["zones"][0]["shared"] is False
    finally:
        for clone in clones:
            clone.close()
        for fd in files.values():
            os.close(fd)
    assert memory.stat().st_mtime_ns == before


@pytest.mark.guest
def test_a_guest_that_ends(vmm, image):
    """The agent ends its machine when the host hangs up. A reset boots the same guest again in the same process; power-off ends it with 0."""
    assert vmm.put("vm.create", vmm.config(image)).status == 204 and vmm.put("vm.boot").status == 204
    vmm.guest().close()

    def over():
        return vmm.process.poll() is not None or "vm/rebooted" in vmm.events()

    wait.until(over, 60, "the guest's end")
    events = vmm.events()
    if "vm/rebooted" in events:
        assert vmm.process.poll() is None and in_order(events, "vm/rebooting", "vm/rebooted")
        vmm.guest()
    else:
        assert vmm.process.returncode == 0 and in_order(events, "vm/shutdown", "vm/deleted", "vmm/shutdown"), events


def children(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.guest
@pytest.mark.parametrize("how", (signal.SIGKILL, signal.SIGTERM))
def test_nothing_outlives_it(image, tmp_path, how):
    """The stand-in's machine is a process of its own, which the real one does not have: it goes with the stand-in, however that ends."""
    vmm = vmm_rig.Vmm(PROGRAMS["stand-in"], tmp_path)
    try:
        assert vmm.put("vm.create", vmm.config(image)).status == 204 and vmm.put("vm.boot").status == 204
        (machine,) = children(vmm.process.pid)
        vmm.process.send_signal(how)
        assert vmm.ended() == (0 if how == signal.SIGTERM else -signal.SIGKILL)
        wait.until(lambda: not alive(machine), 10, "the machine's end")
    finally:
        vmm.close()


def test_a_machine_that_is_lost(image, tmp_path):
    """As when a vCPU fails in the real one: the process ends with 0, and a line at error level alone tells."""
    vmm = vmm_rig.Vmm(PROGRAMS["stand-in"], tmp_path)
    try:
        assert vmm.put("vm.create", vmm.config(image)).status == 204 and vmm.put("vm.boot").status == 204
        os.kill(children(vmm.process.pid)[0], signal.SIGKILL)
        assert vmm.ended() == 0
        assert "ERROR" in (tmp_path / "log").read_text()
    finally:
        vmm.close()
