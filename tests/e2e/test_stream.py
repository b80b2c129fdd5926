"""Events by SSE: exact bytes, exact resume, the end; and wait, Prefer: wait, idempotency over a real run."""
import json
import threading

import pytest
from client import ENDS, check_chain, say, shell, turns


@pytest.mark.guest
def test_sse_live_and_resume(stack, client):
    run = client.create(prompt=turns(shell("for i in 1 2 3 4 5; do echo line $i; sleep 0.2; done"), say("done")))
    seen = []
    # Cut the stream after every third event and go on from there.
    while True:
        for number, item in enumerate(client.stream(run["id"], seen[-1][0] if seen else None)):
            seen.append(item)
            if number == 2:
                break
        if seen[-1][1] == "run.settled":
            break
    rows = stack.control.event_rows(run["id"])
    check_chain(rows)
    assert [(seq, data) for seq, _, data in seen] == [(seq, bytes(data)) for seq, data, _ in rows], "what was streamed is not what was stored"
    assert all(json.loads(data)["type"] == kind for _, kind, data in seen)
    again = client.call("GET", f"/v1/runs/{run['id']}/events", headers={"Accept": "text/event-stream", "Last-Event-ID": str(seen[-1][0])})
    assert again.status_code == 204
    whole = list(client.stream(run["id"]))
    assert whole == seen
    after = client.get(f"/v1/runs/{run['id']}/events?after=2&limit=2")
    assert [e["seq"] for e in after["data"]] == [3, 4] and after["next_cursor"] == "4"


@pytest.mark.guest
def test_many_streams_of_one_run(client):
    run = client.create(prompt=turns(shell("seq 1 200"), say("done")))
    results = [None] * 8

    def read(n):
        results[n] = list(client.__class__(client.url, client.key).stream(run["id"]))
    threads = [threading.Thread(target=read, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert results[0] and all(r == results[0] for r in results)


@pytest.mark.guest
def test_prefer_wait_and_idempotency(client):
    body = {"prompt": turns(say("once")), "shell": True, "max_cost_micros": 500000, "timeout_seconds": 60}
    headers = {"Idempotency-Key": "order-1", "Prefer": "wait=60"}
    answers = []

    def post():
        answers.append(client.__class__(client.url, client.key).call("POST", "/v1/runs", json=body, headers=headers))
    threads = [threading.Thread(target=post) for _ in range(10)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    made = [a for a in answers if a.status_code == 201]
    assert made and all(a.status_code in (201, 409) for a in answers), [a.status_code for a in answers]
    assert len({a.json()["id"] for a in made}) == 1
    run = client.settled(made[0].json()["id"])
    assert run["status"] == "succeeded" and any(a.json()["status"] in ENDS for a in made)
    replay = client.call("POST", "/v1/runs", 201, json=dict(reversed(list(body.items()))), headers={"Idempotency-Key": "order-1"})
    assert replay.headers["Idempotency-Replayed"] == "true" and replay.json()["id"] == run["id"] and replay.json()["status"] == "succeeded"
    other = client.call("POST", "/v1/runs", 422, json=dict(body, shell=False), headers={"Idempotency-Key": "order-1"})
    assert other.json()["type"].endswith("idempotency-mismatch")
    assert client.get("/v1/me")["reserved_micros"] == 0


@pytest.mark.guest
def test_another_organization_sees_nothing(stack, client):
    run = client.run(turns(say("mine")))
    stranger = stack.client()
    for method, path in (("GET", ""), ("GET", "/events"), ("GET", "/wait?timeout_seconds=1"), ("GET", "/receipt"), ("POST", "/cancel")):
        answer = stranger.call(method, f"/v1/runs/{run['id']}{path}")
        assert answer.status_code == 404, (method, path, answer.status_code)
        assert "mine" not in answer.text
    assert stranger.get("/v1/runs")["data"] == []
    sse = stranger.call("GET", f"/v1/runs/{run['id']}/events", headers={"Accept": "text/event-stream"})
    assert sse.status_code == 404
