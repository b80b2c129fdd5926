"""A node on paper: says to Postgres what a host's requests become there, with no host, link or guest. For tests of what lies on the other
side: the API, its streams and lists. Its lease is long, so nothing that it claims is taken away."""
import json
import os
import secrets

import psycopg2

LEASE_MS = 3_600_000
ZERO = bytes(32)


class Work:
    """One claimed run."""

    def __init__(self, run_id, token, next_seq, created_ms):
        self.run_id, self.token, self.seq, self.created_ms = run_id, token, next_seq, created_ms


class PaperNode:
    def __init__(self, conninfo, name="paper", isolation="kvm", memory=65536, vcpus=64, slots=64):
        self.db = psycopg2.connect(conninfo)
        self.db.autocommit = True
        self.id, self.name, self.isolation = f"node_{secrets.token_hex(16)}", name, isolation
        self.room = (memory, vcpus, slots)
        secret = os.urandom(32)
        self.rows("INSERT INTO node_tokens SELECT %s, %s, 1, eph_now_ms() + 60000, '', %s, 0", f"tok_{secrets.token_hex(8)}", secret, isolation)
        result = self.rows("SELECT result FROM eph_enrol(%s, %s, %s, '', %s, %s, %s, %s, %s, %s)", self.id, secret, name, isolation, os.urandom(32),
                           os.urandom(32), os.urandom(32), os.urandom(64), os.urandom(64))
        assert result == [("ok",)], result
        self.next(0)

    def close(self):
        self.db.close()

    def rows(self, sql, *values):
        with self.db.cursor() as cursor:
            cursor.execute(sql, values)
            return cursor.fetchall() if cursor.description else []

    def next(self, want=16):
        """Renews the lease and claims up to `want` runs; returns them as Work."""
        memory, vcpus, slots = self.room
        with self.db.cursor() as cursor:
            cursor.execute("SELECT * FROM eph_next(%s, 1, %s, %s, %s, %s, %s, %s, %s, false, 0, '{}'::text[], '', '{}'::bigint[], '{}'::bigint[], %s, %s, %s)",
                           (self.id, memory, vcpus, slots, memory, vcpus, slots, self.isolation, want, os.urandom(16 * 16), LEASE_MS))
            names = [column.name for column in cursor.description]
            rows = [dict(zip(names, row)) for row in cursor.fetchall()]
        assert rows[0]["result"] == "ok", rows[0]
        return [Work(r["run_id"], bytes(r["token"]), r["next_seq"], r["queued_at_ms"]) for r in rows[1:] if r["kind"] == "assign"]

    def claim(self, run_id):
        """Claims until this run is ours; others that come with it are left claimed."""
        for work in self.next():
            if work.run_id == run_id:
                return work
        raise AssertionError(f"{run_id} was not to be claimed")

    def start(self, work):
        assert self.rows("SELECT eph_start(%s, %s, %s)", self.id, work.run_id, work.token) == [("applied",)]
        return work

    def event_bytes(self, work, seq, kind, data, source):
        head = f'{{"run_id":"{work.run_id}","seq":{seq},"at":"2026-01-01T00:00:00.000Z","t":0.000,"source":"{source}","type":"{kind}","data":'
        return (head + json.dumps(data, separators=(",", ":"), ensure_ascii=False) + "}").encode()

    def events(self, work, *events, spent=0):
        """events: (type, data) or (type, data, source)."""
        blobs = [self.event_bytes(work, work.seq + i, e[0], e[1], e[2] if len(e) > 2 else "host") for i, e in enumerate(events)]
        fence = self.rows("SELECT fence FROM eph_events(%s, %s, %s, %s, %s, %s, %s, %s, %s::text[], %s::int[], %s)", [self.id], [work.run_id], work.token,
                          [spent], [0], [work.seq], [len(blobs)], [1], [e[0] for e in events], [len(b) for b in blobs], b"".join(blobs))
        assert fence == [("applied",)], fence
        work.seq += len(events)

    def finish(self, work, status="succeeded", code="", message="", output=b"done", cost=(0, 100, 200, 0), usage=(1, 10, 4, 5, 0, 0, 500, 0)):
        self.events(work, ("microvm.destroyed", {"reason": "test", "lifetime_ms": 1, "gone_ms": 1}))
        last = self.rows("SELECT hash FROM events WHERE run_id = %s AND seq = %s", work.run_id, work.seq - 1)[0][0]
        fence = self.rows("SELECT fence FROM eph_finish(%s, %s, %s, %s, %s, %s, %s::bigint[], %s::bigint[], %s, %s, %s, %s, %s, %s)", self.id, work.run_id,
                          work.token, status, code, message, list(usage), list(cost), work.seq - 1, bytes(last), ZERO, self.isolation, os.urandom(64), output)
        assert fence == [("applied",)], fence

    def run_to_end(self, run_id, *events, **end):
        work = self.start(self.claim(run_id))
        self.events(work, ("microvm.ready", {"boot_ms": 1, "vmm": "paper"}), ("worker.started", {"shell": True, "web": False}), *events)
        self.finish(work, **end)
        return work
