"""Hosts as network namespaces: a bridge with an address of the control plane's, and for each host a namespace with one wire to it.

    with Network() as network:
        wire = network.add()            # wire.prefix starts a program there, wire.cut() takes its network away, wire.mend() gives it back

Names carry the pid of the test process, addresses come from a /24 of 10.213.0.0/16 that no other test process has; everything goes at close().
A program is started by nsenter, which changes the network alone: `ip netns exec` would also hide the host's control groups behind a fresh /sys.
"""
import fcntl
import os
import re
import subprocess

BLOCKS = 250


def ip(*words, check=True):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)
    assert not check or done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


def sweep():
    """Takes away what test processes left that were killed: their pid stands in the names, and nobody has it any more."""
    names = [line.split()[0] for line in ip("netns", "list", check=False).splitlines() if line.startswith("eph-")]
    for name in names:
        if not os.path.exists(f"/proc/{name.split('-')[1]}"):
            ip("netns", "del", name, check=False)
    for name in os.listdir("/sys/class/net"):
        pid = re.fullmatch(r"eh[bvw](\d+)(\.\d+)?", name)
        if pid and not os.path.exists(f"/proc/{pid[1]}"):
            ip("link", "del", name, check=False)


class Wire:
    """One host's namespace and the two ends of its wire."""

    def __init__(self, network, number):
        self.network, self.number = network, number
        self.name = f"eph-{os.getpid()}-{number}"
        self.outer, inner = f"ehv{os.getpid()}.{number}", f"ehw{os.getpid()}.{number}"
        self.address = f"{network.prefix}.{number + 1}"
        self.prefix = ("nsenter", f"--net=/run/netns/{self.name}", "--")
        ip("netns", "add", self.name)
        try:
            ip("link", "add", self.outer, "type", "veth", "peer", "name", inner)
            ip("link", "set", inner, "netns", self.name, "name", "eth0")
            ip("link", "set", self.outer, "master", network.bridge, "up")
            self.inside("link", "set", "lo", "up")
            self.inside("address", "add", f"{self.address}/24", "dev", "eth0")
            self.inside("link", "set", "eth0", "up")
        except BaseException:
            self.close()
            raise

    def inside(self, *words):
        return ip("-n", self.name, *words)

    def cut(self):
        """Nothing comes through any more, and nobody is told."""
        ip("link", "set", self.outer, "down")

    def mend(self):
        ip("link", "set", self.outer, "up")

    def close(self):
        ip("link", "del", self.outer, check=False)
        ip("netns", "del", self.name, check=False)


class Network:
    def __init__(self):
        sweep()
        self.bridge, self.wires, self.held = f"ehb{os.getpid()}", [], None
        for block in range(BLOCKS):
            held = open(f"/tmp/eph-test-net-{block}", "ab")
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.prefix, self.held = f"10.213.{block}", held
                break
            except BlockingIOError:
                held.close()
        assert self.held, "every block of addresses is in use"
        self.address = f"{self.prefix}.1"
        try:
            ip("link", "add", self.bridge, "type", "bridge")
            ip("address", "add", f"{self.address}/24", "dev", self.bridge)
            ip("link", "set", self.bridge, "up")
        except BaseException:
            self.close()
            raise

    def add(self):
        self.wires.append(Wire(self, len(self.wires) + 1))
        return self.wires[-1]

    def close(self):
        while self.wires:
            self.wires.pop().close()
        ip("link", "del", self.bridge, check=False)
        self.held.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
