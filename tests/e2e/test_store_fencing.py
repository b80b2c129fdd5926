"""The store's SQL functions by themselves, against a real Postgres: fencing, cancels, what time does to runs, everything at once."""
import os
import random
import time

import psycopg2
import pg
from store_db import MICRO, db, in_threads, template  # noqa: F401


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
    assert db.next(nodes[0], want=1)["assign"] == []                  # not at once
    pg.set_clock_offset(db.conninfo, 600)
    a = db.claim_one(nodes[0])
    assert a["attempt"] == 1
    for n in range(3):
        if n:
            assert db.next(nodes[n - 1], want=1)["assign"] == []      # it failed there
            a = db.claim_one(nodes[n])
        assert a["attempt"] == n + 1
        outcome = "ended" if n == 2 else "requeued"
        assert db.rows(refuse, nodes[n], run, a["token"], True) == [("applied", outcome)]
        assert db.rows(refuse, nodes[n], run, a["token"], True)[0][0] == "stale"
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


def test_failed_and_the_only_other_node_goes_away(db):
    """Requeued for another node, which is then lost: its end with the reason of its last start, not a wait until it is too old."""
    org, node = db.org(), db.node()
    db.node()
    run = db.create(org)["run_id"]
    a = db.claim_one(node)
    assert db.value("SELECT outcome FROM eph_refuse(%s, %s, %s, true, 'vm_start_failed', 'the VMM died')", node, run, a["token"]) == "requeued"
    sweep = "SELECT run_id, outcome FROM eph_sweep_queue(600000, 1000, 500) WHERE outcome = 'ended'"
    assert db.rows(sweep) == []
    for later in (9000, 71000):
        pg.set_clock_offset(db.conninfo, later)
        db.next(node)
        db.rows("UPDATE sweep_clock SET at_ms = eph_now_ms()")
        assert db.rows(sweep) == ([(run, "ended")] if later > 70000 else [])
    db.settle()
    assert db.chain(run)[-2][1]["data"]["error"] | {"code": "vm_start_failed", "message": "the VMM died"} == db.chain(run)[-2][1]["data"]["error"]
    assert db.wallet(org)[1] == 0
    db.sound()


def test_a_refusal_never_ends_a_run(db):
    org, node = db.org(), db.node()
    run = db.create(org)["run_id"]
    for n in range(20):
        pg.set_clock_offset(db.conninfo, 1000 * n)
        a = db.claim_one(node)
        assert a["attempt"] == 1
        assert db.value("SELECT outcome FROM eph_refuse(%s, %s, %s, false, 'no_capacity', 'no room')", node, run, a["token"]) == "requeued"
    assert len(db.chain(run)) == 41


def test_the_only_node_is_lost_before_the_start(db):
    """The run waits for it (or another) as long as the queue lets it."""
    org, node = db.org(), db.node()
    run = db.create(org)["run_id"]
    db.claim_one(node)
    pg.set_clock_offset(db.conninfo, 71000)
    db.rows("UPDATE sweep_clock SET at_ms = eph_now_ms()")
    assert db.rows("SELECT run_id, outcome FROM eph_sweep_claimed(60000, 10000, 600000, 500)") == [(run, "requeued")]
    assert db.claim_one(node)["attempt"] == 2


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
    pg.set_clock_offset(db.conninfo, 600)                 # a node that refused is left alone for a moment

    run = db.create(org)["run_id"]
    a = db.claim_one(node)
    db.start(node, run, a["token"])
    assert db.rows(cancel, org, run)[0][0] == "requested"
    db.events(node, run, a["token"], 3, ["microvm.destroyed"])
    assert db.finish(node, run, a["token"], 3, status="cancelled", code="cancelled")[0] == "applied"
    db.settle()
    assert db.value("SELECT cancel_requested_at_ms IS NOT NULL FROM runs WHERE run_id = %s", run)
    db.sound()


def test_a_cancel_is_said_again_with_the_claim(db):
    """The answer with the claim was lost, so the host took the cancel for one of a run that it does not have: it comes with the claim again."""
    org, node = db.org(), db.node()
    run = db.create(org)["run_id"]
    lost = db.claim_one(node)
    assert db.rows("SELECT result FROM eph_cancel(%s, %s)", org, run) == [("requested",)]
    heard = db.next(node, want=0)["command"]
    assert [c["run_id"] for c in heard] == [run]
    db.next(node, last=heard[0]["command_id"])
    pg.set_clock_offset(db.conninfo, 30000)               # what a host dropped is offered again after a pause
    again = db.next(node, last=heard[0]["command_id"])
    assert [(a["run_id"], a["token"]) for a in again["assign"]] == [(run, lost["token"])]
    assert [(c["result"], c["run_id"], c["token"]) for c in again["command"]] == [("cancel", run, lost["token"])]
    assert again["command"][0]["command_id"] > heard[0]["command_id"]


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
    sweep = "SELECT run_id, outcome, memory_mib FROM eph_sweep_queue(600000, 1000, 500)"
    assert db.rows(sweep) == [(None, "waiting", 512)]     # so that a host that had a reason not to take it is asked again
    pg.set_clock_offset(db.conninfo, 600100)
    assert db.rows(sweep) == [(runs[0], "ended", None), (runs[1], "ended", None)]
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
    for ms, ended in ((31000, cancelled), (61000, ending), (241000, running)):
        pg.set_clock_offset(db.conninfo, ms)
        assert db.rows(sweep) == []                       # the clock stood still: nobody could tell us
        db.rows("UPDATE sweep_clock SET at_ms = eph_now_ms()")
        assert db.rows(sweep) == [(ended["run_id"],)]
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


def test_files_outlive_the_longest_wait(db):
    """What no create of the last 25 hours named goes: a run may wait for its host for a day."""
    org = db.org()
    for sha, age in (("ab" * 32, 86400000 + 1800000), ("cd" * 32, 90000001)):
        db.rows("INSERT INTO chunk_files VALUES (%s, decode(%s, 'hex'), 3, true, eph_now_ms() - %s)", org, sha, age)
        db.rows("INSERT INTO chunks VALUES (%s, decode(%s, 'hex'), 0, 'abc')", org, sha)
    assert db.value("SELECT eph_sweep_expire(100)") == 1
    assert db.rows("SELECT encode(f.sha256, 'hex'), length(c.data) FROM chunk_files f JOIN chunks c USING (org_id, sha256)") == [("ab" * 32, 3)]


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
        rng, done = random.Random(i), 0
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
