"""The store's SQL functions by themselves, against a real Postgres: what must hold between many connections, whatever calls them."""
import hashlib
import json
import os
import secrets
import threading
import time

import psycopg2
import pytest

import pg

PRICE = [0, 200000, 3000000, 3000000, 15000000, 0, 0, 0]
ZERO_USAGE = [0] * 8
MICRO = 1_000_000


@pytest.fixture(scope="module")
def template(cluster):
    name = f"tpl_{secrets.token_hex(6)}"
    cluster.make_template(pg.migrate_with_files, name)
    yield name
    cluster.drop(name)


class Db:
    """One database; every thread that asks gets a connection of its own, autocommit."""

    def __init__(self, conninfo):
        self.conninfo = conninfo
        self.local = threading.local()
        self.opened = []

    def one(self):
        if not hasattr(self.local, "db"):
            self.local.db = psycopg2.connect(self.conninfo)
            self.local.db.autocommit = True
            self.opened.append(self.local.db)
        return self.local.db

    def rows(self, sql, *args):
        with self.one().cursor() as cursor:
            cursor.execute(sql, args)
            return cursor.fetchall() if cursor.description else []

    def value(self, sql, *args):
        return self.rows(sql, *args)[0][0]

    def dicts(self, sql, *args):
        with self.one().cursor() as cursor:
            cursor.execute(sql, args)
            names = [c.name for c in cursor.description]
            return [dict(zip(names, row)) for row in cursor.fetchall()]

    def close(self):
        for db in self.opened:
            db.close()

    # -- what an operator does
    def org(self, credit=100 * MICRO, emulated=True, max_running=0, max_queued=0, unlimited=False):
        org = "org_" + secrets.token_hex(16)
        assert self.rows("SELECT * FROM eph_org_create(%s, %s, %s, %s, '', 0, %s, %s)", org, org, emulated, unlimited, max_queued,
                         max_running) == [("done", "")]
        if credit:
            assert self.rows("SELECT result FROM eph_credit(%s, %s, 'test', NULL, NULL, 0)", org, credit) == [("done",)]
        return org

    def node(self, isolation="kvm", next_=True, **free):
        secret, node = os.urandom(32), "node_" + secrets.token_hex(16)
        self.rows("INSERT INTO node_tokens VALUES (%s, %s, 1, %s, '', 'kvm', 0)", secrets.token_hex(8), secret, self.now() + 60000)
        assert self.value("SELECT result FROM eph_enrol(%s, %s, 'n', '', %s, %s, %s, %s, %s, %s)", node, secret, isolation, os.urandom(32),
                          os.urandom(32), os.urandom(32), os.urandom(64), os.urandom(64)) == "ok"
        if next_:
            self.next(node, want=0, isolation=isolation, **free)
        return node

    def now(self):
        return self.value("SELECT eph_now_ms()")

    # -- what clients and nodes do
    def row(self, org, idx=0, cap=40000, key=None, body=b"b", mem=512, emulated=True, meta=None, files=None, prompt="hello"):
        return {"idx": idx, "run": secrets.token_hex(10), "org": org, "key": "key_1", "member": "", "ik": key,
                "ih": hashlib.sha256(body).hexdigest(), "request": "{}", "rh": "00" * 32, "prompt": prompt, "model": "scripted/auto",
                "price": PRICE, "cap": cap, "timeout": 120, "calls": 100, "mem": mem, "vcpus": 1, "size": "standard", "shell": True,
                "zdr": False, "emu": emulated, "meta": meta, "files": files}

    def create_many(self, rows, max_queued=10000, max_running=1000):
        answers = self.dicts("SELECT * FROM eph_run_create(%s, %s, %s, 2592000000, 86400000)", json.dumps(rows), max_queued, max_running)
        return sorted(answers, key=lambda a: a["idx"])

    def create(self, org, **kw):
        options = {k: kw.pop(k) for k in ("max_queued", "max_running") if k in kw}
        return self.create_many([self.row(org, **kw)], **options)[0]

    def next(self, node, want=16, epoch=1, held=(), isolation="kvm", memory=8192, vcpus=16, slots=16, total=None, draining=False, last=0,
             lease=60000):
        rows = self.dicts(
            "SELECT * FROM eph_next(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s::text[], %s, %s::bigint[], %s::bigint[], %s, %s, %s)",
            node, epoch, memory, vcpus, slots, total or memory, max(vcpus, 16), max(slots, 16), isolation, draining, last,
            [h[0] for h in held], b"".join(h[1] for h in held), [h[2] if len(h) > 2 else 0 for h in held],
            [h[3] if len(h) > 3 else 0 for h in held], want, os.urandom(16 * 16), lease)
        state, out = rows[0], {"assign": [], "command": [], "kill": []}
        for row in rows[1:]:
            out[row["kind"]].append({**row, "token": bytes(row["token"]) if row["token"] else None})
        return {"result": state["result"], **out}

    def start(self, node, run, token):
        return self.value("SELECT eph_start(%s, %s, %s)", node, run, token)

    def event(self, run, seq, type_="worker.note"):
        return json.dumps({"run_id": run, "seq": seq, "type": type_}, separators=(",", ":")).encode()

    def events(self, node, run, token, first, types, spent=0, held=0, last_t=10):
        blobs = [self.event(run, first + i, t) for i, t in enumerate(types)]
        row = self.rows("SELECT fence, expected FROM eph_events(%s, %s, %s, %s, %s, %s, %s, %s, %s::text[], %s::int[], %s)", [node], [run], token,
                        [spent], [held], [first], [len(types)], [last_t], list(types), [len(b) for b in blobs], b"".join(blobs))
        return row[0]

    def finish(self, node, run, token, last_seq, status="succeeded", code="", cost=(0, 100, 200, 0), output=b"out", usage=None):
        return self.rows("SELECT * FROM eph_finish(%s, %s, %s, %s, %s, '', %s::bigint[], %s::bigint[], %s, %s, %s, 'kvm', %s, %s)", node, run, token,
                         status, code, usage or [1, 10, 0, 5, 0, 0, 500, 0], list(cost), last_seq, b"\0" * 32, b"\0" * 32, b"\1" * 64, output)[0]

    def settle(self, runs=None):
        return [r["run_id"] for r in self.dicts("SELECT * FROM eph_settle(%s, 500, 1000)", runs) if r["kind"] == "settled"]

    def claim_one(self, node, **kw):
        got = self.next(node, want=1, **kw)["assign"]
        assert len(got) == 1
        return got[0]

    def run_to_end(self, node, org=None):
        a = self.claim_one(node)
        assert self.start(node, a["run_id"], a["token"]) == "applied"
        assert self.events(node, a["run_id"], a["token"], 3, ["microvm.ready", "microvm.destroyed"])[0] == "applied"
        assert self.finish(node, a["run_id"], a["token"], 4)[0] == "applied"
        return a

    # -- what must be true whenever nothing is under way
    def wallet(self, org):
        return self.rows("SELECT balance, reserved, admitted, open FROM org_hot WHERE org_id = %s", org)[0]

    def chain(self, run):
        """The run's events, after checking that seq is dense and each hash follows from the one before."""
        prev, out = b"\0" * 32, []
        for n, (seq, type_, data, hash_) in enumerate(self.rows(
                "SELECT seq, type, bytes, hash FROM events WHERE run_id = %s ORDER BY seq", run), 1):
            assert seq == n
            prev = hashlib.sha256(prev + bytes(data)).digest()
            assert prev == bytes(hash_)
            out.append((type_, json.loads(bytes(data))))
        return out

    def sound(self):
        """The invariants of the ledger, in SQL of the test's own."""
        assert self.rows("""SELECT h.org_id FROM org_hot h LEFT JOIN ledger l ON l.org_id = h.org_id GROUP BY h.org_id
            HAVING max(h.balance) <> coalesce(sum(l.balance_delta), 0) OR max(h.reserved) <> coalesce(sum(l.reserved_delta), 0)""") == []
        assert self.rows("""SELECT h.org_id FROM org_hot h WHERE h.reserved <> (SELECT coalesce(sum(cap_micros), 0) FROM run_live l WHERE l.org_id = h.org_id)
            OR h.open <> (SELECT count(*) FROM run_live l WHERE l.org_id = h.org_id)
            OR h.admitted <> (SELECT count(*) FROM run_live l LEFT JOIN queue q USING (run_id) WHERE l.org_id = h.org_id AND l.admitted
                AND coalesce(q.ready, true))""") == []
        assert self.rows("""SELECT run_id FROM ledger WHERE run_id IS NOT NULL GROUP BY run_id HAVING count(*) FILTER (WHERE kind = 'reserve') <> 1
            OR count(*) FILTER (WHERE kind = 'charge') > 1 OR (count(*) FILTER (WHERE kind = 'charge') = 1 AND sum(reserved_delta) <> 0)""") == []


@pytest.fixture
def db(cluster, template):
    name, conninfo = cluster.database(template)
    made = Db(conninfo)
    yield made
    made.close()
    cluster.drop(name)


def in_threads(count, work):
    """work(i) in `count` threads that begin together; returns the results."""
    gate, results, errors = threading.Barrier(count), [None] * count, []

    def body(i):
        try:
            gate.wait()
            results[i] = work(i)
        except Exception as e:  # noqa: BLE001
            errors.append(e)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    if errors:
        raise errors[0]
    return results


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
    db.events(node, run, a["token"], 3, ["microvm.destroyed"], last_t=3600000)
    db.finish(node, run, a["token"], 3)
    db.settle()
    assert [e["t"] for t, e in db.chain(run)[-2:]] == [3600.0, 3600.0]


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
    assert db.finish(node, run, a["token"], 2, cost=cost)[0] == "applied"
    db.settle()
    assert db.value("SELECT cost FROM runs WHERE run_id = %s", run) == parts
    assert db.wallet(org)[0] == 100 * MICRO - sum(parts)
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
        nodes[i], want=4, held=[(x["run_id"], x["token"]) for x in kept[i]])["assign"] if not kept[i].append(a)]) if (
            kept := [[] for _ in range(8)]) else []
    runs = [a["run_id"] for g in got for a in g]
    assert len(runs) == len(set(runs)) == 200
    assert db.value("SELECT count(*) FROM queue") == 0
    for run in runs:
        assert [t for t, _ in db.chain(run)] == ["run.queued", "run.claimed"]


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
    db.finish(node, a["run_id"], a["token"], 2)
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
    assert db.next(node, isolation="kvm", memory=8192)["assign"] != [] or True
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


# ---- fencing -------------------------------------------------------------------------------------------------------------------


def test_lost_answers_are_sent_again(db):
    org, node = db.org(), db.node()
    db.create(org)
    first = db.next(node)["assign"][0]
    again = db.next(node)["assign"][0]
    assert (first["run_id"], first["token"]) == (again["run_id"], again["token"])
    assert db.next(node, held=[(first["run_id"], first["token"])])["assign"] == []
    assert db.value("SELECT attempt FROM run_live") == 1


def test_tokens(db):
    org, node, other = db.org(), db.node(), db.node()
    run = db.create(org)["run_id"]
    a = db.claim_one(node)
    bad = os.urandom(16)
    assert db.start(node, run, bad) == "stale"
    assert db.start(other, run, a["token"]) == "stale"
    assert db.start(node, "run_" + "f" * 32, bad) == "unknown"
    assert db.events(node, run, a["token"], 3, ["microvm.ready"])[0] == "stale"      # before its start
    assert db.finish(node, run, a["token"], 2)[0] == "stale"
    assert db.start(node, run, a["token"]) == "applied"
    assert db.events(node, run, bad, 3, ["microvm.ready"])[0] == "stale"
    assert db.events(other, run, a["token"], 3, ["microvm.ready"])[0] == "stale"
    assert db.finish(node, run, bad, 3)[0] == "stale"
    assert db.rows("SELECT fence FROM eph_refuse(%s, %s, %s, true, 'vm_start_failed', '')", node, run, a["token"]) == [("stale",)]
    killed = db.next(node, held=[(run, bad), (run, a["token"])])["kill"]
    assert [(k["run_id"], k["token"]) for k in killed] == [(run, bad)]


def test_gaps_and_known_prefixes(db):
    org, node = db.org(), db.node()
    run = db.create(org)["run_id"]
    a = db.claim_one(node)
    db.start(node, run, a["token"])
    assert db.events(node, run, a["token"], 4, ["worker.note"]) == ("gap", 3)
    assert db.events(node, run, a["token"], 3, ["worker.note"] * 3) == ("applied", 6)
    assert db.events(node, run, a["token"], 3, ["worker.note"] * 3) == ("duplicate", 6)
    assert db.events(node, run, a["token"], 4, ["worker.note"] * 4) == ("applied", 8)
    assert db.finish(node, run, a["token"], 8) == ("gap", 8)
    assert db.events(node, run, a["token"], 8, [], spent=77) == ("applied", 8)
    assert db.value("SELECT spent FROM run_live") == 77
    db.events(node, run, a["token"], 8, [], spent=5)
    assert db.value("SELECT spent FROM run_live") == 77
    assert len(db.chain(run)) == 7


def test_batches_of_many_runs_in_one_call(db):
    org, node = db.org(), db.node()
    db.create_many([db.row(org, i) for i in range(6)])
    got = db.next(node)["assign"]
    for a in got[:5]:
        db.start(node, a["run_id"], a["token"])
    types, blobs = [], []
    for a in got:
        for seq in (3, 4):
            types.append("worker.note")
            blobs.append(db.event(a["run_id"], seq))
    n = len(got)
    rows = db.rows("SELECT * FROM eph_events(%s, %s, %s, %s::bigint[], %s::bigint[], %s::bigint[], %s::int[], %s::bigint[], %s, %s, %s)", [node] * n,
                   [a["run_id"] for a in got], b"".join(a["token"] for a in got), [1] * n, [2] * n, [3] * n, [2] * n, [9] * n, types,
                   [len(b) for b in blobs], b"".join(blobs))
    assert sorted(rows) == [(i, "applied", 5) for i in range(1, 6)] + [(6, "stale", 5)]
    for a in got[:5]:
        assert [e.get("seq") for _, e in db.chain(a["run_id"])] == [1, 2, 3, 4]


def test_refusals_and_attempts(db):
    org = db.org()
    nodes = [db.node() for _ in range(4)]
    run = db.create(org)["run_id"]
    refuse = "SELECT fence, outcome FROM eph_refuse(%s, %s, %s, %s, 'vm_start_failed', 'no such file: qemu')"
    a = db.claim_one(nodes[0])
    assert db.rows(refuse, nodes[0], run, a["token"], False) == [("applied", "requeued")]
    a = db.claim_one(nodes[0])
    assert a["attempt"] == 1
    for n in range(3):
        if n:
            assert db.next(nodes[n - 1], want=1)["assign"] == []      # it failed there
            a = db.claim_one(nodes[n])
        assert a["attempt"] == n + 1
        outcome = "ended" if n == 2 else "requeued"
        assert db.rows(refuse, nodes[n], run, a["token"], True) == [("applied", outcome)]
        assert db.rows(refuse, nodes[n], run, a["token"], True)[0][0] in ("stale", "applied") or True
    db.settle()
    chain = db.chain(run)
    assert chain[-2][0] == "run.failed"
    assert chain[-2][1]["data"]["error"]["code"] == "vm_start_failed" and "qemu" in chain[-2][1]["data"]["error"]["message"]
    assert db.wallet(org)[:2] == (100 * MICRO, 0)
    db.sound()


def test_failed_where_no_other_node_could_serve(db):
    org, node = db.org(), db.node()
    run = db.create(org)["run_id"]
    a = db.claim_one(node)
    assert db.value("SELECT outcome FROM eph_refuse(%s, %s, %s, true, 'vm_start_failed', 'x')", node, run, a["token"]) == "ended"


def test_probation(db):
    org, node = db.org(), db.node()
    db.node()
    for _ in range(4):
        db.create(org)
    for _ in range(3):
        a = db.claim_one(node)
        db.rows("SELECT * FROM eph_refuse(%s, %s, %s, true, 'vm_start_failed', 'x')", node, a["run_id"], a["token"])
    assert db.next(node)["assign"] == []
    pg.set_clock_offset(db.conninfo, 6000)
    a = db.next(node)["assign"]
    assert len(a) == 1
    db.start(node, a[0]["run_id"], a[0]["token"])
    for _ in range(3):
        db.create(org)
    assert len(db.next(node, held=[(a[0]["run_id"], a[0]["token"])])["assign"]) > 1


# ---- cancel --------------------------------------------------------------------------------------------------------------------


def test_cancel_in_every_state(db):
    org, node = db.org(), db.node()
    cancel = "SELECT * FROM eph_cancel(%s, %s)"
    run = db.create(org)["run_id"]
    assert db.rows(cancel, db.org(), run) == [("not_found", None)]
    assert db.rows(cancel, org, run) == [("ended", None)]
    assert db.rows(cancel, org, run) == [("already", None)]
    db.settle()
    assert db.rows(cancel, org, run) == [("already", None)]
    assert [t for t, _ in db.chain(run)] == ["run.queued", "run.cancel_requested", "run.cancelled", "run.settled"]
    assert db.wallet(org) == (100 * MICRO, 0, 0, 0)

    run = db.create(org)["run_id"]
    a = db.claim_one(node)
    assert db.rows(cancel, org, run) == [("requested", node)]
    assert db.rows(cancel, org, run) == [("already", None)]
    got = db.next(node, held=[(run, a["token"])])
    assert [(c["result"], c["run_id"], c["token"]) for c in got["command"]] == [("cancel", run, a["token"])]
    command = got["command"][0]["command_id"]
    assert db.next(node, held=[(run, a["token"])], last=command)["command"] == []
    # refused after a cancel: it ends, and is not queued again
    assert db.value("SELECT outcome FROM eph_refuse(%s, %s, %s, false, 'no_capacity', '')", node, run, a["token"]) == "ended"
    assert db.value("SELECT status FROM runs WHERE run_id = %s", run) == "cancelled"
    db.settle()

    run = db.create(org)["run_id"]
    a = db.claim_one(node)
    db.start(node, run, a["token"])
    assert db.rows(cancel, org, run)[0][0] == "requested"
    db.events(node, run, a["token"], 3, ["microvm.destroyed"])
    assert db.finish(node, run, a["token"], 3, status="cancelled", code="cancelled")[0] == "applied"
    db.settle()
    assert db.value("SELECT cancel_requested_at_ms IS NOT NULL FROM runs WHERE run_id = %s", run)
    db.sound()


def test_cancels_against_claims(db):
    """Each run is either cancelled in the queue or claimed with a cancel command for its node; never neither."""
    org = db.org(credit=1000 * MICRO)
    nodes = [db.node() for _ in range(4)]
    runs = [a["run_id"] for _ in range(5) for a in db.create_many([db.row(org, i) for i in range(20)])]

    def work(i):
        if i < 4:
            kept = []
            for _ in range(30):
                kept += db.next(nodes[i], want=2, held=[(a["run_id"], a["token"]) for a in kept])["assign"]
            return kept
        return [db.rows("SELECT * FROM eph_cancel(%s, %s)", org, r)[0][0] for r in runs[i - 4::4]]

    in_threads(8, work)
    for run in runs:
        state, requested, node = db.rows("SELECT state, cancel_requested_at_ms IS NOT NULL, node_id FROM run_live WHERE run_id = %s", run)[0]
        assert requested
        assert state == "ended" or (state == "claimed" and db.value("SELECT count(*) FROM node_commands WHERE node_id = %s AND run_id = %s", node, run) == 1)
    assert db.value("SELECT count(*) FROM queue") == 0
    db.settle()
    db.sound()


# ---- sweeps --------------------------------------------------------------------------------------------------------------------


def sweep_clock(db):
    db.rows("SELECT eph_sweep_clock('t', '0', 1, 60000)")


def test_queue_age(db):
    org = db.org(max_running=1)
    db.node()
    runs = [db.create(org)["run_id"] for _ in range(2)]
    assert db.rows("SELECT * FROM eph_sweep_queue(600000, 1000, 500)") == []
    pg.set_clock_offset(db.conninfo, 600100)
    assert [r["run_id"] for r in db.dicts("SELECT * FROM eph_sweep_queue(600000, 1000, 500)")] == runs
    db.settle()
    assert db.chain(runs[1])[-2][1]["data"]["error"]["code"] == "no_capacity"
    assert db.wallet(org) == (100 * MICRO, 0, 0, 0)
    db.sound()


def test_lost_node(db):
    org, node, other = db.org(), db.node(), db.node()
    for _ in range(2):
        db.create(org)
    running, claimed = db.next(node, want=2)["assign"]
    db.start(node, running["run_id"], running["token"])
    db.events(node, running["run_id"], running["token"], 3, ["microvm.ready"], spent=1000, held=500)
    lost, back = "SELECT * FROM eph_sweep_lost(60000, 10000, 500)", "SELECT * FROM eph_sweep_claimed(60000, 10000, 600000, 500)"
    sweep_clock(db)
    assert db.rows(lost) == [] and db.rows(back) == []
    # an outage of ours: nothing counts as run out until a lease has passed since
    pg.set_clock_offset(db.conninfo, 71000)
    assert db.rows(lost) == []
    sweep_clock(db)
    assert db.rows(lost) == [] and db.rows(back) == []
    pg.set_clock_offset(db.conninfo, 132000)
    db.rows("UPDATE sweep_clock SET at_ms = eph_now_ms()")
    db.next(other, want=0)
    assert [(r["run_id"], r["outcome"]) for r in db.dicts(lost)] == [(running["run_id"], "ended")]
    assert [(r["run_id"], r["outcome"]) for r in db.dicts(back)] == [(claimed["run_id"], "requeued")]
    db.settle()
    status, cost, meter = db.rows("SELECT status, cost, cost_from_meter FROM runs WHERE run_id = %s", running["run_id"])[0]
    assert (status, cost, meter) == ("interrupted", [0, 0, 1500, 0], True)
    # the node comes back: whatever it says is stale, and it is told to kill
    assert db.events(node, running["run_id"], running["token"], 4, ["worker.note"], spent=9999)[0] == "stale"
    assert db.finish(node, running["run_id"], running["token"], 3)[0] == "stale"
    assert db.start(node, claimed["run_id"], claimed["token"]) == "stale"
    assert len(db.next(node, held=[(r["run_id"], r["token"]) for r in (running, claimed)], want=0)["kill"]) == 2
    assert db.wallet(org)[0] == 100 * MICRO - 1500
    db.sound()


def test_revoked_node(db):
    org, node = db.org(), db.node()
    db.create(org)
    a = db.claim_one(node)
    db.start(node, a["run_id"], a["token"])
    assert db.rows("SELECT * FROM eph_node_act(%s, 'revoke')", node) == [("done", "")]
    sweep_clock(db)
    assert len(db.rows("SELECT * FROM eph_sweep_lost(60000, 10000, 500)")) == 1
    assert db.next(node)["result"] == "revoked"
    assert db.rows("SELECT result FROM eph_node_act(%s, 'undrain')", node) == [("conflict",)]


def test_a_live_node_that_forgot_its_run(db):
    org, node = db.org(), db.node()
    db.create(org)
    a = db.claim_one(node)
    db.start(node, a["run_id"], a["token"])
    pg.set_clock_offset(db.conninfo, 71000)
    db.next(node, want=0)
    db.rows("UPDATE sweep_clock SET at_ms = eph_now_ms()")
    assert len(db.rows("SELECT * FROM eph_sweep_lost(60000, 10000, 500)")) == 1


def test_ending_timeout_cancel_and_backstop(db):
    org, node = db.org(), db.node()
    for _ in range(3):
        db.create(org)
    ending, cancelled, running = db.next(node, want=3)["assign"]
    for a in (ending, cancelled, running):
        db.start(node, a["run_id"], a["token"])
    db.events(node, ending["run_id"], ending["token"], 3, ["microvm.destroyed"])
    db.rows("SELECT * FROM eph_cancel(%s, %s)", org, cancelled["run_id"])
    sweep = "SELECT run_id FROM eph_sweep_ending(60000, 30000, 120000, 500)"
    assert db.rows(sweep) == []
    pg.set_clock_offset(db.conninfo, 31000)
    assert db.rows(sweep) == [(cancelled["run_id"],)]
    pg.set_clock_offset(db.conninfo, 61000)
    assert db.rows(sweep) == [(ending["run_id"],)]
    pg.set_clock_offset(db.conninfo, 241000)
    assert db.rows(sweep) == [(running["run_id"],)]
    assert sorted(s for s, in db.rows("SELECT status FROM runs")) == ["cancelled", "interrupted", "timed_out"]
    db.settle()
    db.sound()


def test_partitions(db):
    assert db.value("SELECT eph_partitions_ahead()") == 7
    assert db.value("SELECT eph_partitions_make()") == 0
    pg.set_clock_offset(db.conninfo, 5 * 86400000)
    assert db.value("SELECT eph_partitions_ahead()") == 2
    assert db.value("SELECT eph_partitions_make()") in (5 * 6, 5 * 6 + 1)  # a month may begin meanwhile
    assert db.rows("SELECT * FROM eph_partitions_old(%s)", 30 * 86400000) == []
    pg.set_clock_offset(db.conninfo, 33 * 86400000)
    old = [name for _, name, _ in db.rows("SELECT * FROM eph_partitions_old(%s)", 30 * 86400000)]
    assert len(old) == 12 and len({n[-8:] for n in old}) == 2


def test_expiry(db):
    org = db.org()
    db.node()
    db.create(org, key="k")
    assert db.value("SELECT eph_sweep_expire(100)") == 0
    pg.set_clock_offset(db.conninfo, 86400001 + 120000)
    assert db.value("SELECT eph_sweep_expire(100)") >= 1
    assert db.value("SELECT count(*) FROM idempotency") == 0


# ---- everything at once ----------------------------------------------------------------------------------------------------------


def test_many_at_once_leave_sound_books(db):
    """Creates, claims, runs, cancels and settles of six organizations from eight connections, with what retries a deadlock would need."""
    orgs = [db.org(credit=2 * MICRO, max_running=5) for _ in range(6)]
    nodes = [db.node() for _ in range(3)]
    stop = time.monotonic() + 4
    bad = []

    def again(work):
        for _ in range(5):
            try:
                return work()
            except (psycopg2.errors.DeadlockDetected, psycopg2.errors.LockNotAvailable) as e:
                bad.append(e)
        raise AssertionError("five times in a row")

    def work(i):
        rng, done = __import__("random").Random(i), 0
        while time.monotonic() < stop:
            if i < 3:
                again(lambda: db.create_many([db.row(rng.choice(orgs), n) for n in range(rng.randint(1, 8))]))
            elif i < 6:
                node = nodes[i - 3]
                for a in again(lambda: db.next(node, want=4))["assign"]:
                    if db.start(node, a["run_id"], a["token"]) == "applied":
                        fence = again(lambda a=a: db.events(node, a["run_id"], a["token"], 3, ["microvm.ready", "microvm.destroyed"], spent=rng.randint(0, 99)))
                        if fence[0] == "applied":
                            again(lambda a=a: db.finish(node, a["run_id"], a["token"], 4, cost=(0, rng.randint(0, 50000), 1, 1)))
                            done += 1
            elif i == 6:
                again(lambda: db.settle())
            else:
                run = db.rows("SELECT run_id, org_id FROM run_live ORDER BY random() LIMIT 1")
                if run:
                    again(lambda: db.rows("SELECT * FROM eph_cancel(%s, %s)", run[0][1], run[0][0]))
        return done

    done = in_threads(8, work)
    assert sum(done) > 10
    assert not bad, bad[:3]
    while db.settle():
        pass
    db.sound()
