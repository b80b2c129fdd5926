/*
 * `controld check-ledger`: proves the ledger's invariants in one snapshot and prints a line for each. Everything here blocks;
 * called by main.c without a loop.
 *
 * A checkpoint holds, for each organization, the sums of all rows whose transactions had ended when it was made (xid below the
 * oldest one that was running then: such rows are complete, whatever order commits came in). An incremental check adds the rows
 * since; --full starts from the first row, and is what finds a row that was changed behind the trap. Either makes a new checkpoint
 * when all is well.
 */
#include "store_internal.h"
#include "sync.h"

#include "common/text.h"

struct check {
	const char *name; /* what is proved */
	const char *sql;  /* rows that break it: one text column saying which */
};

/* `since` is what the incremental check reads: everything that was not complete at the checkpoint. Rows are dated by the statement
 * that wrote them, so a row that was not complete then is at most as old as a transaction may get. */
#define SINCE "l.xid >= (SELECT horizon FROM ledger_checkpoint) AND l.at_ms >= (SELECT at_ms - 3600000 FROM ledger_checkpoint)"

static const struct check full_checks[] = {
	{ "every wallet is the sum of its rows", "SELECT format('%s: balance %s, rows say %s; reserved %s, rows say %s', "
						 "coalesce(h.org_id, s.org_id), h.balance, s.b, h.reserved, s.r) "
						 "FROM org_hot h FULL JOIN (SELECT org_id, sum(balance_delta) AS b, "
						 "sum(reserved_delta) AS r FROM ledger GROUP BY org_id) s "
						 "ON s.org_id = h.org_id WHERE coalesce(h.balance, 0) <> coalesce(s.b, 0) OR "
						 "coalesce(h.reserved, 0) <> coalesce(s.r, 0) "
						 "OR h.org_id IS NULL" },
	{ "every settled run has one reserve and one charge, and charge + release = reserve",
			"SELECT format('%s: %s reserve, %s charge, %s left', s.run_id, s.n_reserve, s.n_charge, s.left_over) FROM ("
			"SELECT run_id, count(*) FILTER (WHERE kind = 'reserve') AS n_reserve, count(*) FILTER (WHERE kind = "
			"'charge') AS n_charge, "
			"count(*) FILTER (WHERE kind = 'release') AS n_release, sum(reserved_delta) AS left_over, "
			"sum(-balance_delta) FILTER (WHERE kind = 'charge') AS charge, sum(reserved_delta) FILTER (WHERE kind = "
			"'reserve') AS cap "
			"FROM ledger WHERE run_id IS NOT NULL GROUP BY run_id) s LEFT JOIN run_live v ON v.run_id = s.run_id WHERE "
			"s.n_reserve <> 1 "
			"OR (v.run_id IS NULL AND (s.n_charge <> 1 OR s.left_over <> 0 OR s.n_release > 1 OR s.charge < 0 OR "
			"s.charge > s.cap)) "
			"OR (v.run_id IS NOT NULL AND (s.n_charge <> 0 OR s.n_release <> 0 OR s.cap <> v.cap_micros))" },
	{ "every settled run was charged what it cost",
			"SELECT format('%s: costs %s, charged %s', r.run_id, r.cost[1] + r.cost[2] + r.cost[3] + r.cost[4], "
			"l.charge) FROM runs r "
			"LEFT JOIN (SELECT run_id, sum(-balance_delta) AS charge FROM ledger WHERE kind = 'charge' GROUP BY "
			"run_id) l ON l.run_id = r.run_id "
			"WHERE r.settled_at_ms IS NOT NULL AND (l.charge IS DISTINCT FROM r.cost[1] + r.cost[2] + r.cost[3] + "
			"r.cost[4] "
			"OR r.released_micros <> r.cap_micros - l.charge OR l.charge > r.cap_micros)" },
	{ "every row has the shape of its kind",
			"SELECT format('row %s: %s', id, kind) FROM ledger WHERE NOT coalesce(CASE kind "
			"WHEN 'deposit' THEN balance_delta > 0 AND reserved_delta = 0 AND run_id IS NULL "
			"WHEN 'adjust' THEN balance_delta <> 0 AND reserved_delta = 0 AND run_id IS NULL "
			"WHEN 'reserve' THEN balance_delta = 0 AND reserved_delta >= 0 AND run_id IS NOT NULL "
			"WHEN 'charge' THEN balance_delta <= 0 AND reserved_delta = balance_delta AND run_id IS NOT NULL "
			"WHEN 'release' THEN balance_delta = 0 AND reserved_delta <= 0 AND run_id IS NOT NULL ELSE false END, "
			"false)" },
};

static const struct check since_checks[] = {
	{ "every wallet is its checkpoint and the rows since",
			"SELECT format('%s: balance %s, rows say %s; reserved %s, rows say %s', h.org_id, h.balance, "
			"coalesce(c.balance, 0) + coalesce(s.b, 0), "
			"h.reserved, coalesce(c.reserved, 0) + coalesce(s.r, 0)) FROM org_hot h LEFT JOIN ledger_checkpoint_orgs c "
			"ON c.org_id = h.org_id "
			"LEFT JOIN (SELECT l.org_id, sum(l.balance_delta) AS b, sum(l.reserved_delta) AS r FROM ledger l "
			"WHERE " SINCE " GROUP BY l.org_id) s "
			"ON s.org_id = h.org_id WHERE h.balance <> coalesce(c.balance, 0) + coalesce(s.b, 0) "
			"OR h.reserved <> coalesce(c.reserved, 0) + coalesce(s.r, 0)" },
	{ "every run settled since has one charge, and charge + release = reserve",
			"SELECT format('%s: %s charge, %s of %s released and charged', s.run_id, s.n_charge, s.gone, r.cap_micros) "
			"FROM ("
			"SELECT l.run_id, count(*) FILTER (WHERE l.kind = 'charge') AS n_charge, -sum(l.reserved_delta) AS gone, "
			"sum(-l.balance_delta) AS charge "
			"FROM ledger l WHERE " SINCE
			" AND l.kind IN ('charge', 'release') GROUP BY l.run_id) s LEFT JOIN runs r ON r.run_id = s.run_id "
			"WHERE r.run_id IS NULL OR s.n_charge <> 1 OR s.gone <> r.cap_micros OR s.charge <> r.cost[1] + r.cost[2] "
			"+ r.cost[3] + r.cost[4] "
			"OR r.settled_at_ms IS NULL" },
};

static const struct check always_checks[] = {
	{ "open reservations are the caps of the runs that are not settled",
			"SELECT format('%s: reserved %s, open runs hold %s', h.org_id, h.reserved, coalesce(s.cap, 0)) FROM "
			"org_hot h "
			"LEFT JOIN (SELECT org_id, sum(cap_micros) AS cap FROM run_live GROUP BY org_id) s ON s.org_id = h.org_id "
			"WHERE h.reserved <> coalesce(s.cap, 0)" },
	{ "0 <= reserved <= balance", "SELECT format('%s: balance %s, reserved %s', org_id, balance, reserved) FROM org_hot "
				      "WHERE reserved < 0 OR (NOT unlimited AND reserved > balance)" },
	{ "places and open runs are counted right",
			"SELECT format('%s: %s open, counted %s; %s places, counted %s', h.org_id, coalesce(s.n, 0), h.open, "
			"coalesce(s.places, 0), h.admitted) "
			"FROM org_hot h LEFT JOIN (SELECT l.org_id, count(*) AS n, count(*) FILTER (WHERE l.admitted AND "
			"coalesce(q.ready, true)) AS places "
			"FROM run_live l LEFT JOIN queue q ON q.run_id = l.run_id GROUP BY l.org_id) s ON s.org_id = h.org_id "
			"WHERE h.open <> coalesce(s.n, 0) OR h.admitted <> coalesce(s.places, 0)" },
};

/* Sums of what is complete now, from the ledger itself. */
static const char checkpoint_full[] =
		"WITH h AS (SELECT pg_snapshot_xmin(pg_current_snapshot()) AS horizon), gone AS (DELETE FROM "
		"ledger_checkpoint_orgs) "
		"INSERT INTO ledger_checkpoint (horizon, system_id, at_ms) SELECT horizon, '', eph_now_ms() FROM h "
		"ON CONFLICT (one) DO UPDATE SET horizon = EXCLUDED.horizon, at_ms = EXCLUDED.at_ms";
static const char checkpoint_full_orgs[] = "INSERT INTO ledger_checkpoint_orgs (org_id, balance, reserved) SELECT org_id, "
					   "sum(balance_delta), sum(reserved_delta) FROM ledger "
					   "WHERE xid < (SELECT horizon FROM ledger_checkpoint) GROUP BY org_id";
/* The last one and what became complete since. */
static const char checkpoint_since_orgs[] =
		"INSERT INTO ledger_checkpoint_orgs AS c (org_id, balance, reserved) SELECT l.org_id, sum(l.balance_delta), "
		"sum(l.reserved_delta) "
		"FROM ledger l WHERE " SINCE " AND l.xid < pg_snapshot_xmin(pg_current_snapshot()) GROUP BY l.org_id "
		"ON CONFLICT (org_id) DO UPDATE SET balance = c.balance + EXCLUDED.balance, reserved = c.reserved + "
		"EXCLUDED.reserved";
static const char checkpoint_since[] =
		"UPDATE ledger_checkpoint SET horizon = pg_snapshot_xmin(pg_current_snapshot()), at_ms = eph_now_ms()";

#define SHOWN_MAX 10 /* broken rows printed for a check */

static int run_check(PGconn *db, const struct check *c, FILE *out, bool *holds, struct err *e)
{
	PGresult *r = sync_query(db, c->name, c->sql, 0, NULL, e);

	if (!r)
		return -1;
	fprintf(out, "%s %s\n", PQntuples(r) == 0 ? "ok" : "FAIL", c->name);
	for (int i = 0; i < PQntuples(r) && i < SHOWN_MAX; i++)
		fprintf(out, "     %s\n", PQgetvalue(r, i, 0));
	if (PQntuples(r) > SHOWN_MAX)
		fprintf(out, "     and %d more\n", PQntuples(r) - SHOWN_MAX);
	*holds = *holds && PQntuples(r) == 0;
	PQclear(r);
	return 0;
}

static int run_checks(PGconn *db, const struct check *checks, size_t n, FILE *out, bool *holds, struct err *e)
{
	for (size_t i = 0; i < n; i++) {
		if (run_check(db, &checks[i], out, holds, e) != 0)
			return -1;
	}
	return 0;
}

/* Is there a checkpoint of this cluster to go on from? One that is ahead of us came with a copy from elsewhere. */
static int usable_checkpoint(PGconn *db, bool *yes, struct err *e)
{
	PGresult *r = sync_query(db, "read the checkpoint",
			"SELECT 1 FROM ledger_checkpoint WHERE horizon <= pg_snapshot_xmin(pg_current_snapshot())", 0, NULL, e);

	if (!r)
		return -1;
	*yes = PQntuples(r) == 1;
	PQclear(r);
	return 0;
}

static int check(PGconn *db, bool full, FILE *out, bool *holds, struct err *e)
{
	bool usable = false;

	if (sync_exec(db, "begin", "BEGIN ISOLATION LEVEL REPEATABLE READ", e) != 0 ||
			(!full && usable_checkpoint(db, &usable, e) != 0))
		return -1;
	full = !usable;
	fprintf(out, "%s\n", full ? "from the first row" : "since the last checkpoint");
	if (full) {
		if (run_checks(db, full_checks, sizeof(full_checks) / sizeof(full_checks[0]), out, holds, e) != 0)
			return -1;
	} else if (run_checks(db, since_checks, sizeof(since_checks) / sizeof(since_checks[0]), out, holds, e) != 0) {
		return -1;
	}
	if (run_checks(db, always_checks, sizeof(always_checks) / sizeof(always_checks[0]), out, holds, e) != 0)
		return -1;
	if (!*holds)
		return sync_exec(db, "rollback", "ROLLBACK", e);
	if (sync_exec(db, "checkpoint", full ? checkpoint_full : checkpoint_since_orgs, e) != 0 ||
			sync_exec(db, "checkpoint", full ? checkpoint_full_orgs : checkpoint_since, e) != 0)
		return -1;
	return sync_exec(db, "commit", "COMMIT", e);
}

int store_check_ledger(const char *conninfo, bool full, FILE *out, struct err *e)
{
	PGconn *db = sync_open(conninfo, e);
	bool holds = true;
	int result;

	if (!db)
		return -1;
	result = check(db, full, out, &holds, e);
	PQfinish(db);
	/* Another check made its checkpoint meanwhile: ours is not needed. */
	if (result != 0 && e->code == ERR_CONFLICT)
		result = 0;
	if (result != 0)
		return -1;
	fprintf(out, "%s\n", holds ? "the ledger holds" : "the ledger does NOT hold");
	return holds ? 0 : 1;
}
