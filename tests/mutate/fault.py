"""Seeded faults: what a .fault file says, and the copy of the tree that a fault is put into.

A fault is text that stands exactly once in a file of the tree, and the text that takes its place. That survives edits around it; when the
text itself is gone, the fault is an error that names the file, so that no fault is lost without a word.
"""
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess

FOLDER = pathlib.Path(__file__).resolve().parent / "faults"
KINDS = ("unit", "e2e")


class Wrong(Exception):
    """A fault file that says something which cannot be, with the name of the file and what to mend."""


@dataclasses.dataclass
class Edit:
    file: str
    before: str
    after: str


@dataclasses.dataclass
class Red:
    """A test that must go red: kind, the file without its folder (test_price, test_store_sql.py), the test, and words of its failure."""
    kind: str
    file: str
    test: str
    says: str = ""

    @property
    def name(self):
        return f"{self.file}::{self.test}"

    @property
    def source(self):
        return f"tests/unit/{self.file}.c" if self.kind == "unit" else f"tests/e2e/{self.file}"

    @property
    def definition(self):
        return f"static void {self.test}(" if self.kind == "unit" else f"def {self.test.split('[')[0]}("


@dataclasses.dataclass
class Fault:
    name: str
    what: str
    breaks: str = ""
    hangs: bool = False
    fast: bool = False
    reds: list = dataclasses.field(default_factory=list)
    edits: list = dataclasses.field(default_factory=list)


def read(path):
    """The fault that a file describes; tests/mutate/README.md has the form."""
    lines = path.read_text(encoding="utf-8").split("\n")
    fault = Fault(path.stem, lines[0].strip())
    file, number = None, 1

    def wrong(text):
        return Wrong(f"tests/mutate/faults/{path.name}:{number + 1}: {text}")

    while number < len(lines):
        line = lines[number]
        word, _, rest = line.partition(": ")
        rest = rest.strip()
        if word == "file":
            file = rest
        elif word == "breaks":
            fault.breaks = rest
        elif word == "red":
            match = re.fullmatch(r"(\w+) ([\w.]+)::(\S.*)", rest)
            if not match or match.group(1) not in KINDS:
                raise wrong(f"`red: KIND FILE::TEST` is wanted, with KIND {' or '.join(KINDS)}, not {rest!r}")
            fault.reds.append(Red(*match.groups()))
        elif word == "says":
            if not fault.reds or fault.reds[-1].says:
                raise wrong("`says:` follows the `red:` whose failure it is about, once")
            fault.reds[-1].says = rest
        elif line == "symptom: hang":
            fault.hangs = True
        elif line == "default run":
            fault.fast = True
        elif line == "<<<<":
            try:
                middle = lines.index("====", number)
                end = lines.index(">>>>", middle)
            except ValueError:
                raise wrong("`<<<<` is followed by the text before, `====`, the text after, `>>>>`") from None
            if not file:
                raise wrong("a `file:` line is wanted before the text")
            fault.edits.append(Edit(file, "\n".join(lines[number + 1:middle]), "\n".join(lines[middle + 1:end])))
            number = end
        elif line.strip():
            raise wrong(f"{line!r} is no line of a fault")
        number += 1
    number = 0
    if not fault.what or not fault.breaks or not fault.reds or not fault.edits or not all(r.says for r in fault.reds):
        raise wrong("a fault has a first line that tells the fault, `breaks:`, `red:` with `says:`, and at least one edit")
    return fault


def load():
    return [read(path) for path in sorted(FOLDER.glob("*.fault"))]


def place(edit, top):
    """The file that an edit is about. With a `*` in its name: the last one that holds the text, as the last migration is the one that counts."""
    if "*" not in edit.file:
        return edit.file
    names = [str(path.relative_to(top)) for path in sorted(top.glob(edit.file))]
    return next((name for name in reversed(names) if edit.before in (top / name).read_text(encoding="utf-8")), edit.file)


def replaced_later(name, edit, top):
    """The later migration that defines the edited SQL function again, so that the edit would change nothing."""
    head = (top / name).read_text(encoding="utf-8").split(edit.before)[0] + edit.before
    functions = re.findall(r"FUNCTION (\w+\()", head)
    later = [path for path in sorted((top / name).parent.glob("*.sql")) if path.name > pathlib.Path(name).name]
    return next((path.name for path in later if functions and f"FUNCTION {functions[-1]}" in path.read_text(encoding="utf-8")), "")


def check(fault, top):
    """Raises Wrong when an edit does not fit the tree as it is, or a test that it names is not there."""
    for red in fault.reds:
        if not (top / red.source).is_file() or red.definition not in (top / red.source).read_text(encoding="utf-8"):
            raise Wrong(f"fault {fault.name}: {red.source} has no test {red.test} any more; name the one that proves this now")
    for edit in fault.edits:
        name = place(edit, top)
        if not (top / name).is_file():
            raise Wrong(f"fault {fault.name}: {name} is not there or holds the text no more; bring the fault up to date:\n{edit.before}")
        count = (top / name).read_text(encoding="utf-8").count(edit.before)
        if count != 1 or not edit.before.strip():
            raise Wrong(f"fault {fault.name}: {name} holds this text {count} times, not once; bring the fault up to date:\n{edit.before}")
        later = replaced_later(name, edit, top) if name.endswith(".sql") else ""
        if later:
            raise Wrong(f"fault {fault.name}: {name} defines a function that {later} defines again; bring the fault up to date:\n{edit.before}")


def tracked(top):
    """The files of the tree as they are: those that git knows and those that it would be told of."""
    out = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=top, capture_output=True, check=True).stdout
    return sorted({name for name in out.decode().split("\0") if name and (top / name).is_file()})


class Copy:
    """A copy of the tree. Files whose content is the same are not written, so that a build beside it stays incremental."""

    def __init__(self, top, folder):
        self.top, self.folder = top, folder

    def sync(self):
        """Makes the copy equal to the tree: also undoes whatever an earlier run left in it."""
        names = tracked(self.top)
        for name in names:
            self._write(name, (self.top / name).read_bytes(), self.top / name)
        here = set(names)
        for root, folders, files in os.walk(self.folder, topdown=False):
            for file in files:
                path = pathlib.Path(root) / file
                if str(path.relative_to(self.folder)) not in here:
                    path.unlink()
            for folder in folders:
                if not os.listdir(os.path.join(root, folder)):
                    os.rmdir(os.path.join(root, folder))

    def _write(self, name, data, like=None):
        path = self.folder / name
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        if like:
            shutil.copymode(like, path)

    def apply(self, fault):
        """Puts the fault in. The copy is what the run began with, though the tree itself may be edited meanwhile."""
        check(fault, self.folder)
        names = [place(edit, self.folder) for edit in fault.edits]
        saved = {name: (self.folder / name).read_bytes() for name in names}
        for edit, name in zip(fault.edits, names):
            self._write(name, (self.folder / name).read_text(encoding="utf-8").replace(edit.before, edit.after).encode())
        return saved

    def undo(self, saved):
        for name, data in saved.items():
            self._write(name, data)
