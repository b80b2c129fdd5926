"""What a process that an attacker has taken can still do: attacks in the place of broker, channel and VMM, through noded's own jail."""
import ctypes
import os
import shutil
import socket
import subprocess

import host
import node
import pytest

SIGSYS = "killed by signal 31"
# Refused by the kernel's own answer, not by the filter, whatever else changes.
KERNEL = {"broker": {"dial loopback": "EPERM", "dial the metadata service": "EPERM", "datagram as IPv4 in IPv6": "EPERM", "threads without end": "EAGAIN"},
          "channel": {"dial loopback": "EACCES", "make a file": "EACCES", "threads without end": "EAGAIN"},
          "vmm": {"dial loopback": "EACCES", "write to a library": "EACCES", "threads without end": "EAGAIN"}}


@pytest.fixture(scope="module")
def attacks(bin_dir, image, tmp_path_factory):
    """attacks(seccomp) -> [(place, attack, what must hold, how it ended)]"""
    uid_base, held = node.claim_uids()
    home, name = tmp_path_factory.mktemp("jail"), f"eph-try-{os.getpid()}"
    made = {}

    def attack(seccomp):
        if seccomp not in made:
            with socket.create_server(("127.0.0.1", 0), backlog=64) as listed:
                config = home / "noded.conf"
                config.write_text(f"state_dir = {home}/state\nrun_dir = /run/{name}\nemulation = allow\nkvm = off\nvmm = qemu\nimage_dir = {image}\n"
                                  f"cgroup_parent = /{name}\nuid_base = {uid_base}\nseccomp = {seccomp}\n")
                done = subprocess.run([f"{bin_dir}/../tests/rig/jail_try", "--config", config, str(listed.getsockname()[1])], capture_output=True,
                                      text=True, timeout=200, check=False, env=dict(os.environ, ASAN_OPTIONS="detect_leaks=0"))
            assert done.returncode == 0, done.stderr
            assert "stays behind" not in done.stderr, done.stderr
            made[seccomp] = [tuple(line.split("\t")) for line in done.stdout.splitlines()]
        return made[seccomp]
    yield attack
    held.close()
    shutil.rmtree(f"/run/{name}", ignore_errors=True)
    host.remove_cgroups(name)


def test_each_is_refused(attacks):
    found = attacks("enforce")
    assert {place for place, *_ in found} == {"broker", "channel", "vmm"} and len(found) > 90
    for place, attack, kind, how in found:
        assert not how.startswith("not started"), (place, attack, how)
        assert (how == "done") == (kind == "harmless"), f"{place}: {attack}: {how}"
    assert sum(how == SIGSYS for *_, how in found) > 50


def test_walls_stand_without_the_filter(attacks):
    """Ids, capabilities, namespaces, tree, limits, Landlock and the connect filter, while the system call filter only logs."""
    found = attacks("log")
    for place, attack, kind, how in found:
        if kind == "walls":
            assert how != "done", f"{place}: {attack}"
    ends = {(place, attack): how for place, attack, _, how in found}
    for place, expected in KERNEL.items():
        for attack, how in expected.items():
            if how == "EACCES" and attack.startswith("dial") and not landlock():
                how = "ENETUNREACH"
            assert ends[place, attack] == how, (place, attack)
    # What these prove is not the filter's doing: it let them through.
    assert ends["channel", "fork"] == "done" and SIGSYS not in {how for (_, attack), how in ends.items() if attack != "system calls by other numbers"}


def landlock():
    return ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1)) > 0
