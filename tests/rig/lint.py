"""The rules of the house that a program can check. Each check returns a list of findings; empty means clean."""
import concurrent.futures
import json
import re
import subprocess

FOLDERS = ("controld", "noded", "guest-agent", "common", "proto", "tests", "deploy", "cli")
TOP_LEVEL = set(FOLDERS) | {"CMakeLists.txt", "CMakePresets.json", "README.md"}
CODE = (".c", ".h")


def tracked(top):
    out = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=top, capture_output=True, text=True, check=True).stdout
    return [name for name in out.splitlines() if (top / name).is_file()]


def code(top):
    return [name for name in tracked(top) if name.endswith(CODE)]


def check_format(top, build):
    files = code(top)
    out = subprocess.run(["clang-format", "--dry-run", "--ferror-limit=1", *files], cwd=top, capture_output=True, text=True, check=False)
    return sorted({line.split(":")[0] + ": run clang-format -i" for line in out.stderr.splitlines() if "warning:" in line or "error:" in line})


def check_tidy(top, build):
    """Without the path analyzer, which takes fifty times as long: `tests/run analyze` has it."""
    return tidy(top, build, ["--checks=-clang-analyzer-*"])


def check_analyzer(top, build):
    return tidy(top, build, [])


def check_cppcheck(top, build):
    out = subprocess.run(["cppcheck", "-q", "-j2", "--enable=warning,performance,portability", "--inline-suppr", "--suppress=normalCheckLevelMaxBranches",
                          "--suppress=missingIncludeSystem", "--template={file}:{line}: {severity}: {message} [{id}]", f"-I{top}", f"-I{top}/common",
                          "--include=/usr/include/x86_64-linux-gnu/sys/queue.h", "-D_GNU_SOURCE", *[name for name in code(top) if name.endswith(".c") and not name.startswith("tests/")]],
                         cwd=top, capture_output=True, text=True, check=False)
    return [line for line in out.stderr.splitlines() if re.match(r"\S+:\d+: ", line)]


def tidy(top, build, options):
    entries = json.loads((build / "compile_commands.json").read_text())
    files = sorted({e["file"] for e in entries if e["file"].startswith(str(top)) and "/tests/" not in e["file"] and "/build/" not in e["file"]})

    def one(file):
        out = subprocess.run(["clang-tidy", "-p", str(build), "--quiet", *options, "--extra-arg=-Wno-unknown-warning-option", file], cwd=top,
                             capture_output=True, text=True, check=False)
        return [line for line in out.stdout.splitlines() if re.search(r"(warning|error):", line)]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return sorted({line.replace(str(top) + "/", "") for found in pool.map(one, files) for line in found})


def check_calls(top, build):
    banned = re.compile(r"\b(strcpy|strcat|sprintf|vsprintf|strncpy|strncat|strtok|atoi|atol|atoll|gets)\s*\(")
    found = []
    for name in code(top):
        for number, line in enumerate((top / name).read_text(errors="replace").splitlines(), 1):
            if banned.search(line):
                found.append(f"{name}:{number}: {line.strip()}")
    return found


def check_sizes(top, build):
    found = []
    for name in tracked(top):
        if name.endswith((".c", ".h", ".py", ".js", ".sql")):
            lines = (top / name).read_text(errors="replace").count("\n")
            if lines > 700:
                found.append(f"{name}: {lines} lines; is there a second noun in it?")
    return found


def check_layout(top, build):
    names = {name.split("/")[0] for name in tracked(top)}
    found = [f"{name}: not a name for the top level" for name in sorted(names - TOP_LEVEL) if not name.startswith(".")]
    folders = {"/".join(name.split("/")[:-1]) for name in tracked(top) if not name.startswith("tests/fuzz/corpus/")} - {""}
    found += [f"{folder}: no README.md" for folder in sorted(folders) if not (top / folder / "README.md").exists()]
    return found


def check_layers(top, build):
    """common <- proto <- {controld, noded, guest-agent}; cli uses common alone; controld and noded never include each other."""
    allowed = {"common": {"common"}, "proto": {"common", "proto"}, "controld": {"common", "proto", "controld"},
               "noded": {"common", "proto", "noded"}, "guest-agent": {"common", "proto", "guest-agent"}, "cli": {"common", "cli"}}
    found = []
    for name in code(top):
        folder = name.split("/")[0]
        for line in (top / name).read_text(errors="replace").splitlines() if folder in allowed else ():
            include = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            target = include and next((part for part in include.group(1).split("/") if part in allowed), None)
            if target and target not in allowed[folder]:
                found.append(f"{name}: includes {include.group(1)}")
    return found


def check_words(top, build):
    home = re.escape(str(top.parent))
    bad = re.compile(rf'(^|[^A-Za-z0-9_.]){home}/|"resolved": *"http|https?://[a-z0-9.-]*(npm|debian)[a-z0-9.-]*\.[a-z]+')
    found = []
    for name in tracked(top):
        for number, line in enumerate((top / name).read_text(errors="replace").splitlines(), 1):
            if bad.search(line):
                found.append(f"{name}:{number}: a path of this machine or a registry's host: {line.strip()[:120]}")
    return found


def check_sleeps(top, build):
    """Tests wait for conditions. time.sleep stands only in the rig's one waiting loop."""
    found = []
    for name in tracked(top):
        if not name.startswith("tests/") or not name.endswith((".c", ".py")) or name in ("tests/rig/lint.py", "tests/rig/wait.py"):
            continue
        for number, line in enumerate((top / name).read_text(errors="replace").splitlines(), 1):
            if re.search(r"\b(usleep|sleep)\(|time\.sleep\(", line):
                found.append(f"{name}:{number}: {line.strip()}")
    return found


CHECKS = [("format", check_format), ("clang_tidy", check_tidy), ("unsafe_calls", check_calls), ("file_sizes", check_sizes), ("layout", check_layout),
          ("layers", check_layers), ("words", check_words), ("sleeps", check_sleeps),
          ("cppcheck", check_cppcheck)]
SLOW_CHECKS = [("clang_analyzer", check_analyzer)]
