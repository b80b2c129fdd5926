"""The `ephemeral` command against a real service: exit statuses, login, what is shown of a hostile run, JSON byte for byte, Ctrl-C."""
import hashlib
import json
import os
import re
import select
import signal
import subprocess
import time

import pytest
from client import say, shell, turns

ROW = re.compile(r"^ +[0-9]+\.[0-9]{2}  ")


@pytest.fixture
def cli(bin_dir, client, stack, tmp_path):
    """Runs the command as a member whose home is empty; `env` changes the environment."""
    def run(*words, env=None, expect=None, **kwargs):
        full = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "EPHEMERAL_URL": client.url, "EPHEMERAL_API_KEY": client.key, "COLUMNS": "100",
                "ASAN_OPTIONS": "detect_leaks=1", **(env or {})}
        done = subprocess.run([f"{bin_dir}/ephemeral", *words], env={k: v for k, v in full.items() if v is not None}, capture_output=True,
                              timeout=150, check=False, **({"stdin": subprocess.DEVNULL} if "input" not in kwargs else {}), **kwargs)
        assert b"AddressSanitizer" not in done.stderr and b"runtime error" not in done.stderr, done.stderr.decode(errors="replace")
        if expect is not None:
            assert done.returncode == expect, (words, done.stdout[-2000:], done.stderr[-2000:])
        return done
    return run


def text(done):
    return done.stdout.decode(), done.stderr.decode()


@pytest.mark.guest
def test_wait_shows_the_page(cli, client):
    prompt = turns(shell("printf '\\033[31mred\\n'; echo '\u202eevil'; exit 3"), say("done \x1b[2J\u0007"))
    done = cli("run", prompt, "--shell", "--max-cost", "0.5", "--metadata", "job=cli", "--wait", "--verbose", expect=0)
    out, err = text(done)
    assert "web off" in err and not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", out + err), "something raw reached the terminal"
    order = [out.index(word) for word in ("budget $0.50 reserved", "microVM ready", "worker started · shell on · web off", "$ printf", "exit 3",
                                          "microVM destroyed", "2 model calls", "done \\x1b[2J", "charged, ", "Model $")]
    assert order == sorted(order), out
    assert all(len(line) <= 100 for line in out.splitlines() if ROW.match(line)), "rows are cut to the width"
    run_id = re.search(r"run_[0-9a-f]{32}", err).group(0)
    # JSON passes the bytes on as the service gave them; stream and pages agree.
    pages, stream = (cli("events", run_id, "--json", *more, expect=0).stdout for more in ((), ("--follow",)))
    assert pages == stream and [json.loads(line)["seq"] for line in pages.splitlines()] == list(range(1, pages.count(b"\n") + 1))
    chain = bytes(32)
    for line in pages.splitlines():
        chain = hashlib.sha256(chain + line).digest()
    assert chain.hex() == client.get(f"/v1/runs/{run_id}/receipt")["last_hash"]
    assert json.loads(cli("get", run_id, "--json", expect=0).stdout)["metadata"] == {"job": "cli"}
    listed = json.loads(cli("runs", "--json", "--metadata", "job=cli", expect=0).stdout)["data"]
    assert [run["id"] for run in listed] == [run_id]
    replayed, _ = text(cli("replay", run_id, "--speed", "1000", "--verbose", expect=0))
    assert [line for line in replayed.splitlines() if ROW.match(line)] == [line for line in out.splitlines() if ROW.match(line)]


@pytest.mark.guest
def test_ends_are_exit_statuses(cli):
    done = cli("run", turns(shell("sleep 60")), "--shell", "--timeout", "3", "--max-cost", "0.5", "--wait", expect=1)
    assert "Timed out" in text(done)[0] and "timeout of 3 s" in text(done)[0]
    run_id = cli("run", turns(shell("sleep 60")), "--shell", "--max-cost", "0.5", expect=0).stdout.decode().strip()
    assert "cancel requested" in text(cli("cancel", run_id, expect=0))[0]
    assert "cancelled" in text(cli("wait", run_id, expect=1))[0]
    assert json.loads(cli("wait", run_id, "--json", expect=1).stdout)["status"] == "cancelled"


@pytest.mark.guest
def test_interrupt_detaches(bin_dir, client, tmp_path):
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "EPHEMERAL_URL": client.url, "EPHEMERAL_API_KEY": client.key}
    process = subprocess.Popen([f"{bin_dir}/ephemeral", "run", turns(shell("sleep 60")), "--shell", "--max-cost", "0.5", "--wait"], env=env,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    shown, deadline = b"", time.monotonic() + 60
    while b"worker started" not in shown and time.monotonic() < deadline:
        if select.select([process.stdout], [], [], 1)[0]:
            shown += os.read(process.stdout.fileno(), 65536)
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and time.monotonic() - begin < 3
    run_id = re.search(r"ephemeral cancel (run_[0-9a-f]{32})", err.decode()).group(1)
    assert client.read(run_id)["status"] == "running", "the run goes on"
    client.cancel(run_id)
    assert client.settled(run_id)["status"] == "cancelled"


def test_login_keeps_the_key_to_its_url(cli, client, stack, tmp_path):
    none = {"EPHEMERAL_API_KEY": None}
    assert cli("login", env=none, input=b"eph_wrong\n", expect=3).stderr.count(b"\n") >= 1
    assert not (tmp_path / ".config").exists(), "a key that was not accepted is not saved"
    assert client.key.encode() not in cli("login", env=none, input=client.key.encode() + b"\n", expect=0).stdout
    saved = tmp_path / ".config" / "ephemeral" / "config.json"
    assert saved.stat().st_mode & 0o777 == 0o600 and json.loads(saved.read_text())["keys"] == {client.url: client.key}
    assert b"member" in cli("status", env=none, expect=0).stdout
    assert b"member" in cli("status", env={**none, "EPHEMERAL_URL": None}, expect=0).stdout, "the URL of the login is the default"
    elsewhere = client.url.replace("127.0.0.1", "localhost")
    refused = cli("status", env={**none, "EPHEMERAL_URL": elsewhere}, expect=3)
    assert b"no API key for " + elsewhere.encode() in refused.stderr
    cli("logout", env=none, expect=0)
    cli("status", env=none, expect=3)


def test_wrong_use_and_refusals(cli, client):
    many = cli("run", "x", "--timeout", "99999", "--size", "huge", "--web", expect=2).stderr.decode()
    for field in ("/timeout_seconds", "/size", "/web"):
        assert field in many, many
    problem = json.loads(cli("run", "x", "--max-cost-micros", "1", "--json", expect=2).stdout)
    assert problem["status"] == 400 and problem["errors"][0]["pointer"] == "#/max_cost_micros"
    assert b"did you mean" in cli("rnu", expect=2).stderr
    assert b"did you mean --shell?" in cli("run", "x", "--shel", expect=2).stderr
    assert b"DOLLARS is missing" in cli("admin", "org", "credit", "org_x", expect=2).stderr
    assert cli("help", "admin", "node", expect=0).stdout.count(b"admin node ") == 6
    cli("get", "run_" + "0" * 32, expect=2)
    cli("get", "nonsense", expect=2)
    assert b"not accepted" in cli("runs", env={"EPHEMERAL_API_KEY": "eph_" + "A" * 43}, expect=3).stderr
    assert b"cannot be asked" in cli("runs", env={"EPHEMERAL_URL": "http://127.0.0.1:1"}, expect=3).stderr
    assert b"EPHEMERAL_OPERATOR_KEY" in cli("admin", "org", "list", expect=3).stderr
    # One key, one run, however often the command is given; another body with it is refused.
    ids = {cli("run", "say it", "--max-cost", "0.5", "--idempotency-key", "cli-once", expect=0).stdout for _ in range(2)}
    assert len(ids) == 1
    cli("run", "say something else", "--max-cost", "0.5", "--idempotency-key", "cli-once", expect=2)
    client.cancel(ids.pop().decode().strip())


def test_admin(cli, stack):
    env = {"EPHEMERAL_OPERATOR_URL": stack.control.operator_url, "EPHEMERAL_OPERATOR_KEY": stack.control.operator_key}
    name = f"cli-{os.getpid()}-{time.monotonic_ns()}"
    org = cli("admin", "org", "create", name, "--allow-emulated", env=env, expect=0).stdout.decode().strip()
    assert re.fullmatch(r"org_[0-9a-f]{32}", org)
    assert cli("admin", "org", "credit", org, "1.5", "--note", "test", env=env, expect=0).stdout == b"balance $1.50\n"
    key = cli("admin", "key", "create", org, "--role", "viewer", env=env, expect=0).stdout.decode().strip()
    assert key.startswith("eph_") and b"viewer" in cli("status", env={"EPHEMERAL_API_KEY": key}, expect=0).stdout
    assert cli("run", "x", env={"EPHEMERAL_API_KEY": key}, expect=3).stderr, "a viewer may not run"
    token = json.loads(cli("admin", "node", "token", "--uses", "2", "--label", "a=b", "--label", "c=d", "--json", env=env, expect=0).stdout)
    assert token["uses"] == 2 and token["labels"] == "a=b,c=d"
    assert stack.node.name.encode() in cli("admin", "node", "list", env=env, expect=0).stdout
    cli("admin", "provider", "set", name, "--base-url", "https://models.example/v1", "--api-key-file", "-", env=env, input=b"secret\n", expect=0)
    cli("admin", "model", "set", f"{name}/m", env=env, expect=0)
    cli("admin", "price", "set", f"{name}/m", "--input", "0.25", "--output", "2", "--percent", "2.5", env=env, expect=0)
    models = json.loads(cli("admin", "model", "list", "--json", env=env, expect=0).stdout)["data"]
    priced = next(m for m in models if m["id"] == f"{name}/m")
    assert (priced["input_micros_per_million"], priced["output_micros_per_million"], priced["model_percent_hundredths"]) == (250000, 2000000, 250)
