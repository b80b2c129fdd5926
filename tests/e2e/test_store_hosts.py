"""The store's SQL functions against hosts that lie, hang or come back after an outage of ours."""
import pg
from store_db import db, template  # noqa: F401


def test_a_host_takes_no_more_than_it_has_places_for(db):
    org, node = db.org(), db.node()
    db.create_many([db.row(org, i) for i in range(40)])
    held = []
    for _ in range(5):
        held += [(a["run_id"], a["token"]) for a in db.next(node, held=held, slots=16)["assign"]]   # always says that all is free
    assert len(held) == 16
    for run, token in held[:3]:
        db.start(node, run, token)
        db.events(node, run, token, 3, ["microvm.destroyed"])
        assert db.finish(node, run, token, 3)[0] == "applied"
    assert len(db.next(node, held=held[3:], slots=16)["assign"]) == 3


def test_a_host_that_takes_runs_and_starts_none_is_put_in_probation(db):
    org, node = db.org(), db.node()
    db.node()
    for _ in range(3):
        db.create(org)
    held = [(a["run_id"], a["token"]) for a in db.next(node, want=3)["assign"]]
    pg.set_clock_offset(db.conninfo, 181000)
    db.rows("UPDATE sweep_clock SET at_ms = eph_now_ms()")
    db.rows("UPDATE nodes_live SET lease_until_ms = eph_now_ms() + 60000")
    swept = db.rows("SELECT run_id, outcome FROM eph_sweep_claimed(60000, 10000, 180000, 500)")
    assert sorted(swept) == sorted((run, "requeued") for run, _ in held)
    db.create(org)
    assert db.next(node)["assign"] == []


def test_a_claim_does_not_run_out_while_nobody_could_say_that_it_started(db):
    org, node = db.org(), db.node()
    db.create(org)
    a = db.claim_one(node)
    sweep = "SELECT run_id FROM eph_sweep_claimed(60000, 10000, 180000, 500)"
    pg.set_clock_offset(db.conninfo, 181000)
    assert db.rows(sweep) == []
    db.rows("SELECT eph_sweep_clock('t', '0', 1, 60000)")
    assert db.rows(sweep) == []
    assert db.start(node, a["run_id"], a["token"]) == "applied"


def test_a_host_is_never_more_than_it_enrolled_as(db):
    org, node = db.org(), db.node(isolation="emulated")
    run = db.create(org)["run_id"]
    a = db.claim_one(node, isolation="kvm")
    db.start(node, run, a["token"])
    db.events(node, run, a["token"], 3, ["microvm.destroyed"])
    assert db.finish(node, run, a["token"], 3)[0] == "applied"       # says that it was kvm
    assert db.value("SELECT isolation FROM runs WHERE run_id = %s", run) == "emulated"
