"""`ephemeral` when things go wrong around it: the service is away or something else, Ctrl-C, a standard output that cannot be written, and
answers meant to take over the terminal. Without a service: what it talks to is a few bytes on a port."""
import concurrent.futures
import json
import os
import re
import select
import signal
import ssl
import subprocess
import time

import pytest
from cli_cases import CASES, NOBODY, OFFLINE, words
from cli_rig import Command, Service, Transcripts, reply

import images

RUN = NOBODY["run"]
ASKING = [verb for verb in CASES if verb not in OFFLINE]
PAGE = b"<!DOCTYPE html><html><head><title>Corporate proxy</title></head><body>Please sign in.</body></html>"
PROBLEM = json.dumps({"type": "x", "title": "Internal error", "status": 500, "detail": "Something broke here.", "request_id": "req_1"}).encode()
RUNNING = {"id": RUN, "status": "running", "reserved_micros": 1000, "data": [], "next_cursor": None}
# name -> (what the service says, the exit status of every verb)
AWAY = {
    "html": (reply(200, PAGE, "text/html"), 3),
    "html by a gateway": (reply(502, PAGE, "text/html"), 3),
    "500": (reply(500, PROBLEM, "application/problem+json"), 3),
    "418": (reply(418, b""), 3),
    "999": (reply(999, b"{}"), 3),
    "299 with nothing of ours": (reply(299, b"[1,2,3]"), 3),
    "a redirect": (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", 3),
    "cut in the middle": (reply(200, b'{"id":"run_', length=4000), 3),
    "closed at once": (b"", 3),
    "no http": (b"SSH-2.0-OpenSSH_9.2\r\n", 3),
    "invalid JSON": (reply(200, b'{"id": tru}'), 3),
    "invalid UTF-8": (reply(200, b'{"id":"\xff\xfe\x1b[2J"}'), 3),
    "another service's JSON": (reply(200, b'{"hello":"world"}'), 3),
    "too deep": (reply(200, b"[" * 5000 + b"]" * 5000), 3),
    "wrong types": (reply(200, b'{"id":7,"status":[],"data":{"a":1},"organization":false,"token":1,"key":{},"name":0,"balance_micros":"x","role":2}'), 3),
}
TERMINAL = re.compile(rb"\x1b\[(?:0|1|2|31|32|33|36)?m|\x1b\[K|\r\x1b\[K|\r\n")


@pytest.fixture
def command(bin_dir, tmp_path):
    return Command(bin_dir, tmp_path)


def env_for(url):
    return {"EPHEMERAL_URL": url, "EPHEMERAL_API_KEY": NOBODY["key"], "EPHEMERAL_OPERATOR_URL": url, "EPHEMERAL_OPERATOR_KEY": "ephop_" + "A" * 43}


def every_verb(command, url, transcripts, name, status):
    """Runs each verb that asks against url; each ends with `status`, says one thing on standard error and nothing else."""
    folder = command.home / "images"
    names = {**NOBODY, "images": str(folder), "image0": images.make(folder / "0", "of nobody")}

    def one(verb):
        arguments, given = words(verb, 0, names)
        return verb, arguments, command.run(*arguments, input=given, env=env_for(url))
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        for verb, arguments, done in pool.map(one, ASKING):
            transcripts.add(f"away {name}", f"ephemeral {verb}", done)
            assert done.returncode == status, (name, verb, done)
            assert not done.stdout or verb == "run", (name, verb, done.stdout[:500])
            assert b"ephemeral: " in done.stderr and not re.search(rb"[\x00-\x08\x0b-\x1f\x7f]", done.stderr), (name, verb, done.stderr)
            assert NOBODY["key"].encode() not in done.stderr and b"ephop_" not in done.stderr


@pytest.mark.parametrize("name", AWAY)
def test_transcript_of_a_service_that_is_none(command, name):
    transcripts = Transcripts()
    answer, status = AWAY[name]
    with Service(lambda head: answer) as service:
        every_verb(command, service.url, transcripts, name, status)
    transcripts.check()


def test_transcript_of_refused_connections_and_tls(command, tmp_path):
    transcripts = Transcripts()
    every_verb(command, "http://127.0.0.1:1", transcripts, "refused", 3)
    with Service(lambda head: reply(200, b"{}")) as plain:
        done = command.run("get", RUN, env=env_for(plain.url.replace("http:", "https:")))
        assert done.returncode == 3 and b"SSL" in done.stderr or b"TLS" in done.stderr, done.stderr
        assert not plain.asked, "the key was sent in the clear"
    # A certificate that nobody vouches for: no byte of the request leaves.
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
                    "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{tmp_path}/key", "-out", f"{tmp_path}/cert"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{tmp_path}/cert", f"{tmp_path}/key")
    with Service(lambda head: reply(200, b"{}"), context) as secure:
        done = command.run("get", RUN, env=env_for(secure.url.replace("http:", "https:")))
        assert done.returncode == 3 and b"certificate" in done.stderr, done
        assert not secure.asked
    transcripts.check()


def test_long_answers(command):
    """10 MB are read; what is over the client's bound is refused in words; neither takes memory without end."""
    row = {"id": RUN, "status": "succeeded", "created_at": "2026-11-30T12:00:00.000Z", "cost_micros": 1, "cost_final": True, "prompt": "p" * 10_000}
    big = json.dumps({"data": [row] * 1000, "next_cursor": None}).encode()
    with Service(lambda head: reply(200, big)) as service:
        done = command.run("runs", env=env_for(service.url))
        assert done.returncode == 0 and done.stdout.count(b"run_") == 1000 and max(map(len, done.stdout.decode().splitlines())) <= 110
        assert command.run("runs", "--json", env=env_for(service.url)).stdout == big + b"\n"
        output = json.dumps({"id": RUN, "status": "succeeded", "output": "o" * 10_000_000, "cost_micros": 1, "max_cost_micros": 2}).encode()
        service.answer = lambda head: reply(200, output)
        assert command.run("get", RUN, env=env_for(service.url)).stdout.count(b"o") >= 10_000_000

        def endless(head):
            yield b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{\"a\":\""
            while True:
                yield b"x" * 65536
        service.answer = endless
        done = command.run("get", RUN, env=env_for(service.url))
        assert done.returncode == 3 and b"over 64 MiB" in done.stderr and not done.stdout
        # An event stream without line ends is bounded as well.
        service.answer = lambda head: (piece for piece in [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\ndata: ", b"x" * (8 << 20)])
        done = command.run("events", RUN, "--follow", env=env_for(service.url))
        assert done.returncode == 3 and b"ephemeral: " in done.stderr, done


# --- standard output ----------------------------------------------------------------------------------------------------------------------


def test_full_disk_and_closed_output(command, bin_dir):
    """Where standard output is lost the status says so, for every program and verb, in one line."""
    run = json.dumps({**RUNNING, "status": "succeeded", "output": "x" * 100_000}).encode()
    programs = [(command.program, ["help"]), (command.program, ["--help"]), (command.program, ["--version"]), (command.program, ["version", "--json"]),
                (command.program, ["run", "--help"]), (f"{bin_dir}/controld", ["help"]), (f"{bin_dir}/controld", ["help", "config"]),
                (f"{bin_dir}/controld", ["--version"]), (f"{bin_dir}/noded", ["help"]), (f"{bin_dir}/noded", ["help", "config"]), (f"{bin_dir}/noded", ["--version"])]
    with Service(lambda head: reply(200, run)) as service:
        programs += [(command.program, ["get", RUN, *more]) for more in ([], ["--json"])] + [(command.program, ["wait", RUN])]
        for program, arguments in programs:
            full = dict(command.env(**env_for(service.url)))
            with open("/dev/full", "wb") as out:
                done = subprocess.run([program, *arguments], stdout=out, stderr=subprocess.PIPE, env=full, check=False, timeout=60)
            assert done.returncode not in (0, 1 if "ephemeral" in program else 0) and done.stderr.count(b"\n") == 1 and b"standard output" in done.stderr, (program, arguments, done)
            closed = subprocess.run(["sh", "-c", 'exec "$0" "$@" >&-', program, *arguments], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=full, check=False,
                                    timeout=60)
            assert closed.returncode != 0 and b"standard output" in closed.stderr, (program, arguments, closed)
        # Every descriptor closed: what is asked stays right, and no answer lands in a socket.
        closed = subprocess.run(["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', command.program, "get", RUN], env=full, check=False, timeout=60)
        assert closed.returncode == 3
        assert all(head.startswith(b"GET /v1/runs/run_") for head in service.asked)


def test_reader_leaves(command):
    """`| head -1`: quiet, soon, and not with the status of something that is done."""
    rows = json.dumps({"data": [{"id": RUN, "prompt": "x" * 200}] * 20_000, "next_cursor": None}).encode()
    event = b'id: %d\nevent: shell.output\ndata: {"run_id":"r","seq":%d,"t":1,"type":"shell.output","source":"guest","data":{"call_id":"c","stream":"stdout","text":"line\\n"}}\n\n'

    def events(head):
        yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        for n in range(1, 10_000_000):
            yield event % (n, n)
    with Service(lambda head: reply(200, rows)) as service:
        for answer, arguments in ((service.answer, ["runs"]), (service.answer, ["runs", "--json"]), (events, ["events", RUN, "--follow"])):
            service.answer = answer
            script = '"$0" "$@" | head -c 20 >/dev/null; exit "${PIPESTATUS[0]}"'
            began = time.monotonic()
            done = subprocess.run(["bash", "-c", script, command.program, *arguments], env=command.env(**env_for(service.url)), stdin=subprocess.DEVNULL,
                                  capture_output=True, check=False, timeout=60)
            assert done.returncode == 3 and done.stderr == b"", (arguments, done)
            assert time.monotonic() - began < 20


# --- Ctrl-C -------------------------------------------------------------------------------------------------------------------------------


def started(command, url, *arguments, **kwargs):
    kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs}
    return subprocess.Popen([command.program, *arguments], env=command.env(**env_for(url)), stdin=subprocess.DEVNULL, **kwargs)


def silence(head):
    """Says nothing until the other side is gone."""
    yield b""
    select.select([], [], [], 30)


@pytest.mark.parametrize("arguments", [["wait", RUN], ["events", RUN, "--follow"], ["run", "x", "--wait"], ["run", "x", "--wait", "--json"]], ids=lambda a: a[0] + str(len(a)))
def test_interrupt_while_the_service_is_silent(command, arguments):
    def answer(head):
        return reply(201, json.dumps(RUNNING).encode()) if head.startswith(b"POST") else silence(head)
    with Service(answer) as service:
        process = started(command, service.url, *arguments)
        deadline = time.monotonic() + 30
        while not any(head.startswith(b"GET") for head in service.asked) and time.monotonic() < deadline:
            select.select([], [], [], 0.02)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, err = process.communicate(timeout=20)
        assert process.returncode == 130 and time.monotonic() - began < 5, err
        assert b"goes on" in err and RUN.encode() in err


def test_interrupt_twice(command):
    """Standard output is a pipe that nobody reads: the first Ctrl-C cannot be answered in words, the second ends it at once."""
    event = b'id: %d\nevent: x\ndata: {"run_id":"r","seq":%d,"t":1,"type":"shell.output","source":"guest","data":{"call_id":"c","stream":"stdout","text":"' + b"y" * 5000 + b'"}}\n\n'

    def events(head):
        yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        for n in range(1, 1000):
            yield event % (n, n)
        select.select([], [], [], 30)
    with Service(events) as service:
        process = started(command, service.url, "events", RUN, "--follow")
        fill = process.stdout.fileno()
        assert select.select([fill], [], [], 30)[0]
        blocked = re.compile(r"pipe_write")
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:  # until it hangs in write(2)
            with open(f"/proc/{process.pid}/wchan", encoding="ascii") as file:
                if blocked.search(file.read()):
                    break
            select.select([], [], [], 0.05)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
        process.stdout.close()
        process.stderr.close()


# --- what the terminal is shown -----------------------------------------------------------------------------------------------------------

EVIL = "A\x1b]0;pwned\x07\x1b[2J\x1b[31m\x9b31m\u202eevil\u2028\u200f\ufeff\U000e0041\r\n\x08\x7fZ"


def poisoned(value, key=""):
    """The same JSON with every string made hostile, but for those that decide which words are chosen."""
    if isinstance(value, dict):
        return {name: poisoned(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [poisoned(inner) for inner in value]
    return EVIL if isinstance(value, str) and key not in ("type", "status") else value


def seen_safely(status, seen, colour):
    rest = TERMINAL.sub(b"", seen).replace(b"\t", b"")
    text = rest.decode("utf-8")  # and valid
    bad = [c for c in text if ord(c) < 32 and c != "\n" or 0x7f <= ord(c) < 0xa0 or c in "\u202e\u2028\u200f\ufeff" or 0xe0000 <= ord(c) < 0xe0080]
    assert not bad, (bad[:5], seen[:2000])
    assert "Traceback" not in text and status in (0, 1, 2, 3), (status, text)
    if not colour:
        assert b"\x1b[3" not in seen and b"\x1b[1m" not in seen and b"\x1b[2m" not in seen, "colour in spite of NO_COLOR"


ANSWERS = {
    "get": {**RUNNING, "status": "failed", "output": "o", "error": {"code": "c", "message": "m", "remedy": "r"}, "model": "m", "node": "n", "isolation": "i",
                            "created_at": "t", "started_at": "t", "ended_at": "t", "waiting_for": {"reason": "x"}},
    "status": {"organization": {"name": "n"}, "role": "r", "balance_micros": 1, "default_model": "m", "limits": {}, "rates": {}},
    "list": {"data": [{"id": "i", "name": "n", "status": "s", "email": "e", "role": "r", "prompt": "p", "created_at": "2026-11-30T12:00:00.000Z", "label": "l", "labels": "l",
                       "isolation": "k", "base_url": "u", "upstream": "u", "provider": "p", "live": True, "cost_micros": 1}], "next_cursor": "c"},
    "one": {"id": "i", "name": "n", "key": "k", "token": "t", "role": "r", "email": "e", "base_url": "u", "balance_micros": 1, "labels": "l"},
    "problem": {"type": "t", "title": "t", "status": 400, "detail": "d", "errors": [{"pointer": "#/x", "detail": "d"}], "request_id": "r"},
}


def test_hostile_answers_on_a_terminal(command):
    """Every verb on a pseudo terminal, every string of the answer an attack: only our own few escapes reach it."""
    with Service(lambda head: b"") as service:
        for name, body in ANSWERS.items():
            status = 400 if name == "problem" else 200
            hostile = poisoned(body)
            if name == "get":
                hostile["id"] = RUN
            service.answer = lambda head, b=json.dumps(hostile).encode(), s=status: reply(s, b)
            shown = 0
            verbs = [v for v in ASKING if v not in ("login", "wait", "events", "replay")]

            def one(job):
                verb, no_color = job
                arguments, _ = words(verb, 0, NOBODY)
                if verb in ("admin provider set",):
                    arguments[arguments.index("-")] = "/dev/null"
                return verb, no_color, command.on_terminal(*arguments, env={**env_for(service.url), "NO_COLOR": no_color})
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                for verb, no_color, (code, seen) in pool.map(one, [(v, c) for v in verbs for c in (None, "1")][:2 * len(verbs)]):
                    seen_safely(code, seen, no_color is None)
                    shown += b"pwned" in seen
                    assert b"\r\n" in seen or not seen, (verb, seen)
            # The attack was really shown, made harmless: by the verbs that this answer is for.
            assert shown >= 2, name


def hostile_stream(head):
    kinds = ["run.queued", "run.claimed", "microvm.ready", "worker.started", "model.call", "model.reply", "model.retry", "model.usage", "shell.started", "shell.output",
             "shell.exited", "shell.dropped", "worker.note", "microvm.destroyed", EVIL, "run.failed", "run.settled"]
    data = {name: EVIL for name in ("node", "model", "text", "command", "reason", "vmm", "message", "code", "error", "name", "stream", "call_id", "output", "status", "note")}
    yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    for seq, kind in enumerate(kinds, 1):
        event = {"run_id": EVIL, "seq": seq, "at": EVIL, "t": 0.5 * seq, "source": EVIL, "type": kind, "data": data}
        yield f"id: {seq}\nevent: {EVIL.encode('unicode_escape').decode()}\ndata: {json.dumps(event)}\n\n".encode()


def test_hostile_timeline_on_a_terminal(command):
    run = json.dumps({**poisoned({"output": "x", "model": "m", "error": {"message": "m", "code": "c", "remedy": "r"}}), "id": RUN, "status": "failed", "cost": {"model_micros": 1}}).encode()

    def answer(head):
        return hostile_stream(head) if b"event-stream" in head else reply(201 if head.startswith(b"POST") else 200, run)
    with Service(answer) as service:
        for arguments in (["events", RUN, "--follow"], ["run", "x", "--wait"], ["run", "x", "--wait", "--verbose"]):
            for no_color in (None, "1"):
                code, seen = command.on_terminal(*arguments, env={**env_for(service.url), "NO_COLOR": no_color})
                seen_safely(code, seen, no_color is None)
                assert code == 1 and b"\\x1b]0;pwned\\x07" in seen and (b"\x1b[" in seen) == (no_color is None), seen[-500:]
        # Not a terminal: no escape at all, and no moving line.
        done = command.run("events", RUN, "--follow", env=env_for(service.url))
        assert b"\x1b" not in done.stdout + done.stderr and b"\r" not in done.stdout and done.returncode == 1
        # Broken bytes of a stream are refused in words.
        for broken in (b"data: {\"seq\":1,\xff}\n\n", b"data: nonsense\n\n", b"data: {\"seq\":-1}\n\n", b"data: {\"seq\":1,\"t\":1e999,\"type\":\"\\ud800\"}\n\n"):
            service.answer = lambda head, b=broken: b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + b
            done = command.run("events", RUN, "--follow", env=env_for(service.url))
            assert done.returncode == 3 and done.stderr.startswith(b"ephemeral: ") and not done.stdout, (broken, done)


def test_status_is_part_of_the_documentation(command):
    """The statuses that help promises are those of cli/README.md and of these tests."""
    text = " ".join(command.run("help").stdout.decode().split())
    assert "Exit status: 0 done (and the run, where one was awaited, succeeded), 1 the run ended otherwise, 2 wrong use, 3 could not ask or was not allowed to, 130 detached" in text
    readme = (os.path.dirname(__file__) + "/../../cli/README.md")
    with open(readme, encoding="utf-8") as file:
        promised = " ".join(file.read().split())
    for piece in ("0 done", "1 the run ended otherwise", "2 wrong use", "3 could not ask or was not allowed to", "130 detached"):
        assert piece in promised
