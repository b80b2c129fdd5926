"""Looking at a host's processes and groups from outside, for the benches: nothing here asks our own programs."""
import os
import pathlib
import select
import time

CGROUPS = pathlib.Path("/sys/fs/cgroup")


def pss_kib(pid):
    """Proportional set size; None when the process is gone."""
    try:
        text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.split("\nPss:")[1].split()[0])


def group_folders(node, role):
    """Directories of the groups of this node's VMs in a role, in every hierarchy."""
    found = []
    for top in [CGROUPS, *CGROUPS.iterdir()]:
        base = top / node.cgroup_name
        if base.is_dir():
            found += [path for path in base.iterdir() if path.name.startswith("vm_") and f".{role}." in path.name]
    return found


class Watched:
    """A process and its groups, from now on until both are gone."""

    def __init__(self, pid, folders):
        self.fd, self.folders = os.pidfd_open(pid), folders

    def until_gone(self, seconds=60):
        """Waits; returns (when the process had ended, when its groups were gone as well), in seconds of the wall clock."""
        ended, _, _ = select.select([self.fd], [], [], seconds)
        assert ended, f"the process lives after {seconds} s"
        dead = time.time()
        os.close(self.fd)
        deadline = time.monotonic() + seconds
        while any(os.path.exists(path) for path in self.folders):
            assert time.monotonic() < deadline, f"groups are left after {seconds} s: {self.folders}"
        return dead, time.time()
