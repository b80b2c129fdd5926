"""Bytes instead of requests: broken framing on both listeners, bodies that are cut, slow, longer or shorter than said, floods, thousands of
idle connections, readers of a stream that do not read. After each a good request is answered; memory is measured and bounded."""
import concurrent.futures
import json
import os
import re
import resource
import select
import socket
import statistics
import threading
import time

import pytest
import requests
import wait
from api_rig import client, connect, control, paper, problem, read_all, rss_kib  # noqa: F401
from paper_node import PaperNode

import control as control_rig

MIB = 1024 * 1024
POST = b"POST /v1/runs HTTP/1.1\r\nHost: x\r\n"
GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
# name: (bytes, statuses that are an answer)
HOSTILE = {
    "two lengths": (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x", 400),
    "the same length twice": (POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400),
    "lengths in a list": (POST + b"Content-Length: 2, 2\r\n\r\n{}", 400),
    "plus in the length": (POST + b"Content-Length: +2\r\n\r\n{}", 400),
    "negative length": (POST + b"Content-Length: -1\r\n\r\n", 400),
    "hex length": (POST + b"Content-Length: 0x2\r\n\r\n{}", 400),
    "no digits in the length": (POST + b"Content-Length: \r\n\r\n", 400),
    "length of 2^64 + 2": (POST + b"Content-Length: 18446744073709551618\r\n\r\n{}", 400),
    "length of 10^18 - 1": (POST + b"Content-Length: 999999999999999999\r\n\r\n{}", 413),
    "length of one too many": (POST + b"Content-Length: 12582913\r\n\r\n{}", 413),
    "length and chunked": (POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "chunked and length": (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n", 400),
    "space before the colon": (POST + b"Content-Length : 2\r\n\r\n{}", 400),
    "tab before the colon": (POST + b"Content-Length\t: 2\r\n\r\n{}", 400),
    "folded header": (POST + b"X: a\r\n b\r\n\r\n", 400),
    "folded length": (POST + b"Content-Length:\r\n 2\r\n\r\n{}", 400),
    "header without a colon": (POST + b"nonsense\r\n\r\n", 400),
    "header without a name": (POST + b": x\r\n\r\n", 400),
    "NUL in a header": (POST + b"X: a\0b\r\n\r\n", 400),
    "NUL in a header's name": (POST + b"X\0: a\r\n\r\n", 400),
    "CR in a header": (POST + b"X: a\rb\r\n\r\n", 400),
    "escape in a header": (POST + b"X: \x1b[2J\r\n\r\n", 400),
    "bare LF": (b"GET /healthz HTTP/1.1\nHost: x\n\n", 400),
    "bare LF in the headers": (b"GET /healthz HTTP/1.1\r\nHost: x\nX: y\r\n\r\n", 400),
    "bare CR": (b"GET /healthz HTTP/1.1\rHost: x\r\r", 408),
    "no host": (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    "the same host twice": (b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
    "host of two": (b"GET /healthz HTTP/1.1\r\nHost: a, b\r\n\r\n", 400),
    "user in the host": (b"GET /healthz HTTP/1.1\r\nHost: a@b\r\n\r\n", 400),
    "absolute URI": (b"GET http://other/healthz HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "asterisk": (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "no slash": (b"GET healthz HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "CONNECT": (b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n", (400, 501)),
    "TRACE": (b"TRACE / HTTP/1.1\r\nHost: x\r\n\r\n", (400, 501)),
    "a method that is none": (b"NONSENSE / HTTP/1.1\r\nHost: x\r\n\r\n", (400, 501)),
    "small letters": (b"get / HTTP/1.1\r\nHost: x\r\n\r\n", (400, 501)),
    "no version": (b"GET /healthz\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 505)),
    "HTTP/1.2": (b"GET /healthz HTTP/1.2\r\nHost: x\r\n\r\n", (400, 505)),
    "HTTP/9.9": (b"GET /healthz HTTP/9.9\r\nHost: x\r\n\r\n", (400, 505)),
    "blanks in the line": (b"GET  /healthz  HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "more words in the line": (b"GET /healthz x HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "hex in a chunk's size": (POST + b"Transfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n", 400),
    "negative chunk": (POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\na\r\n0\r\n\r\n", 400),
    "blank in a chunk's size": (POST + b"Transfer-Encoding: chunked\r\n\r\n 1\r\na\r\n0\r\n\r\n", 400),
    "huge chunk": (POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\na", 400),
    "chunk of 4 GiB": (POST + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\na", 413),
    "chunk extension": (POST + b"Transfer-Encoding: chunked\r\n\r\n1;x=y\r\na\r\n0\r\n\r\n", 400),
    "chunk longer than said": (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n", 400),
    "LF after a chunk": (POST + b"Transfer-Encoding: chunked\r\n\r\n1\na\r\n0\r\n\r\n", 400),
    "trailers": (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: y\r\n\r\n", 400),
    "gzip, chunked": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    "chunked twice": (POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "xchunked": (POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
    "identity": (POST + b"Transfer-Encoding: identity\r\nContent-Length: 2\r\n\r\n{}", 400),
    "chunked in HTTP/1.0": (b"POST /v1/runs HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "HEAD with a body": (b"HEAD /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
    "nothing but ends of lines": (b"\r\n\r\n\r\n", 400),
    "NUL": (b"\0" * 100 + b"\r\n\r\n", 400),
    "NUL in the path": (b"GET /healthz%00 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "raw NUL in the path": (b"GET /healthz\0 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "bad escape in the path": (b"GET /healthz%zz HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "cut escape in the path": (b"GET /healthz% HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "bad escape in the query": (b"GET /healthz?a=%zz HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "path that is not UTF-8": (b"GET /healthz%ff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "raw bytes in the path": (b"GET /healthz\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "65 parameters": (b"GET /healthz?" + b"&".join(b"a%d=1" % i for i in range(65)) + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "a long line": (b"GET /" + b"x" * 40000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
    "a long header": (GET + b"A: " + b"x" * 40000 + b"\r\n\r\n", 431),
    "many headers": (GET + b"A: b\r\n" * 8000 + b"\r\n", 431),
    "a line without an end": (b"G" * 100000, 431),
    "Expect": (GET + b"Expect: nonsense\r\n\r\n", 417),
}
SMUGGLED = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("listener", ["api", "operator"])
@pytest.mark.parametrize("name", sorted(name for name, (_, status) in HOSTILE.items() if status != 408))  # never whole: test_slow_requests
def test_hostile_bytes(control, name, listener):
    """One answer, a problem, and the connection ends: what stands behind the broken bytes is never read as a request."""
    data, statuses = HOSTILE[name]
    with connect(control, listener=listener) as s:
        s.sendall(data)
        try:
            s.sendall(SMUGGLED)
        except OSError:
            pass
        got, closed = read_all(s)
    head, _, body = got.partition(b"\r\n\r\n")
    assert closed, "the connection stays open"
    status = int(head.split(b" ")[1])
    assert len(re.findall(rb"HTTP/1.1 \d", got)) == 1, f"more than one answer: {got[:600]}"
    assert status in (statuses if isinstance(statuses, tuple) else (statuses,)), got[:300]
    assert b"connection: close" in head.lower() and b"application/problem+json" in head, got[:300]
    if not data.startswith(b"HEAD"):
        found = json.loads(body)
        assert found["detail"] and found["title"] and found["status"] == status and not found["type"].endswith("/internal"), found
    assert requests.get(f"http://{control.addresses[listener]}/healthz", timeout=10).status_code == 200


def test_unusual_and_fine(control, client):
    """What looks odd and is allowed: case, blanks around values, HTTP/1.0, an empty Host in 1.0, many small writes."""
    for data in (b"GET /healthz HTTP/1.1\r\nhOsT:x\r\nX:\r\n\r\n", b"GET /healthz HTTP/1.1\r\nHost:  \t x \t \r\n\r\n", b"GET /healthz HTTP/1.0\r\n\r\n",
                 b"GET /healthz? HTTP/1.1\r\nHost: x\r\n\r\n", b"HEAD /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"):
        with connect(control) as s:
            for i in range(len(data)):
                s.sendall(data[i:i + 1])
            assert re.match(rb"HTTP/1.[01] 200", s.recv(65536)), data


def head_of(client, length=None, extra=""):
    line = f"Content-Length: {length}\r\n" if length is not None else ""
    return f"POST /v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\nContent-Type: application/json\r\n{line}{extra}\r\n".encode()


def test_headers_that_stand_twice(control, client):
    """One of them would win for us and the other for a proxy: each that decides something is refused."""
    body = b'{"prompt":"x"}'
    for extra, status, words in (("Content-Type: application/json\r\n", 415, "more than once"), ("Content-Type: text/plain\r\n", 415, "more than once"),
                                 ("Content-Encoding: identity\r\nContent-Encoding: gzip\r\n", 415, "more than once"),
                                 (f"Authorization: Bearer {client.key}\r\n", 401, "more than one Authorization"),
                                 ("Idempotency-Key: a\r\nIdempotency-Key: a\r\n", 400, "more than once")):
        with connect(control) as s:
            s.sendall(head_of(client, len(body), extra + "Connection: close\r\n") + body)
            got, _ = read_all(s)
        assert got.startswith(b"HTTP/1.1 %d" % status) and words in got.decode(), got[:600]
    assert client.get("/v1/runs")["data"] == []


def test_pipelined(control, client):
    one = f"GET /v1/me HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\n\r\n".encode()
    with connect(control) as s:
        s.sendall(one + SMUGGLED + GET + b"Connection: close\r\n\r\n")
        assert read_all(s)[0].count(b"HTTP/1.1 200") == 3


def test_chunked_bodies(control, client):
    """In one piece, byte by byte, with sizes in capitals and zeros before them."""
    body = b'{"prompt":"chunked"}'
    whole = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    single = b"".join(b"01\r\n%c\r\n" % b for b in body) + b"0\r\n\r\n"
    for chunks in (whole, whole.upper().replace(body.upper(), body), single):
        with connect(control) as s:
            s.sendall(head_of(client, extra="Transfer-Encoding: chunked\r\nConnection: close\r\n") + chunks)
            got, _ = read_all(s)
        assert got.startswith(b"HTTP/1.1 201"), got[:200]
        client.cancel(json.loads(got.partition(b"\r\n\r\n")[2])["id"])
    # Chunks without an end: cut at the limit of the body, wherever that falls.
    with connect(control, seconds=30) as s:
        s.sendall(head_of(client, extra="Transfer-Encoding: chunked\r\n"))
        piece = b"100000\r\n" + b"x" * MIB + b"\r\n"
        try:
            for _ in range(14):
                s.sendall(piece)
        except OSError:
            pass
        got, closed = read_all(s)
    assert closed and (not got or got.startswith(b"HTTP/1.1 413")), got[:200]


def test_bodies_of_another_length(control, client):
    """Cut: nothing is made. Longer than said: the rest is read as the next request, and is none."""
    body = json.dumps({"prompt": "x", "metadata": {"cut": "1"}}).encode()
    for cut in (0, 1, len(body) - 1):
        with connect(control) as s:
            s.sendall(head_of(client, len(body)) + body[:cut])
            s.shutdown(socket.SHUT_WR)
            got, closed = read_all(s)
        assert closed and not got.startswith(b"HTTP/1.1 2"), got[:200]
    assert client.get("/v1/runs?metadata.cut=1")["data"] == []
    with connect(control) as s:
        s.sendall(head_of(client, len(body) - 1) + body + b"\r\n\r\n")
        got, closed = read_all(s)
    assert closed and got.startswith(b"HTTP/1.1 400") and client.get("/v1/runs?metadata.cut=1")["data"] == []
    with connect(control) as s:
        s.sendall(head_of(client, len(body)) + body + b"nonsense\r\n\r\n")
        got, closed = read_all(s)
    assert closed and re.findall(rb"HTTP/1.1 (\d+)", got) in ([b"201", b"400"], [b"201"]), got[:300]
    for run in client.get("/v1/runs?metadata.cut=1")["data"]:
        client.cancel(run["id"])


def trickle(s, data, seconds):
    """Sends a byte at a time until the server ends it; returns what it said and after how long."""
    begin, got, at = time.monotonic(), b"", 0
    s.settimeout(0.2)
    while time.monotonic() - begin < seconds:
        try:
            s.sendall(data[at % len(data):at % len(data) + 1])
            at += 1
            more = s.recv(65536)
            got += more
            if not more:
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return got, time.monotonic() - begin


def test_slow_requests(cluster, bin_dir):
    """A line, headers, a body or chunks at a byte at a time do not hold a connection: 408 within the deadline, and others are served."""
    with control_rig.Control(cluster, bin_dir, http_deadline_seconds=2) as own:
        node = PaperNode(own.conninfo)
        client = own.new_client()
        cases = {"line": (b"", b"G"), "headers": (GET, b"X: y\r\n"), "body": (head_of(client, 100000), b"x"), "bare CR": (HOSTILE["bare CR"][0], b"\r"),
                 "chunks": (head_of(client, extra="Transfer-Encoding: chunked\r\n"), b"1\r\na\r\n"), "nothing more": (head_of(client, 10), b"")}

        def slow(name):
            start, more = cases[name]
            with connect(own) as s:
                s.sendall(start)
                if more:
                    return name, *trickle(s, more, 40)
                begin = time.monotonic()
                return name, read_all(s)[0], time.monotonic() - begin

        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            results = [pool.submit(slow, name) for name in cases]
            assert client.get("/v1/me")["role"] == "member"
            for name, got, seconds in (r.result() for r in results):
                assert seconds < 20, f"{name}: held for {seconds:.1f} s"
                assert got.startswith(b"HTTP/1.1 4") and got.count(b"HTTP/1.1 ") == 1, (name, got[:200])
        node.close()


# --- floods ------------------------------------------------------------------------------------------------------------------------------


def flood(s, data, limit, seconds):
    """Pushes data as long as the server takes it, reading nothing; returns how many bytes went."""
    s.setblocking(False)
    sent, until = 0, time.monotonic() + seconds
    while sent < limit and time.monotonic() < until:
        _, ready, _ = select.select([], [s], [], 0.5)
        if not ready:
            break      # it stopped reading
        try:
            sent += s.send(data)
        except BlockingIOError:
            continue
        except OSError:
            break
    return sent


def test_pipelined_floods(control, client):
    """Requests by the hundred megabytes, whose answers nobody reads: the server stops reading, its memory does not grow with them."""
    before = rss_kib(control.process)
    one = f"GET /v1/me HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\nX: {'y' * 20000}\r\n\r\n".encode()
    sockets = [connect(control, SO_RCVBUF=4096) for _ in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        sent = list(pool.map(lambda s: flood(s, one * 50, 150 * MIB, 15), sockets))
    grown = (rss_kib(control.process) - before) / 1024
    # A connection may hold the largest request there may be, and one read; the sanitizer keeps what was freed for a while.
    assert grown < 4 * 13 + 300, f"{grown:.0f} MiB more after {sum(sent) / MIB:.0f} MiB"
    assert client.get("/v1/me")["role"] == "member"
    for s in sockets:
        s.close()


def test_flood_into_an_open_stream(control, paper, client):
    """What is sent after the request of an event stream is not read: no memory, and the stream goes on."""
    run = client.create(prompt="x")["id"]
    before = rss_kib(control.process)
    with connect(control) as s:
        s.sendall(f"GET /v1/runs/{run}/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\nAccept: text/event-stream\r\n\r\n".encode())
        assert s.recv(65536).startswith(b"HTTP/1.1 200")
        sent = flood(s, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3000, 200 * MIB, 10)
        grown = (rss_kib(control.process) - before) / 1024
        assert grown < 64, f"{grown:.0f} MiB more after {sent / MIB:.0f} MiB"
        client.cancel(run)
        s.setblocking(True)
        s.settimeout(20)
        got = b""
        while b"event: run.settled" not in got:
            got += s.recv(65536)
        assert b"HTTP/1.1 " not in got.partition(b"event: run.settled")[0], "the flood was answered in the stream's place"


def test_bodies_without_an_end(control):
    """Many uploads at once, without a key and never finished: the budget for bodies ends them with 503, memory stays within it."""
    before = rss_kib(control.process)
    sockets = [connect(control, seconds=20) for _ in range(40)]

    def push(s):
        try:
            s.sendall(POST + b"Content-Length: 12000000\r\n\r\n")
            return flood(s, b"x" * MIB, 11 * MIB, 20)
        except OSError:
            return 0

    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        sent = sum(pool.map(push, sockets))
    grown = (rss_kib(control.process) - before) / 1024
    answers = []
    for s in sockets:
        s.settimeout(0.1)
        answers.append(read_all(s)[0][:12])
        s.close()
    assert grown < 256 + 350, f"{grown:.0f} MiB more after {sent / MIB:.0f} MiB"
    if sent > 300 * MIB:
        assert b"HTTP/1.1 503" in answers, answers
    assert requests.get(f"{control.url}/healthz", timeout=30).status_code == 200


# --- idle connections --------------------------------------------------------------------------------------------------------------------


def test_two_thousand_idle_connections(cluster, bin_dir):
    """Others are served as before; each costs little; they are closed in time; those over the limit wait and are served when there is room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    count = 2000 if min(hard, 8192) > 2600 else 800
    with control_rig.Control(cluster, bin_dir, http_idle_seconds=12, http_deadline_seconds=30) as own:
        node = PaperNode(own.conninfo)
        client = own.new_client()
        client.get("/v1/me")
        before, fds = rss_kib(own.process), len(os.listdir(f"/proc/{own.process.pid}/fd"))
        idle = [connect(own) for _ in range(count)]
        for s in idle[::2]:        # half of them asked for something first
            s.sendall(GET + b"\r\n")
        wait.until(lambda: len(os.listdir(f"/proc/{own.process.pid}/fd")) >= fds + count, 30, "all of them to be accepted")
        times = []
        for _ in range(50):
            begin = time.monotonic()
            client.call("GET", "/v1/me", 200)
            times.append(time.monotonic() - begin)
        each = (rss_kib(own.process) - before) / count
        assert each < 40, f"{each:.1f} KiB a connection"
        assert statistics.median(times) < 0.5, sorted(times)[-5:]
        wait.until(lambda: len(os.listdir(f"/proc/{own.process.pid}/fd")) <= fds + 20, 60, "the idle ones to be closed")
        assert client.get("/v1/me")["role"] == "member"
        for s in idle:
            s.close()
        node.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connections_are_bounded(cluster, bin_dir):
    """Over http_connections nobody is served until somebody leaves; the other listener has its own count."""
    with control_rig.Control(cluster, bin_dir, http_connections=32, http_idle_seconds=60) as own:
        held = [connect(own) for _ in range(32)]
        for s in held:
            s.sendall(GET + b"\r\n")
            assert s.recv(65536).startswith(b"HTTP/1.1 200")
        with connect(own, seconds=30) as late:
            late.sendall(GET + b"\r\n")
            assert not select.select([late], [], [], 1)[0], "one more than there may be was served"
            assert requests.get(f"{own.operator_url}/healthz", timeout=10).status_code == 200
            for s in held[:8]:
                s.close()
            assert late.recv(65536).startswith(b"HTTP/1.1 200")
        for s in held[8:]:
            s.close()


def test_out_of_descriptors(cluster, bin_dir):
    """A process that may not have more descriptors does not spin or die: who was there is served, who waited is served later."""
    with control_rig.Control(cluster, bin_dir, start=False, scripted=False) as own:
        own.start(prefix=("prlimit", "--nofile=128:128"))
        held = [connect(own, seconds=30) for _ in range(200)]
        wait.until(lambda: "accept failed" in own.log_text() or len(os.listdir(f"/proc/{own.process.pid}/fd")) >= 120, 20, "the descriptors to be used up")
        for s in held[:190]:
            s.close()
        assert requests.get(f"{own.url}/healthz", timeout=60).status_code == 200
        assert own.log_text().count("accept failed") < 500, "it spins"
        for s in held[190:]:
            s.close()


# --- readers that do not read --------------------------------------------------------------------------------------------------------------


def test_many_lazy_readers(control, paper, client):
    """10 readers of a large timeline that read nothing: all are cut, the server holds a page for each at most, others get every event."""
    run = client.create(prompt="x")["id"]
    work = paper.start(paper.claim(run))
    for _ in range(40):
        paper.events(work, *[("shell.output", {"call_id": "c", "stream": "stdout", "text": "y" * 15000}, "guest") for _ in range(10)])
    before = rss_kib(control.process)
    lazy = [connect(control, SO_RCVBUF=4096) for _ in range(10)]
    for s in lazy:
        s.sendall(f"GET /v1/runs/{run}/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\nAccept: text/event-stream\r\n\r\n".encode())
    wait.until(lambda: control.log_text().count(f"event stream cut run={run}") >= 10, 90, "the slow readers to be cut")
    grown = (rss_kib(control.process) - before) / 1024
    assert grown < 10 + 150, f"{grown:.0f} MiB more for 10 readers"
    paper.finish(work)
    seqs = [event["seq"] for event in client.events(run)]
    assert seqs == list(range(1, len(seqs) + 1)) and len(seqs) > 400
    for s in lazy:
        s.close()


def test_a_reader_of_a_plain_answer_that_does_not_read(cluster, bin_dir):
    """A large answer that nobody takes is given up after a while, and does not hold up others meanwhile."""
    with control_rig.Control(cluster, bin_dir, http_idle_seconds=2) as own:
        node = PaperNode(own.conninfo)
        client = own.new_client()
        run = client.create(prompt="x")["id"]
        node.run_to_end(run, output=b"o" * 1_000_000)
        client.settled(run, 20)
        fds = len(os.listdir(f"/proc/{own.process.pid}/fd"))
        lazy = [connect(own, SO_RCVBUF=4096) for _ in range(20)]
        for s in lazy:
            s.sendall(f"GET /v1/runs/{run} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\n\r\n".encode() * 5)
        assert client.read(run)["status"] == "succeeded"
        wait.until(lambda: len(os.listdir(f"/proc/{own.process.pid}/fd")) <= fds + 2, 60, "those that do not read to be cut")
        for s in lazy:
            s.close()
        node.close()


def test_everything_at_once(control, paper):
    """Broken bytes, cut bodies and good calls from many threads: every good one is answered rightly."""
    client = control.new_client()
    stop = threading.Event()
    noise = [data for data, _ in HOSTILE.values()]

    def bad(i):
        n = 0
        while not stop.is_set():
            try:
                with connect(control, seconds=2) as s:
                    s.sendall(noise[(i * 7 + n) % len(noise)])
                    n += 1
                    if n % 3 == 0:
                        s.recv(100)
            except OSError:
                pass
        return n

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        bads = [pool.submit(bad, i) for i in range(6)]
        try:
            runs = [client.create(prompt=f"good {i}")["id"] for i in range(40)]
            assert all(client.read(run)["status"] == "queued" for run in runs)
        finally:
            stop.set()
        assert sum(b.result() for b in bads) > 50
    assert len({*runs}) == 40 and len(client.get("/v1/runs?limit=100")["data"]) == 40
    for run in runs:
        client.cancel(run)
