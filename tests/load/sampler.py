"""Memory and descriptors of long-lived processes while a test runs, and the judgement whether they grew."""
import pathlib
import statistics
import threading
import time

MIB = 1024 * 1024


def footprint(pid):
    """(resident bytes, open descriptors), or None when the process is gone."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024, len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir()))
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return None


class Sampler:
    """Sampler({name: pid}): a thread that looks once a second between `with`; `mark(done)` says how far the work is, from 0 to 1."""

    def __init__(self, pids):
        self.pids, self.samples, self.done, self.over = pids, {name: [] for name in pids}, 0.0, threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def mark(self, done):
        self.done = done

    def watch(self):
        while not self.over.wait(1):
            for name, pid in self.pids.items():
                found = footprint(pid)
                if found:
                    self.samples[name].append((self.done, *found))

    def __enter__(self):
        self.began = time.monotonic()
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.over.set()
        self.thread.join(5)
        self.seconds = time.monotonic() - self.began

    def part(self, name, first, last, column):
        return [s[column] for s in self.samples[name] if first <= s[0] < last]

    def rows(self):
        """For each process: the median of resident bytes and of descriptors in the second quarter of the work, and in its last."""
        for name in self.pids:
            early, late = (0.25, 0.5), (0.75, 1.01)
            assert self.part(name, *early, 1) and self.part(name, *late, 1), f"{name}: no samples, did it end?"
            yield name, *(statistics.median(self.part(name, *span, 1)) for span in (early, late)), *(round(statistics.median(self.part(name, *span, 2))) for span in (early, late))

    def bounded(self, growth=1.10, slack=3 * MIB, descriptors=6):
        """Complaints about what grew after the warm-up. slack: what an allocator may keep; descriptors: a few runs more at a time."""
        found = []
        for name, rss, rss_late, fds, fds_late in self.rows():
            if rss_late > rss * growth + slack:
                found.append(f"{name}: {rss / MIB:.1f} MiB became {rss_late / MIB:.1f} MiB")
            if fds_late > fds + descriptors:
                found.append(f"{name}: {fds} descriptors became {fds_late}")
        return found

    def table(self):
        lines = [f"  {'process':10} {'MiB 2nd quarter':>16} {'MiB last':>9} {'fds 2nd quarter':>16} {'fds last':>9}"]
        for name, rss, rss_late, fds, fds_late in self.rows():
            lines.append(f"  {name:10} {rss / MIB:16.1f} {rss_late / MIB:9.1f} {fds:16} {fds_late:9}")
        return "\n".join(lines)
