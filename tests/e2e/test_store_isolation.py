"""What is wrong with one organization's run or one host's batch holds up nobody else, seen through a real controld."""
import psycopg2
import pytest
import requests
import wait
from api_rig import control, paper  # noqa: F401
from store_db import db, in_threads, template  # noqa: F401

BROKEN = """CREATE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF {when} THEN RAISE EXCEPTION 'made to fail'; END IF; RETURN NEW; END $$;
    CREATE TRIGGER broken BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION broken()"""


@pytest.fixture
def breaks(control):
    """breaks(table, when): makes Postgres refuse such rows until the test is over."""
    made = []

    def make(table, when):
        control.query(BROKEN.format(table=table, when=when))
        made.append(table)
    yield make
    for table in made:
        control.query(f"DROP TRIGGER broken ON {table}; DROP FUNCTION broken()")


def test_a_run_that_cannot_be_settled_stands_alone(control, paper, breaks):
    bad, good = control.new_client(), control.new_client()
    runs = [client.create(prompt="x")["id"] for client in (bad, good, bad, good)]
    breaks("ledger", f"NEW.kind = 'charge' AND NEW.org_id = '{bad.org}'")
    works = {w.run_id: w for w in paper.next()}
    for run in runs:
        paper.finish(paper.start(works[run]))
    for run in (runs[1], runs[3]):
        wait.until(lambda run=run: good.read(run)["cost_final"], 15, "the other organization's run to be settled")
    assert bad.read(runs[0])["billing_pending"]
    assert f"cannot be settled run={runs[0]}" in control.log_text()


def test_what_could_not_be_settled_is_settled_later(control):
    wait.until(lambda: control.query("SELECT count(*) FROM settle_pending")[0][0] == 0, 15, "all to be settled")
    control.check_ledger()


def test_a_create_that_fails_stands_alone(control, paper, breaks):
    bad, good = control.new_client(), control.new_client()
    breaks("run_content", "NEW.prompt = 'poison'")
    orders = [(bad, "poison", 500), (good, "fine", 201)] * 8

    def order(i):
        client, prompt, expect = orders[i]
        client.call("POST", "/v1/runs", expect, json={"prompt": prompt, "max_cost_micros": 1000})
    in_threads(len(orders), order)
    assert control.query("SELECT count(*) FROM run_live WHERE org_id = %s", good.org)[0][0] == 8


def test_asking_whether_it_is_ready_costs_one_statement_at_a_time(control):
    """/readyz needs no key: while the database hangs, all who ask share one statement, and all are answered."""
    def scans():    # of a table that only this statement reads
        return control.query("SELECT coalesce(seq_scan, 0) + coalesce(idx_scan, 0) FROM pg_stat_user_tables WHERE relname = 'schema_migrations'")[0][0]
    before = scans()
    db = psycopg2.connect(control.conninfo)
    db.cursor().execute("LOCK TABLE nodes_live IN ACCESS EXCLUSIVE MODE")

    def ask(i):
        if i > 0:
            return requests.get(f"{control.url}/readyz", timeout=30).status_code
        wait.until(lambda: control.log_text().count("path=/readyz") == 0 and control.query(
            "SELECT count(*) FROM pg_locks WHERE NOT granted")[0][0] > 0, 10, "a statement to wait")
        db.rollback()
        return 200
    assert in_threads(61, ask) == [200] * 61
    db.close()
    wait.until(lambda: scans() > before, 15, "Postgres to count it")
    assert scans() - before <= 30       # of which the migrations at its start may be a dozen


def test_settling_run_by_run_locks_wallets_in_their_order(db):
    low, high = sorted(db.org() for _ in range(2))
    db.node()
    for org in (high, low):          # the older run is the higher organization's
        run = db.create(org)["run_id"]
        db.rows("SELECT * FROM eph_cancel(%s, %s)", org, run)
    other = psycopg2.connect(db.conninfo)
    lock = other.cursor()
    lock.execute("SELECT 1 FROM org_hot WHERE org_id = %s FOR UPDATE", (low,))

    def settle(i):
        if i == 0:
            return db.rows("SELECT kind FROM eph_settle_each(10, 100)")
        wait.until(lambda: db.rows("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"), 10, "the settle to wait")
        lock.execute("SELECT 1 FROM org_hot WHERE org_id = %s FOR UPDATE NOWAIT", (high,))
        return other.rollback()
    assert in_threads(2, settle)[0] == [("settled",), ("settled",)]
    other.close()
    db.sound()
