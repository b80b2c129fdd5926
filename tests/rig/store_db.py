"""The store's schema by itself: a migrated database for each test, and its functions as Python calls them."""
import hashlib
import json
import os
import secrets
import threading

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
