"""A small file system of a test's own, to run out of room or inodes on."""
import os
import pathlib
import subprocess


class Room:
    """A small file system for state_dir or run_dir."""

    def __init__(self, path, options):
        self.path = pathlib.Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=0700,{options}", "none", self.path], check=True)

    def fill(self, leave):
        free = os.statvfs(self.path)
        with open(self.path / "filler", "wb") as out:
            os.posix_fallocate(out.fileno(), 0, max(free.f_bavail * free.f_frsize - leave, 1))

    def take_inodes(self):
        for n in range(os.statvfs(self.path).f_favail):
            (self.path / f"filler{n}").touch()

    def empty(self):
        for path in self.path.glob("filler*"):
            path.unlink()

    def close(self):
        subprocess.run(["umount", "-l", self.path], check=False)
