"""The rules of the house that a program can check. Each check returns a list of findings; empty means clean."""
import concurrent.futures
import json
import os
import re
import shlex
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


ALLOWED = "tests/rig/gcc-analyzer.txt"
ENGLISH = {**os.environ, "LC_ALL": "C"}
GCC_ANALYZER = ["-O2", "-fanalyzer", "-fdiagnostics-path-format=none", "-fdiagnostics-plain-output"]


def allowed(top):
    """{(file, function, warning): reason}: what the list forgives, one finding a line."""
    rows = {}
    for number, line in enumerate((top / ALLOWED).read_text().splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            match = re.fullmatch(r"(\S+) (\S+) (-Wanalyzer-\S+): (\S.{15,})", line)
            if not match:
                raise ValueError(f"{ALLOWED}:{number}: FILE FUNCTION -Wanalyzer-NAME: reason")
            rows[match.groups()[:3]] = match.group(4)
    return rows


def check_gcc_analyzer(top, build):
    """gcc's path analyzer, as the code is shipped (-O2, no sanitizer). A finding is mended or stands in the list with its reason; a line of
    the list that forgives nothing any more is a finding as well."""
    leaky = (b"#include <stdlib.h>\nint use(int n);\nint f(int n);\nint f(int n)\n{\n\tchar *p = malloc(4);\n\tif (!p || use(n))\n\t\treturn 1;\n"
             b"\t*p = (char)use(n);\n\tn = use(*p);\n\tfree(p);\n\treturn n;\n}\n")
    out = subprocess.run(["gcc", "-x", "c", "-", "-S", "-o", "/dev/null", *GCC_ANALYZER], input=leaky, capture_output=True, check=False, env=ENGLISH)
    if [key[1:] for key, _ in analyzer_lines(out.stderr.decode())] != [("f", "-Wanalyzer-malloc-leak")]:
        return ["gcc's analyzer does not find a leak where there is one: " + out.stderr.decode()[-300:]]
    entries = {e["file"]: e for e in json.loads((build / "compile_commands.json").read_text())
               if e["file"].startswith(str(top)) and "/tests/" not in e["file"] and "/build/" not in e["file"]}

    def one(entry):
        words = [w for w in shlex.split(entry["command"]) if not w.startswith(("-fsanitize", "-fno-sanitize", "-O", "-Werror"))]
        words = words[next(i for i, w in enumerate(words) if os.path.basename(w) in ("gcc", "cc")):]  # without a compiler cache before it
        words[words.index("-o") + 1] = "/dev/null"
        words[words.index("-c")] = "-S"
        out = subprocess.run([*words, *GCC_ANALYZER], cwd=entry["directory"],
                             capture_output=True, text=True, check=False, env=ENGLISH)
        if out.returncode != 0:
            return [(entry["file"], "?", "?", out.stderr[-500:])]
        return [(*key, line) for key, line in analyzer_lines(out.stderr)]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        raw = [finding for found in pool.map(one, entries.values()) for finding in found]
    found = {(file.replace(f"{top}/", ""), function, warning): line.replace(f"{top}/", "") for file, function, warning, line in raw}
    forgiven = allowed(top)
    return sorted([f"{line} in {key[1]}()" for key, line in found.items() if key not in forgiven] +
                  [f"{ALLOWED}: {' '.join(key)} is found no more; take the line out" for key in forgiven if key not in found])


def analyzer_lines(text):
    """((file, function, warning), line) of every finding in gcc's words."""
    function = "?"
    for line in text.splitlines():
        inside = re.match(r"\S+: In function '([^']+)'", line)
        if inside:
            function = inside.group(1)
        warning = re.match(r"(\S+?):\d+:\d+: warning: .*\[(-W[a-z=-]+)\]$", line)
        if warning:
            yield (warning.group(1), function, warning.group(2)), line


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


def check_python(top, build):
    """Names that no line defines, which Python finds only when it comes there. (What pyflakes says of fixtures is not meant.)"""
    files = [name for name in tracked(top) if name.endswith(".py")] + ["tests/bench/run"]
    out = subprocess.run(["/usr/bin/python3", "-m", "pyflakes", *files], cwd=top, capture_output=True, text=True, check=False)
    if out.returncode not in (0, 1) or "No module" in out.stderr:
        return ["pyflakes did not run: " + out.stderr.strip()[-300:]]
    return [line for line in out.stdout.splitlines() if "undefined name" in line and "unable to detect" not in line or "syntax" in line.lower()]


def check_named_tests(top, build):
    """tests/README.md lists what is attacked by which test: each that it names must be there."""
    found, text = [], {}
    for name in tracked(top):
        if name.startswith("tests/") and name.endswith((".py", ".c")):
            text.setdefault(name.rsplit("/", 1)[-1].rsplit(".", 1)[0], []).append((top / name).read_text())
    named = re.findall(r"`(\w+)::(\w+)`", (top / "tests" / "README.md").read_text())
    for stem, test in named:
        if not any(re.search(rf"^(def|static void) {test}\(", source, re.M) for source in text.get(stem, [])):
            found.append(f"tests/README.md: there is no test {stem}::{test}")
    return found if named else ["tests/README.md: it names no test as `file::test`"]


CHECKS = [("format", check_format), ("clang_tidy", check_tidy), ("unsafe_calls", check_calls), ("file_sizes", check_sizes), ("layout", check_layout),
          ("layers", check_layers), ("words", check_words), ("sleeps", check_sleeps), ("named_tests", check_named_tests),
          ("python_names", check_python),
          ("cppcheck", check_cppcheck)]
SLOW_CHECKS = [("clang_analyzer", check_analyzer), ("gcc_analyzer", check_gcc_analyzer)]
