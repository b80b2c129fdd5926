"""Creating runs when things change or are short: repeated requests, no money, no host, files of what is refused, large bodies beside others."""
import base64
import concurrent.futures
import json
import os
import pathlib
import signal
import statistics
import threading
import time

import requests
import wait
from api_rig import client, connect, control, paper, problem, rss_kib  # noqa: F401
from paper_node import PaperNode

import control as control_rig

MIB = 1024 * 1024


def files_of(control, org):
    """(files, bytes) that are kept for an organization."""
    return control.query("SELECT (SELECT count(*) FROM chunk_files WHERE org_id = %s), coalesce(sum(length(data)), 0)::bigint FROM chunks WHERE org_id = %s",
                         org, org)[0]


def large(mib=8, prompt="x", **fields):
    return {"prompt": prompt, "files": [{"path": "a", "content_base64": base64.b64encode(os.urandom(int(mib * MIB) - 1024)).decode()}], **fields}


def create(client, body, key=None, **headers):
    return client.call("POST", "/v1/runs", json=body, headers={**({"Idempotency-Key": key} if key else {}), **headers})


# --- a repeated request gets its run, whatever changed since ----------------------------------------------------------------------------


def test_replay_comes_before_what_changes(control, paper):
    """Price, model and default change, the balance goes: the repeated request gets its run, another body 422, a new key the refusal."""
    control.operator("PUT", "/models/scripted/changing", json={})
    control.operator("PUT", "/prices/scripted/changing", json={"input_micros_per_million": 1, "output_micros_per_million": 1})
    owner = control.new_client(default_model="scripted/changing", default_max_cost_micros=60000)
    named = {"prompt": "x", "model": "scripted/changing", "max_cost_micros": 50000, "files": [{"path": "a", "content": "b"}]}
    bare = {"prompt": "y"}
    first = [create(owner, body, key).json()["id"] for body, key in ((named, "named"), (bare, "bare"))]

    def check(pointer, word):
        for body, key, run in ((named, "named", first[0]), (bare, "bare", first[1])):
            again = create(owner, body, key)
            assert again.status_code == 201 and again.json()["id"] == run and again.headers["Idempotency-Replayed"] == "true", again.text
            problem(create(owner, {**body, "prompt": "z"}, key), 422, "idempotency-mismatch")
            found = problem(create(owner, body, "fresh"), 400, "invalid-request", pointer)
            assert word in found["detail"]
            assert word in problem(create(owner, body), 400, "invalid-request", pointer)["detail"]

    # Too dear for the caps.
    control.operator("PUT", "/prices/scripted/changing", json={"input_micros_per_million": 10**9, "output_micros_per_million": 10**9})
    check("#/max_cost_micros", "at least")
    # Without a price, and gone altogether (there is no call that does it: an operator's hand in the database).
    control.query("DELETE FROM model_prices WHERE model_id = 'scripted/changing'")
    wait.until(lambda: "price" in create(owner, named).text, 10, "the price to be gone")
    check("#/model", "price")
    control.query("UPDATE organizations SET default_model = 'scripted/gone' WHERE id = %s", owner.org)
    control.query("UPDATE models SET id = 'scripted/renamed' WHERE id = 'scripted/changing'")
    wait.until(lambda: "no model here" in create(owner, named).text and "no model here" in create(owner, bare).text, 10, "the model to be gone")
    check("#/model", "no model here")
    # No money left: what was made is still found.
    balance = owner.get("/v1/me")["available_micros"]
    control.credit(owner.org, -balance)
    assert create(owner, named, "named").json()["id"] == first[0]
    for run in first:
        owner.cancel(run)
    assert create(owner, named, "named").json()["status"] == "cancelled"
    control.query("UPDATE models SET id = 'scripted/changing' WHERE id = 'scripted/renamed'")


# --- refused: exact answers, and nothing is kept -------------------------------------------------------------------------------------------


def refusals(control):
    """(client, body, status, type, words) of everything that is refused after a body was found good."""
    poor = control.new_client(credit=0)
    full = control.new_client(max_queued_runs=1)
    full.create(prompt="the one")
    kvm_only = control.new_client(allow_emulated=False)
    rich = control.new_client()
    return [(poor, {"max_cost_micros": 40000}, 402, "insufficient-balance", ["40000 micros", "0 micros", poor.org, "admin org credit"]),
            (full, {}, 429, "rate-limited", ["1 runs queued"]),
            (kvm_only, {}, 503, "no-node", ["standard (512 MiB, 1 vCPU)", "KVM", f"admin org set {kvm_only.org} --allow-emulated yes", "admin node token"]),
            (rich, {"size": "large"}, 503, "no-node", ["large", "2048 MiB", "Ask for another size"]),
            (rich, {"model": "no/such"}, 400, "invalid-request", ["no/such", "GET /v1/models"]),
            (rich, {"max_cost_micros": 1}, 400, "invalid-request", ["is 1,", "at least"])]


def test_refused_creates_leave_nothing(cluster, bin_dir):
    """No balance, a full queue, no host, hosts that cannot hold it, no model, a cap too low: status, type, what helps; no file, key or row stays."""
    with control_rig.Control(cluster, bin_dir, size_large="2048,2") as own:
        node = PaperNode(own.conninfo, isolation="emulated", memory=1024, vcpus=1, slots=4)
        for client, fields, status, kind, words in refusals(own):
            for more in ({}, {"files": [{"path": "a", "content": "b" * 600_000}, {"path": "c", "content": "d"}]}):
                before = own.query("SELECT count(*) FROM runs")[0]
                for key in (None, "again"):
                    answer = create(client, {"prompt": "x", **fields, **more}, key)
                    found = problem(answer, status, kind)
                    text = found["detail"] + str(found.get("errors", ""))
                    assert all(word in text for word in words), (words, text)
                    assert status not in (429, 503) or int(answer.headers["Retry-After"]) > 0
                assert files_of(own, client.org) == (0, 0), f"{kind} left files behind"
                assert own.query("SELECT count(*) FROM idempotency WHERE org_id = %s AND endpoint = 'runs'", client.org) == [(0,)], f"{kind} keeps its key"
                assert own.query("SELECT count(*) FROM runs")[0] == before
            assert client.get("/v1/me")["reserved_micros"] in (0, own.query("SELECT coalesce(sum(cap_micros), 0)::bigint FROM run_live WHERE org_id = %s",
                                                                           client.org)[0][0])
        # No host at all.
        own.revoke("paper")
        rich = own.new_client()
        problem(create(rich, large(1)), 503, "no-node")
        assert files_of(own, rich.org) == (0, 0)
        node.close()


def test_one_wallet_many_creates_with_files(control, paper):
    """100 at once, money for 10: 10 runs, the others 402; what lost a race after its files were stored goes an hour after the queue's time, not after a day."""
    owner = control.new_client(credit=10 * 50000)

    def one(i):
        return create(owner, {"prompt": "x", "max_cost_micros": 50000, "files": [{"path": "a", "content": f"{i}" * 1000}]}).status_code

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(one, range(100)))
    assert answers.count(201) == 10 and answers.count(402) == 90, answers
    me = owner.get("/v1/me")
    assert me["reserved_micros"] == 500000 and me["available_micros"] == 0
    kept = control.query("SELECT f.used_at_ms < eph_now_ms() - 82000000, EXISTS (SELECT 1 FROM run_files r JOIN runs u ON u.run_id = r.run_id "
                         "WHERE r.sha256 = f.sha256 AND u.org_id = f.org_id) FROM chunk_files f WHERE f.org_id = %s", owner.org)
    assert all(leaves != named for leaves, named in kept), "files of refused creates stay for a day, or those of runs do not"
    for run in owner.get("/v1/runs?limit=100")["data"]:
        owner.cancel(run["id"])


def test_refused_creates_do_not_take_files_from_queued_runs(cluster, bin_dir):
    """As above, all with the same file, and runs that may wait for a day: however many are refused, the file stays until those have started."""
    with control_rig.Control(cluster, bin_dir, queue_timeout_seconds=86400) as own:
        node, owner = PaperNode(own.conninfo), own.new_client(credit=10 * 50000)
        body = {"prompt": "x", "max_cost_micros": 50000, "files": [{"path": "a", "content": "same" * 1000}]}
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(lambda _: create(owner, body).status_code, range(100)))
        assert answers.count(201) == 10 and answers.count(402) == 90, answers
        assert own.query("SELECT used_at_ms + 90000000 > eph_now_ms() + 86400000 FROM chunk_files WHERE org_id = %s", owner.org) == [(True,)]
        node.close()


# --- large bodies ----------------------------------------------------------------------------------------------------------------------------


def latencies(client, stop):
    seen = []
    while not stop.is_set():
        begin = time.monotonic()
        client.call("GET", "/v1/me", 200)
        seen.append(time.monotonic() - begin)
    return seen


def cpu_seconds(process):
    """(of the loop's thread, of all threads)"""
    def one(task):
        return int(pathlib.Path(f"/proc/{process.pid}/task/{task}/schedstat").read_text().split()[0]) / 1e9
    return one(process.pid), sum(one(task) for task in os.listdir(f"/proc/{process.pid}/task"))


def test_large_bodies_do_not_hold_up_others(control, paper):
    """While 8 MiB of files come in again and again, small calls are answered; the loop does the smaller part of the work, in short turns."""
    owner, other = control.new_client(), control.new_client()
    bodies = [large(8, prompt=f"{i}") for i in range(5)]
    begin = time.monotonic()
    runs = [create(owner, bodies[0]).json()["id"]]
    alone = time.monotonic() - begin
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        loop, all_threads = cpu_seconds(control.process)
        for body in bodies[1:3]:
            runs.append(create(owner, body).json()["id"])
        loop, all_threads = (now - before for now, before in zip(cpu_seconds(control.process), (loop, all_threads)))
        asking = pool.submit(latencies, other, stop)
        for body in bodies[3:]:
            runs.append(create(owner, body).json()["id"])
        stop.set()
        seen = asking.result(60)
    assert loop < all_threads / 2, f"the loop took {loop:.3f} s of {all_threads:.3f} s: bodies are not read beside it"
    assert len(seen) > 20 and statistics.median(seen) < max(0.05, alone / 5), (alone, sorted(seen)[-5:])
    for run in runs:
        owner.cancel(run)


def test_faults_of_large_bodies(control, client):
    """What is read on the other thread is refused in the same words."""
    long = "x" * 200_000
    headers = {"Content-Type": "application/json"}
    problem(client.call("POST", "/v1/runs", json={"prompt": long}), 400, "invalid-request", "#/prompt")
    problem(client.call("POST", "/v1/runs", json={"prompt": 7, "shell": long, "nonsense": long}), 400, "invalid-request", "#/prompt", "#/shell", "#/nonsense")
    problem(client.call("POST", "/v1/runs", data=b'{"prompt":"' + b"x" * 100_000 + b"\xff\"}", headers=headers), 400, "invalid-request", "#")
    problem(client.call("POST", "/v1/runs", data="[" * 100_000, headers=headers), 400, "invalid-request", "#")
    found = problem(client.call("POST", "/v1/runs", data="[" + "1," * 1_100_000 + "1]", headers=headers), 400, "invalid-request", "#")
    assert "1000000 values" in found["detail"]
    many = {"prompt": "x", "files": [{"path": "same", "content": "y" * 3000}] * 32}
    assert len(problem(client.call("POST", "/v1/runs", json=many), 400, "invalid-request")["errors"]) == 31
    problem(client.call("POST", "/v1/runs", json=large(1), headers={"Idempotency-Key": "k" * 256}), 400, "invalid-request", "Idempotency-Key")
    run = create(client, large(0.2), "large")
    again = create(client, {**large(0.2), "prompt": "other"}, "large")
    problem(again, 422, "idempotency-mismatch")
    client.cancel(run.json()["id"])


def test_large_bodies_of_clients_that_leave(control, client):
    """They go while their body is read elsewhere: nothing is answered, nothing is lost, the server goes on."""
    data = b'{"prompt":"' + b"x" * 100_000 + b'","shell":"' + b"y" * 3_000_000 + b'"}'
    head = f"POST /v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    for _ in range(10):
        with connect(control) as s:
            s.sendall(head.encode() + data)
    assert client.get("/v1/me")["role"] == "member"


def test_too_many_large_bodies(cluster, bin_dir):
    """More large bodies at once than may be: each is answered, 201 or 503 with Retry-After; memory stays bounded; afterwards all is well."""
    with control_rig.Control(cluster, bin_dir, http_body_budget_mib=32, http_deadline_seconds=120) as own:
        node = PaperNode(own.conninfo)
        client = own.new_client()
        body = json.dumps(large(4)).encode()
        answers = []

        def one(i):
            try:
                answer = requests.post(f"{own.url}/v1/runs", data=body.replace(b'"x"', b'"%d"' % i), timeout=300,
                                       headers={"Authorization": f"Bearer {client.key}", "Content-Type": "application/json"})
            except requests.ConnectionError:
                return 503      # refused and closed while it still sent
            answers.append(answer)
            return answer.status_code

        before = rss_kib(own.process)
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            statuses = list(pool.map(one, range(6)))
        grown = (rss_kib(own.process) - before) / 1024
        assert set(statuses) <= {201, 503} and 201 in statuses, statuses
        for answer in answers:
            if answer.status_code == 503:
                detail = problem(answer, 503, "unavailable")["detail"]
                assert ("16 MiB together" in detail or "request bodies" in detail) and int(answer.headers["Retry-After"]) > 0
        assert grown < 400, f"{grown} MiB more, and 6 bodies have 33 MiB"
        assert one(99) == 201 and files_of(own, client.org)[0] == 1
        node.close()


def test_large_bodies_of_clients_that_left_count_until_they_are_freed(cluster, bin_dir):
    """The database stands still behind a large create, and its client goes: what is in memory of it counts, until the answer is there."""
    with control_rig.Control(cluster, bin_dir, http_body_budget_mib=32) as own:
        node, client = PaperNode(own.conninfo), own.new_client()
        first, second = (json.dumps(large(8)).encode() for _ in range(2))
        head = f"POST /v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.key}\r\nContent-Type: application/json\r\nContent-Length: {len(first)}\r\n\r\n"

        def too_many():
            try:
                answer = client.call("POST", "/v1/runs", data=second, headers={"Content-Type": "application/json"}, timeout=5)
            except requests.Timeout:
                return False    # taken, and waits for the database
            return answer.status_code == 503 and "16 MiB together" in answer.text

        spent = [-1.0]

        def work_is_done():
            """Nothing was done since the look before."""
            spent.append(cpu_seconds(own.process)[1])
            return spent[-1] - spent[-2] < 0.02

        [(backend,)] = own.query("SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s AND datname = current_database()", "%money%")
        os.kill(backend, signal.SIGSTOP)
        try:
            with connect(own) as s:
                s.sendall(head.encode() + first)
                wait.until(too_many, 10, "the first to be counted")
                wait.until(work_is_done, 10, "the first to be read", every=0.3)
                descriptors = len(os.listdir(f"/proc/{own.process.pid}/fd"))
            wait.until(lambda: len(os.listdir(f"/proc/{own.process.pid}/fd")) < descriptors, 10, "the connection to be gone")
            assert too_many(), "what the client that left holds is forgotten"
        finally:
            os.kill(backend, signal.SIGCONT)
        wait.until(lambda: not too_many(), 30, "room again")
        node.close()
