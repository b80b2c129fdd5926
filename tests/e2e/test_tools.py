"""The agent's tools in a booted guest: shell, read_file, write_file, list_files, files of the request."""
import base64

import pytest
from client import check_timeline, output_of, say, shell, turns


def call(tool, **arguments):
    return {"tool_calls": [{"name": tool, "arguments": arguments}]}


def good(client, run):
    events = client.events(run["id"])
    assert run["status"] == "succeeded", (run["error"], [e["type"] for e in events])
    check_timeline(run, events)
    return events


@pytest.mark.guest
def test_shell_results(client):
    run = client.run(turns(
        {"tool_calls": [{"name": "shell", "arguments": {"command": command}} for command in
                        ("echo out; echo err >&2; exit 3", "kill -TERM $$", "cat; echo read", "printf 'a\\0b\\377\\xe2\\x82\\xac\\n'", "cd /tmp; X=1", "echo \"[$X]\"; pwd")]},
        say("{{tool:1}}|{{tool:2}}|{{tool:3}}|{{tool:5}}|{{tool:6}}")))
    events = good(client, run)
    exits = [e["data"] for e in events if e["type"] == "shell.exited"]
    assert exits[0]["exit_code"] == 3 and "signal" not in exits[0]
    assert exits[1]["signal"] == 15 and "exit_code" not in exits[1]
    assert exits[2]["exit_code"] == 0
    out = [e["data"] for e in events if e["type"] == "shell.output"]
    assert {o["stream"] for o in out} == {"stdout", "stderr"}
    binary = [o for o in out if "base64" in o]
    assert any(b"\xff" in base64.b64decode(o["base64"]) for o in binary), "invalid UTF-8 must come as base64"
    assert "[]" in run["output"], "a variable of one command must not live on in the next"
    assert run["output"].rstrip().endswith("/scratch") or "/scratch" in run["output"]


@pytest.mark.guest
def test_shell_time_limit_and_whole_tree(client):
    run = client.run(turns(
        shell("trap '' TERM; (setsid sleep 300 &) ; sleep 300", timeout_seconds=2),
        shell("(setsid sh -c 'sleep 200' > /dev/null 2>&1 &); (sleep 300 &); echo started"),
        shell("ps -e 2>/dev/null || ls /proc | grep -c '^[0-9]*$'; pgrep sleep || grep -l sleep /proc/[0-9]*/comm 2>/dev/null; echo looked"),
        say("{{tool:1}} {{tool:3}}")), 60)
    events = good(client, run)
    exits = [e["data"] for e in events if e["type"] == "shell.exited"]
    assert exits[0]["timed_out"] is True and 1900 <= exits[0]["duration_ms"] < 6000
    assert exits[1]["duration_ms"] < 5000, "a daemon that keeps stdout must not hold the command"
    third = [e["data"]["call_id"] for e in events if e["type"] == "shell.started"][2]
    assert "sleep" not in output_of(events, third), "a process of an earlier command lives on"


@pytest.mark.guest
def test_shell_output_caps(client):
    run = client.run(turns(shell("seq 1 600000"), say("{{tool:1}}")), 90, max_cost_micros=5_000_000)
    events = good(client, run)
    kept = output_of(events)
    exited = next(e["data"] for e in events if e["type"] == "shell.exited")
    whole = sum(len(str(n)) + 1 for n in range(1, 600001))
    assert len(kept) <= 1024 * 1024
    assert exited["cut_bytes"] == whole - len(kept)
    assert len(run["output"]) <= 300 * 1024
    assert run["output"].lstrip().startswith(("1\n", "exit", "{", "[")) or "1\n2\n3" in run["output"], "the head is kept for the model"
    assert "600000" in run["output"], "the tail is kept for the model"


@pytest.mark.guest
def test_files(client):
    files = [{"path": "in/notes.txt", "content": "first line\nsecond line\n"}, {"path": "bin.dat", "content_base64": base64.b64encode(bytes(range(256)) * 1000).decode()}]
    run = client.run(turns(
        call("list_files"), call("read_file", path="in/notes.txt"), call("write_file", path="deep/er/new.txt", content="café\n"),
        shell("cat deep/er/new.txt; stat -c '%U %s' deep/er/new.txt bin.dat; sha256sum bin.dat"),
        call("read_file", path="nowhere.txt"), call("read_file", path="/etc/shadow"), call("write_file", path="/etc/passwd", content="x"),
        call("read_file"), call("frobnicate", x=1), {"tool_calls": [{"name": "shell", "arguments": "not json"}]},
        say("\n".join(f"<{n}> {{{{tool:{n}}}}}" for n in range(1, 11)))), 90, files=files, max_cost_micros=3_000_000)
    good(client, run)
    part = {n: run["output"].split(f"<{n}>")[1].split(f"<{n + 1}>")[0] for n in range(1, 11)}
    assert "in" in part[1] and "bin.dat" in part[1]
    assert "first line\nsecond line" in part[2]
    assert "café" in part[4] and "worker 6" in part[4] and "worker 256000" in part[4]
    import hashlib
    assert hashlib.sha256(bytes(range(256)) * 1000).hexdigest() in part[4]
    for n in (5, 6, 7, 8, 9, 10):
        assert part[n].strip(), f"tool call {n} had no answer"
    assert "root:" not in part[6]
    assert [f["path"] for f in run["request"]["files"]] == ["in/notes.txt", "bin.dat"]
    assert all(len(f["sha256"]) == 64 and "content" not in f for f in run["request"]["files"])


@pytest.mark.guest
def test_no_shell_unless_asked(client):
    run = client.run(turns(shell("echo hello"), call("write_file", path="a.txt", content="1"), say("{{tool:1}}")), shell=False)
    events = good(client, run)
    assert not [e for e in events if e["type"].startswith("shell.")]
    assert next(e for e in events if e["type"] == "worker.started")["data"]["shell"] is False
    assert "hello" not in run["output"]
