"""guest-agent alone: the rig boots it and speaks the host's side of the guest channel, so that every frame can be chosen."""
import json
import re
import struct
import time

import pytest
from fixtures import count
from guest_host import (SETUP_END, SHELL_EXITED, SHELL_OUTPUT, SHELL_STARTED, STOP, TOOL_CALLED, Guest, GuestError,
                        encode_reply, run, shell, tool)



@pytest.fixture
def boot(image):
    """boot(**options) -> a booting Guest, gone at the end of the test."""
    guests = []

    def make(**options):
        count("guests", 1)
        guests.append(Guest(image, **options))
        return guests[-1]

    yield make
    for guest in guests:
        guest.close()


@pytest.fixture(scope="module")
def worker(image):
    """A guest shared by the tests that only run commands in it; it must survive every one of them."""
    count("guests", 1)
    with Guest(image) as guest:
        guest.start()
        yield guest


# --- setup

@pytest.mark.guest
def test_setup(boot):
    guest = boot()
    files = [("a.txt", b"hello\n"), ("deep/er/empty", b""), ("big.bin", bytes(range(256)) * 8192), ("deep/er/last", b"x")]
    hello = guest.probe()
    assert hello["protocol"] == 1 and hello["kernel"].endswith("-cloud-amd64") and 400 < hello["memory_mib"] <= 512
    ack = guest.setup("who are you?", files=files, real_ns=2_000_000_000 * 10**9)
    assert ack["reseeded"] and ack["clock_set"]
    assert re.fullmatch(r"/tmp/ephemeral-run-[A-Za-z0-9]{6}/scratch", ack["workdir"])
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", ack["boot_id"])
    number, tools, messages = guest.call()
    assert number == 1 and tools == {"shell", "read_file", "write_file", "list_files"}
    assert [m.role for m in messages] == ["system", "user"] and messages[1].content == "who are you?"
    assert ack["workdir"] in messages[0].content and "deep/er/empty (0 bytes)" in messages[0].content
    result, _ = run(guest, "date +%Y-%m-%d; cat /proc/sys/kernel/random/boot_id; find . -type f -printf '%p %s %u %m\\n' | sort; pwd; "
                           "find . -type d ! -user worker; touch deep/er/new && sha256sum big.bin | cut -c1-8")
    lines = result.splitlines()
    assert lines[0] == "2033-05-18" and lines[1] == ack["boot_id"]
    assert lines[2:6] == ["./a.txt 6 worker 644", "./big.bin 2097152 worker 644", "./deep/er/empty 0 worker 644",
                          "./deep/er/last 1 worker 644"]
    assert lines[6] == ack["workdir"]
    import hashlib
    assert lines[7] == hashlib.sha256(files[2][1]).hexdigest()[:8]
    assert guest.finish("the end ✓") == "the end ✓"
    guest.sock.close()
    assert guest.wait_exit(10) == 0


@pytest.mark.guest
def test_without_shell(boot):
    guest = boot(memory_mib=256)
    _, ack, (_, tools, messages) = guest.start(shell=False)
    assert tools == {"read_file", "write_file", "list_files"}
    assert "cannot run commands" in messages[0].content
    results = guest.run_tools(shell("echo hello"), tool("write_file", path="a.txt", content="one"), tool("list_files"))
    assert "no tool named shell in this run" in results[0] and "read_file write_file list_files" in results[0]
    assert results[1:] == ["Wrote 3 bytes to a.txt.", "file 3 a.txt\n"]
    assert not [e for e in guest.events if e.kind in (SHELL_STARTED, SHELL_OUTPUT, SHELL_EXITED)]
    assert [(e.name, e.path) for e in guest.events] == [("shell", ""), ("write_file", "a.txt"), ("list_files", ".")]


@pytest.mark.guest
def test_broken_machine_says_why(image, boot, monkeypatch):
    import guest_host
    whole = guest_host.qemu_argv
    monkeypatch.setattr(guest_host, "qemu_argv", lambda *a: [x for x in whole(*a)[:-4]])
    guest = boot()
    guest.probe()
    guest.wait(lambda: guest.fatal, "fatal")
    assert "no virtio disk" in guest.fatal
    guest.wait_exit(10)


@pytest.mark.guest
@pytest.mark.parametrize("wrong", ["out of order", "path", "file too long", "malformed"])
def test_host_breaks_protocol(boot, wrong):
    """Not an attack, since the host is trusted: but the agent must end with a reason, not hang."""
    guest = boot()
    guest.probe()
    if wrong == "out of order":
        guest.send(SETUP_END, 0, b"\1")
    elif wrong == "malformed":
        guest.send_raw(struct.pack("<I", 1 << 30) + b"x" * 16)
    else:
        with pytest.raises(GuestError, match="fatal"):
            guest.setup("x", files=[("../x", b"1")] if wrong == "path" else [("x", b"1"), ("x", b"2")])
    guest.wait(lambda: guest.fatal, "fatal")
    assert guest.fatal
    guest.wait_exit(10)


@pytest.mark.guest
def test_stop(boot):
    guest = boot()
    guest.start()
    guest.reply("", [("c", *shell("trap '' TERM; sleep 100"))])
    guest.wait(lambda: [e for e in guest.events if e.kind == SHELL_STARTED], "start of the command")
    guest.send(STOP, 0, b"cancelled")
    assert guest.wait_exit(10) == 0


# --- credit

@pytest.mark.guest
def test_events_wait_for_credit(boot):
    guest = boot()
    guest.start()
    guest.give_event_credit = False
    guest.reply("", [("c", *shell("seq 1 100000")), ("d", *shell("seq 1 100000"))])
    # Both commands run to their end; what they printed waits in the guest.
    guest.wait(lambda: guest.withheld > 200_000, "output")
    with pytest.raises(GuestError, match="no model call in time"):
        guest.call(seconds=1)
    assert guest.withheld <= 256 * 1024
    guest.give_event_credit = True
    guest.give_credit()
    guest.call()
    whole = "".join(f"{n}\n" for n in range(1, 100001)).encode()
    assert guest.output_of("c") == whole and guest.output_of("d") == whole
    assert len(guest.events) < 200, "output comes in large pieces"


@pytest.mark.guest
def test_long_conversation(boot):
    """Each turn adds 256 KiB; the oldest turns are dropped so that a call always fits."""
    guest = boot()
    guest.start("remember me")
    big = "y" * 600_000
    assert guest.run_tools(tool("write_file", path="big", content=big)) == ["Wrote 600000 bytes to big."]
    longest = 0
    for _ in range(16):
        guest.reply("", [(f"c{guest.number}", *shell("cat big"))])
        _, _, messages = guest.call()
        size = sum(len(m.content) + sum(len(c.arguments) for c in m.calls) for m in messages)
        longest = max(longest, size)
        assert size < 4 * 1024 * 1024 - 65536
        assert [m.role for m in messages[:2]] == ["system", "user"] and messages[1].content == "remember me"
        assert [m.role for m in messages[2:]] == ["assistant", "tool"] * ((len(messages) - 2) // 2)
        assert "bytes cut ...]" in messages[-1].content and len(messages[-1].content) < 300_000
    assert longest > 2 * 1024 * 1024
    text = "z" * (1024 * 1024)
    guest.send_message(5, 6, guest.stream, encode_reply(guest.number, text))
    guest.wait(lambda: guest.result is not None, "result")
    assert guest.result == text


# --- tools

@pytest.mark.guest
def test_bad_tool_calls(boot):
    guest = boot()
    guest.start()
    calls = [("frobnicate", "{}"), ("shell", "not json"), ("shell", "[1]"), ("shell", "{}"), ("shell", '{"command": 1}'),
             ("shell", '{"command": "true", "timeout_seconds": 121}'), ("shell", '{"command": "true", "x": 1}'),
             ("read_file", '{"path": ""}'), ("", ""), ("list_files", ""), ("list_files", '{"path": null}')]
    results = guest.run_tools(*calls, finish="length")
    wanted = ["no tool named frobnicate", "not valid JSON", "of type array", "command is missing", "must be of type string, not integer",
              "1 to 120 are allowed", "no argument named x", "1 to 4095 are allowed", "no tool named", "[the folder is empty]",
              "[the folder is empty]"]
    for result, text in zip(results, wanted, strict=True):
        assert text in result, (result, text)
    assert all(r.startswith("Not done: ") for r in results[:9])
    assert "timeout_seconds (integer, optional)" in results[1]
    errors = [e for e in guest.events if e.kind == TOOL_CALLED and e.text]
    assert len(errors) == 9
    # What is no JSON is not sent back as if it were.
    guest.run_tools(("shell", '{"command": "ec'), finish="length")
    guest.reply("", [("x", *shell("true"))])
    _, _, messages = guest.call()
    cut = [m for m in messages if "cut at its token limit" in m.content]
    assert len(cut) == 1 and "smaller steps" in cut[0].content
    for message in messages:
        for call in message.calls:
            json.loads(call.arguments)


def test_file_tools(worker):
    results = worker.run_tools(
        tool("write_file", path="d/e/f.txt", content="naïve\nline 2\n"), tool("read_file", path="d/e/f.txt"),
        tool("read_file", path="d/e/f.txt", offset=7), tool("read_file", path="d/e/f.txt", limit=3),
        tool("read_file", path="d/e/f.txt", offset=100), tool("list_files", path="d"), tool("read_file", path="d"),
        tool("read_file", path="nowhere"), tool("read_file", path="/etc/shadow"), tool("write_file", path="/etc/passwd", content="x"),
        tool("read_file", path="/dev/zero"), tool("read_file", path="/bin/ls"), tool("list_files", path="/etc/hostname"),
        tool("write_file", path="/proc/sys/kernel/hostname", content="x"), tool("write_file", path="d", content="x"))
    assert results[:5] == ["Wrote 14 bytes to d/e/f.txt.", "naïve\nline 2\n", "line 2\n", "na\n[bytes 0 to 2 of 14; go on with offset 2]",
                           "[nothing at this offset: the file has 14 bytes]"]
    assert results[5] == "folder - e\n"
    for result, text in zip(results[6:], ("this is a folder", "No such file", "permission denied", "permission denied",
                                          "not a regular file", "not a text file", "not a folder", "permission denied",
                                          "this is a folder"), strict=True):
        assert result.startswith("Not done: ") and text in result, (result, text)
    result, _ = run(worker, "mkfifo pipe; ln -s /etc/hostname link; touch \"$(printf 'a\\033[31mb')\"; truncate -s 1G sparse; "
                            "stat -c '%U %a' d/e/f.txt d")
    assert result.splitlines()[:2] == ["worker 644", "worker 755"]
    results = worker.run_tools(tool("read_file", path="pipe"), tool("write_file", path="pipe", content="x"), tool("list_files"),
                               tool("read_file", path="link"), tool("write_file", path="full", content="x" * 900_000))
    assert "not a regular file" in results[0] and results[1].startswith("Not done")
    assert "link - link -> /etc/hostname\n" in results[2] and "special - pipe\n" in results[2] and "\x1b" not in results[2]
    assert results[3] == "ephemeral\n" and results[4] == "Wrote 900000 bytes to full."


@pytest.mark.parametrize(("command", "code", "signal", "text"), [
    ("echo out; echo err >&2; exit 3", 3, False, "[exit code 3]"),
    ("kill -TERM $$", 15, True, "[ended by signal 15 (Terminated)]"),
    ("cat; read x; echo $?", 0, False, "1\n[exit code 0]"),
    ("printf 'no newline'", 0, False, "no newline\n[exit code 0]"),
    ("printf 'a\\xff\\x00b€'", 0, False, "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b€\n[exit code 0]"),
    ("nosuchcommand", 127, False, "command not found"),
    ("curl -sS -m 8 https://example.com", 6, False, "curl: (6) Could not resolve host: example.com\n[exit code 6]"),
])
def test_shell_ends(worker, command, code, signal, text):
    result, exited = run(worker, command)
    assert text in result
    assert (exited.code, exited.has_signal, exited.timed_out) == (code, signal, False)


def test_shell_time_limit(worker):
    begun = time.monotonic()
    result, exited = run(worker, "trap '' TERM INT HUP; (setsid sleep 500 &); while :; do :; done", timeout_seconds=1)
    assert "time limit of 1 s" in result and exited.timed_out and exited.has_signal and exited.code == 9
    assert 1000 <= exited.duration_ms < 5000 and time.monotonic() - begun < 10


def test_daemons_end_with_their_command(worker):
    _, exited = run(worker, "(setsid nohup sleep 1000 &); (setsid sh -c 'while :; do echo noise; sleep 0.05; done' &); echo main done")
    assert exited.duration_ms < 5000
    result, _ = run(worker, "cat /proc/[0-9]*/stat 2>/dev/null | grep -c -E '\\((sleep|sh)\\)'; cat /sys/fs/cgroup/worker/pids.current")
    # the pipe's two processes and the shell
    assert result.splitlines()[0] == "0" and int(result.splitlines()[1]) <= 2


def test_output_caps_and_characters(worker):
    """No character is broken over the border of two events, and what is not shown is counted."""
    worker.run_tools(shell("yes 'é€𝄞 line' | head -c 30000000"))
    started = [e for e in worker.events if e.kind == SHELL_STARTED][-1]
    parts = [e.text for e in worker.events if e.kind == SHELL_OUTPUT and e.call_id == started.call_id]
    exited = [e for e in worker.events if e.kind == SHELL_EXITED][-1]
    assert all(part.decode() and len(part) <= 16384 for part in parts)
    assert sum(map(len, parts)) + exited.cut_bytes == 30_000_000
    assert 1024 * 1024 - 4 < sum(map(len, parts)) <= 1024 * 1024


def test_output_is_shown_as_it_happens(worker):
    before = len(worker.events)
    worker.reply("", [("slow", *shell("for i in 1 2 3; do echo line $i; sleep 0.3; done"))])
    worker.call()
    lines = [e for e in worker.events[before:] if e.kind == SHELL_OUTPUT]
    assert [e.text for e in lines] == [b"line 1\n", b"line 2\n", b"line 3\n"]
    assert lines[2].at - lines[0].at > 0.4


def test_order_of_calls(worker):
    before = len(worker.events)
    results = worker.run_tools(*[shell(f"echo {n}; X={n}; cd /; exit {n}") for n in range(5)], shell("echo \"[$X]\"; pwd"))
    assert results[:5] == [f"{n}\n[exit code {n}]" for n in range(5)]
    assert re.fullmatch(r"\[\]\n/tmp/ephemeral-run-\w{6}/scratch\n\[exit code 0\]", results[5])
    kinds = [(e.kind, e.call_id[-1]) for e in worker.events[before:]]
    assert kinds[:6] == [(SHELL_STARTED, "0"), (SHELL_OUTPUT, "0"), (SHELL_EXITED, "0"), (SHELL_STARTED, "1"), (SHELL_OUTPUT, "1"),
                         (SHELL_EXITED, "1")]
