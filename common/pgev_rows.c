/* Reading a result. Pure; valid only while the callback that got the rows runs. */
#include "pgev_internal.h"

#include "text.h"

#include <stdlib.h>
#include <string.h>

int pg_nrows(const struct pg_rows *r)
{
	return r ? PQntuples(r->res) : 0;
}

/* A row or column that is not there is our own mistake; it reads as NULL and does not end the process. */
static bool there(const struct pg_rows *r, int row, int col)
{
	return r && row >= 0 && row < PQntuples(r->res) && col >= 0 && col < PQnfields(r->res);
}

bool pg_is_null(const struct pg_rows *r, int row, int col)
{
	return !there(r, row, col) || PQgetisnull(r->res, row, col);
}

const char *pg_text(const struct pg_rows *r, int row, int col)
{
	return there(r, row, col) ? PQgetvalue(r->res, row, col) : "";
}

int64_t pg_i64(const struct pg_rows *r, int row, int col)
{
	int64_t v = 0;
	struct err ignored;

	if (text_i64(pg_text(r, row, col), INT64_MIN, INT64_MAX, &v, &ignored) != 0)
		return 0;
	return v;
}

bool pg_bool(const struct pg_rows *r, int row, int col)
{
	return pg_text(r, row, col)[0] == 't';
}

int64_t pg_affected(const struct pg_rows *r)
{
	int64_t v = 0;
	struct err ignored;

	if (!r || text_i64(PQcmdTuples(r->res), 0, INT64_MAX, &v, &ignored) != 0)
		return 0;
	return v;
}

uint8_t *pg_bytea(const struct pg_rows *r, int row, int col, size_t *len)
{
	const char *s = pg_text(r, row, col);
	size_t n = strlen(s);
	uint8_t *out;

	*len = 0;
	if (pg_is_null(r, row, col) || n < 2 || s[0] != '\\' || s[1] != 'x')
		return NULL;
	n = (n - 2) / 2;
	out = malloc(n + 1);
	if (!out)
		return NULL;
	if (!text_unhex(s + 2, out, n)) {
		free(out);
		return NULL;
	}
	out[n] = '\0';
	*len = n;
	return out;
}
