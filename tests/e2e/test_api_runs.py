"""Runs through the API, carried on by a node on paper: the life of a run, waiting, events as pages and streams."""
import concurrent.futures
import hashlib
import json
import socket
import threading
import time

import wait
from api_rig import client, control, paper, problem  # noqa: F401
from client import check_chain, check_timeline


# --- the life of a run, by a node on paper -----------------------------------------------------------------------------------------------


def test_whole_run(control, paper, client):
    run = client.create(prompt="x", max_cost_micros=40000)
    paper.run_to_end(run["id"], ("shell.started", {"call_id": "c1", "command": "printf 'a\\n'"}, "guest"),
                     ("shell.output", {"call_id": "c1", "stream": "stdout", "text": "ü\n\"type\":\"run.settled\""}, "guest"), output="Fertig: ü".encode())
    run = client.settled(run["id"], 20)
    events = client.events(run["id"])
    assert run["status"] == "succeeded" and run["output"] == "Fertig: ü" and run["cost_micros"] == 300 and run["released_micros"] == 39700
    assert run["cost"] == {"run_fee_micros": 0, "compute_micros": 100, "model_micros": 200, "web_micros": 0} and run["cost_final"]
    assert run["usage"]["total_tokens"] == run["usage"]["input_tokens"] + run["usage"]["output_tokens"]
    assert run["started_at"] and run["ended_at"] and run["expires_at"] and run["node"] == "paper" and run["isolation"] == "kvm"
    check_chain(control.event_rows(run["id"]))
    assert [e["type"] for e in events][-2:] == ["run.succeeded", "run.settled"]
    receipt = client.get(f"/v1/runs/{run['id']}/receipt")
    canonical = json.dumps(run["request"], sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert receipt["request_sha256"] == hashlib.sha256(canonical).hexdigest()
    rows = control.event_rows(run["id"])
    assert receipt["last_seq"] == len(rows) and receipt["last_hash"] == rows[-1][2].hex() and receipt["cost_micros"] == 300
    assert receipt["node"]["signature"] and receipt["node"]["receipt_key"]


def test_failed_run(paper, client):
    run = client.create(prompt="x")
    paper.run_to_end(run["id"], status="failed", code="budget_exceeded", message="The next call needs 7 micros, 3 are left.", output=b"half \xff\x00 way")
    run = client.settled(run["id"], 20)
    assert run["status"] == "failed" and run["error"]["code"] == "budget_exceeded" and "7 micros" in run["error"]["message"] and run["error"]["remedy"]
    assert run["output"] == "half \ufffd\ufffd way"


def test_receipt_comes_at_the_end(client):
    run = client.create(prompt="x")["id"]
    problem(client.call("GET", f"/v1/runs/{run}/receipt"), 409, "conflict")
    client.cancel(run)


def test_cancel(paper, client):
    run = client.create(prompt="x")["id"]
    first = client.cancel(run)
    assert first["status"] == "cancelled" and first["cancel_requested_at"] and first["error"]["code"] == "cancelled"
    assert client.cancel(run)["status"] == "cancelled", "cancel is idempotent"
    run = client.settled(run, 20)
    check_timeline(run, client.events(run["id"]))
    # A running one is asked to stop; its host ends it.
    run = client.create(prompt="x")["id"]
    work = paper.start(paper.claim(run))
    assert client.cancel(run)["status"] == "running"
    assert client.cancel(run)["cancel_requested_at"]
    assert "run.cancel_requested" in [e["type"] for e in client.events(run)] or work.seq
    problem(client.call("POST", f"/v1/runs/{run}/cancel", json={"x": 1}), 400, "invalid-request", "#/x")


# --- wait ------------------------------------------------------------------------------------------------------------------------------


def test_wait(paper, client):
    run = client.create(prompt="x")["id"]
    begin = time.monotonic()
    assert client.get(f"/v1/runs/{run}/wait?timeout_seconds=1")["status"] == "queued"
    assert 0.9 < time.monotonic() - begin < 5
    problem(client.call("GET", f"/v1/runs/{run}/wait?timeout_seconds=0"), 400, "invalid-request", "timeout_seconds")
    problem(client.call("GET", f"/v1/runs/{run}/wait?timeout_seconds=61"), 400, "invalid-request", "timeout_seconds")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: client.get(f"/v1/runs/{run}/wait?timeout_seconds=30"))
        paper.run_to_end(run)
        ended = waiting.result(20)
    assert ended["status"] == "succeeded" and ended["cost_final"]


def test_prefer_wait(paper, client):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(lambda: client.call("POST", "/v1/runs", json={"prompt": "x", "metadata": {"prefer": "1"}}, headers={"Prefer": "wait=20"}))
        run = wait.until(lambda: client.get("/v1/runs?metadata.prefer=1")["data"], 10, "the run")[0]["id"]
        paper.run_to_end(run)
        answer = asking.result(30)
    assert answer.status_code == 201 and answer.headers["Preference-Applied"] == "wait=20" and answer.json()["status"] == "succeeded"
    answer = client.call("POST", "/v1/runs", 201, json={"prompt": "x"}, headers={"Prefer": "respond-async, wait=1"})
    assert answer.json()["status"] == "queued" and answer.headers["Preference-Applied"] == "wait=1"
    client.cancel(answer.json()["id"])


# --- events ----------------------------------------------------------------------------------------------------------------------------


def ended_run(client, paper, events=40):
    run = client.create(prompt="x")["id"]
    paper.run_to_end(run, *[("worker.note", {"text": f"note {i} \u20ac\n\r\u2028"}, "guest") for i in range(events)])
    client.settled(run, 20)
    return run


def test_event_pages(control, paper, client):
    run = ended_run(client, paper)
    rows = control.event_rows(run)
    seen, after = [], 0
    while True:
        answer = client.call("GET", f"/v1/runs/{run}/events?limit=7&after={after}", 200)
        page = answer.json()
        seen += page["data"]
        if page["next_cursor"] is None:
            break
        assert page["next_cursor"] == str(page["data"][-1]["seq"])
        after = page["next_cursor"]
    assert [e["seq"] for e in seen] == [row[0] for row in rows]
    # The exact bytes of the writer stand in the answer.
    whole = client.call("GET", f"/v1/runs/{run}/events?limit=1000", 200).content
    assert whole == b'{"data":[' + b",".join(row[1] for row in rows) + b'],"next_cursor":null}'
    assert client.get(f"/v1/runs/{run}/events?after=100000") == {"data": [], "next_cursor": None}
    for bad in ("after=-1", "after=x", "limit=0", "limit=1001", "after=1&cursor=1"):
        problem(client.call("GET", f"/v1/runs/{run}/events?{bad}"), 400, "invalid-request")
    # Of a run that goes on, the cursor is where to ask again.
    queued = client.create(prompt="x")["id"]
    assert client.get(f"/v1/runs/{queued}/events")["next_cursor"] == "1"
    assert client.get(f"/v1/runs/{queued}/events?after=1") == {"data": [], "next_cursor": "1"}
    client.cancel(queued)


def test_stream_of_an_ended_run(control, paper, client):
    run = ended_run(client, paper)
    rows = control.event_rows(run)
    assert [(seq, data) for seq, _, data in client.stream(run)] == [(row[0], row[1]) for row in rows]
    for last in range(0, len(rows), 7):
        assert [seq for seq, _, _ in client.stream(run, last)] == list(range(last + 1, len(rows) + 1))
    assert all(json.loads(data)["type"] == kind for _, kind, data in client.stream(run))
    answer = client.call("GET", f"/v1/runs/{run}/events", headers={"Accept": "text/event-stream", "Last-Event-ID": str(len(rows))})
    assert answer.status_code == 204
    answer = client.call("GET", f"/v1/runs/{run}/events?after={len(rows)}", headers={"Accept": "text/event-stream"})
    assert answer.status_code == 204
    problem(client.call("GET", f"/v1/runs/{run}/events", headers={"Accept": "text/event-stream", "Last-Event-ID": "abc"}), 400, "invalid-request",
            "Last-Event-ID")
    # A browser that comes back keeps the address of its first request: the header wins.
    answer = client.call("GET", f"/v1/runs/{run}/events?after=3", headers={"Accept": "text/event-stream", "Last-Event-ID": str(len(rows) - 1)})
    assert answer.text.count("\nid: ") + answer.text.startswith("id: ") == 1


def test_stream_follows(paper, client):
    run = client.create(prompt="x")["id"]
    seen = []
    reader = threading.Thread(target=lambda: seen.extend(client.stream(run)), daemon=True)
    reader.start()
    work = paper.start(paper.claim(run))
    for i in range(5):
        paper.events(work, ("worker.note", {"text": f"n{i}"}, "guest"))
    paper.finish(work)
    reader.join(20)
    assert not reader.is_alive(), "the stream did not end"
    assert [seq for seq, _, _ in seen] == list(range(1, len(seen) + 1))
    assert [kind for _, kind, _ in seen][-2:] == ["run.succeeded", "run.settled"]


def replay(client, run, pause=None):
    """The seqs of an ended run's stream, read in large pieces."""
    answer = client.session.get(f"{client.url}/v1/runs/{run}/events", headers={"Accept": "text/event-stream"}, stream=True, timeout=60)
    seen = []
    with answer:
        for piece in answer.iter_lines(chunk_size=65536):
            if piece.startswith(b"id: "):
                seen.append(int(piece[4:]))
                if pause and len(seen) % 10 == 0:
                    threading.Event().wait(pause)
    return seen


def much(paper, work, batches):
    for _ in range(batches):
        paper.events(work, *[("shell.output", {"call_id": "c", "stream": "stdout", "text": "y" * 15000}, "guest") for _ in range(10)])


def test_long_replay_to_a_slow_reader(paper, client):
    """More than a stream may queue, read slowly: every event comes, none is lost."""
    run = client.create(prompt="x")["id"]
    work = paper.start(paper.claim(run))
    much(paper, work, 30)
    paper.finish(work)
    client.settled(run, 20)
    seen = replay(client, run, pause=0.02)
    assert seen == list(range(1, len(seen) + 1)) and len(seen) > 300


def test_slow_reader_is_cut(control, paper, client):
    run = client.create(prompt="x")["id"]
    work = paper.start(paper.claim(run))
    much(paper, work, 30)
    host, port = control.addresses["api"].split(":")
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect((host, int(port)))
        lazy.sendall(f"GET /v1/runs/{run}/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\nAccept: text/event-stream\r\n\r\n".encode())
        wait.until(lambda: f"event stream cut run={run}" in control.log_text(), 30, "the slow reader to be cut")
    paper.finish(work)
    assert len(replay(client, run)) > 300
