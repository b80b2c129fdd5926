"""Nothing that one organization asks for may cost what all have stored: how many pages Postgres touches with much history beside none."""
import json
import pathlib
import re

import pytest
import wait
from store_db import db, template  # noqa: F401

SOURCE = pathlib.Path(__file__).resolve().parents[2] / "controld" / "store"
SESSION = ("SELECT set_config('plan_cache_mode', 'force_generic_plan', false), set_config('enable_seqscan', 'off', false), "
           "set_config('enable_bitmapscan', 'off', false)")
HISTORY = 3000
PAGES = 60


def statement(file, name):
    """The SQL of a struct pg_stmt as the compiler sees it: its literals and macros put together."""
    text = (SOURCE / file).read_text(encoding="utf-8")
    macros = dict(re.findall(r"#define (\w+)[ \t\\\n]+((?:\"(?:[^\"\\]|\\.)*\"|[\w \t\\\n])+)", text))
    body = re.search(rf"\.name = \"{name}\",\s*\.sql = (.*?),\s*\.nparams", text, re.S).group(1)

    def flat(piece):
        return "".join(json.loads(f'"{literal}"') if literal else flat(macros[word]) if word in macros else ""
                       for literal, word in re.findall(r"\"((?:[^\"\\]|\\.)*)\"|(\w+)", piece))
    return flat(body)


def pages(db, sql, *args):
    """Pages touched by the slowest way it may be run: with a plan that knows no values."""
    plan = db.rows(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", *args)[0][0][0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


@pytest.fixture
def history(db):
    """An organization with thousands of ended runs, each with a key of its own."""
    org = db.org(unlimited=True)
    db.node()
    for n in range(0, HISTORY, 500):
        db.create_many([db.row(org, i, key=f"key {n + i}") for i in range(500)])
    db.rows("""DO $$ DECLARE r text; BEGIN FOR r IN SELECT run_id FROM queue LOOP PERFORM eph_unqueue(r);
        PERFORM eph_end(r, eph_now_ms(), 'cancelled', 'cancelled', '', NULL, NULL); END LOOP; END $$""")
    while db.settle():
        pass
    db.rows("VACUUM ANALYZE")
    db.rows(SESSION)
    return org


def test_a_refused_create_looks_at_its_own_key_only(db, history):
    poor = db.org(credit=0)
    db.rows("PREPARE made(jsonb) AS SELECT * FROM eph_run_create($1, 10000, 1000, 2592000000, 86400000)")

    def refused(key):
        row = json.dumps([db.row(poor, key=key)])
        return pages(db, "EXECUTE made(%s)", row)
    refused("first")                                     # makes the plans
    assert db.create(poor, key="second")["result"] == "insufficient"
    assert refused("third") < PAGES
    assert db.value("SELECT count(*) FROM idempotency WHERE org_id = %s", poor) == 0


def test_a_list_of_few_among_many(db, history):
    small = db.org()
    db.create(small)
    for org, status, name in [(history, "queued", "run_list_live"), (history, "running", "run_list_live"), (history, "interrupted", "run_list_ended"),
                              (small, None, "run_list")]:
        types = "text, text, bigint, text" if status else "text, text, bigint"
        db.rows(f"PREPARE list({types}) AS {statement('run_read.c', name)}")
        touched = pages(db, "EXECUTE list(%s, NULL, 21, %s)", org, status) if status else pages(db, "EXECUTE list(%s, NULL, 21)", org)
        assert touched < PAGES, (name, status)
        db.rows("DEALLOCATE list")


def test_lists_by_status_hold_what_they_say(db):
    org, node = db.org(), db.node()
    runs = []
    for _ in range(5):  # ids begin with the millisecond: each in one of its own, so that "newest first" says all
        runs.append(db.create(org)["run_id"])
        wait.until(lambda: db.rows("SELECT eph_now_ms() > eph_run_ms(%s)", runs[-1])[0][0], what="the next millisecond")
    db.run_to_end(node)
    a = db.claim_one(node)
    db.start(node, a["run_id"], a["token"])
    db.claim_one(node, held=[(a["run_id"], a["token"])])

    def listed(status, cursor=None, limit=21):
        name = "run_list_live" if status in ("queued", "running") else "run_list_ended"
        db.rows("DEALLOCATE ALL")
        db.rows(f"PREPARE list(text, text, bigint, text) AS {statement('run_read.c', name)}")
        return [row[0] for row in db.rows("EXECUTE list(%s, %s, %s, %s)", org, cursor, limit, status)]
    for settled in (False, True):
        if settled:
            db.settle()
        assert listed("succeeded") == [runs[0]]
        assert listed("running") == [runs[1]]
        assert listed("queued") == runs[:1:-1]            # one is claimed: nobody sees a difference
        assert listed("queued", limit=2) == [runs[4], runs[3]] and listed("queued", cursor=runs[3]) == [runs[2]]
        assert listed("failed") == []
