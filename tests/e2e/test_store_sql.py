"""The store's SQL functions by themselves, against a real Postgres: a run's life, money, idempotency, the queue."""
import hashlib
import json

import psycopg2
import pytest

import pg
from store_db import MICRO, db, in_threads, template  # noqa: F401


# ---- the life of one run -----------------------------------------------------------------------------------------------------


def test_life_of_a_run(db):
    org, node = db.org(), db.node()
    made = db.create(org, meta={"a": "1"}, files=[{"path": "x/y z", "size": 3, "sha256": "ab" * 32}])
    assert made["result"] == "created"
    run = made["run_id"]
    assert db.wallet(org) == (100 * MICRO, 40000, 1, 1)
    a = db.claim_one(node)
    assert a["run_id"] == run and a["attempt"] == 1 and a["next_seq"] == 3 and a["files"] == "3 " + "ab" * 32 + " x/y z" and a["cap"] == 40000
    assert db.start(node, run, a["token"]) == "applied"
    assert db.start(node, run, a["token"]) == "duplicate"
    assert db.events(node, run, a["token"], 3, ["microvm.ready", "worker.started", "worker.note"], spent=50, held=1000) == ("applied", 6)
    assert db.events(node, run, a["token"], 3, ["microvm.ready", "worker.started", "worker.note", "microvm.destroyed"]) == ("applied", 7)
    assert db.value("SELECT state FROM run_live WHERE run_id = %s", run) == "ending"
    assert db.finish(node, run, a["token"], 6)[0] == "applied"
    assert db.finish(node, run, a["token"], 6)[0] == "duplicate"
    assert db.settle([run]) == [run]
    assert db.settle([run]) == []
    assert db.finish(node, run, a["token"], 6)[0] == "duplicate"
    assert [t for t, _ in db.chain(run)] == ["run.queued", "run.claimed", "microvm.ready", "worker.started", "worker.note", "microvm.destroyed",
                                             "run.succeeded", "run.settled"]
    assert db.chain(run)[-1][1]["data"] == {"charged_micros": 300, "released_micros": 39700, "parts": {
        "run_fee_micros": 0, "compute_micros": 100, "model_micros": 200, "web_micros": 0}}
    assert db.wallet(org) == (100 * MICRO - 300, 0, 0, 0)
    status, released, head = db.rows("SELECT status, released_micros, head_seq FROM runs WHERE run_id = %s", run)[0]
    assert (status, released, head) == ("succeeded", 39700, 8)
    assert db.value("SELECT count(*) FROM run_meta WHERE org_id = %s AND k = 'a' AND v = '1'", org) == 1
    db.sound()


def test_event_bytes_are_exact(db):
    run = "run_" + "0" * 32
    made = bytes(db.value("SELECT eph_event(%s, 7, 1700000000123, 61004, 'run.queued', '{}')", run))
    assert made.decode() == ('{"run_id":"' + run + '","seq":7,"at":"2023-11-14T22:14:21.127Z","t":61.004,"source":"control","type":"run.queued","data":{}}')


def test_time_never_goes_back_on_the_timeline(db):
    org, node = db.org(), db.node()
    run = db.create(org)["run_id"]
    a = db.claim_one(node)
    db.start(node, run, a["token"])
    db.events(node, run, a["token"], 3, ["microvm.destroyed"], last_t=600000)
    db.finish(node, run, a["token"], 3)
    db.settle()
    assert [e["t"] for t, e in db.chain(run)[-2:]] == [600.0, 600.0]


# ---- money --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 10])
def test_parallel_creates_against_a_wallet_for_ten(db, batch):
    org = db.org(credit=10 * 40000 + 39999)
    db.node()
    results = in_threads(10, lambda i: [a for _ in range(10 // batch) for a in db.create_many([db.row(org, idx=n) for n in range(batch)])])
    answers = [a for r in results for a in r]
    assert sorted(a["result"] for a in answers) == ["created"] * 10 + ["insufficient"] * 90
    assert all(a["needed"] == 40000 for a in answers if a["result"] == "insufficient")
    assert db.wallet(org)[:2] == (439999, 400000)
    assert db.value("SELECT count(*) FROM runs") == 10
    db.sound()


def test_a_smaller_run_still_fits(db):
    org = db.org(credit=50000)
    db.node()
    answers = db.create_many([db.row(org, 0, cap=40000), db.row(org, 1, cap=40000), db.row(org, 2, cap=10000)])
    assert [a["result"] for a in answers] == ["created", "insufficient", "created"]
    assert answers[1]["available"] == 10000
    db.sound()


def test_unlimited_goes_below_zero(db):
    org = db.org(credit=0, unlimited=True)
    node = db.node()
    db.create(org)
    a = db.run_to_end(node)
    db.settle()
    assert db.wallet(org)[:2] == (-300, 0)
    assert a["cap"] == 40000
    db.sound()


@pytest.mark.parametrize("cost,parts", [
    ((10, 10, 10, 10), [10, 10, 10, 10]),
    ((100, 20000, 30000, 0), [100, 20000, 19900, 0]),
    ((100, 50000, 30000, 7), [100, 39900, 0, 0]),
    ((-5, -1, 40001, -1), [0, 0, 40000, 0]),
    ((2**62, 2**62, 2**62, 2**62), [40000, 0, 0, 0]),
])
def test_charge_is_clamped_and_adds_up(db, cost, parts):
    org, node = db.org(), db.node()
    run = db.create(org)["run_id"]
    a = db.claim_one(node)
    db.start(node, run, a["token"])
    db.events(node, run, a["token"], 3, ["microvm.destroyed"])
    assert db.finish(node, run, a["token"], 3, cost=cost)[0] == "applied"
    db.settle()
    assert db.value("SELECT cost FROM runs WHERE run_id = %s", run) == parts
    assert db.wallet(org)[0] == 100 * MICRO - sum(parts)
    db.sound()


def test_only_what_ended_is_settled(db):
    """Also where somebody asks for it by name, or put it on the list."""
    org, node = db.org(), db.node()
    run = db.create(org)["run_id"]
    a = db.claim_one(node)
    db.rows("INSERT INTO settle_pending VALUES (%s, 0)", run)
    assert db.settle([run]) == []
    assert db.start(node, run, a["token"]) == "applied"
    assert db.settle([run]) == db.settle() == []
    assert db.wallet(org) == (100 * MICRO, 40000, 1, 1)
    db.rows("DELETE FROM settle_pending")
    db.events(node, run, a["token"], 3, ["microvm.destroyed"])
    assert db.finish(node, run, a["token"], 3)[0] == "applied"
    assert db.settle() == [run]
    db.sound()


def test_settles_once_from_many(db):
    org, node = db.org(), db.node()
    for _ in range(30):
        db.create(org)
    for _ in range(30):
        db.run_to_end(node)
    settled = [r for got in in_threads(8, lambda i: [r for _ in range(20) for r in db.settle()]) for r in got]
    assert len(settled) == len(set(settled)) == 30
    assert db.value("SELECT count(*) FROM ledger WHERE kind = 'charge'") == 30
    assert db.wallet(org) == (100 * MICRO - 30 * 300, 0, 0, 0)
    db.sound()


def test_ledger_is_insert_only(db):
    db.org()
    for sql in ("UPDATE ledger SET balance_delta = 1", "DELETE FROM ledger", "TRUNCATE ledger"):
        with pytest.raises(psycopg2.Error):
            db.rows(sql)
    db.rows("GRANT UPDATE, DELETE ON ledger TO CURRENT_USER")
    with pytest.raises(psycopg2.errors.RaiseException):
        db.rows("UPDATE ledger SET note = 'x'")
    with pytest.raises(psycopg2.errors.RaiseException):
        db.rows("DELETE FROM ledger")


def test_credit(db):
    org = db.org(credit=0)
    call = "SELECT result, balance FROM eph_credit(%s, %s, 'n', %s, %s, 86400000)"
    assert db.rows(call, org, 500, "k", b"h1") == [("done", 500)]
    assert db.rows(call, org, 500, "k", b"h1") == [("replayed", 500)]
    assert db.rows(call, org, 600, "k", b"h2") == [("mismatch", 500)]
    assert db.rows(call, org, -501, None, None) == [("limit", 500)]
    assert db.rows(call, org, -100, None, None) == [("done", 400)]
    assert db.rows(call, org, 10**15, None, None) == [("limit", 400)]
    assert db.rows(call, "org_none", 1, None, None) == [("not_found", 0)]
    db.sound()


# ---- idempotency ---------------------------------------------------------------------------------------------------------------


def test_equal_requests_make_one_run(db):
    org = db.org()
    db.node()

    def ask(_):
        out = []
        for _ in range(12):
            answer = db.create(org, key="same", body=b"1")
            out.append((answer["result"], answer["run_id"]))
        return out

    answers = [a for r in in_threads(8, ask) for a in r]
    assert sum(r == "created" for r, _ in answers) == 1
    assert all(r in ("created", "replayed") for r, _ in answers)
    assert len({run for _, run in answers}) == 1
    assert db.create(org, key="same", body=b"2")["result"] == "mismatch"
    assert db.create(db.org(), key="same", body=b"2")["result"] == "created"
    assert db.value("SELECT count(*) FROM runs WHERE org_id = %s", org) == 1
    db.sound()


def test_equal_requests_in_one_batch(db):
    org = db.org()
    db.node()
    answers = db.create_many([db.row(org, i, key="k") for i in range(5)] + [db.row(org, 5)])
    assert [a["result"] for a in answers] == ["created"] + ["again"] * 4 + ["created"]
    answers = db.create_many([db.row(org, i, key="k") for i in range(5)])
    assert [a["result"] for a in answers] == ["replayed"] * 5
    db.sound()


def test_a_refusal_leaves_nothing_and_expired_rows_are_overwritten(db):
    org = db.org(credit=39999)
    db.node()
    assert db.create(org, key="k", body=b"1")["result"] == "insufficient"
    assert db.value("SELECT count(*) FROM idempotency") == 0
    db.rows("SELECT eph_credit(%s, 100000, '', NULL, NULL, 0)", org)
    first = db.create(org, key="k", body=b"1")
    assert first["result"] == "created"
    pg.set_clock_offset(db.conninfo, 86400001)
    db.rows("SELECT eph_partitions_make()")
    second = db.create(org, key="k", body=b"other")
    assert second["result"] == "created" and second["run_id"] != first["run_id"]
    db.sound()


def test_a_key_in_use_waits_and_gives_up(db):
    org = db.org()
    db.node()
    holder = psycopg2.connect(db.conninfo)
    with holder.cursor() as cursor:
        cursor.execute("SELECT result FROM eph_run_create(%s, 10, 10, 1000, 1000)", (json.dumps([db.row(org, key="k")]),))
    db.rows("SET lock_timeout = '200ms'")
    with pytest.raises(psycopg2.errors.LockNotAvailable):
        db.create(org, key="k")
    holder.rollback()
    assert db.create(org, key="k")["result"] == "created"
    holder.close()


# ---- queue ---------------------------------------------------------------------------------------------------------------------


def test_claims_from_eight_connections_never_share_a_run(db):
    org = db.org(credit=1000 * MICRO)
    nodes = [db.node() for _ in range(8)]
    for _ in range(10):
        db.create_many([db.row(org, i) for i in range(20)])
    got = in_threads(8, lambda i: [a for n in range(40) for a in db.next(
        nodes[i], want=4, slots=200, held=[(x["run_id"], x["token"]) for x in kept[i]])["assign"] if not kept[i].append(a)]) if (
            kept := [[] for _ in range(8)]) else []
    runs = [a["run_id"] for g in got for a in g]
    assert len(runs) == len(set(runs)) == 200
    assert db.value("SELECT count(*) FROM queue") == 0
    for run in runs:
        assert [t for t, _ in db.chain(run)] == ["run.queued", "run.claimed"]


def test_a_claim_does_not_wait_for_a_cancel(db):
    """A cancel that is not committed yet has the first run's row: a host takes what comes after it, at once, and the first is not lost."""
    org, node = db.org(), db.node()
    runs = [db.create(org)["run_id"] for _ in range(3)]
    holder = psycopg2.connect(db.conninfo)
    with holder.cursor() as cursor:
        cursor.execute("SELECT result FROM eph_cancel(%s, %s)", (org, runs[0]))
        assert cursor.fetchone()[0] == "ended"
        db.rows("SET lock_timeout = '2s'")
        held = [(a["run_id"], a["token"]) for a in db.next(node, want=2)["assign"]]
        assert [run for run, _ in held] == runs[1:]
    holder.rollback()
    holder.close()
    assert [a["run_id"] for a in db.next(node, want=2, held=held)["assign"]] == runs[:1]
    db.sound()


def test_a_newcomer_behind_a_thousand(db):
    big, small, node = db.org(credit=1000 * MICRO), db.org(), db.node()
    for _ in range(50):
        db.create_many([db.row(big, i) for i in range(20)], max_running=100000)
    for _ in range(3):
        db.next(node, want=16, memory=100000, vcpus=100, slots=100)  # not held: sent again, so take them as they come
    mine = db.create(small)["run_id"]
    held, place = [], None
    for n in range(10):
        got = db.next(node, want=4, memory=100000, vcpus=1000, slots=1000, held=held)["assign"]
        if any(a["run_id"] == mine for a in got):
            place = n
            break
        held += [(a["run_id"], a["token"]) for a in got]
    assert place is not None and place <= 8
    order = [r for r, in db.rows("SELECT run_id FROM run_live WHERE state = 'claimed'")]
    assert mine in order and len(order) < 70


def test_organizations_take_turns(db):
    orgs = [db.org(credit=1000 * MICRO) for _ in range(4)]
    node = db.node()
    for org in orgs:
        db.create_many([db.row(org, i) for i in range(40)])
    claimed = db.next(node, want=16, memory=100000, vcpus=100, slots=100)["assign"]
    owners = [db.value("SELECT org_id FROM runs WHERE run_id = %s", a["run_id"]) for a in claimed]
    assert {o: owners.count(o) for o in orgs} == {o: 4 for o in orgs}


def test_admission_and_promotion(db):
    org, node = db.org(max_running=2), db.node()
    runs = [db.create(org)["run_id"] for _ in range(5)]
    assert db.wallet(org)[2:] == (2, 5)
    got = db.next(node, want=16)["assign"]
    assert [a["run_id"] for a in got] == runs[:2]
    assert db.rows("SELECT * FROM eph_cancel(%s, %s)", org, runs[2]) == [("ended", None)]  # never had a place
    db.settle()
    assert db.wallet(org)[2:] == (2, 4)
    held = [(a["run_id"], a["token"]) for a in got]
    assert db.next(node, want=16, held=held)["assign"] == []
    a = got[0]
    db.start(node, a["run_id"], a["token"])
    db.events(node, a["run_id"], a["token"], 3, ["microvm.destroyed"])
    db.finish(node, a["run_id"], a["token"], 3)
    promoted = [r for r in db.dicts("SELECT * FROM eph_settle(NULL, 10, 1000)") if r["kind"] == "promoted"]
    assert promoted and promoted[0]["count"] == 1 and promoted[0]["memory_mib"] == 512
    assert [a["run_id"] for a in db.next(node, want=16, held=held)["assign"]] == [runs[3]]
    db.sound()


def test_queued_runs_are_bounded(db):
    org, node = db.org(max_queued=3), db.node()
    answers = db.create_many([db.row(org, i) for i in range(5)])
    assert [a["result"] for a in answers] == ["created"] * 3 + ["too_many_queued"] * 2
    assert answers[3]["lim"] == 3
    db.claim_one(node)
    assert db.create(org)["result"] == "created"
    assert db.create(org)["result"] == "too_many_queued"


def test_fit_and_isolation(db):
    org, strict = db.org(), db.org(emulated=False)
    node = db.node(isolation="emulated", memory=1024)
    assert db.create(org, mem=4096)["result"] == "no_node"
    assert db.create(strict, emulated=False)["result"] == "no_node"
    db.create(org, mem=1024)
    assert db.next(node, isolation="emulated", memory=512, total=1024)["assign"] == []
    assert len(db.next(node, isolation="emulated", memory=1024)["assign"]) == 1
    kvm = db.node()
    assert db.create(strict, emulated=False)["result"] == "created"
    assert db.next(node, isolation="kvm", memory=8192, want=0)["result"] == "ok"  # it cannot raise itself
    assert db.value("SELECT isolation FROM nodes_live WHERE node_id = %s", node) == "emulated"
    assert len(db.next(kvm)["assign"]) == 1


def test_a_large_run_does_not_starve(db):
    org, node = db.org(credit=1000 * MICRO), db.node(memory=2048)
    large = db.create(org, mem=2048)["run_id"]
    for _ in range(4):
        db.create(org, mem=512)
    small = db.next(node, want=16, memory=1536, total=2048)["assign"]
    assert [a["memory_mib"] for a in small] == [512] * 3
    held = [(a["run_id"], a["token"]) for a in small]
    pg.set_clock_offset(db.conninfo, 61000)
    assert db.next(node, memory=512, total=2048, held=held)["assign"] == []  # kept free for it now
    got = db.next(node, memory=2048, total=2048, held=held)["assign"]
    assert [a["run_id"] for a in got][:1] == [large]
