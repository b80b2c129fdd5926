"""The API as bad clients and bad days find it: hostile bytes, clients that leave, Postgres away, going down."""
import concurrent.futures
import json
import signal
import socket
import time

import pytest
import requests
import wait
from api_rig import client, control, paper, problem  # noqa: F401
from paper_node import PaperNode

import control as control_rig
import pg


# --- hostile HTTP ------------------------------------------------------------------------------------------------------------------------


def raw(control, data, seconds=10, shut=False):
    host, port = control.addresses["api"].split(":")
    with socket.create_connection((host, int(port)), seconds) as s:
        s.settimeout(seconds)
        s.sendall(data)
        if shut:
            s.shutdown(socket.SHUT_WR)
        got = b""
        while True:
            try:
                more = s.recv(65536)
            except (TimeoutError, ConnectionResetError):
                break
            if not more:
                break
            got += more
        return got


HOSTILE = {
    "two lengths": b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "plus in length": b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Length: +2\r\n\r\n{}",
    "length and chunked": b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "space before the colon": b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Length : 2\r\n\r\n{}",
    "no host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "hex in chunk": b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n",
    "nonsense": b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    "NUL in the path": b"GET /healthz%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "bad escape": b"GET /healthz%zz HTTP/1.1\r\nHost: x\r\n\r\n",
    "too many headers": b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"x" * 40000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_bytes(control, name):
    got = raw(control, HOSTILE[name])
    head, _, body = got.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    assert status in (400, 408, 413, 431, 505), got[:300]
    assert got.count(b"HTTP/1.1 ") == 1, "more than one answer"
    assert b"application/problem+json" in head and json.loads(body)["status"], got[:300]
    assert b"connection: close" in head.lower()
    assert requests.get(f"{control.url}/healthz", timeout=10).status_code == 200


def test_pipelined(control, client):
    one = f"GET /v1/me HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\n\r\n".encode()
    got = raw(control, one + b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" + b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert got.count(b"HTTP/1.1 200") == 3


def test_chunked_body(control, client):
    body = b'{"prompt":"chunked"}'
    head = f"POST /v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    got = raw(control, head.encode() + b"Transfer-Encoding: chunked\r\n\r\n5\r\n" + body[:5] + b"\r\n" + b"%x\r\n" % (len(body) - 5) + body[5:] + b"\r\n0\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 201"), got[:200]
    client.cancel(json.loads(got.partition(b"\r\n\r\n")[2])["id"])


def test_client_that_goes_away(control, paper, client):
    """Clients that leave in the middle of a create, a wait and a stream: nobody else notices, and what was begun is done."""
    host, port = control.addresses["api"].split(":")
    run = client.create(prompt="x")["id"]
    auth = f"Host: x\r\nAuthorization: Bearer {client.key}\r\n"
    body = json.dumps({"prompt": "gone", "metadata": {"gone": "1"}})
    for data in (f"POST /v1/runs HTTP/1.1\r\n{auth}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}",
                 f"GET /v1/runs/{run}/wait?timeout_seconds=60 HTTP/1.1\r\n{auth}\r\n",
                 f"GET /v1/runs/{run}/events HTTP/1.1\r\n{auth}Accept: text/event-stream\r\n\r\n"):
        for _ in range(10):
            s = socket.create_connection((host, int(port)), 10)
            s.sendall(data.encode())
            s.close()
    client.cancel(run)
    for made in client.get("/v1/runs?metadata.gone=1")["data"]: # those that were whole before their client left
        client.cancel(made["id"])
    assert requests.get(f"{control.url}/healthz", timeout=10).status_code == 200


# --- health, and Postgres away --------------------------------------------------------------------------------------------------------------


def test_health(control, paper):
    assert requests.get(f"{control.url}/healthz", timeout=10).json()["status"] == "ok"
    ready = requests.get(f"{control.operator_url}/readyz", timeout=10)
    assert ready.status_code == 200 and ready.json()["status"] == "ready" and ready.json()["reasons"] == [], ready.text
    assert ready.json()["nodes_live"] >= 1


def test_slow_request_is_ended(cluster, bin_dir):
    """A client that sends its request a byte at a time does not hold a connection for ever."""
    with control_rig.Control(cluster, bin_dir, http_deadline_seconds=1) as own:
        host, port = own.addresses["api"].split(":")
        with socket.create_connection((host, int(port)), 10) as s:
            s.settimeout(0.2)
            got, begin = b"", time.monotonic()
            while time.monotonic() - begin < 15:
                try:
                    s.sendall(b"G")
                    more = s.recv(65536)
                    got += more
                    if not more:
                        break
                except TimeoutError:
                    continue
                except (ConnectionResetError, BrokenPipeError):
                    break
            assert time.monotonic() - begin < 10


def test_idle_time_is_not_waiting_time(cluster, bin_dir):
    """A client that waits for an answer, or follows a quiet run, is not idle."""
    with control_rig.Control(cluster, bin_dir, http_idle_seconds=1) as own:
        node = PaperNode(own.conninfo)
        client = own.new_client()
        run = client.create(prompt="x")["id"]
        stream = client.stream(run)
        assert next(stream)[1] == "run.queued"
        assert client.get(f"/v1/runs/{run}/wait?timeout_seconds=4")["status"] == "queued"
        own.new_client(org=client.org).cancel(run)
        assert [kind for _, kind, _ in stream][-1] == "run.settled"
        node.close()


def test_quiet_stream_has_a_heartbeat(control, client):
    run = client.create(prompt="x")["id"]
    answer = client.session.get(f"{client.url}/v1/runs/{run}/events", headers={"Accept": "text/event-stream"}, stream=True, timeout=20)
    with answer:
        assert next(line for line in answer.iter_lines(chunk_size=1) if line.startswith(b":")), "a comment while nothing happens"
    client.cancel(run)


def test_streams_are_bounded(cluster, bin_dir):
    with control_rig.Control(cluster, bin_dir, stream_clients=8) as own:
        node = PaperNode(own.conninfo)
        client = own.new_client()
        run = client.create(prompt="x")["id"]
        headers = {"Authorization": f"Bearer {client.key}", "Accept": "text/event-stream"}
        open_ones = [requests.get(f"{own.url}/v1/runs/{run}/events", headers=headers, stream=True, timeout=20) for _ in range(8)]
        assert all(answer.status_code == 200 for answer in open_ones)
        for path in ("events", "wait"):
            answer = client.call("GET", f"/v1/runs/{run}/{path}", headers={"Accept": "text/event-stream"})
            assert "8" in problem(answer, 503, "unavailable")["detail"] and int(answer.headers["Retry-After"]) > 0
        open_ones.pop().close()
        wait.until(lambda: client.call("GET", f"/v1/runs/{run}/wait?timeout_seconds=1").status_code == 200, 10, "the place of one that left")
        for answer in open_ones:
            answer.close()
        client.cancel(run)
        node.close()


def test_two_controlds(cluster, bin_dir):
    """Keys, runs and streams are the same on each; what one does the other's clients see at once."""
    with control_rig.Control(cluster, bin_dir) as one:
        shared = {"keyring": one.config["keyring"], "tls_dir": one.config["tls_dir"]}
        with control_rig.Control(cluster, bin_dir, conninfo=one.conninfo, scripted=False, **shared) as two:
            node = PaperNode(one.conninfo)
            here = one.new_client("admin")
            there = control_rig.client_rig.Client(two.url, here.key)
            run = here.create(prompt="x", headers={"Idempotency-Key": "k"})["id"]
            assert there.create(prompt="x", headers={"Idempotency-Key": "k"})["id"] == run
            stream = there.stream(run)
            assert next(stream)[1] == "run.queued"
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(lambda: two_waits(two, here.key, run))
                here.cancel(run)
                assert [kind for _, kind, _ in stream][-1] == "run.settled"
                assert waiting.result(20)["status"] == "cancelled"
            robot = here.call("POST", "/v1/keys", 201, json={"role": "viewer"}).json()
            viewer = control_rig.client_rig.Client(two.url, robot["key"])
            viewer.get("/v1/me")
            here.call("DELETE", f"/v1/keys/{robot['id']}", 204)
            wait.until(lambda: viewer.call("GET", "/v1/me").status_code == 401, 5, "the revocation to count everywhere")
            node.close()


def two_waits(control, key, run):
    return control_rig.client_rig.Client(control.url, key).get(f"/v1/runs/{run}/wait?timeout_seconds=15")


def test_postgres_away(bin_dir):
    """Without the database: 503 with Retry-After within seconds, never a hang; with it again everything goes on by itself."""
    with pg.Cluster() as own_cluster, control_rig.Control(own_cluster, bin_dir) as own:
        node = PaperNode(own.conninfo)
        client = own.new_client()
        run = client.create(prompt="x")["id"]
        node.close()
        own_cluster.stop_server()
        wait.until(lambda: client.call("GET", f"/v1/runs/{run}").status_code != 200, 10, "the cached answers to end")
        calls = [("GET", f"/v1/runs/{run}"), ("POST", "/v1/runs"), ("GET", f"/v1/runs/{run}/events"), ("GET", f"/v1/runs/{run}/wait"), ("GET", "/v1/me")]

        def ask(call):
            begin = time.monotonic()
            answer = requests.request(call[0], own.url + call[1], json={"prompt": "y"} if call[0] == "POST" else None, timeout=30,
                                      headers={"Authorization": f"Bearer {client.key}"})
            return answer, time.monotonic() - begin

        with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
            for answer, seconds in pool.map(ask, calls):
                problem(answer, 503, "unavailable")
                assert int(answer.headers["Retry-After"]) > 0 and seconds < 5
        assert requests.get(f"{own.url}/healthz", timeout=10).status_code == 200
        ready = requests.get(f"{own.url}/readyz", timeout=10)
        assert ready.status_code == 503 and "Postgres" in ready.json()["reasons"][0]
        own_cluster.start_server()
        own.until_ready(20)
        assert client.read(run)["status"] == "queued"
        client.cancel(run)


def test_drain(cluster, bin_dir):
    """At SIGTERM streams and waits are answered, and the process ends with 0."""
    with control_rig.Control(cluster, bin_dir) as own:
        node = PaperNode(own.conninfo)
        client = own.new_client()
        run = client.create(prompt="x")["id"]
        stream = client.stream(run)
        assert next(stream)[1] == "run.queued"
        host, port = own.addresses["api"].split(":")
        with socket.create_connection((host, int(port)), 10) as waiting:
            waiting.sendall(f"GET /v1/runs/{run}/wait?timeout_seconds=60 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\n\r\n".encode())
            # One loop takes requests as they come: when this one is answered, the other has been taken.
            assert requests.get(f"{own.url}/readyz", timeout=10).status_code == 200
            assert own.stop() == 0
            assert b'"status":"queued"' in waiting.recv(65536)
        assert not list(stream)
        node.close()


def test_drain_ends_streams_whole(cluster, bin_dir):
    """A stream that is ended by SIGTERM ends as HTTP says, so that its client knows that it may resume."""
    with control_rig.Control(cluster, bin_dir) as own:
        node = PaperNode(own.conninfo)
        client = own.new_client()
        run = client.create(prompt="x")["id"]
        stream = client.stream(run)
        assert next(stream)[1] == "run.queued"
        assert own.stop() == 0
        assert not list(stream)
        own.keep_addresses()
        own.start()
        resumed = control_rig.client_rig.Client(own.url, client.key).stream(run, last_id=1)
        client.cancel(run)
        assert [kind for _, kind, _ in resumed][-1] == "run.settled"
        node.close()


def test_killed_in_the_middle_of_creates(cluster, bin_dir):
    """kill -9 while creates are under way: a retry with the same key finds its run or makes it, never a second one."""
    with control_rig.Control(cluster, bin_dir) as own:
        node = PaperNode(own.conninfo)
        client = own.new_client()
        own.keep_addresses()
        answered = []

        def create(key):
            try:
                answer = requests.post(f"{own.url}/v1/runs", json={"prompt": key, "max_cost_micros": 50000, "metadata": {"key": key}}, timeout=30,
                                       headers={"Authorization": f"Bearer {client.key}", "Idempotency-Key": key})
                answered.append(key)
                return answer.json().get("id")
            except requests.RequestException:
                return None

        keys = [f"key-{i}" for i in range(120)]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            first = [pool.submit(create, key) for key in keys]
            wait.until(lambda: len(answered) >= 20, 20, "some creates to be answered")
            own.stop(signal.SIGKILL)
            before = [f.result() for f in first]
        assert None in before and any(before)
        own.start()
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            after = list(pool.map(create, keys))
        assert all(after) and len(set(after)) == len(keys)
        assert all(old in (None, new) for old, new in zip(before, after))
        assert client.get("/v1/me")["reserved_micros"] == 50000 * len(keys)
        assert not [line for line in own.check_ledger() if line.startswith("FAIL")]
        node.close()
