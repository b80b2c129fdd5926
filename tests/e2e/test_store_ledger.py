"""`controld check-ledger` as a program against a real Postgres: what each of its two checks finds, and what neither may cry about."""
import os
import subprocess

import psycopg2
import pytest

import pg
import wait
from store_db import MICRO, db, template  # noqa: F401

BIN = os.environ.get("EPHEMERAL_BIN", "")
SANITIZER = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"}


@pytest.fixture
def check(db):
    def run(*options, expect=0):
        done = subprocess.run([f"{BIN}/controld", "check-ledger", *options, "--set", f"database={db.conninfo}"], capture_output=True, text=True,
                              timeout=120, env=dict(os.environ, **SANITIZER), check=False)
        assert done.returncode == expect, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout
    return run


@pytest.fixture
def piece(db, check):
    """Checks until what is new in the ledger is a piece: an open transaction of any database of the cluster may hold that up."""
    def count():
        return db.value("SELECT count(*) FROM ledger_pieces")

    def run():
        before = count()
        wait.until(lambda: check() and count() > before, 30, "a piece of the ledger")
    return run


@pytest.fixture
def behind(db, cluster):
    """SQL behind the ledger's trap, as only somebody with all rights can."""
    name = dict(part.split("=", 1) for part in db.conninfo.split())["dbname"]
    admin = psycopg2.connect(cluster.conninfo(name, "postgres"))
    admin.autocommit = True

    def run(sql, *args):
        with admin.cursor() as cursor:
            cursor.execute("SET session_replication_role = replica")
            cursor.execute(sql, args)
    yield run
    admin.close()


def work(db, org, node, runs=2):
    for _ in range(runs):
        db.create(org)
        db.run_to_end(node)
    db.settle()


def failed(text):
    return [line for line in text.splitlines() if line.startswith("FAIL")]


def test_a_changed_old_row_is_found_by_the_incremental_check(db, check, piece, behind):
    """Also one whose wallet was made to agree."""
    org, node = db.org(), db.node()
    work(db, org, node)
    assert "from the first row" in check()
    for _ in range(3):
        work(db, org, node, 1)
        piece()
    assert "since the last checkpoint" in check()
    row = db.value("SELECT min(id) FROM ledger WHERE kind = 'deposit'")
    behind("UPDATE ledger SET balance_delta = balance_delta + 5 WHERE id = %s", row)
    behind("UPDATE org_hot SET balance = balance + 5 WHERE org_id = %s", org)
    behind("UPDATE ledger_checkpoint_orgs SET balance = balance + 5 WHERE org_id = %s", org)
    assert [line for line in failed(check(expect=1)) if "read again" in line]
    assert [line for line in failed(check("--full", expect=1)) if "every piece" in line]
    behind("UPDATE ledger SET balance_delta = balance_delta - 5 WHERE id = %s", row)
    behind("UPDATE org_hot SET balance = balance - 5 WHERE org_id = %s", org)
    behind("UPDATE ledger_checkpoint_orgs SET balance = balance - 5 WHERE org_id = %s", org)
    check()
    check("--full")


@pytest.mark.parametrize("harm", ["UPDATE ledger SET note = 'other' WHERE kind = 'deposit'", "DELETE FROM ledger WHERE kind = 'deposit'",
                                  "UPDATE ledger SET at_ms = at_ms + 1 WHERE kind = 'charge'",
                                  "UPDATE ledger SET org_id = 'org_' || repeat('0', 32) WHERE kind = 'reserve'"])
def test_whatever_of_an_old_row_is_changed(db, check, piece, behind, harm):
    org, node = db.org(), db.node()
    work(db, org, node)
    piece()
    check()
    behind(harm)
    assert failed(check(expect=1))


def test_every_piece_has_its_turn(db, check, piece, behind):
    """More pieces than one check reads again: a change in any is found after as many checks as it takes to read all."""
    org, node = db.org(), db.node()
    for _ in range(20):
        assert db.rows("SELECT result FROM eph_credit(%s, 1, 'x', NULL, NULL, 0)", org) == [("done",)]
        piece()
    pieces = db.value("SELECT count(*) FROM ledger_pieces")
    assert pieces >= 18
    behind("UPDATE ledger SET note = 'y' WHERE id = (SELECT max(id) FROM ledger) - 1")
    seen = []
    for n in range(5):
        text = subprocess.run([f"{BIN}/controld", "check-ledger", "--set", f"database={db.conninfo}"], capture_output=True, text=True, timeout=120,
                              env=dict(os.environ, **SANITIZER), check=False).stdout
        if failed(text):
            seen.append(n)
            break
    assert seen and seen[0] <= pieces // 8 + 1
    assert node


def test_a_rewritten_piece_breaks_the_chain(db, check, piece, behind):
    org, node = db.org(), db.node()
    for _ in range(3):
        work(db, org, node, 1)
        piece()
    head = [line for line in check("--full").splitlines() if "chain stands" in line]
    assert len(head) == 1 and len(head[0].split()[-1]) == 64
    row = db.value("SELECT min(id) FROM ledger WHERE kind = 'deposit'")
    behind("UPDATE ledger SET note = 'z' WHERE id = %s", row)
    behind("UPDATE ledger_pieces p SET digest = d.digest FROM (SELECT n, (eph_ledger_digest(from_xid, to_xid)).digest FROM ledger_pieces) d "
           "WHERE d.n = p.n")
    assert ["FAIL the pieces are a chain"] == failed(check("--full", expect=1))
    behind("DELETE FROM ledger_pieces WHERE n = 1")
    assert failed(check("--full", expect=1))


def test_a_checkpoint_older_than_the_records_raises_no_alarm(db, check, piece, behind):
    """Runs that were settled since the checkpoint, whose records went with their retention; and one whose record is missing too early."""
    org, node = db.org(), db.node()
    work(db, org, node)
    piece()
    work(db, org, node)
    day = db.value("SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')")
    behind(f"DELETE FROM runs_{day} WHERE run_id = (SELECT max(run_id) FROM runs)")
    assert [line for line in failed(check(expect=1)) if "one charge" in line]
    for table in ("runs", "run_content", "run_output", "run_meta", "run_files", "events"):
        behind(f"ALTER TABLE {table} DETACH PARTITION {table}_{day}")
        behind(f"DROP TABLE {table}_{day}")
    assert "since the last checkpoint" in check()
    check("--full")


def test_a_clock_that_went_back_raises_no_alarm(db, check, piece):
    org, node = db.org(), db.node()
    work(db, org, node)
    piece()
    pg.set_clock_offset(db.conninfo, -5 * 3600_000)
    db.rows("SELECT eph_partitions_make()")
    assert db.rows("SELECT result FROM eph_credit(%s, 7, 'late', NULL, NULL, 0)", org) == [("done",)]
    assert "since the last checkpoint" in check()


def test_a_slipped_row_and_a_wrong_wallet(db, check, piece, behind):
    org, node = db.org(), db.node()
    work(db, org, node)
    piece()
    behind("UPDATE org_hot SET balance = balance + 1 WHERE org_id = %s", org)
    assert failed(check(expect=1)) and failed(check("--full", expect=1))
    behind("INSERT INTO ledger (at_ms, org_id, kind, balance_delta, reserved_delta) VALUES (eph_now_ms(), %s, 'deposit', 1, 0)", org)
    assert not failed(check())


def test_what_is_lost_to_fenced_hosts_is_told(db, check):
    org, node = db.org(), db.node()
    run = db.create(org)["run_id"]
    a = db.claim_one(node)
    db.start(node, run, a["token"])
    pg.set_clock_offset(db.conninfo, 71000)
    db.rows("UPDATE sweep_clock SET at_ms = eph_now_ms()")
    assert len(db.rows("SELECT 1 FROM eph_sweep_lost(60000, 10000, 10)")) == 1
    db.settle()
    assert "0 runs were reported on" in check()
    db.events(node, run, a["token"], 3, ["worker.note"], spent=1234)
    assert "1 runs were reported on by their hosts after they were fenced: 1234 micros" in check()
    assert db.wallet(org)[0] == 100 * MICRO
