"""The store's SQL functions against hosts that lie, drop what they are given or speak when they are fenced, against money at the edge of
64 bits, and against a clock that goes back."""
import os

import psycopg2
import pytest

import pg
from store_db import MICRO, db, template  # noqa: F401

MOST = 2 ** 63 - 1
CAP_MAX = 10 ** 15
NODE_LOST = ("interrupted", "node_lost")


def running(db, org, node, **kw):
    run = db.create(org, **kw)["run_id"]
    a = db.claim_one(node)
    assert a["run_id"] == run and db.start(node, run, a["token"]) == "applied"
    return run, a["token"]


def end_of(db, run):
    return db.rows("SELECT status, error_code FROM runs WHERE run_id = %s", run)[0]


def lose(db, later=71000):
    """Time in which every node falls silent, with our own sweeps going on."""
    pg.set_clock_offset(db.conninfo, later)
    db.rows("UPDATE sweep_clock SET at_ms = eph_now_ms(), lease_floor_ms = 0")
    return db.rows("SELECT run_id FROM eph_sweep_lost(60000, 10000, 500)")


# ---- what a fenced host still says -------------------------------------------------------------------------------------------------


def test_money_that_a_fenced_host_used_is_counted_once_and_charged_to_nobody(db):
    org, node, other = db.org(), db.node(), db.node()
    run, token = running(db, org, node)
    db.events(node, run, token, 3, ["microvm.ready"], spent=1000, held=500)
    assert lose(db) == [(run,)]
    db.settle()
    late = "SELECT run_id, node_id, reports, used_micros, charged_micros FROM late_reports"
    # Nobody but the last holder makes a row.
    db.events(other, run, token, 4, ["worker.note"], spent=39999)
    db.events(node, run, os.urandom(16), 4, ["worker.note"], spent=39999)
    db.next(other, held=[(run, token, 39999, 0)], want=0)
    assert db.rows(late) == []
    assert db.events(node, run, token, 4, ["worker.note"], spent=9000, held=200)[0] == "stale"
    assert db.rows(late) == [(run, node, 1, 9200, 1500)]
    assert db.finish(node, run, token, 4, cost=(0, 100, 8000, 0))[0] == "stale"
    assert len(db.next(node, held=[(run, token, 9500, 0)], want=0)["kill"]) == 1
    assert db.finish(node, run, token, 4, cost=(MOST, MOST, 0, -5))[0] == "stale"
    assert db.rows(late) == [(run, node, 4, 40000, 1500)]
    assert db.wallet(org)[0] == 100 * MICRO - 1500
    db.sound()
    pg.set_clock_offset(db.conninfo, 366 * 86400000)
    db.rows("SELECT eph_partitions_make()")
    db.value("SELECT eph_sweep_expire(100)")
    assert db.rows(late) == []


def test_a_run_that_was_given_to_another_makes_no_late_report(db):
    org, node, other = db.org(), db.node(), db.node()
    run = db.create(org)["run_id"]
    first = db.claim_one(node)
    assert db.value("SELECT outcome FROM eph_refuse(%s, %s, %s, true, 'vm_start_failed', 'x')", node, run, first["token"]) == "requeued"
    a = db.claim_one(other)
    assert db.start(other, run, a["token"]) == "applied"
    assert db.start(node, run, first["token"]) == "stale"
    assert db.events(node, run, first["token"], 3, ["microvm.ready"], spent=5)[0] == "stale"
    assert db.finish(node, run, first["token"], 5)[0] == "stale"
    assert db.value("SELECT count(*) FROM late_reports") == 0
    assert db.value("SELECT state FROM run_live") == "running"


# ---- hosts that lie ---------------------------------------------------------------------------------------------------------------


def test_an_end_without_a_destroyed_vm_is_no_end(db):
    org, node = db.org(), db.node()
    run, token = running(db, org, node)
    db.events(node, run, token, 3, ["microvm.ready", "worker.started"], spent=700)
    assert db.finish(node, run, token, 4)[0] == "stale"
    assert end_of(db, run) == NODE_LOST
    db.settle()
    assert db.wallet(org)[0] == 100 * MICRO - 700
    assert [t for t, _ in db.chain(run)][-2:] == ["run.interrupted", "run.settled"]
    assert "destroyed" in db.chain(run)[-2][1]["data"]["error"]["message"]
    assert db.finish(node, run, token, 4)[0] == "stale"
    db.sound()


def test_nothing_is_told_of_a_vm_after_its_end(db):
    org, node = db.org(), db.node()
    run, token = running(db, org, node)
    assert db.events(node, run, token, 3, ["microvm.ready", "microvm.destroyed", "worker.note"])[0] == "stale"
    assert db.events(node, run, token, 3, ["microvm.destroyed", "microvm.destroyed"])[0] == "stale"
    assert db.events(node, run, token, 3, ["microvm.ready", "microvm.destroyed"])[0] == "applied"
    assert db.events(node, run, token, 3, ["microvm.ready", "microvm.destroyed"])[0] == "duplicate"
    assert db.events(node, run, token, 5, [], spent=9)[0] == "applied"
    assert db.events(node, run, token, 5, ["worker.note"])[0] == "stale"
    assert db.events(node, run, token, 4, ["microvm.destroyed", "worker.note"])[0] == "stale"
    assert db.finish(node, run, token, 4)[0] == "applied"
    assert len(db.chain(run)) == 5


def test_a_time_beyond_any_run_of_its_timeout(db):
    org, node = db.org(), db.node()
    run, token = running(db, org, node)              # its timeout is 120 s
    assert db.events(node, run, token, 3, ["microvm.ready"], last_t=721_000 + 5000)[0] == "stale"
    assert db.events(node, run, token, 3, ["microvm.ready"], last_t=MOST)[0] == "stale"
    assert db.events(node, run, token, 3, ["microvm.ready"], last_t=700_000)[0] == "applied"
    assert db.events(node, run, token, 4, ["worker.note"], last_t=5)[0] == "applied"
    assert db.value("SELECT last_t_ms FROM run_live") == 700_000


def test_events_without_end_stop_at_the_bound_of_a_run(db):
    """A host that keeps no bound: what it may store of one run is bounded all the same."""
    org, node = db.org(), db.node()
    run, token = running(db, org, node)
    db.rows("UPDATE run_live SET seq = 20201")
    assert db.events(node, run, token, 20202, ["worker.note"])[0] == "stale"
    db.rows("UPDATE run_live SET seq = 2, event_bytes = 18874369")
    assert db.events(node, run, token, 3, ["worker.note"])[0] == "stale"
    assert db.events(node, run, token, 2 ** 31, ["worker.note"])[0] == "stale"
    db.rows("UPDATE run_live SET event_bytes = 0")
    assert db.events(node, run, token, 2 ** 31, ["worker.note"]) == ("gap", 3)
    assert db.events(node, run, token, MOST - 5, ["worker.note"]) == ("gap", 3)


def test_a_meter_is_clamped_and_never_falls(db):
    org, node = db.org(), db.node()
    run, token = running(db, org, node)
    for spent, held, seen in ((-5, -5, (0, 0)), (100, 50, (100, 50)), (99, 7, (100, 50)), (MOST, 0, (40000, 0)), (0, MOST, (40000, 0))):
        db.events(node, run, token, 3, [], spent=spent, held=held)
        assert db.rows("SELECT spent, held FROM run_live") == [seen]
    db.next(node, held=[(run, token, MOST, MOST)], want=0)
    assert lose(db, 200000) == [(run,)]
    db.settle()
    assert db.wallet(org)[0] == 100 * MICRO - 40000


@pytest.mark.parametrize("cost, charged", [((MOST, MOST, MOST, MOST), 40000), ((0, 0, 40001, 0), 40000), ((-MOST, 0, 5, 0), 5), ((-1, -1, -1, -1), 0)])
def test_a_false_bill_is_clamped_to_the_cap(db, cost, charged):
    org, node = db.org(), db.node()
    run, token = running(db, org, node)
    db.events(node, run, token, 3, ["microvm.destroyed"])
    assert db.finish(node, run, token, 3, cost=cost)[0] == "applied"
    assert db.settle() == [run]
    assert db.wallet(org)[:2] == (100 * MICRO - charged, 0)
    assert sum(db.chain(run)[-1][1]["data"]["parts"].values()) == charged
    db.sound()


def test_a_receipt_for_less_than_the_chain_is_none(db):
    org, node = db.org(), db.node()
    for last, kept in ((3, False), (4, True)):
        run, token = running(db, org, node)
        db.events(node, run, token, 3, ["microvm.ready", "microvm.destroyed"])
        hash_ = bytes(db.value("SELECT hash FROM events WHERE run_id = %s AND seq = %s", run, last))
        assert db.value("SELECT fence FROM eph_finish(%s, %s, %s, 'succeeded', '', '', %s::bigint[], %s::bigint[], %s, %s, %s, 'kvm', %s, 'x')",
                        node, run, token, [0] * 8, [0] * 4, last, hash_, bytes(32), b"\1" * 64) == "applied"
        assert (db.value("SELECT receipt_signature FROM runs WHERE run_id = %s", run) is not None) is kept


def test_capacity_that_is_a_lie(db):
    org, node = db.org(credit=1000 * MICRO), db.node(next_=False)
    db.create_many([db.row(org, i) for i in range(20)])
    assert db.next(node, memory=2 ** 31 - 1, vcpus=2 ** 31 - 1, slots=2 ** 31 - 1, want=16)["assign"].__len__() == 16
    assert db.next(node, memory=-2 ** 31, vcpus=-2 ** 31, slots=-2 ** 31, total=1)["result"] == "ok"
    assert db.next(node, memory=0, vcpus=0, slots=0)["result"] == "ok"
    other = db.node()
    assert db.next(other, memory=-5, vcpus=-5, slots=-5, total=8192)["assign"] == []
    assert db.next(other, memory=8192, vcpus=1, slots=1, want=16)["assign"].__len__() == 1


# ---- a host that drops what it is given ---------------------------------------------------------------------------------------------


def test_a_claim_that_is_dropped_again_and_again_is_sent_with_pauses_and_then_ends(db):
    org, node = db.org(), db.node()
    run = db.create(org)["run_id"]
    token = db.claim_one(node)["token"]
    at, sent = 0, []
    while at < 90000:
        pg.set_clock_offset(db.conninfo, at)
        db.rows("UPDATE sweep_clock SET at_ms = eph_now_ms()")
        got = db.next(node)["assign"]
        if got:
            assert [a["token"] for a in got] == [token]
            sent.append(db.now())
            assert db.next(node)["assign"] == []         # asked in a circle, it gets nothing
        ended = db.rows("SELECT outcome FROM eph_sweep_claimed(60000, 10000, 180000, 500)")
        if ended:
            break
        at += 250
    assert ended == [("ended",)] and len(sent) == 7, sent
    assert all(b - a > 250 * 2 ** i - 200 for i, (a, b) in enumerate(zip(sent[:5], sent[1:]))), sent
    db.settle()
    error = db.chain(run)[-2][1]["data"]["error"]
    assert error["code"] == "vm_start_failed" and "8 times" in error["message"]
    assert db.value("SELECT failed_in_row FROM nodes_live WHERE node_id = %s", node) == 1
    assert db.wallet(org)[:2] == (100 * MICRO, 0)
    db.sound()


def test_what_a_host_dropped_still_counts_as_its_room(db):
    org, node = db.org(), db.node(memory=1024)
    for _ in range(3):
        db.create(org)
    assert len(db.next(node, memory=1024)["assign"]) == 2
    assert len(db.next(node, memory=1024)["assign"]) == 2    # sent again
    assert db.next(node, memory=1024)["assign"] == []        # a pause, and no third one in its place
    assert db.value("SELECT count(*) FROM queue") == 1


def test_a_second_attempt_has_its_offers_anew(db):
    org, node = db.org(), db.node()
    db.node()
    run = db.create(org)["run_id"]
    a = db.claim_one(node)
    db.next(node)
    assert db.value("SELECT offers FROM run_live") == 1
    db.rows("SELECT * FROM eph_refuse(%s, %s, %s, false, 'no_capacity', '')", node, run, a["token"])
    pg.set_clock_offset(db.conninfo, 1000)
    db.claim_one(node)
    assert db.value("SELECT offers FROM run_live") == 0


# ---- money at the edge of 64 bits ----------------------------------------------------------------------------------------------------


def test_credit_at_the_edges(db):
    org, free = db.org(credit=0), db.org(credit=0, unlimited=True)
    credit = "SELECT result, balance FROM eph_credit(%s, %s, NULL, NULL, NULL, 0)"
    for amount in (MOST, -MOST, -2 ** 63, CAP_MAX + 1, -CAP_MAX - 1):
        assert db.rows(credit, org, amount)[0][0] == "limit"
        assert db.rows(credit, free, amount)[0][0] == "limit"
    assert db.rows(credit, org, CAP_MAX) == [("done", CAP_MAX)]
    assert db.rows(credit, org, 1) == [("limit", CAP_MAX)]
    assert db.rows(credit, org, -CAP_MAX) == [("done", 0)]
    assert db.rows(credit, org, -1) == [("limit", 0)]
    assert db.rows(credit, free, -CAP_MAX) == [("done", -CAP_MAX)]
    assert db.rows(credit, free, -1) == [("limit", -CAP_MAX)]
    db.rows("UPDATE org_hot SET balance = %s WHERE org_id = %s", MOST, org)
    assert db.rows(credit, org, 1) == [("limit", MOST)]
    assert db.rows(credit, org, -1) == [("limit", MOST)]


def test_a_cap_beyond_the_bound_is_refused_whole(db):
    org = db.org(unlimited=True)
    db.node()
    for cap in (MOST, CAP_MAX + 1, 0, -1, -2 ** 63):
        with pytest.raises(psycopg2.errors.CheckViolation):
            db.create(org, cap=cap)
    assert db.create(org, cap=CAP_MAX)["result"] == "created"
    assert db.wallet(org)[1:] == (CAP_MAX, 1, 1)
    db.sound()


def test_a_reservation_that_would_overflow_is_an_error_and_changes_nothing(db):
    org = db.org(unlimited=True)
    db.node()
    db.rows("UPDATE org_hot SET reserved = %s WHERE org_id = %s", MOST - 100, org)
    with pytest.raises(psycopg2.errors.NumericValueOutOfRange):
        db.create(org, cap=101)
    assert db.wallet(org) == (100 * MICRO, MOST - 100, 0, 0)
    assert db.value("SELECT count(*) FROM run_live") == 0 and db.value("SELECT count(*) FROM queue") == 0
    poor = db.org(credit=0)
    db.rows("UPDATE org_hot SET balance = %s, reserved = 0 WHERE org_id = %s", MOST, poor)
    assert db.create(poor, cap=CAP_MAX)["result"] == "created"


def test_a_settlement_that_would_overflow_holds_up_nobody_else(db):
    bad, good, node = db.org(unlimited=True), db.org(), db.node()
    for org in (bad, good):
        db.create(org)
        db.run_to_end(node)
    db.rows("UPDATE org_hot SET balance = %s WHERE org_id = %s", -2 ** 63 + 10, bad)
    with pytest.raises(psycopg2.errors.NumericValueOutOfRange):
        db.settle()
    kinds = sorted(db.rows("SELECT kind FROM eph_settle_each(100, 100)"))
    assert kinds == [("failed",), ("settled",)]
    assert db.wallet(good)[:2] == (100 * MICRO - 300, 0)
    db.rows("UPDATE org_hot SET balance = %s WHERE org_id = %s", 100 * MICRO, bad)
    assert len(db.settle()) == 1
    db.sound()


# ---- a clock that goes back ------------------------------------------------------------------------------------------------------------


def test_a_clock_that_goes_back_a_day_loses_no_deadline(db):
    """What was dated a day ahead would stand still for a day: leases, claims, a host's pause."""
    org, node, gone = db.org(), db.node(), db.node()
    pg.set_clock_offset(db.conninfo, 86400000)
    db.rows("SELECT eph_sweep_clock('t', '0', 1, 60000)")
    for n in (node, gone):
        db.next(n, want=0)
    for _ in range(2):
        db.create(org)
    held = db.claim_one(gone)
    db.start(gone, held["run_id"], held["token"])
    refused = db.claim_one(node)
    db.rows("SELECT * FROM eph_refuse(%s, %s, %s, false, 'no_capacity', '')", node, refused["run_id"], refused["token"])
    pg.set_clock_offset(db.conninfo, 0)
    db.rows("SELECT eph_sweep_clock('t', '0', 1, 60000)")
    assert db.value("SELECT max(lease_until_ms) - eph_now_ms() FROM nodes_live") <= 60000
    assert [a["run_id"] for a in db.next(node)["assign"]] == [refused["run_id"]]      # its pause is over
    assert db.rows("SELECT run_id FROM eph_sweep_lost(60000, 10000, 500)") == []      # a lease from now on
    db.next(node, held=[(refused["run_id"], b"\0" * 16)], want=0)
    assert lose(db, 75000) == [(held["run_id"],)]
    db.settle()
    db.sound()
