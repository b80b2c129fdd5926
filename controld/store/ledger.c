/* Money that an operator puts in or takes out: a ledger row and the wallet, in one transaction. Called by api on the loop's thread;
 * does not block. Reservations, charges and releases are run_create.c's and settle.c's. */
#include "store_internal.h"

static const struct pg_stmt stmt_credit = {
	.name = "credit",
	.sql = "SELECT result, balance, reserved FROM eph_credit($1, $2, $3, $4, $5, $6)",
	.nparams = 6,
};

static void on_credit(void *arg, const struct pg_rows *rows, const char *sqlstate, const struct err *e)
{
	static const struct {
		const char *text;
		enum store_credit_result result;
	} table[] = {
		{ "done", STORE_CREDIT_DONE },
		{ "replayed", STORE_CREDIT_REPLAYED },
		{ "mismatch", STORE_CREDIT_MISMATCH },
		{ "not_found", STORE_CREDIT_NOT_FOUND },
		{ "limit", STORE_CREDIT_LIMIT },
	};
	struct call *c = arg;
	struct store_credit out = { .result = STORE_CREDIT_LIMIT };

	(void)sqlstate;
	if (e) {
		c->cb.credit(c->arg, NULL, call_error(e));
		free(c);
		return;
	}
	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		if (strcmp(pg_text(rows, 0, 0), table[i].text) == 0)
			out.result = table[i].result;
	}
	out.balance_micros = pg_i64(rows, 0, 1);
	out.reserved_micros = pg_i64(rows, 0, 2);
	c->cb.credit(c->arg, &out, NULL);
	free(c);
}

int store_org_credit(struct store *s, const char *org_id, int64_t amount_micros, const char *note, const char *idempotency_key,
		const uint8_t body_hash[32], store_credit_cb cb, void *arg, struct err *e)
{
	struct call *c;
	struct params p = { .n = 0 };

	if (amount_micros > PRICE_MICROS_MAX || amount_micros < -PRICE_MICROS_MAX)
		return err_set(e, ERR_LIMIT, "an amount is at most a billion dollars");
	c = call_new(s, arg, e);
	if (!c)
		return -1;
	c->cb.credit = cb;
	params_text(&p, org_id);
	params_i64(&p, amount_micros);
	params_text(&p, note ? note : "");
	params_text(&p, idempotency_key);
	params_bytes(&p, idempotency_key ? body_hash : NULL, 32);
	params_i64(&p, s->opt.idempotency_ms);
	return call_exec(c, s->money, &stmt_credit, &p, on_credit, e);
}
