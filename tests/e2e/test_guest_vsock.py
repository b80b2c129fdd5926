"""The agent's other transport: a vsock, as under Cloud Hypervisor. No vsock of a host is needed: the guest has one to itself (the kernel's
loopback), and tests/rig/vsock_guest.c in the same guest is the host's end of it."""
import hashlib
import pathlib
import runpy
import subprocess

import guest_host
import pytest
from fixtures import count
from guest_host import Guest, run

TOP = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def vsock_image(bin_dir, tmp_path_factory):
    """An image whose init is vsock_guest, with the agent beside it."""
    folder = tmp_path_factory.mktemp("vsock-image")
    base = subprocess.run([TOP / "deploy/guest-image/build", "--quiet"], capture_output=True, text=True, timeout=900, check=True).stdout.split()[-1]
    program = pathlib.Path(bin_dir).parent / "tests" / "rig" / "vsock_guest"
    subprocess.run([TOP / "deploy/guest-image/pack", "--image", base, "--agent", program, "--out", folder], capture_output=True, timeout=60, check=True)
    entry = runpy.run_path(str(TOP / "deploy/guest-image/pack"))["entry"]
    archive = folder / "initramfs.cpio"
    data = archive.read_bytes() + entry(1, "agent", 0o100755, (pathlib.Path(bin_dir) / "guest-agent").read_bytes()) + entry(0, "TRAILER!!!", 0, b"")
    archive.unlink()
    archive.write_bytes(data + bytes(-len(data) % 512))
    return folder


@pytest.mark.guest
def test_a_run_over_a_vsock(vsock_image, monkeypatch):
    """Probe, setup with files, commands, result: all of it over AF_VSOCK, after a host that came late and a first connection that was lost.
    And the command finds that the address family is not for it, although the machine has it."""
    argv = guest_host.qemu_argv
    monkeypatch.setattr(guest_host, "qemu_argv", lambda *a: [x.replace("eph.channel=virtio:ephemeral.0", "eph.channel=vsock:1:1024") for x in argv(*a)])
    count("guests", 1)
    with Guest(vsock_image) as guest:
        assert guest.probe()["protocol"] == 1
        big = bytes(range(256)) * 4096
        ack = guest.setup("over a vsock", files=[("big.bin", big)])
        assert ack["reseeded"] and ack["clock_set"]
        guest.call()
        result, _ = run(guest, "sha256sum big.bin | cut -c1-8; head -c 100000 /dev/zero | tr '\\0' y; echo; "
                               "python3 -c 'import socket; socket.socket(40, socket.SOCK_STREAM)' 2>&1 | tail -1; "
                               "grep -c '^vsock_loopback' /proc/modules; cat /proc/cmdline")
        assert hashlib.sha256(big).hexdigest()[:8] in result
        assert "y" * 1000 in result
        assert "Address family not supported" in result
        assert "\n1\n" in result and "eph.channel=vsock:1:1024" in result
        assert guest.finish("the end") == "the end"
        guest.sock.close()
        guest.wait_exit(20)
