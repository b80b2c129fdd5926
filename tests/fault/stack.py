"""What a worker of the matrix plays its cells on: a Postgres of its own that syncs to disk, controld (or a pair of them), noded, a model
provider that no fault touches, and the network between host and controld as a proxy."""
import ctypes
import os
import re
import select
import signal
import socket
import struct
import time

import psycopg2
from provider import Provider
from proxy import Proxy

import control as control_rig
import fixtures
import node as node_rig
import pg
import wait

LEASES = {"short-lease": {"lease_seconds": 9, "lease_renew_seconds": 1, "lease_grace_seconds": 1},
          "short-pair": {"lease_seconds": 15, "lease_renew_seconds": 1, "lease_grace_seconds": 1}}

# Waits inside the statement that moves a run, exactly there: a trigger takes a lock that the rig holds.
HOLDS = {"start": 1, "finish": 2, "settle": 3}
HOLD_SQL = """
CREATE FUNCTION test_hold() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock_shared(4711, TG_ARGV[0]::integer); RETURN coalesce(NEW, OLD); END $$;
CREATE TRIGGER test_start BEFORE UPDATE ON run_live FOR EACH ROW WHEN (OLD.state = 'claimed' AND NEW.state = 'running') EXECUTE FUNCTION test_hold(1);
CREATE TRIGGER test_finish BEFORE UPDATE ON run_live FOR EACH ROW WHEN (OLD.state <> 'ended' AND NEW.state = 'ended') EXECUTE FUNCTION test_hold(2);
CREATE TRIGGER test_settle BEFORE DELETE ON run_live FOR EACH ROW EXECUTE FUNCTION test_hold(3);
"""


class Stack(fixtures.Stack):
    """kind: plain; network, short-lease (with a proxy on the node link); pair, short-pair (two controlds that the host knows)."""

    def __init__(self, kind, bin_dir, image):
        super().__init__(None, None)
        self.kind, self.proxy, self.pair, self.provider, self.boot_ids = kind, None, (), Provider(), set()
        self.cluster = pg.Cluster(fsync=True)
        try:
            self.open(bin_dir, image)
        except BaseException:
            self.abandon()
            raise

    def open(self, bin_dir, image):
        self.cluster.start()
        self.control = control = control_rig.Control(self.cluster, bin_dir, scripted=False, **LEASES.get(self.kind, {}))
        node_config = {"max_vms": 3, "max_concurrent_boots": 1, "boot_timeout_ms": 60_000}
        self.provider.serve_to(control)
        control.keep_addresses()
        with psycopg2.connect(control.conninfo) as db, db.cursor() as cursor:
            cursor.execute(HOLD_SQL)
        db.close()
        if self.kind in ("network", "short-lease"):
            self.proxy = Proxy(re.sub(r"^.*//", "", control.addresses["link"]))
            node_config["controld"] = f"tls+tcp://{self.proxy.address}"
        if self.kind in ("pair", "short-pair"):
            self.pair = self.make_pair(control, bin_dir)
        self.node = node_rig.Node(self.pair[0] if self.pair else control, bin_dir, image, f"{self.kind}-{os.getpid()}", **node_config)
        self.node.start()

    def make_pair(self, control, bin_dir):
        """Two more on the same database, which the host knows; the first one, which it does not, serves the clients meanwhile."""
        pair = []
        for _ in range(2):
            made = control_rig.Control(control.cluster, bin_dir, conninfo=control.conninfo, scripted=False, keyring=control.home / "keyring",
                                       tls_dir=control.home / "tls", **LEASES.get(self.kind, {}))
            made.keep_addresses()
            made.operator_key = control.operator_key
            pair.append(made)
        pair[0].write_config(link_addresses=",".join(c.addresses["link"] for c in pair))
        pair[0].stop()
        pair[0].start()
        return tuple(pair)

    def close(self):
        """To a clean host; what the programs have to say at their end is checked."""
        try:
            super().close()
            for made in self.pair:
                made.close()
        finally:
            self.abandon()

    def abandon(self):
        """Everything goes, in whatever state it is."""
        for made in (self.node, *self.pair, self.control):
            if made:
                made.stop(signal.SIGKILL)
        if self.node:
            wait.until(lambda: not self.node.role_pids("vmm"), 20, "VMs to die with their host")
        if self.proxy:
            self.proxy.close()
        self.provider.close()
        self.cluster.stop()

    # --- who is there ----------------------------------------------------------------------------------------------------------------

    def pids(self, process):
        if process == "keeper":
            return [self.node.process.pid]
        if process == "postgres":
            return self.postgres_pids()
        if process in ("controld", "first", "second"):
            return [self.controld(process).process.pid]
        return self.node.role_pids(process)

    def controld(self, process):
        return self.control if process == "controld" else self.pair[("first", "second").index(process)]

    def postgres_pids(self):
        """The postmaster first, so that it starts nothing anew while the others are dealt with."""
        top = self.cluster.process.pid
        with open(f"/proc/{top}/task/{top}/children", encoding="ascii") as children:
            return [top, *map(int, children.read().split())]

    def log_since(self, offset):
        with open(self.node.log, "rb") as log:
            log.seek(offset)
            return log.read().decode(errors="replace")

    def log_size(self):
        return os.path.getsize(self.node.log)


class Processes:
    """Processes held by pidfd, so that a signal never reaches whoever has their number later."""

    def __init__(self, pids):
        self.pids, self.fds = [], []
        for pid in pids:
            try:
                self.fds.append(os.pidfd_open(pid))
                self.pids.append(pid)
            except ProcessLookupError:
                continue

    def send(self, how):
        for fd in self.fds:
            try:
                signal.pidfd_send_signal(fd, how)
            except ProcessLookupError:
                continue

    def gone(self):
        return len(select.select(self.fds, [], [], 0)[0]) == len(self.fds)

    def stopped(self):
        return all(state_of(pid) in ("T", "Z", "X", "") for pid in self.pids)

    def close(self):
        while self.fds:
            os.close(self.fds.pop())


def state_of(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


# --- being at a step -----------------------------------------------------------------------------------------------------------------

class DatabaseHold:
    """While it is held, the statement that moves a run at `step` waits in Postgres, before it commits."""

    def __init__(self, stack, step):
        self.number, self.conninfo = HOLDS[step], stack.control.conninfo
        self.db = psycopg2.connect(self.conninfo)
        self.db.autocommit = True
        self.db.cursor().execute("SELECT pg_advisory_lock(4711, %s)", (self.number,))

    def reached(self):
        cursor = self.db.cursor()
        cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 4711 AND objid = %s AND NOT granted", (self.number,))
        return cursor.fetchone()[0] > 0

    def release(self):
        try:
            self.db.close()
        except psycopg2.Error:
            pass  # the server is gone, and its locks with it


class BusyDirectory:
    """While it is held, a VM's directory cannot be removed, so the VM is dead and not gone."""

    def __init__(self, stack, vm):
        self.path = f"{stack.node.run_dir}/vm/{vm}/vmm/held"
        with open(self.path, "wb"):
            pass

    def release(self):
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass


SYS_PIDFD_GETFD, SYS_PIDFD_OPEN = 438, 434
RF_CB_HELLO = 193


def waiting_bytes(pid, fd):
    """What waits in a socket of a process, looked at without taking it."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = libc.syscall(SYS_PIDFD_OPEN, pid, 0)
    copy = libc.syscall(SYS_PIDFD_GETFD, process, fd, 0)
    error = ctypes.get_errno()
    if process >= 0:
        os.close(process)
    if copy < 0:
        raise OSError(error, f"descriptor {fd} of process {pid}")
    with socket.socket(fileno=copy) as s:
        try:
            return s.recv(1 << 20, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""


def frame_types(data):
    types, at = [], 0
    while at + 5 <= len(data):
        length, kind = struct.unpack_from("<IB", data, at)
        types.append(kind)
        at += 4 + length
    return types


class Frozen:
    """Processes that stand still while it is held."""

    def __init__(self, processes):
        self.processes = processes
        processes.send(signal.SIGSTOP)

    def release(self):
        self.processes.send(signal.SIGCONT)
        self.processes.close()


class HelloWaits(Frozen):
    """Whoever is to read the guest's hello stands still from its question on, until the answer waits in its socket. That is the broker; under a
    short lease, which it could not renew meanwhile, it is channel, before it."""

    ASKED = {"broker": "to=probe", "channel": "guest channel from=silent to=probed"}
    SOCKET = 4  # the broker's of channel, and channel's of the guest (noded/roles.h)

    def __init__(self, role, stack, logged):
        self.role, self.logged = role, logged
        wait.until(lambda: logged(self.ASKED[role]), 90, "the question for the hello", every=0.005)
        super().__init__(Processes(stack.node.role_pids(role)))
        self.again = time.monotonic() + 2

    def reached(self):
        waiting = [waiting_bytes(pid, self.SOCKET) for pid in self.processes.pids]
        if any(data and (self.role == "channel" or RF_CB_HELLO in frame_types(data)) for data in waiting):
            return True
        assert not self.logged("to=start"), "the hello was taken before its reader could be stopped"
        if time.monotonic() > self.again:  # it may have been stopped before its question left
            self.processes.send(signal.SIGCONT)
            self.processes.send(signal.SIGSTOP)
            self.again = time.monotonic() + 2
        return False
