"""What holds the processes of a living run: looked at from the host's side, in /proc and in the cgroups, while a command runs in the guest."""
import fcntl
import os
import pathlib
import re
import signal

import host
import pytest
import vmm_rig
import wait
from client import say, shell, turns

ROLES = ("vmm", "channel", "broker", "link")
OF_A_VM = ("vmm", "channel", "broker")
NAMESPACES = ("mnt", "pid", "ipc", "uts", "cgroup")
MIB = 1 << 20
APPEND, WRITE = 0o2000, 0o3

# Descriptors by number: what each is, and whether it can be written to. Numbers that are not here may only be of a LOOP kind.
NULL, LOG, SOCKET, PIPE = "/dev/null", r"\S+/noded\.log", r"socket:\[\d+\]", r"pipe:\[\d+\]"
SPOOL = r"\S+/spool/vm_[0-9a-f]{32}"
PLAN = r"/memfd:plan \(deleted\)"
IMAGE = (r"\S+/vmlinux", r"\S+/initramfs\.cpio", r"\S+/rootfs\.sqfs")
EXPECTED = {
    "broker": {0: NULL, 1: LOG, 2: LOG, 3: SOCKET, 4: SOCKET, 6: r"\S+/vm_[0-9a-f]{32}\.vmm\.[0-9a-f]{8}/cgroup\.kill"},
    "link": {0: NULL, 1: LOG, 2: LOG, 3: SOCKET},
}
# VMM and channel differ with the driver: QEMU has streams for guest, monitor and console; Cloud Hypervisor has its API's listener, its events and its
# console, and what the guest's one connection comes to is closed by then.
EXPECTED_OF = {
    "qemu": {"vmm": {0: NULL, 1: PIPE, 2: PIPE, 3: SOCKET, 4: SOCKET, 5: PIPE, **dict(enumerate(IMAGE, 6))},
             "channel": {0: NULL, 1: LOG, 2: LOG, 3: SOCKET, 4: SOCKET, 5: SOCKET, 6: PIPE, 7: PLAN}},
    "cloud-hypervisor": {"vmm": {0: NULL, 1: PIPE, 2: PIPE, 3: SOCKET, 4: PIPE, 5: PIPE, **dict(enumerate(IMAGE, 6))},
                         "channel": {0: NULL, 1: LOG, 2: LOG, 3: SOCKET, 5: SOCKET, 6: PIPE, 7: PLAN, 8: PIPE}},
}
# What a process makes for itself: its event loop; a VMM opens the root again, Cloud Hypervisor (and what stands in for it) its console, its vsock
# and streams of its own, its channel takes the guest's connection; broker and link speak TCP, link reads the spool.
LOOP = r"anon_inode:\[(eventpoll|eventfd|timerfd|signalfd)\]"
OWN = {
    "vmm": rf"{LOOP}|/dev/kvm|anon_inode:kvm-(vm|vcpu:\d+)|\S+/rootfs\.sqfs",
    "channel": rf"{LOOP}|{PIPE}",
    "broker": rf"{LOOP}|{PIPE}|{SOCKET}|{SPOOL}",
    "link": rf"{LOOP}|{PIPE}|{SOCKET}|{SPOOL}",
}
OWN_OF = {
    "qemu": {},
    "cloud-hypervisor": {"vmm": rf"{OWN['vmm']}|{SOCKET}|{PIPE}|anon_inode:\[io_uring\]", "channel": rf"{OWN['channel']}|{SOCKET}"},
}
WRITABLE = {"vmm": (), "channel": (LOG,), "broker": (LOG, SPOOL, EXPECTED["broker"][6]), "link": (LOG,)}


class Process:
    def __init__(self, role, pid):
        self.role, self.pid, self.proc = role, pid, pathlib.Path(f"/proc/{pid}")
        lines = (self.proc / "status").read_text().splitlines()
        self.status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def namespace(self, name):
        return os.readlink(self.proc / "ns" / name)

    def descriptors(self):
        """number -> (what, flags)"""
        found = {}
        for fd in (self.proc / "fd").iterdir():
            info = (self.proc / "fdinfo" / fd.name).read_text()
            found[int(fd.name)] = (os.readlink(fd), int(re.search(r"flags:\s+(\d+)", info)[1], 8))
        return found

    def limit(self, name):
        return re.search(rf"^{name}\s+(\S+)\s+(\S+)", (self.proc / "limits").read_text(), re.MULTILINE).groups()

    def mounts(self):
        """(mount point, options, kind) of each mount that it sees"""
        found = []
        for line in (self.proc / "mountinfo").read_text().splitlines():
            fields, _, after = line.partition(" - ")
            found.append((fields.split()[4], fields.split()[5].split(","), after.split()[0]))
        return found

    def groups(self):
        """The directories of its own cgroup, in every hierarchy."""
        found = []
        for line in (self.proc / "cgroup").read_text().splitlines():
            path = line.split(":", 2)[2]
            if "/vm_" in path:
                found.append(path.rsplit("/", 1)[1])
        return found


@pytest.fixture(scope="module")
def run(stack):
    """The processes of one run whose guest is busy, by role."""
    client = stack.client()
    made = client.create(prompt=turns(shell("sleep 100"), say("never said")))
    client.event(made["id"], "shell.started")
    found = {}
    for role in ROLES:
        # Another noded of this machine may use the same range of ids: ours are our noded's children.
        mine = [Process(role, pid) for pid in stack.node.role_pids(role)]
        mine = [p for p in mine if p.status["PPid"] == str(stack.node.process.pid)]
        assert len(mine) == 1, f"{len(mine)} processes of role {role}"
        found[role] = mine[0]
    yield found
    client.cancel(made["id"])
    client.settled(made["id"])
    stack.node.clean()


@pytest.mark.guest  # once: the tests here share one guest
def test_ids_and_rights(run, stack):
    uids = [p.status["Uid"].split() for p in run.values()]
    assert len({u[0] for u in uids}) == len(ROLES), f"roles share a uid: {uids}"
    for process in run.values():
        s = process.status
        assert len(set(s["Uid"].split())) == 1 and s["Uid"] == s["Gid"], (process.role, s["Uid"], s["Gid"])
        assert stack.node.uid_base - 1 <= int(s["Uid"].split()[0]) < stack.node.uid_base + 3 * 64
        assert s["Groups"] == "", f"{process.role} has groups {s['Groups']}"
        assert {s[name].strip("0") for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {""}, process.role
        assert s["NoNewPrivs"] == "1", process.role
        assert process.role == "link" or pathlib.Path(f"/proc/{process.pid}/oom_score_adj").read_text() == "0\n", process.role
        assert process.limit("Max core file size") == ("0", "0"), process.role
        assert process.limit("Max locked memory") == ("0", "0") and process.limit("Max msgqueue size") == ("0", "0"), process.role
        assert int(process.limit("Max open files")[1]) <= 4096, process.role
        assert process.limit("Max file size")[1].isdigit(), process.role
    # QEMU's own sandbox stands on top of ours. Cloud Hypervisor filters each of its threads but the first by itself.
    filters = {role: (process.status["Seccomp"], process.status.get("Seccomp_filters")) for role, process in run.items()}
    assert filters == {"vmm": ("2", "2") if stack.node.vmm == "qemu" else ("0", "0"), "channel": ("2", "1"), "broker": ("2", "1"), "link": ("2", "1")}, filters
    assert run["vmm"].limit("Max file size") == ("0", "0")


def test_namespaces(run):
    for name in NAMESPACES:
        seen = [p.namespace(name) for p in run.values()] + [os.readlink(f"/proc/self/ns/{name}")]
        assert len(set(seen)) == len(seen), f"{name} namespace is shared: {seen}"
    for process in run.values():
        assert process.status["NSpid"].split()[1:] == ["1"], f"{process.role} is not alone in a pid namespace of its own"
    for role in ("vmm", "channel"):
        assert run[role].namespace("net") not in (os.readlink("/proc/self/ns/net"), run["vmm" if role == "channel" else "channel"].namespace("net"))
        devices = [line.split(":")[0].strip() for line in (run[role].proc / "net/dev").read_text().splitlines()[2:]]
        assert devices == ["lo"], f"{role} has network devices {devices}"
        routes = (run[role].proc / "net/route").read_text().splitlines()[1:]
        assert not routes, f"{role} has routes {routes}"


def few(folder, kind):
    """The one place where a VMM may make files, its sockets: room for a few, in memory."""
    room = os.statvfs(folder)
    assert kind == "tmpfs" and room.f_files <= 16 and room.f_blocks * room.f_frsize <= MIB, (kind, room)
    assert all(entry.is_socket() for entry in folder.iterdir())


def test_tree(run, stack):
    for process in run.values():
        mounts = process.mounts()
        assert [kind for point, _, kind in mounts if point == "/"] == ["tmpfs"], f"{process.role} sees another root"
        for point, options, kind in mounts:
            assert "nosuid" in options, (process.role, point)
            if (process.role, point, stack.node.vmm) == ("vmm", "/v", "cloud-hypervisor"):
                few(process.proc / "root/v", kind)
                continue
            assert "ro" in options or kind == "proc", f"{process.role} can write to {point}"
            assert "nodev" in options or point == "/" or point.startswith("/dev/"), (process.role, point)
        root = process.proc / "root"
        hidden = {"root", "home", "sys", "run", "tmp", "var", stack.node.state_dir[1:]}
        if process.role == "vmm":  # the stand-in is there where it was built
            hidden -= set(pathlib.Path(stack.node.config.get("cloud_hypervisor", "/usr")).parts[1:2])
        assert not [name for name in hidden if (root / name).exists()], process.role
        # /proc of its own pid namespace only, and nothing about the machine.
        seen = {e.name for e in (root / "proc").iterdir() if e.name.isdigit()}
        machine = {"2"} if process.role == "vmm" and stack.node.vmm == "cloud-hypervisor" and not vmm_rig.real() else set()  # behind the stand-in
        assert seen == {"1"} | machine, process.role
        assert not (root / "proc/sys").exists() and not (root / "proc/kcore").exists(), process.role


def sealed(process, number):
    with open(process.proc / "fd" / str(number), "rb") as memory:
        seals = fcntl.fcntl(memory, fcntl.F_GET_SEALS)
    return seals & fcntl.F_SEAL_WRITE and seals & fcntl.F_SEAL_GROW and seals & fcntl.F_SEAL_SEAL


def test_descriptors(run, stack):
    vmm = stack.node.vmm
    wanted, own = {**EXPECTED, **EXPECTED_OF[vmm]}, {**OWN, **OWN_OF[vmm]}
    for role, process in run.items():
        for number, (what, flags) in sorted(process.descriptors().items()):
            expected = wanted[role].get(number, own[role])
            assert re.fullmatch(expected, what), f"{role} has descriptor {number}: {what}"
            if re.fullmatch(PLAN, what):
                assert sealed(process, number), "the plan can be written to"
            elif what.startswith("/") and what not in (NULL, "/dev/kvm") and flags & WRITE:
                assert any(re.fullmatch(path, what) for path in WRITABLE[role]), f"{role} can write to {what}"
                assert not re.fullmatch(LOG, what) or flags & APPEND, "the log can be written over"
        assert (role == "broker") == any(re.fullmatch(SPOOL, what) and flags & WRITE for what, flags in process.descriptors().values()), role
        missing = set(wanted[role]) - set(process.descriptors())
        assert not missing, f"{role} lacks {missing}"
    # Each end of a socket is in one process: none was left behind in another.
    of = {role: {what for what, _ in p.descriptors().values() if what.startswith("socket:")} for role, p in run.items()}
    assert vmm != "qemu" or len(of["vmm"]) == 2 and len(of["channel"]) == 3
    everything = [s for sockets in of.values() for s in sockets]
    assert len(everything) == len(set(everything)), of
    console = {what for what, _ in run["vmm"].descriptors().values() if what.startswith("pipe:")}
    assert vmm != "qemu" or len(console) == 1
    assert run["channel"].descriptors()[6][0] in console


def test_environment_tells_nothing(run):
    for role, process in run.items():
        names = {entry.split(b"=")[0] for entry in (process.proc / "environ").read_bytes().split(b"\0") if entry}
        assert names <= {b"LC_ALL", b"PATH", b"ASAN_OPTIONS", b"EPHEMERAL_CLOCK_FILE"}, (role, names)


def value(folders, *names):
    """The first of these files that exists in one of the folders."""
    for folder in folders:
        for name in names:
            if (folder / name).exists():
                return (folder / name).read_text().split()
    raise AssertionError(f"none of {names} in {folders}")


def test_cgroups(run, stack):
    guest_mib = 512  # size `standard`
    bounds = {"vmm": (guest_mib * MIB, (guest_mib + 512) * MIB), "channel": (MIB, 1024 * MIB), "broker": (MIB, 1024 * MIB)}
    every = [pathlib.Path(path) for path in host.cgroups(stack.node.cgroup_name)]
    for role in OF_A_VM:
        names = set(run[role].groups())
        assert len(names) == 1 and f".{role}." in next(iter(names)), f"{role} stands in {names}"
        folders = [path for path in every if path.name in names]
        for folder in folders:
            assert str(run[role].pid) in (folder / "cgroup.procs").read_text().split(), f"{role} is not in {folder}"
        assert any((folder / "cgroup.kill").exists() for folder in folders), "nothing to kill it by"
        memory = int(value(folders, "memory.max", "memory.limit_in_bytes")[0])
        assert bounds[role][0] <= memory <= bounds[role][1], (role, memory)
        assert 1 <= int(value(folders, "pids.max")[0]) <= 256, role
    cpu = [path for path in every if path.name in run["vmm"].groups()]
    assert value(cpu, "cpu.max", "cpu.cfs_quota_us")[0] not in ("max", "-1"), "the VMM's cpu is not limited"


def peak(folders):
    return int(value(folders, "memory.peak", "memory.max_usage_in_bytes")[0])


@pytest.mark.guest
def test_memory_has_room(run, stack):
    """A guest fills its memory and its timeline: the groups' peaks stay below four fifths of what is beyond the guest's memory."""
    guest_mib = 512
    client = stack.client()
    # What the guest takes beyond its own memory ends inside it.
    fill = shell("python3 -c 'x = bytearray(360 << 20); print(len(x))'; head -c 3000000 /dev/urandom | base64; sleep 100")
    made = client.create(prompt=turns(fill, say("never said")))
    wait.until(lambda: sum(e["type"] == "shell.output" for e in client.events(made["id"])) > 3, 120, "output")
    every = [pathlib.Path(path) for path in host.cgroups(stack.node.cgroup_name)]
    seen = {}
    for role in OF_A_VM:
        mine = [Process(role, pid) for pid in stack.node.role_pids(role) if pid != run[role].pid]
        groups = {name for process in mine if process.status["PPid"] == str(stack.node.process.pid) for name in process.groups()}
        assert len(groups) == 1, (role, groups)
        folders = [path for path in every if path.name in groups]
        limit, base = int(value(folders, "memory.max", "memory.limit_in_bytes")[0]), guest_mib * MIB if role == "vmm" else 0
        seen[role] = (peak(folders) // 1024, limit // 1024)
        assert peak(folders) - base <= 0.8 * (limit - base), (role, seen)
    print("peak and limit in KiB:", seen)
    client.cancel(made["id"])
    client.settled(made["id"], 60)


@pytest.mark.guest
def test_a_vm_whose_broker_stands_still(make_stack):
    """The node is cut off and the broker keeps no deadline: keeper destroys the VM a little after its lease, and the broker makes its peace with that."""
    stack = make_stack(control={"lease_seconds": 6, "lease_renew_seconds": 1, "lease_grace_seconds": 1}, node={"max_vms": 1})
    client = stack.client()
    made = client.create(prompt=turns(shell("sleep 100"), say("never said")))
    client.event(made["id"], "shell.started")
    stopped = stack.node.role_pids("broker") + stack.node.role_pids("link")
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    wait.until(lambda: not stack.node.role_pids("vmm"), 30, "the VM to be destroyed by keeper")
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    settled = client.settled(made["id"], 60)
    assert settled["status"] == "interrupted" and settled["error"]["code"] in ("node_lost", "lease_expired"), settled["error"]
    stack.node.clean(40)
