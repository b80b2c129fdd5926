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


def select(db, org, selector):
    return db.rows("SELECT result FROM eph_org_update(%s, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, %s)", org, selector)[0][0]


def labelled(db, labels, **free):
    node = db.node(**free)
    db.rows("UPDATE nodes SET labels = %s WHERE id = %s", labels, node)
    return node


def test_runs_go_to_hosts_that_match_the_selector(db):
    """Set, changed and taken away; two organizations side by side; what was queued before keeps its class."""
    picky, easy = db.org(), db.org()
    plain, blue = db.node(), labelled(db, "disk=fast,pool=blue")
    assert select(db, picky, "pool=blue,disk=fast,pool=blue") == "done"
    assert db.value("SELECT selector FROM organizations WHERE id = %s", picky) == "disk=fast,pool=blue"
    mine, other = db.create(picky)["run_id"], db.create(easy)["run_id"]
    held = {node: [(a["run_id"], a["token"]) for a in db.next(node)["assign"]] for node in (plain, blue)}
    assert [held[plain][0][0], held[blue][0][0]] == [other, mine]
    before = db.create(picky)["run_id"]
    assert select(db, picky, "") == "done"
    after = db.create(picky)["run_id"]
    assert [a["run_id"] for a in db.next(plain, held=held[plain])["assign"]] == [after]
    assert [a["run_id"] for a in db.next(blue, held=held[blue])["assign"]] == [before]
    db.sound()


def test_what_no_enrolled_host_could_serve_is_refused(db):
    org, node = db.org(), labelled(db, "pool=green")
    for selector, result in (("pool=blue", "no_node"), ("pool=green,disk=fast", "no_node"), ("pool=gree", "no_node"), ("pool=green", "created")):
        assert select(db, org, selector) == "done"
        judged = db.value("SELECT result FROM eph_run_judge(%s, NULL, '', 40000, 512, 1, true, 100)", org)
        assert (judged, db.create(org)["result"]) == ("admissible" if result == "created" else result, result), selector
    assert db.create(org, mem=65536)["result"] == "no_node"                            # larger than the host is
    assert db.rows("SELECT result FROM eph_node_act(%s, 'revoke')", node) == [("done",)]
    assert db.create(org)["result"] == "no_node"
    db.sound()


def test_selectors_that_change_use_no_classes_up(db):
    """Far more selectors than there are numbers of classes; a class that a run is in stays until the run is settled."""
    org, blue = db.org(), labelled(db, "pool=blue")
    select(db, org, "pool=blue")
    run = db.create(org)["run_id"]
    for i in range(300):
        assert select(db, org, f"n={i}") == "done"
        assert db.create(org)["result"] == "no_node"
    assert select(db, org, "") == "done"
    assert db.value("SELECT count(*) FROM queue_class WHERE selector <> ''") == 1
    assert db.run_to_end(blue)["run_id"] == run
    db.settle()
    assert select(db, org, "x=y") == "done" and select(db, org, "") == "done"
    assert db.value("SELECT count(*) FROM queue_class WHERE selector <> ''") == 0
    orgs = [db.org() for _ in range(17)]
    assert [select(db, o, f"pool={i}") for i, o in enumerate(orgs)] == ["done"] * 16 + ["limit"]
    db.sound()


def test_a_host_that_says_goodbye_is_stopped_and_fenced(db):
    org, node = db.org(), db.node()
    shown = "SELECT lease_until_ms > eph_now_ms(), stopped_at_ms > 0 AND lease_until_ms <= stopped_at_ms FROM nodes_live WHERE node_id = %s"
    assert db.rows(shown, node) == [(True, False)]
    assert db.value("SELECT eph_node_bye(%s, 1)", node) is True
    assert db.rows(shown, node) == [(False, True)]
    db.create(org)
    assert db.next(node, epoch=1)["result"] == "old_epoch"                             # a poll of the process that said it, still on its way
    assert len(db.next(node, epoch=2)["assign"]) == 1                                  # the next process
    assert db.rows(shown, node) == [(True, False)]
    assert db.value("SELECT eph_node_bye(%s, 1)", node) is False                       # said again, too late
    assert db.rows(shown, node) == [(True, False)]


def test_a_host_is_removed_when_it_is_gone(db):
    node = db.node()
    act = "SELECT result FROM eph_node_act(%s, %s)"
    assert db.rows(act, node, "remove") == [("conflict",)]                             # it answers
    db.value("SELECT eph_node_bye(%s, 1)", node)
    assert db.rows(act, node, "remove") == [("done",)] and db.rows(act, node, "remove") == [("done",)]
    assert db.rows(act, node, "undrain") == [("not_found",)]
    assert db.next(node, epoch=2)["result"] == "revoked"
    revoked = db.node()
    assert db.rows(act, revoked, "revoke") == [("done",)] and db.rows(act, revoked, "remove") == [("done",)]
    assert db.value("SELECT count(*) FROM nodes WHERE removed_at_ms IS NULL") == 0
