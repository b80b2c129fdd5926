"""Every verb of `ephemeral` and every command of controld and noded, as a user sees it, against recorded transcripts (cli_rig.py says how to
write them anew). The verbs come from the program's own table: one without a case here fails."""
import os
import re
import subprocess

import pytest
from api_rig import control, paper  # noqa: F401
from cli_cases import CASES, NOBODY, OFFLINE, words
from cli_rig import FOLDER, Command, Transcripts

import control as control_rig
import images


@pytest.fixture
def command(bin_dir, tmp_path):
    return Command(bin_dir, tmp_path)


@pytest.fixture
def transcripts():
    made = Transcripts()
    yield made
    made.check()


@pytest.fixture(scope="module")
def world(control, paper, tmp_path_factory):
    """What the cases speak of: an organization with runs in several states, keys, a host."""
    client = control.new_client(name="transcripts")
    ended = client.create(prompt="Count to two.", max_cost_micros=40000)["id"]
    paper.run_to_end(ended, ("model.started", {"call": 1, "model": "scripted/auto"}, "guest"),
                     ("shell.started", {"call_id": "c1", "command": "echo one; echo two"}, "guest"),
                     ("shell.output", {"call_id": "c1", "stream": "stdout", "text": "one\ntwo\n"}, "guest"),
                     ("shell.exited", {"call_id": "c1", "exit_code": 0, "duration_ms": 12}, "guest"), output=b"One, two.")
    failed = client.create(prompt="Spend it all.", max_cost_micros=40000)["id"]
    paper.run_to_end(failed, status="failed", code="budget_exceeded", message="The next call needs 7 micros, 3 are left.", output=b"")
    for run in (ended, failed):
        client.settled(run, 20)
    waiting = client.create(prompt="Wait for me.", max_cost_micros=40000)["id"]
    spare = control.operator("POST", f"/orgs/{client.org}/keys", json={"role": "viewer", "name": "spare"})["id"]
    names = {"run": waiting, "ended": ended, "failed": failed, "org": client.org, "key": client.key, "spare": spare, "node": paper.id}
    folder = tmp_path_factory.mktemp("images")
    names |= {"images": str(folder), **{f"image{i}": images.make(folder / str(i), f"transcript {i}") for i in range(3)}}
    env = {"EPHEMERAL_URL": control.url, "EPHEMERAL_API_KEY": client.key, "EPHEMERAL_OPERATOR_URL": control.operator_url,
           "EPHEMERAL_OPERATOR_KEY": control.operator_key}
    return names, env


def test_every_verb_has_a_case(command):
    verbs = command.verbs()
    assert len(verbs) >= 30 and set(verbs) == set(CASES), "a verb without a case in cli_cases.py, or a case without a verb"
    recorded = {path.stem for path in FOLDER.glob("*.txt")}
    assert {verb.replace(" ", "-") for verb in verbs} <= recorded, "a verb without a transcript"


def test_transcript_of_each_verb(command, world, transcripts):
    """Help, wrong use, no login, then normal use as text and as JSON."""
    names, env = world
    for verb, usage in command.verbs().items():
        def add(shown, *arguments, input=b"", env=None):
            transcripts.add(verb, f"ephemeral {shown}", command.run(*arguments, input=input, env=env), (names["images"], "IMAGES"), (command.home, "HOME"))
        add(f"{verb} --help", *verb.split(), "--help")
        add(f"{verb} --jsno", *verb.split(), "--jsno")
        needed = len([word for word in usage.split() if not word.startswith("[")])
        if needed:
            add(verb, *verb.split(), env=env)
        arguments, given = words(verb, 0, NOBODY)
        if verb not in OFFLINE:
            add(f"{verb}   (nobody is logged in)", *arguments, input=given)
        for number in range(len(CASES[verb])):
            arguments, given = words(verb, number, names)
            here = {**env, "EPHEMERAL_API_KEY": None} if verb in ("login", "logout") else env
            shown = " ".join(f"'{word}'" if " " in word else word for word in arguments)
            add(shown, *arguments, input=given, env=here)
            add(f"{shown} --json", *arguments, "--json", input=given, env=here)


def test_transcript_of_the_program_itself(command, transcripts):
    for arguments in ([], ["--help"], ["-h"], ["--version"], ["rnu"], ["admin"], ["admin", "--help"], ["admin", "nod"], ["admin", "nod", "lsit"], ["admin", "org", "lsit"],
                      ["--json", "runs"], ["runs", "-x"], ["runs", "--limit"], ["runs", "--all=yes"], ["get", "a", "b"], ["help", "nonsense"],
                      ["version", "x"], ["run", "x", "--timeout", "1", "--timeout", "2"], ["get", "run_x\x1b[2J\nforged"], ["run", *["w"] * 40],
                      ["run", "x", "--file", "/nonexistent"], ["run", "x", "--max-cost", "1e3"], ["run", "x", "--metadata", "novalue"], ["run", ""],
                      ["runs", "--url", "ftp://example.com"], ["runs", "--url", "http://user:secret@example.com"],
                      ["runs", "--url", "http://127.0.0.1:1/?key=secret"]):
        shown = " ".join(ascii(a)[1:-1] if a.isascii() and a.isprintable() else ascii(a) for a in arguments[:6])
        done = command.run(*arguments, env={"EPHEMERAL_API_KEY": "eph_" + "A" * 43})
        assert b"secret" not in done.stdout + done.stderr, "what stands in a URL beside host and path is said again"
        transcripts.add("ephemeral", f"ephemeral {shown}", done)


def test_help_fits_a_terminal(command, bin_dir):
    """No line of any help is over 80 columns."""
    helps = {f"ephemeral help {verb}": command.run("help", *verb.split()).stdout for verb in command.verbs()}
    helps["ephemeral help"] = command.run("help").stdout
    for program in ("controld", "noded"):
        for words_ in (["--help"], ["help", "config"]):
            helps[f"{program} {' '.join(words_)}"] = subprocess.run([f"{bin_dir}/{program}", *words_], capture_output=True, check=True).stdout
    wide = [f"{name}: {line}" for name, text in helps.items() for line in text.decode().splitlines() if len(line) > 80]
    assert not wide, "\n".join(wide)
    assert all(text.decode().count("\n") > 3 for text in helps.values())


def test_transcript_of_controld(cluster, bin_dir, tmp_path, transcripts):
    made = control_rig.Control(cluster, bin_dir, start=False, scripted=False, log_level="warn")
    try:
        def add(*arguments, config=True):
            full = [f"{bin_dir}/controld", *arguments, *(["--config", made.file] if config else [])]
            done = subprocess.run(full, capture_output=True, timeout=120, env=dict(os.environ, **control_rig.SANITIZER), check=False)
            transcripts.add("controld", f"controld {' '.join(arguments)}", done, (made.home, "HOME"), (tmp_path, "TMP"))
            return done.stdout.decode() + done.stderr.decode()
        said = add("help", config=False)
        commands = set(re.findall(r"^  ([a-z-]+)(?: \[config\])?  +\S", said.split("commands")[1].split("options")[0], re.M))
        assert commands == {"serve", "bootstrap", "migrate", "check-ledger", "help"}, "a command without a transcript"
        for arguments in (["help", "config"], ["help", "nonsense"], ["--version"], ["nonsense"], ["--confg", "x"], ["--config"], ["serve", "extra"],
                          ["--set", "novalue"], ["--ready-fd", "99"], ["--ready-fd", "x"], ["-t", "--config", f"{tmp_path}/missing"]):
            add(*arguments, config=False)
        for arguments in (["-t"], ["bootstrap"], ["bootstrap", "--json"], ["bootstrap", "--json", "--new-operator-key"], ["migrate"], ["check-ledger"],
                          ["check-ledger", "--full"], ["-t", "--set", "listne=x"], ["-t", "--set", "log_level=loud"], ["-t", "--set", "listen=nowhere"],
                          ["-t", "--set", "stop_wait_seconds=-1"], ["-t", "--set", "keyring=/nonexistent"],
                          ["check-ledger", "--set", "database=host=/nonexistent dbname=x password=hunter2", "--set", "start_wait_seconds=0"]):
            assert "hunter2" not in add(*arguments), "the database's password is said again"
    finally:
        made.stop()
        made.remove()


def test_transcript_of_noded(bin_dir, tmp_path, transcripts):
    bad = tmp_path / "noded.conf"
    bad.write_text("node_name = x\nmax_vmz = 3\n")
    for arguments in (["help"], ["--help"], ["help", "config"], ["help", "nonsense"], ["version"], ["--version"], ["nonsense"], ["--confg", "x"], ["--config"],
                      ["--set", "max_vms"], ["--set", "max_vms=99999999"], ["-t", "--config", str(bad)], ["-t", "--config", f"{tmp_path}/missing"],
                      ["--role", "nonsense"], ["--ready-fd", "x"]):
        done = subprocess.run([f"{bin_dir}/noded", *arguments], capture_output=True, timeout=60, check=False, env=dict(os.environ, ASAN_OPTIONS="detect_leaks=0"))
        transcripts.add("noded", f"noded {' '.join(arguments)}", done, (tmp_path, "TMP"), (bin_dir, "BIN"))
        assert done.returncode == (0 if arguments[0] in ("help", "--help", "version", "--version") and "nonsense" not in arguments else done.returncode or 1)
