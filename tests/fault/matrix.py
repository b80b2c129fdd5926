"""Plays cells on several stacks at once and prints what came of them: `tests/run kill`, or by hand `tests/fault/matrix.py PROCESS/STEP/FAULT`.
Workers are processes; each has one stack at a time, and plays cells of the kind that it is made for as long as there are any."""
import argparse
import json
import multiprocessing
import os
import pathlib
import queue
import signal
import sys
import time
import traceback

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "rig")]

import cells as plan  # noqa: E402
from scene import Scene  # noqa: E402
from stack import Stack  # noqa: E402

WORKERS = 7
CELL_SECONDS = 400
KINDS = ("plain", "short-lease", "network", "pair", "short-pair")


def say(text):
    print(text, flush=True)


class Board:
    """The cells that are still to be played, by kind of stack; shared between the workers."""

    def __init__(self, context, cells):
        self.left = {kind: context.Value("i", 0) for kind in KINDS}
        self.todo = {kind: [c for c in cells if c.stack == kind] for kind in KINDS}
        # Stops use no CPU: one in two, so that neither are all workers busy with guests nor all asleep.
        plain = self.todo["plain"]
        slow, fast = [c for c in plain if c.fault == "stop"], [c for c in plain if c.fault != "stop"]
        self.todo["plain"] = [c for pair in zip(slow, fast) for c in pair] + slow[len(fast):] + fast[len(slow):]

    def take(self, kind):
        """The next cell for a worker that has a stack of this kind (None: no stack yet)."""
        sizes = {name: len(self.todo[name]) - self.left[name].value for name in KINDS}
        for name in [kind] * bool(kind) + sorted(KINDS, key=lambda k: -sizes[k]):
            with self.left[name].get_lock():
                at = self.left[name].value
                if at < len(self.todo[name]):
                    self.left[name].value += 1
                    return self.todo[name][at]
        return None


def log_of(logs, cell):
    return pathlib.Path(logs) / f"kill-{cell.name.replace('/', '-')}.log"


def give_up(_number, _frame):
    raise SystemExit(1)


def too_long(_number, _frame):
    raise TimeoutError(f"the cell took longer than {CELL_SECONDS} s")


def worker(board, first_kind, results, bin_dir, image, logs):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, give_up)
    signal.signal(signal.SIGALRM, too_long)
    stack, kind = None, first_kind
    try:
        while (cell := board.take(kind)) is not None:
            began = time.monotonic()
            scene, kind = None, cell.stack
            signal.alarm(CELL_SECONDS)
            try:
                if stack is None or stack.kind != kind:
                    old, stack = stack, None
                    if old:
                        old.close()
                    stack = Stack(kind, bin_dir, image)
                scene = Scene(stack, cell)
                said = scene.play()
                results.put((cell, True, said, time.monotonic() - began))
                log_of(logs, cell).write_text(scene.story(), errors="replace")
            except Exception as error:  # noqa: BLE001 - whatever it is, the cell is red and the others go on
                signal.alarm(0)
                log = log_of(logs, cell)
                log.write_text(traceback.format_exc() + "\n" + (scene.story() if scene else ""), errors="replace")
                results.put((cell, False, f"{type(error).__name__}: {str(error)[:1000]}\n({log})", time.monotonic() - began))
                old, stack = stack, None
                try:
                    if old:
                        old.close()
                except Exception:  # noqa: BLE001 - it is broken; the next cell gets another
                    pass
        signal.alarm(CELL_SECONDS)
    finally:
        try:
            if stack:
                stack.close()
        except Exception:  # noqa: BLE001
            results.put((plan.Cell("stack", "close", kind), False, traceback.format_exc(), 0))


def play(cells, bin_dir, image, logs, workers):
    """Yields (cell, ok, text, seconds) as they come."""
    cells = [c for c in cells if not c.impossible]
    context = multiprocessing.get_context("fork")
    board, results = Board(context, cells), context.Queue()
    crew = []
    firsts = ["plain", "plain", "short-lease", "plain", "network", "plain", "pair"]
    for n in range(min(workers, len(cells))):
        crew.append(context.Process(target=worker, args=(board, firsts[n % len(firsts)], results, bin_dir, image, logs)))
        crew[-1].start()
    done = 0
    try:
        while any(process.is_alive() for process in crew) or not results.empty():
            try:
                cell, ok, text, seconds = results.get(timeout=0.5)
            except queue.Empty:
                continue
            done += 1
            say(f"  {done:3}/{len(cells)} {'ok    ' if ok else 'FAILED'} {cell.name:28} {seconds:5.0f} s  {text}")
            yield cell, ok, text, seconds
        if done < len(cells):
            yield plan.Cell("stack", "workers", "all"), False, f"{len(cells) - done} cells were not played: a worker ended", 0
    finally:
        for process in crew:
            if process.is_alive():
                process.terminate()
        for process in crew:
            process.join(60)


def table(found):
    """The matrix as text: a row for each process and fault, a column for each step."""
    marks = {(c.process, c.fault, c.step): "ok" if ok else "RED" for c, ok, _, _ in found}
    rows = list(dict.fromkeys((c.process, c.fault) for c in plan.all_cells()))
    lines = [" ".join([f"{'process':10} {'fault':11}", *(f"{step:>8}" for step in plan.STEPS)])]
    for process, fault in rows:
        row = [marks.get((process, fault, step)) or ("–" if (process, step) in plan.IMPOSSIBLE else "") for step in plan.STEPS]
        if any(mark in ("ok", "RED") for mark in row):
            lines.append(" ".join([f"{process:10} {fault:11}", *(f"{mark:>8}" for mark in row)]))
    return lines


def main():
    parser = argparse.ArgumentParser(description="Plays cells of the matrix process x step x fault.")
    parser.add_argument("cells", nargs="*", metavar="PROCESS/STEP/FAULT", help="which; any part may be *; all without one")
    parser.add_argument("--short", action="store_true", help="the few of the default run")
    parser.add_argument("--json", metavar="FILE", help="write what came of each")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, give_up)  # ends the workers, which end what they started
    wanted = plan.SHORT if options.short else [c for words in options.cells or [""] for c in plan.matching(words)]
    logs = pathlib.Path(os.environ.get("EPHEMERAL_TEST_LOGS", TOP / "var" / "tests"))
    logs.mkdir(parents=True, exist_ok=True)
    found = list(play(wanted, os.environ.get("EPHEMERAL_BIN", str(TOP / "build" / "asan" / "bin")),
                      os.environ.get("EPHEMERAL_IMAGE", str(TOP / "var" / "tests" / "image")), logs, 2 if options.short else WORKERS))
    if options.json:
        rows = [{"name": cell.name, "ok": ok, "seconds": round(seconds, 1), "text": text} for cell, ok, text, seconds in found]
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    for line in [*table(found), f"{sum(ok for _, ok, _, _ in found)} cells ok, {sum(not ok for _, ok, _, _ in found)} red; – stands for {len(plan.IMPOSSIBLE)} "
                 "steps at which a process is not there (cells.py says why)"]:
        say(line)
    return 0 if all(ok for _, ok, _, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
