"""Runs the kinds of tests that tests/run names and sums them up: the last line is `N passed, N failed, N skipped`.

Each kind is a function that yields Test records. A kind prepares what it needs through `Prepared`, which builds each preset and the
guest image once. Long output goes to var/tests/*.log; what failed is printed with the name of its log.
"""
import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as xml

TOP = pathlib.Path(__file__).resolve().parents[2]
LOGS = TOP / "var" / "tests"
sys.path.insert(0, str(TOP / "tests" / "rig"))
sys.path.insert(0, str(TOP / "tests" / "mutate"))

import fault as faults  # noqa: E402
import fuzz  # noqa: E402
import lint  # noqa: E402
import mutate  # noqa: E402
import pg  # noqa: E402


@dataclasses.dataclass
class Test:
    kind: str
    name: str
    outcome: str  # passed, failed, skipped
    seconds: float
    detail: str = ""


class Broken(Exception):
    """Something that every test of a kind needs could not be made."""


def say(text):
    print(text, flush=True)


def run(command, log, timeout, env=None, cwd=TOP):
    """Runs a command with its output in a log; returns the exit status (124: over its time)."""
    log = LOGS / log
    with open(log, "w", encoding="utf-8", errors="replace") as out:
        try:
            return subprocess.run(command, cwd=cwd, env=env, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                  timeout=timeout, check=False).returncode
        except subprocess.TimeoutExpired:
            out.write(f"\nover its time of {timeout} s\n")
            return 124


def tail(log, lines=40):
    path = LOGS / log
    text = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return "\n".join(text[-lines:])


class Prepared:
    """What kinds share, made on first use."""

    def __init__(self):
        self._done = {}

    def once(self, what, make):
        if what not in self._done:
            began = time.monotonic()
            say(f"  {what} …")
            self._done[what] = make()
            say(f"  {what}: {time.monotonic() - began:.0f} s")
        return self._done[what]

    def build(self, preset):
        def make():
            for step, command in (("configure", ["cmake", "--preset", preset]), ("build", ["cmake", "--build", "--preset", preset])):
                log = f"{step}-{preset}.log"
                if run(command, log, 1500):
                    raise Broken(f"{' '.join(command)} failed (var/tests/{log}):\n{tail(log)}")
            return TOP / "build" / preset
        return self.once(f"build {preset}", make)

    def image_base(self):
        """The guest image without an agent."""
        def make():
            log = "image.log"
            if run(["deploy/guest-image/build"], log, 1200):
                raise Broken(f"deploy/guest-image/build failed (var/tests/{log}):\n{tail(log)}")
            return tail(log, 1).strip()
        return self.once("guest image", make)

    def image(self):
        """The packed guest image that tests boot: the agent of the release build."""
        def make():
            release = self.build("release")
            out = LOGS / "image"
            if run(["deploy/guest-image/pack", "--image", self.image_base(), "--agent", str(release / "bin" / "guest-agent"), "--out", str(out)],
                   "pack.log", 60):
                raise Broken(f"deploy/guest-image/pack failed (var/tests/pack.log):\n{tail('pack.log')}")
            return out
        return self.once("guest image with the agent", make)


# --- kinds -------------------------------------------------------------------------------------------------------------------

def kind_lint(prepared, options):
    yield from checks("lint", prepared, lint.CHECKS)


def kind_analyze(prepared, options):
    yield from checks("analyze", prepared, lint.SLOW_CHECKS)


def checks(kind, prepared, rows):
    build = prepared.build("asan")
    for name, check in rows:
        began = time.monotonic()
        found = check(TOP, build)
        yield Test(kind, name, "failed" if found else "passed", time.monotonic() - began, "\n".join(found[:60]))


def kind_unit(prepared, options):
    build = prepared.build("asan")
    report = LOGS / "unit.xml"
    report.unlink(missing_ok=True)
    env = dict(os.environ, ASAN_OPTIONS="detect_leaks=1", UBSAN_OPTIONS="print_stacktrace=1")
    code = run(["ctest", "--test-dir", str(build), "-j2", "--output-on-failure", "--output-junit", str(report), "-R", r"^unit\."],
               "unit.log", 600, env)
    if not report.exists():
        raise Broken(f"ctest wrote no report (exit {code}, var/tests/unit.log):\n{tail('unit.log')}")
    yield from junit("unit", report, r"^unit\.")


def kind_fuzz(prepared, options):
    if options.coverage:
        build, found = prepared.build("coverage"), fuzz.coverage
    elif options.keep:
        build, found = prepared.build("fuzz"), fuzz.keep
    else:
        build, found = prepared.build("fuzz"), None  # everything, so that clang sees it all
    rows = found(build, LOGS, say) if found else fuzz.run(build, int(options.minutes * 60) if options.minutes else 10, LOGS)
    for name, ok, seconds, detail in rows:
        yield Test("fuzz", name, "passed" if ok else "failed", seconds, detail)


def pytest(kind, prepared, options, select, timeout, workers=2, extra=(), more_env=None, log=None):
    """Runs e2e tests against the sanitized build; the Postgres cluster of this run serves all workers."""
    log = log or kind
    build = prepared.build("asan")
    image = prepared.image()
    release = prepared.build("release")
    report = LOGS / f"{log}.xml"
    report.unlink(missing_ok=True)
    with pg.Cluster(fsync=False) as cluster:
        env = dict(os.environ, EPHEMERAL_TEST_PG=cluster.socket_dir, EPHEMERAL_BIN=str(build / "bin"), EPHEMERAL_RELEASE_BIN=str(release / "bin"),
                   EPHEMERAL_IMAGE=str(image), EPHEMERAL_TEST_LOGS=str(LOGS),
                   EPHEMERAL_SHARED=os.environ.get("EPHEMERAL_SHARED", str(TOP.parent / "shared")), PYTHONDONTWRITEBYTECODE="1", **(more_env or {}))
        command = ["/usr/bin/python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit2",
                   "--timeout=300", *(["-n", str(workers), "--dist", "loadgroup"] if workers > 1 else []), *extra, *select]
        if options.match:
            command += ["-k", options.match]
        code = run(command, f"{log}.log", timeout, env)
    if not report.exists():
        raise Broken(f"pytest wrote no report (exit {code}, var/tests/{log}.log):\n{tail(f'{log}.log')}")
    yield from junit(kind, report)


# Of the end-to-end tests, those that come by another way with another VMM: how it starts, what its guest may do, how it ends, what holds it.
SHORT = ["tests/e2e/test_sample.py", "tests/e2e/test_jail.py", "tests/e2e/test_hostile_guest.py", "tests/e2e/test_ends.py::test_vmm_binary_is_gone",
         "tests/e2e/test_ends.py::test_a_process_of_the_run_is_killed", "tests/e2e/test_ends.py::test_node_restarted"]


def kind_contract(prepared, options):
    """What a VMM does, and then a short set of the end-to-end tests on Cloud Hypervisor; all of them: tests/run e2e --vmm cloud-hypervisor."""
    yield from pytest("contract", prepared, options, ["tests/contract"], 600)
    yield from pytest("contract", prepared, options, SHORT, 900, more_env={"EPHEMERAL_VMM": "cloud-hypervisor"}, log="contract-e2e")


def kind_e2e(prepared, options):
    yield from pytest("e2e", prepared, options, ["tests/e2e"], 2400)
    yield from booted("e2e")


def booted(kind):
    """Guests really booted, as the nodes of the tests counted them, against the tests that claim one."""
    count = LOGS / "guests"
    claims = sum(int(line) for line in (LOGS / "guest-claims").read_text().split()) if (LOGS / "guest-claims").exists() else 0
    boots = sum(int(line) for line in count.read_text().split()) if count.exists() else 0
    outcome = "passed" if boots >= claims else "failed"
    yield Test(kind, "guests_booted", outcome, 0, f"{boots} guests booted for {claims} tests that claim one")


def kind_fault(prepared, options):
    yield from matrix("fault", prepared, ["--short"])


def kind_kill(prepared, options):
    yield from matrix("kill", prepared, options.match.split() if options.match else [])


def matrix(kind, prepared, words):
    """Cells of tests/fault, each a test; what they print is shown as it comes."""
    report = LOGS / f"{kind}.json"
    report.unlink(missing_ok=True)
    env = dict(os.environ, EPHEMERAL_BIN=str(prepared.build("asan") / "bin"), EPHEMERAL_IMAGE=str(prepared.image()), EPHEMERAL_TEST_LOGS=str(LOGS),
               PYTHONDONTWRITEBYTECODE="1")
    code = subprocess.run(["/usr/bin/python3", "tests/fault/matrix.py", "--json", str(report), *words], cwd=TOP, env=env, stdin=subprocess.DEVNULL,
                          check=False).returncode
    if not report.exists():
        raise Broken(f"tests/fault/matrix.py wrote no report (exit {code})")
    for row in json.loads(report.read_text()):
        yield Test(kind, row["name"], "passed" if row["ok"] else "failed", row["seconds"], row["text"])


def kind_load(prepared, options):
    report = LOGS / "load-report.txt"
    report.unlink(missing_ok=True)
    yield from pytest("load", prepared, options, ["tests/load"], 5400, workers=1)
    say(report.read_text(encoding="utf-8") if report.exists() else "  no figures: no test of load came to its end")
    if not options.match:
        began = time.monotonic()
        code = run(["tests/bench/run", "--bin", str(prepared.build("release") / "bin"), "--image", str(prepared.image())], "bench.log", 1800)
        say(tail("bench.log", 12))
        yield Test("load", "start_times", "failed" if code else "passed", time.monotonic() - began, tail("bench.log"))


def kind_hostile(prepared, options):
    yield from pytest("hostile", prepared, options, ["tests/hostile"], 1800, workers=1)


def kind_restarts(prepared, options):
    """50 kills by name, or as many as EPHEMERAL_KILLS says; three in the default run."""
    yield from endurance("restarts", prepared, options, {} if "restarts" in options.kinds else {"EPHEMERAL_KILLS": "3"})


def kind_hosts(prepared, options):
    yield from endurance("hosts", prepared, options, {})


def endurance(kind, prepared, options, more_env):
    report = LOGS / "endure-report.txt"
    report.unlink(missing_ok=True)
    yield from pytest(kind, prepared, options, [f"tests/endure/test_{kind}.py"], 5400, workers=1, more_env=more_env)
    if report.exists():
        say(report.read_text(encoding="utf-8"))


def kind_deploy(prepared, options):
    yield from pytest("deploy", prepared, options, ["tests/deploy"], 1200, workers=1)


def kind_mutate(prepared, options):
    """Each seeded fault is a test: passed when the tests that it names found it. The default run tries three that are quick."""
    try:
        for result in mutate.run(TOP, LOGS, prepared.image_base, options.match, "mutate" not in options.kinds, say):
            yield Test("mutate", result.fault.name, "passed" if result.found else "failed", result.seconds, result.detail)
    except (faults.Wrong, mutate.NotPrepared) as error:
        raise Broken(str(error)) from error


def junit(kind, report, strip=""):
    for case in xml.parse(report).getroot().iter("testcase"):
        name = re.sub(strip, "", case.get("name"))
        if kind != "unit" and case.get("classname"):
            name = f"{case.get('classname').split('.')[-1]}::{name}"
        outcome, detail = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                outcome, detail = "failed", (child.text or child.get("message") or "")
            elif child.tag == "skipped":
                outcome, detail = "skipped", child.get("message") or (child.text or "")
        if outcome == "passed" and case.get("status") == "notrun":
            outcome, detail = "failed", "was not run"
        yield Test(kind, name, outcome, float(case.get("time") or 0), detail)


KINDS = {
    "lint": (kind_lint, True, "format, clang-tidy, cppcheck, and the rules of the house"),
    "unit": (kind_unit, True, "pure logic, cmocka under ASan and UBSan"),
    "fuzz": (kind_fuzz, True, "libFuzzer on every reader of foreign bytes, 10 s each (--minutes N for long)"),
    "contract": (kind_contract, True, "what noded's driver believes of Cloud Hypervisor, against the stand-in, and against the real one where it can run"),
    "e2e": (kind_e2e, True, "the whole system with booted guests"),
    "fault": (kind_fault, True, "seven cells of kill"),
    "mutate": (kind_mutate, True, "seeded faults that tests must find: all by name, three in the default run"),
    "restarts": (kind_restarts, True, "noded killed with -9 while runs are alive: 50 times by name, three in the default run"),
    "deploy": (kind_deploy, True, "deploy/quickstart on a copy of the tree"),
    "analyze": (kind_analyze, False, "the path analyzers of clang and gcc over every file"),
    "kill": (kind_kill, False, "processes killed and stopped at every step of a run (-k PROCESS/STEP/FAULT: some)"),
    "hostile": (kind_hostile, False, "guests that break the channel's protocol: every attack there is"),
    "hosts": (kind_hosts, False, "three hosts, two controlds, Postgres: each killed five times under load"),
    "load": (kind_load, False, "200 runs by 8 clients, 500 followers, the budget at the meter; start times beside the bare boot"),
}


def arguments():
    parser = argparse.ArgumentParser(prog="tests/run", description="Builds and tests Ephemeral. Without a kind: those of the default run.",
                                     epilog="\n".join(f"  {name:8} {'' if default else '(by name) '}{text}" for name, (_, default, text) in KINDS.items()),
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="kinds to run, in this order")
    parser.add_argument("--json", metavar="FILE", help="write the outcome of every test")
    parser.add_argument("--minutes", type=float, help="fuzz: minutes for each target")
    parser.add_argument("--coverage", action="store_true", help="fuzz: instead, what of the readers the kept inputs reach, against what is claimed")
    parser.add_argument("--keep", action="store_true", help="fuzz: instead, keep inputs in tests/fuzz/corpus that reach more")
    parser.add_argument("-k", dest="match", metavar="WORDS", help="e2e, load, deploy: only tests whose name matches (pytest -k); mutate: faults")
    parser.add_argument("--vmm", choices=("qemu", "cloud-hypervisor"), help="what nodes of e2e, fault, kill, hostile, load run their VMs with (default: QEMU). "
                        "cloud-hypervisor: the real one where it and KVM are, else the stand-in of tests/rig")
    options = parser.parse_args()
    if options.vmm:
        os.environ["EPHEMERAL_VMM"] = options.vmm
    for kind in options.kinds:
        if kind not in KINDS:
            parser.error(f"unknown kind {kind!r}; kinds are {', '.join(KINDS)}")
    return options


def run_kind(kind, prepared, options):
    say(f"{kind}: {KINDS[kind][2]}")
    tests = []
    began = time.monotonic()
    try:
        for test in KINDS[kind][0](prepared, options):
            tests.append(test)
            if test.outcome == "failed":
                say(f"  FAILED {test.name}\n" + "\n".join("    " + line for line in test.detail.splitlines()[-60:]))
            elif test.outcome == "skipped":
                say(f"  skipped {test.name}: {test.detail}")
    except Broken as broken:
        tests.append(Test(kind, "prepare", "failed", 0, str(broken)))
        say(f"  FAILED to prepare: {broken}")
    if not tests:
        tests.append(Test(kind, "prepare", "failed", 0, "no test was found"))
        say("  FAILED: no test was found")
    passed = sum(t.outcome == "passed" for t in tests)
    say(f"  {passed} of {len(tests)} passed in {time.monotonic() - began:.0f} s")
    return tests, time.monotonic() - began


def main():
    options = arguments()
    began = time.monotonic()
    LOGS.mkdir(parents=True, exist_ok=True)
    for counter in ("guests", "guest-claims"):
        (LOGS / counter).unlink(missing_ok=True)
    prepared = Prepared()
    tests, seconds = [], {}
    for kind in options.kinds or [name for name, row in KINDS.items() if row[1]]:
        found, seconds[kind] = run_kind(kind, prepared, options)
        tests += found
    count = {outcome: sum(t.outcome == outcome for t in tests) for outcome in ("passed", "failed", "skipped")}
    if options.json:
        document = {
            "passed": count["passed"], "failed": count["failed"],
            "skipped": [{"name": f"{t.kind}/{t.name}", "reason": t.detail} for t in tests if t.outcome == "skipped"],
            "seconds": round(time.monotonic() - began, 1),
            "kinds": {kind: {"passed": sum(t.kind == kind and t.outcome == "passed" for t in tests),
                             "failed": sum(t.kind == kind and t.outcome == "failed" for t in tests), "seconds": round(seconds[kind], 1)}
                      for kind in seconds},
            "tests": [{"kind": t.kind, "name": t.name, "outcome": t.outcome, "seconds": round(t.seconds, 3)} for t in tests],
        }
        pathlib.Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    for t in tests:
        if t.outcome == "failed":
            say(f"failed: {t.kind}/{t.name}")
    say(f"whole time {time.monotonic() - began:.0f} s")
    say(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
