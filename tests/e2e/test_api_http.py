"""The API as bad days find it: clients that leave, Postgres away, going down. Hostile bytes are in test_api_bytes.py."""
import concurrent.futures
import json
import signal
import socket
import time

import requests
import wait
from api_rig import client, control, paper, problem  # noqa: F401
from paper_node import PaperNode

import control as control_rig
import pg


# --- clients that leave -------------------------------------------------------------------------------------------------------------------


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
