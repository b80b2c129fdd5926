/*
 * `controld check-ledger`: proves the ledger's invariants in one snapshot and prints a line for each. Everything here blocks;
 * called by main.c without a loop.
 *
 * A checkpoint holds, for each organization, the sums of all rows whose transactions had ended when it was made (xid below the
 * oldest one that was running then: such rows are complete, whatever order commits came in), and the digest of the rows that
 * became complete since the one before: a piece, chained to the piece before it. Either check makes a new checkpoint when all is
 * well.
 *
 * What each proves. Incremental: everything since the last checkpoint, and that the pieces it read again (those that were not
 * looked at for longest, up to PIECES_AGAIN and ROWS_AGAIN) are as they were; so a changed old row is found after as many checks as
 * there are pieces, not at once. --full: everything from the first row, and every piece. Whoever may write all tables can also
 * write new digests: the last line's chain, noted elsewhere, is what such a one cannot make to agree. A database restored elsewhere
 * begins a new chain.
 */
#include "store_internal.h"
#include "sync.h"

#include "common/text.h"

struct check {
	const char *name; /* what is proved */
	const char *sql;  /* rows that break it: one text column saying which */
};

#define PIECES_AGAIN "8"
#define ROWS_AGAIN "200000"

/* `since` is what the incremental check reads: everything that was not complete at the checkpoint. By transaction, not by time: a
 * clock may go back. */
#define SINCE "l.xid >= (SELECT horizon FROM ledger_checkpoint)"

/* Records of runs go after their retention, the ledger stays: a run without a record is only wrong where records of its day are
 * kept. */
#define RECORD_KEPT(run)                                                                                                           \
	"to_regclass('runs_' || to_char(timestamp 'epoch' + eph_run_ms(" run                                                       \
	") * interval '1 millisecond', 'YYYYMMDD')) IS NOT NULL"

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
	{ "every piece is as it was when it was whole", "SELECT format('piece %s: %s rows then, %s now, or some of them changed', "
							"p.n, p.rows, d.rows) FROM ledger_pieces p "
							"CROSS JOIN LATERAL eph_ledger_digest(p.from_xid, p.to_xid) d WHERE d.rows "
							"<> p.rows OR d.digest <> p.digest" },
	{ "the pieces are a chain", "SELECT format('piece %s does not follow from the one before', p.n) FROM (SELECT n, digest, "
				    "chain, from_xid, rows, "
				    "lag(chain) OVER (ORDER BY n) AS before, lag(to_xid) OVER (ORDER BY n) AS ended, row_number() "
				    "OVER (ORDER BY n) AS at "
				    "FROM ledger_pieces) p WHERE p.at <> p.n OR p.from_xid <> coalesce(p.ended, '0'::xid8) "
				    "OR p.chain <> sha256(coalesce(p.before, ''::bytea) || p.digest || int8send(p.rows))" },
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
	/* A reserve is dated by the millisecond that its run's id begins with. */
	{ "every run settled since has one charge, and charge + release = reserve",
			"SELECT format('%s: %s charge, %s of %s released and charged', s.run_id, s.n_charge, s.gone, res.cap) FROM "
			"("
			"SELECT l.run_id, count(*) FILTER (WHERE l.kind = 'charge') AS n_charge, -sum(l.reserved_delta) AS gone, "
			"sum(-l.balance_delta) AS charge FROM ledger l WHERE " SINCE
			" AND l.kind IN ('charge', 'release') GROUP BY l.run_id) s "
			"LEFT JOIN LATERAL (SELECT sum(v.reserved_delta) AS cap, count(*) AS n FROM ledger v "
			"WHERE v.at_ms = eph_run_ms(s.run_id) AND v.run_id = s.run_id AND v.kind = 'reserve') res ON true "
			"LEFT JOIN runs r ON r.run_id = s.run_id "
			"WHERE s.n_charge <> 1 OR res.n <> 1 OR s.gone <> res.cap OR s.charge > res.cap "
			"OR (r.run_id IS NULL AND " RECORD_KEPT(
					"s.run_id") ") "
						    "OR (r.run_id IS NOT NULL AND (r.settled_at_ms IS NULL OR r.cap_micros <> "
						    "res.cap "
						    "OR s.charge <> r.cost[1] + r.cost[2] + r.cost[3] + r.cost[4]))" },
	{ "the pieces read again are as they were",
			"WITH chosen AS MATERIALIZED (SELECT p.* FROM (SELECT n, from_xid, to_xid, rows, digest, "
			"sum(rows) OVER (ORDER BY looked_at_ms, n) - rows AS before FROM (SELECT * FROM ledger_pieces "
			"ORDER BY looked_at_ms, n LIMIT " PIECES_AGAIN ") q) p WHERE p.before < " ROWS_AGAIN ") "
			"SELECT format('piece %s: %s rows then, %s now, or some of them changed', chosen.n, chosen.rows, d.rows) "
			"FROM "
			"chosen "
			"CROSS JOIN LATERAL eph_ledger_digest(chosen.from_xid, chosen.to_xid) d "
			"WHERE d.rows <> chosen.rows OR d.digest <> chosen.digest" },
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
static const char *const checkpoint_full[] = {
	"DELETE FROM ledger_checkpoint_orgs",
	"INSERT INTO ledger_checkpoint (horizon, system_id, at_ms) VALUES (pg_snapshot_xmin(pg_current_snapshot()), '', "
	"eph_now_ms()) "
	"ON CONFLICT (one) DO UPDATE SET horizon = EXCLUDED.horizon, at_ms = EXCLUDED.at_ms",
	"INSERT INTO ledger_checkpoint_orgs (org_id, balance, reserved) SELECT org_id, sum(balance_delta), sum(reserved_delta) "
	"FROM ledger WHERE xid < (SELECT horizon FROM ledger_checkpoint) GROUP BY org_id",
	NULL,
};
/* The last one and what became complete since. */
static const char *const checkpoint_since[] = {
	"INSERT INTO ledger_checkpoint_orgs AS c (org_id, balance, reserved) SELECT l.org_id, sum(l.balance_delta), "
	"sum(l.reserved_delta) FROM ledger l WHERE " SINCE " AND l.xid < pg_snapshot_xmin(pg_current_snapshot()) GROUP BY l.org_id "
	"ON CONFLICT (org_id) DO UPDATE SET balance = c.balance + EXCLUDED.balance, reserved = c.reserved + EXCLUDED.reserved",
	"UPDATE ledger_checkpoint SET horizon = pg_snapshot_xmin(pg_current_snapshot()), at_ms = eph_now_ms()",
	"UPDATE ledger_pieces p SET looked_at_ms = eph_now_ms() FROM (SELECT n FROM (SELECT n, sum(rows) OVER (ORDER BY "
	"looked_at_ms, n) "
	"- rows AS before FROM (SELECT * FROM ledger_pieces ORDER BY looked_at_ms, n LIMIT " PIECES_AGAIN ") q) b "
	"WHERE b.before < " ROWS_AGAIN ") chosen WHERE p.n = chosen.n",
	NULL,
};
/* What became complete since the last piece is the next one. */
static const char *const next_piece[] = {
	"INSERT INTO ledger_pieces (n, from_xid, to_xid, rows, digest, chain, looked_at_ms) SELECT coalesce(last.n, 0) + 1, at.x, "
	"c.horizon, "
	"d.rows, d.digest, sha256(coalesce(last.chain, ''::bytea) || d.digest || int8send(d.rows)), eph_now_ms() "
	"FROM ledger_checkpoint c LEFT JOIN LATERAL (SELECT * FROM ledger_pieces ORDER BY n DESC LIMIT 1) last ON true "
	"CROSS JOIN LATERAL (SELECT coalesce(last.to_xid, '0'::xid8) AS x) at "
	"CROSS JOIN LATERAL eph_ledger_digest(at.x, c.horizon) d WHERE d.rows > 0",
	NULL,
};

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
	/* Its transactions are numbered anew: a chain over the old numbers says nothing here. */
	return *yes ? 0
		    : sync_exec(db, "begin a chain",
				      "DELETE FROM ledger_pieces WHERE EXISTS (SELECT 1 FROM ledger_pieces WHERE to_xid > "
				      "pg_snapshot_xmin(pg_current_snapshot()))",
				      e);
}

static int exec_all(PGconn *db, const char *const *statements, struct err *e)
{
	for (; *statements; statements++) {
		if (sync_exec(db, "checkpoint", *statements, e) != 0)
			return -1;
	}
	return 0;
}

/* For whoever reads it: nothing here is wrong, and nobody is charged for it. */
static int say_more(PGconn *db, FILE *out, struct err *e)
{
	PGresult *r = sync_query(db, "what is known besides",
			"SELECT count(*), coalesce(sum(greatest(used_micros - charged_micros, 0)), 0), "
			"(SELECT format('%s %s', n, encode(chain, 'hex')) FROM ledger_pieces ORDER BY n DESC LIMIT 1) FROM "
			"late_reports",
			0, NULL, e);

	if (!r)
		return -1;
	fprintf(out, "note: %s runs were reported on by their hosts after they were fenced: %s micros used and charged to nobody\n",
			PQgetvalue(r, 0, 0), PQgetvalue(r, 0, 1));
	if (!PQgetisnull(r, 0, 2))
		fprintf(out, "note: the chain stands at piece %s\n", PQgetvalue(r, 0, 2));
	PQclear(r);
	return 0;
}

/* All was read and holds. Another check that made its checkpoint meanwhile leaves nothing to do. */
static int make_checkpoint(PGconn *db, bool full, FILE *out, struct err *e)
{
	if (exec_all(db, full ? checkpoint_full : checkpoint_since, e) == 0 && exec_all(db, next_piece, e) == 0 &&
			say_more(db, out, e) == 0 && sync_exec(db, "commit", "COMMIT", e) == 0)
		return 0;
	return e->code == ERR_CONFLICT ? 0 : -1;
}

static int check(PGconn *db, bool full, FILE *out, bool *holds, struct err *e)
{
	bool usable = false;

	if (sync_exec(db, "begin", "BEGIN ISOLATION LEVEL REPEATABLE READ", e) != 0 || usable_checkpoint(db, &usable, e) != 0)
		return -1;
	full = full || !usable;
	fprintf(out, "%s\n", full ? "from the first row" : "since the last checkpoint");
	if (full) {
		if (run_checks(db, full_checks, sizeof(full_checks) / sizeof(full_checks[0]), out, holds, e) != 0)
			return -1;
	} else if (run_checks(db, since_checks, sizeof(since_checks) / sizeof(since_checks[0]), out, holds, e) != 0) {
		return -1;
	}
	if (run_checks(db, always_checks, sizeof(always_checks) / sizeof(always_checks[0]), out, holds, e) != 0)
		return -1;
	return *holds ? make_checkpoint(db, full, out, e) : sync_exec(db, "rollback", "ROLLBACK", e);
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
	if (result != 0)
		return -1;
	fprintf(out, "%s\n", holds ? "the ledger holds" : "the ledger does NOT hold");
	return holds ? 0 : 1;
}
