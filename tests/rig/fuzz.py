"""The fuzz targets of tests/fuzz: runs them, measures what of their readers the kept inputs reach, keeps inputs that reach more.

Inputs of a target: its seeds (tests/fuzz/corpus/NAME), those that were kept (tests/fuzz/corpus/NAME.kept, one file of length and
bytes) and those that this machine found (var/tests/corpus/NAME). Runs write executions and coverage to var/tests/fuzz.json.
"""
import concurrent.futures
import glob
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import time

TOP = pathlib.Path(__file__).resolve().parents[2]
FUZZ = TOP / "tests" / "fuzz"
KEPT_TARGET_BYTES = 56 * 1024  # of one .kept file
KEPT_INPUT_BYTES = 4096
LEAST_EXECUTIONS = 200  # fewer: it did not run; the slowest targets do tens a second on a machine that is busy


def names():
    return sorted(path.stem for path in FUZZ.glob("fuzz_*.c"))


def read_kept(name):
    path = FUZZ / "corpus" / f"{name}.kept"
    data = path.read_bytes() if path.exists() else b""
    while data:
        size, = struct.unpack_from("<I", data)
        yield data[4:4 + size]
        data = data[4 + size:]


def write_kept(name, inputs):
    (FUZZ / "corpus" / f"{name}.kept").write_bytes(b"".join(struct.pack("<I", len(one)) + one for one in inputs))


def unpack_kept(name, logs):
    """The kept inputs as files of a directory, for programs that read directories."""
    out = logs / "corpus-kept" / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for i, one in enumerate(read_kept(name)):
        (out / f"{i:04}").write_bytes(one)
    return out


def inputs_of(name, logs):
    seeds = FUZZ / "corpus" / name
    return [str(path) for path in (unpack_kept(name, logs), seeds) if path.is_dir()]


def note(logs, key, rows):
    """Adds rows (target -> figures) to var/tests/fuzz.json."""
    path = logs / "fuzz.json"
    document = json.loads(path.read_text()) if path.exists() else {}
    document.setdefault(key, {}).update(rows)
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


# --- running -----------------------------------------------------------------------------------------------------------------

def run_one(binary, seconds, logs):
    """One target for so long; (ok, seconds, detail, figures)."""
    name = binary.name
    if not binary.exists():
        return False, 0.0, "was not built", {}
    found = logs / "corpus" / name
    found.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}.log"
    words = FUZZ / f"{name}.dict"
    command = [str(binary), f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=2048", "-print_final_stats=1",
               f"-artifact_prefix={logs}/{name}-", *([f"-dict={words}"] if words.exists() else []), str(found), *inputs_of(name, logs)]
    began = time.monotonic()
    with open(log, "w", encoding="utf-8", errors="replace") as out:
        try:
            code = subprocess.run(command, cwd=TOP, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                  timeout=seconds + 120, check=False).returncode
        except subprocess.TimeoutExpired:
            code = 124
    text = log.read_text(errors="replace")
    count = re.search(r"number_of_executed_units:\s*(\d+)", text)
    seen = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", text) or [("0", "0", "0")]
    took = time.monotonic() - began
    figures = {"seconds": round(took), "executions": int(count.group(1)) if count else 0, "edges": int(seen[-1][0]),
               "features_at_start": int(seen[0][1]), "features": int(seen[-1][1]), "corpus": int(seen[-1][2]), "exit": code}
    figures["per_second"] = round(figures["executions"] / max(took, 1))
    ok = code == 0 and figures["executions"] >= LEAST_EXECUTIONS
    detail = f"{figures['executions']} executions"
    if not ok:
        detail = f"exit {code}, {detail} (var/tests/{log.name})\n" + "\n".join(text.splitlines()[-40:])
    return ok, took, detail, figures


def run(build, seconds, logs):
    """Every target, two at a time; yields (name, ok, seconds, detail)."""
    binaries = [build / "tests" / "fuzz" / name for name in names()]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for binary, (ok, took, detail, figures) in zip(binaries, pool.map(lambda b: run_one(b, seconds, logs), binaries)):
            note(logs, "runs", {binary.name: figures})
            yield binary.name, ok, took, detail


# --- coverage ----------------------------------------------------------------------------------------------------------------

def claims(name):
    """What a target's first lines say: the files (or folders/) that it reads with, and the least share of them that is reached."""
    text = (FUZZ / f"{name}.c").read_text()
    files = " ".join(re.findall(r"^/\* reads: (.*) \*/$", text, re.M)).split()
    least = re.search(r"^/\* reached: (\d+) % of lines, (\d+) % of branches", text, re.M)
    return files, (int(least.group(1)), int(least.group(2))) if least else None


def count(summaries, files):
    """(lines, branches) reached of these files, in percent."""
    wanted = {path for name in files for path in (glob.glob(f"{TOP}/{name}*.c") if name.endswith("/") else [f"{TOP}/{name}"])}
    shares = []
    for kind in ("lines", "branches"):
        rows = [one["summary"][kind] for one in summaries if one["filename"] in wanted]
        total = sum(row["count"] for row in rows)
        shares.append(100.0 * sum(row["covered"] for row in rows) / total if total else 100.0)
    missing = {f"{TOP}/{name}" for name in files if not name.endswith("/")} - {one["filename"] for one in summaries}
    return shares[0], shares[1], [os.path.relpath(path, TOP) for path in sorted(missing)]


def summaries_of(build, name, logs, more):
    """Per file, what the kept inputs (and those of the directories `more`) reach."""
    binary, raw, merged = build / "tests" / "fuzz" / name, logs / f"{name}.profraw", logs / f"{name}.profdata"
    raw.unlink(missing_ok=True)
    env = dict(os.environ, LLVM_PROFILE_FILE=str(raw))
    with open(logs / f"{name}.log", "w", encoding="utf-8", errors="replace") as out:
        code = subprocess.run([str(binary), *inputs_of(name, logs), *more], cwd=TOP, env=env, stdout=out, stderr=subprocess.STDOUT,
                              stdin=subprocess.DEVNULL, timeout=600, check=False).returncode
    if code:
        raise RuntimeError(f"exit {code} (var/tests/{name}.log)")
    subprocess.run(["llvm-profdata", "merge", "-sparse", "-o", str(merged), str(raw)], check=True)
    out = subprocess.run(["llvm-cov", "export", "-summary-only", f"-instr-profile={merged}", str(binary)], check=True, capture_output=True)
    raw.unlink()
    return json.loads(out.stdout)["data"][0]["files"]


def coverage(build, logs, say):
    """Replays what is kept and compares with what each target claims; yields (name, ok, seconds, detail). Prints a table."""
    say(f"  {'target':20} {'lines':>7} {'at least':>8} {'branches':>9} {'at least':>8}  {'files':>5}")
    for name in names():
        began = time.monotonic()
        files, least = claims(name)
        try:
            lines, branches, missing = count(summaries_of(build, name, logs, []), files)
        except (RuntimeError, subprocess.SubprocessError) as error:
            yield name, False, time.monotonic() - began, str(error)
            continue
        note(logs, "coverage", {name: {"lines": round(lines, 1), "branches": round(branches, 1), "files": files}})
        want = least or (101, 101)
        say(f"  {name:20} {lines:6.1f}% {want[0]:7}% {branches:8.1f}% {want[1]:7}%  {len(files):5}")
        faults = []
        if not files or least is None:
            faults.append("its first lines do not say what it reads and how much of that is reached")
        if missing:
            faults.append(f"it does not read with {' '.join(missing)}")
        if lines < want[0] or branches < want[1]:
            faults.append(f"{lines:.1f} % of lines and {branches:.1f} % of branches are reached, {want[0]} and {want[1]} are claimed")
        yield name, not faults, time.monotonic() - began, "; ".join(faults)


# --- keeping -----------------------------------------------------------------------------------------------------------------

def keep(build, logs, say):
    """Merges what this machine found with what is kept, smallest inputs first up to the bound, and writes the .kept files."""
    for name in names():
        merged, found = logs / "corpus-merged" / name, logs / "corpus" / name
        shutil.rmtree(merged, ignore_errors=True)
        merged.mkdir(parents=True)
        found.mkdir(parents=True, exist_ok=True)
        seeds = FUZZ / "corpus" / name
        began = time.monotonic()
        # Seeds first: what they reach already need not be kept.
        if seeds.is_dir():
            for path in seeds.iterdir():
                shutil.copy(path, merged / f"seed-{path.name}")
        command = [str(build / "tests" / "fuzz" / name), "-merge=1", "-rss_limit_mb=2048", "-timeout=10", f"-max_len={KEPT_INPUT_BYTES}",
                   str(merged), str(unpack_kept(name, logs)), str(found)]
        with open(logs / f"{name}.merge.log", "w", encoding="utf-8", errors="replace") as out:
            code = subprocess.run(command, cwd=TOP, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
        if code:
            yield name, False, time.monotonic() - began, f"merge ended with {code} (var/tests/{name}.merge.log)"
            continue
        inputs = [path.read_bytes() for path in merged.iterdir() if not path.name.startswith("seed-")]
        inputs.sort(key=lambda one: (len(one), one))
        kept, size = [], 0
        for one in inputs:
            size += 4 + len(one)
            if size > KEPT_TARGET_BYTES:
                break
            kept.append(one)
        write_kept(name, kept)
        say(f"  {name:20} {len(kept)} of {len(inputs)} inputs kept")
        yield name, True, time.monotonic() - began, ""
