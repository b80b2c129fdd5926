"""One noded for a test: its own state, run directory, uids and cgroup; enrolled with a join token through the operator API."""
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile

import host
import vmm_rig
import wait

SLOTS = 64
BLOCK = 20000


def worker_number():
    """0, 1, ... of the pytest worker, so that uids and paths of parallel workers never meet."""
    name = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return int(name.removeprefix("gw"))


def claim_uids():
    """A block of user ids of this process's own, also beside other test runs on this host; held until the process ends."""
    for block in range(1000):
        held = open(f"/tmp/eph-test-uids-{block}", "ab")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return 300000 + block * BLOCK, held
        except BlockingIOError:
            held.close()
    raise AssertionError("every block of user ids is in use")


class Node:
    _count = 0
    _uids = None

    def __init__(self, control, bin_dir, image, name=None, vmm=None, **config):
        """vmm: "qemu" or "cloud-hypervisor"; None: what EPHEMERAL_VMM says for the whole run of tests, else QEMU."""
        Node._count += 1
        self.name = name or f"w{worker_number()}n{Node._count}"
        self.control, self.bin_dir = control, bin_dir
        self.home = pathlib.Path(tempfile.mkdtemp(prefix=f"eph-{self.name}-", dir=os.environ.get("EPHEMERAL_TEST_TMP", "/tmp")))
        self.run_dir = f"/run/eph-{self.name}-{os.getpid()}"
        self.state_dir = str(self.home / "state")
        self.cgroup_name = f"eph-{self.name}-{os.getpid()}"
        Node._uids = Node._uids or claim_uids()
        self.uid_base = Node._uids[0] + 1 + Node._count % 90 * 200
        token = self.home / "join-token"
        token.write_text(control.node_token() + "\n")
        token.chmod(0o600)
        self.vmm = vmm or os.environ.get("EPHEMERAL_VMM") or "qemu"
        vmm_config = vmm_rig.node_config() if self.vmm == "cloud-hypervisor" else {"vmm": "qemu"}
        self.config = {"state_dir": self.state_dir, "run_dir": self.run_dir, "join_token_file": str(token), "node_name": self.name, "emulation": "allow",
                       "uid_base": self.uid_base, "image_dir": str(image), "max_vms": 4, "max_concurrent_boots": 1, "memory_mib": 4096, "vcpus": 8,
                       "cgroup_parent": f"/{self.cgroup_name}", "spool_keep_seconds": 600, "log_level": "debug", "metrics_listen": "127.0.0.1:0",
                       "start_mode": "cold", **vmm_config, **config}
        self.log = self.home / "noded.log"
        self.process = None
        self.prefix, self.env = (), {}  # what starts it, and what is in its environment: another network (netns.py), another clock
        self.write_config()

    def write_config(self, **changes):
        self.config.update(changes)
        self.file = self.home / "noded.conf"
        self.file.write_text("".join(f"{name} = {value}\n" for name, value in self.config.items() if value is not None))

    def start(self, ready=True):
        read, write = os.pipe()
        log = open(self.log, "ab")
        env = dict(os.environ, ASAN_OPTIONS="detect_leaks=0:abort_on_error=1", UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1", **self.env)
        self.process = subprocess.Popen([*self.prefix, f"{self.bin_dir}/noded", "--config", str(self.file), "--ready-fd", str(write)], pass_fds=[write], stdout=log,
                                        stderr=log, stdin=subprocess.DEVNULL, env=env)
        # As a unit may set it: its VMs' processes must not have it as well.
        pathlib.Path(f"/proc/{self.process.pid}/oom_score_adj").write_text("100")
        os.close(write)
        log.close()
        with os.fdopen(read) as pipe:
            line = pipe.readline() if ready else ""
        if ready:
            assert line, f"noded did not start:\n{self.log_tail()}"
            self.addresses = json.loads(line)
            wait.until(lambda: self.control.node_live(self.name), 20, f"node {self.name} to be live")
        return self

    def log_tail(self, lines=60):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def restart(self, how=signal.SIGKILL, bin_dir=None):
        """Another noded on the same state, of another binary when that is given; runs that can go on do."""
        self.stop(how)
        self.bin_dir = bin_dir or self.bin_dir
        return self.start()

    def logged(self, text):
        """Lines of noded's log, of all its starts, that hold the text."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if text in line]

    def stop(self, how=signal.SIGINT, seconds=30):
        """SIGINT ends every VM; SIGTERM and SIGKILL leave those that can go on."""
        if self.process and self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(seconds)
        code = self.process.returncode if self.process else 0
        self.process = None
        return code

    def keeps_vms(self):
        """Has VMs of its own accord, without a run: warm ones, or one that a snapshot is made of."""
        return self.config.get("start_mode") != "cold" or int(self.config.get("warm_min") or 0) > 0

    def role_pids(self, role):
        """Pids of this node's processes in a role: link, broker, channel, or vmm."""
        wanted = {"broker": 0, "channel": 1, "vmm": 2}
        found = {}
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                uid = int((entry / "status").read_text().split("Uid:")[1].split()[0])
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            except (FileNotFoundError, ProcessLookupError, IndexError):
                continue
            if state in ("Z", "X"):
                continue
            if role == "link" and uid == self.uid_base - 1:
                found[int(entry.name)] = int(parent)
            elif role in wanted and self.uid_base <= uid < self.uid_base + 3 * SLOTS and (uid - self.uid_base) % 3 == wanted[role]:
                found[int(entry.name)] = int(parent)
        # What a process of the role started itself (the machine behind a stand-in) is a part of it.
        return [pid for pid, parent in found.items() if parent not in found]

    def clean(self, seconds=20):
        """Waits until nothing of any VM is left on this host."""
        def nothing():
            left = host.leftovers(self)
            return not left or None
        try:
            wait.until(nothing, seconds, "a clean host")
        except AssertionError as error:
            raise AssertionError("left on the host:\n" + "\n".join(host.leftovers(self)) + "\n" + self.log_tail()) from error

    def close(self):
        code = self.stop()
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        keep = os.environ.get("EPHEMERAL_TEST_LOGS")
        if keep:
            shutil.copy(self.log, f"{keep}/noded-{self.name}.log")
        shutil.rmtree(self.home, ignore_errors=True)
        shutil.rmtree(self.run_dir, ignore_errors=True)
        host.remove_cgroups(self.cgroup_name)
        assert "ERROR: AddressSanitizer" not in text and "runtime error:" not in text, text[-6000:]
        assert code == 0, f"noded ended with {code}:\n{text[-3000:]}"
