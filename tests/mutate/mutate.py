"""Proves that tests can fail: puts one seeded fault at a time into a copy of the tree, builds what changed, and runs the tests that the fault
names. A fault is found when each of them passed on the copy without a fault, in this run, and fails with it, in the words that the fault says.
A fault that does not compile, a test that fails for another reason and a test that runs out of time prove nothing.
"""
import dataclasses
import fcntl
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml

import fault as faults
import pg

HERE = pathlib.Path(__file__).resolve().parent
PROGRAMS = ("controld", "noded", "ephemeral")
UNIT_SECONDS = 120
E2E_SECONDS = 300
AGENT = ("guest-agent/", "proto/", "common/")  # what the guest's image is made from


class NotPrepared(Exception):
    """The copy without a fault could not be built."""


@dataclasses.dataclass
class Result:
    fault: faults.Fault
    found: bool
    seconds: float
    detail: str

    @property
    def by(self):
        return ", ".join(red.name for red in self.fault.reds)


@dataclasses.dataclass
class Outcome:
    """How one test ended: passed, failed, hung, or missing (it was not run, or was skipped), with what it said."""
    state: str
    text: str = ""


class Bench:
    """The copy, its build, and what the tests need; one a machine at a time."""

    def __init__(self, top, logs, image_base):
        self.folder = logs / "mutate"
        self.logs = self.folder / "logs"
        self.tree, self.build = self.folder / "tree", self.folder / "build"
        self.top, self.image_base = top, image_base
        self.copy = faults.Copy(top, self.tree)
        self.image, self.cluster, self.scratch = None, None, None

    def __enter__(self):
        self.logs.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.folder / "lock", "w", encoding="ascii")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.copy.sync()
        self.scratch = tempfile.mkdtemp(prefix="eph-mutate-", dir="/tmp")
        os.chmod(self.scratch, 0o755)
        return self

    def __exit__(self, *exc):
        if self.cluster:
            self.cluster.stop()
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.lock.close()

    def run(self, log, seconds, command, env=None):
        """The exit status of a command whose output goes to a log of this run; 124: over its time."""
        with open(self.logs / log, "w", encoding="utf-8", errors="replace") as out:
            return subprocess.run(["/usr/bin/python3", str(HERE / "reap.py"), str(seconds), *map(str, command)], cwd=self.tree, env=env, stdout=out,
                                  stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False).returncode

    def text(self, log):
        return (self.logs / log).read_text(encoding="utf-8", errors="replace")

    def configure(self):
        launcher = ["-DCMAKE_C_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
        # -w: a fault may leave a variable unused; that is no reason not to compile it.
        command = ["cmake", "-S", self.tree, "-B", self.build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug", "-DEPHEMERAL_SANITIZE=address,undefined",
                   "-DEPHEMERAL_TEST_CLOCK=ON", "-DCMAKE_C_FLAGS=-w", *launcher]
        if self.run("configure.log", 300, command):
            raise NotPrepared(f"{' '.join(map(str, command))} failed:\n{self.text('configure.log')[-3000:]}")

    def make(self, targets, log):
        env = dict(os.environ, CCACHE_BASEDIR=str(self.folder))
        return self.run(log, 1200, ["ninja", "-C", self.build, "-j2", *sorted(targets)], env) == 0

    def pack(self, log):
        """The guest's image with the agent of this build."""
        out = self.folder / "image"
        command = ["deploy/guest-image/pack", "--image", self.image_base(), "--agent", self.build / "bin" / "guest-agent", "--out", out]
        if self.run(log, 60, command):
            raise NotPrepared(f"deploy/guest-image/pack failed:\n{self.text(log)[-3000:]}")
        self.image = out

    # --- tests -------------------------------------------------------------------------------------------------------------------

    def unit(self, program, log, only="*"):
        """{test: Outcome} of a program's tests."""
        env = dict(os.environ, ASAN_OPTIONS="detect_leaks=1", UBSAN_OPTIONS="print_stacktrace=1", EPHEMERAL_UNIT_ONLY=only)
        code = self.run(log, UNIT_SECONDS, [self.build / "tests" / "unit" / program], env)
        lines = [self._with_source(line) for line in self.text(log).splitlines()]
        outcomes, name, said = {}, None, []
        for line in lines:
            match = re.match(r"\[ +(RUN|OK|FAILED) +\] (\S+)", line)
            if not match:
                said.append(line)
            elif match.group(1) == "RUN":
                name, said = match.group(2), []
            elif match.group(2) == name:
                outcomes[name] = Outcome("passed" if match.group(1) == "OK" else "failed", "\n".join(said))
                name = None
        if name:  # it ended within a test: a crash or its time
            outcomes[name] = Outcome("hung" if code == 124 else "failed", "\n".join(said))
        if only in outcomes:  # it ran alone, and two streams share the log: all of it is about this test
            outcomes[only].text = "\n".join(lines)
        return outcomes

    def _with_source(self, line):
        """cmocka tells the line of a failed assertion and not its text."""
        match = re.match(r"\[   LINE   \] --- (\S+?):(\d+): ", line)
        path = match and self.build / match.group(1)
        if not match or not path.is_file():
            return line
        source = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return line + "\n" + "\n".join(source[int(match.group(2)) - 1:int(match.group(2))])

    def e2e(self, names, log):
        """{file::test: Outcome}; of a test with several cases, failed when one of them is."""
        if not self.cluster:
            self.cluster = pg.Cluster(parent=self.scratch, fsync=False)
            self.cluster.start()
        report = self.logs / (log + ".xml")
        report.unlink(missing_ok=True)
        env = dict(os.environ, EPHEMERAL_TEST_PG=self.cluster.socket_dir, EPHEMERAL_BIN=str(self.build / "bin"),
                   EPHEMERAL_RELEASE_BIN=str(self.build / "bin"), EPHEMERAL_IMAGE=str(self.image), EPHEMERAL_TEST_LOGS=str(self.logs),
                   EPHEMERAL_TEST_TMP=self.scratch, EPHEMERAL_SHARED=os.environ.get("EPHEMERAL_SHARED", str(self.top.parent / "shared")),
                   PYTHONDONTWRITEBYTECODE="1")
        command = ["/usr/bin/python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit2",
                   f"--timeout={E2E_SECONDS}", *(f"tests/e2e/{name}" for name in names)]
        code = self.run(log, E2E_SECONDS * (1 if len(names) == 1 else 4) + 60, command, env)
        if not report.exists():
            return {name: Outcome("hung" if code == 124 else "missing", self.text(log)[-3000:]) for name in names}
        outcomes = {}
        for case in xml.parse(report).getroot().iter("testcase"):
            name = f"{case.get('classname', '').split('.')[-1]}.py::{case.get('name')}"
            said = [child.text or child.get("message") or "" for child in case if child.tag in ("failure", "error")]
            state = "failed" if said else "missing" if case.find("skipped") is not None else "passed"
            if said and "Timeout >" in said[0]:
                state = "hung"
            for key in {name, name.split("[")[0]}:
                if key not in outcomes or state != "passed":
                    outcomes[key] = Outcome(state, "\n".join(said + ([outcomes[key].text] if key in outcomes else [])))
        return outcomes


def booted(top, red):
    """Does the test's file want the image of a guest?"""
    path = top / red.source
    return red.kind == "e2e" and path.is_file() and re.search(r"mark\.guest|\bimage\b", path.read_text(encoding="utf-8")) is not None


def targets(top, fault):
    """What is to be built for the tests that a fault names. The store's SQL is tested from its files: that needs no program."""
    wanted = set()
    for red in fault.reds:
        if red.kind == "unit":
            wanted.add(red.file)
        elif re.search(r"\b(bin_dir|EPHEMERAL_BIN|control|paper|stack|make_stack|boot|worker|check)\b", (top / red.source).read_text(encoding="utf-8")):
            wanted |= set(PROGRAMS)
        if booted(top, red):
            wanted.add("guest-agent")
    return wanted


def baseline(bench, chosen, say):
    """Builds the copy without a fault and runs every named test once: {(kind, name): Outcome}."""
    say("  the tree without a fault: build …")
    bench.configure()
    wanted = set().union(*(targets(bench.tree, fault) for fault in chosen))
    if wanted and not bench.make(wanted, "build.log"):
        raise NotPrepared(f"the tree does not build:\n{bench.text('build.log')[-3000:]}")
    if "guest-agent" in wanted:
        bench.pack("pack.log")
    say("  the tree without a fault: tests …")
    outcomes = {}
    for program, test in sorted({(red.file, red.test) for fault in chosen for red in fault.reds if red.kind == "unit"}):
        outcomes.update({("unit", f"{program}::{name}"): outcome for name, outcome in bench.unit(program, f"{program}.log", test).items()})
    names = sorted({red.name for fault in chosen for red in fault.reds if red.kind == "e2e"})
    if names:
        outcomes.update({("e2e", name): outcome for name, outcome in bench.e2e(names, "e2e.log").items()})
    return outcomes


def judge(fault, red, outcome):
    """Nothing when the test is red for the right reason, else what is missing."""
    if outcome is None or outcome.state == "missing":
        return f"{red.name} was not run"
    if outcome.state == "passed":
        return f"{red.name} stays green: no test sees this fault"
    if outcome.state == "hung" and not fault.hangs:
        return f"{red.name} ran out of time, which proves nothing unless the fault says `symptom: hang`"
    if outcome.state == "failed" and red.says not in outcome.text:
        return f"{red.name} is red, but not in these words: {red.says}\n{outcome.text[-3000:]}"
    return ""


def prove(bench, fault, before):
    """Puts the fault in, runs its tests, takes it out again. Returns what is missing to call it found; '' when nothing is."""
    for red in fault.reds:
        outcome = before.get((red.kind, red.name))
        if outcome is None or outcome.state != "passed":
            return f"{red.name} does not pass without the fault: {outcome.state if outcome else 'there is no such test'}\n" + \
                (outcome.text[-3000:] if outcome else "")
    saved = bench.copy.apply(fault)
    try:
        wanted = targets(bench.tree, fault)
        if wanted and not bench.make(wanted, f"{fault.name}.build.log"):
            return f"it does not compile:\n{bench.text(f'{fault.name}.build.log')[-2000:]}"
        touched = any(edit.file.startswith(AGENT) for edit in fault.edits) and any(booted(bench.tree, red) for red in fault.reds)
        if touched:
            bench.pack(f"{fault.name}.pack.log")
        problems = []
        for number, red in enumerate(fault.reds):
            log = f"{fault.name}.{number}.log"
            outcomes = bench.unit(red.file, log, red.test) if red.kind == "unit" else bench.e2e([red.name], log)
            problems.append(judge(fault, red, outcomes.get(red.test if red.kind == "unit" else red.name)))
        return "\n".join(filter(None, problems))
    finally:
        bench.copy.undo(saved)


def choose(everything, match, short):
    """-k: words joined by `or`, each part of a name. The default run takes those that say so."""
    if match:
        words = re.split(r"\s+or\s+", match.strip())
        return [fault for fault in everything if any(word in fault.name for word in words)]
    return [fault for fault in everything if fault.fast] if short else everything


def run(top, logs, image_base, match, short, say):
    """Yields a Result for each fault; say() prints a line. image_base() gives the folder of the guest image without an agent."""
    everything = faults.load()
    chosen = choose(everything, match, short)
    stale = 0
    for fault in chosen if match else everything:
        try:
            faults.check(fault, top)
        except faults.Wrong as wrong:
            say(f"  {fault.name} | {fault.breaks} | OUT OF DATE | 0.0")
            yield Result(fault, False, 0.0, str(wrong))
            stale += 1
            everything, chosen = ([f for f in those if f is not fault] for those in (everything, chosen))
    if not chosen:
        say(f"  0 of {stale} found")
        return
    chosen.sort(key=lambda fault: (any(booted(top, red) for red in fault.reds), fault.edits[0].file, fault.name))
    with Bench(top, logs, image_base) as bench:
        began = time.monotonic()
        before = baseline(bench, chosen, say)
        say(f"  {len(before)} tests ran on the tree without a fault, after {time.monotonic() - began:.0f} s; now {len(chosen)} of {len(everything)} faults")
        say("  fault | property | found by | seconds")
        count = 0
        for fault in chosen:
            began = time.monotonic()
            problem = prove(bench, fault, before)
            result = Result(fault, not problem, time.monotonic() - began, problem)
            count += result.found
            say(f"  {fault.name} | {fault.breaks} | {result.by if result.found else 'NOT FOUND'} | {result.seconds:.1f}")
            yield result
        say(f"  {count} of {len(chosen) + stale} found")


if __name__ == "__main__":
    sys.exit("call it as tests/run mutate")
