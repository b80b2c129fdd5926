#!/usr/bin/python3
"""reap.py SECONDS COMMAND...: runs a command for at most so long, then ends every process that came from it and takes away what those left.

A fault may well be that processes are not ended, a group is left or a directory stays. So this process is the parent of whatever loses its
own (a subreaper) and ends all that descends from it, and nothing else. The exit status is the command's; 124: over its time.
"""
import ctypes
import glob
import os
import pathlib
import shutil
import signal
import subprocess
import sys

CGROUPS = "/sys/fs/cgroup"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def descendants():
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
    found, level = set(), {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level} - found
        found |= level
    return found


def end_all():
    """Kills until nobody is left; returns the scratch directories that they stood in."""
    stood = set()
    while True:
        for pid in descendants():
            try:
                cwd = os.readlink(f"/proc/{pid}/cwd")
                if cwd.startswith("/tmp/eph-"):
                    stood.add("/".join(cwd.split("/")[:3]))
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return stood


def remove_groups(pid):
    """The rig names groups and run directories by the id of the process that runs the tests."""
    for top in glob.glob(f"{CGROUPS}/eph-*-{pid}") + glob.glob(f"{CGROUPS}/*/eph-*-{pid}"):
        for root, _, _ in os.walk(top, topdown=False):
            try:
                os.rmdir(root)
            except OSError:
                continue
    for folder in glob.glob(f"/run/eph-*-{pid}"):
        shutil.rmtree(folder, ignore_errors=True)


def main():
    seconds, command = float(sys.argv[1]), sys.argv[2:]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # who asked is gone: end, and leave nothing
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(125))
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    code = 125
    try:
        code = child.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"\nover its time of {seconds:.0f} s", flush=True)
        code = 124
    except KeyboardInterrupt:
        pass
    finally:
        for folder in end_all():
            shutil.rmtree(folder, ignore_errors=True)
        remove_groups(child.pid)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
