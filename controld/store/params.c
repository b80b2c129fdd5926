/* Parameters, array literals and columns: the small change of every statement. Pure. Called by all of store/ on the loop's thread.
 */
#include "store_internal.h"

#include "common/log.h"
#include "common/text.h"

#include <inttypes.h>

static struct pg_param *params_next(struct params *p)
{
	check_abort(p->n < PARAMS_MAX);
	return &p->p[p->n++];
}

void params_text(struct params *p, const char *s)
{
	*params_next(p) = (struct pg_param){ s, -1 };
}

void params_i64(struct params *p, int64_t v)
{
	struct pg_param *to = params_next(p);
	char *number = p->number[p->n - 1];

	if (!text_fmt(number, sizeof(p->number[0]), "%" PRId64, v))
		number[0] = '\0';
	*to = (struct pg_param){ number, -1 };
}

void params_i64_or_null(struct params *p, int64_t v, int64_t null_value)
{
	if (v == null_value)
		params_text(p, NULL);
	else
		params_i64(p, v);
}

void params_bool(struct params *p, bool v)
{
	params_text(p, v ? "t" : "f");
}

void params_bool_or_null(struct params *p, int v)
{
	params_text(p, v < 0 ? NULL : v ? "t" : "f");
}

void params_bytes(struct params *p, const void *bytes, size_t n)
{
	*params_next(p) = bytes ? (struct pg_param)PG_BYTES(bytes, n) : (struct pg_param){ NULL, -1 };
}

void array_begin(struct buf *b)
{
	buf_add_char(b, '{');
}

static void array_comma(struct buf *b)
{
	if (b->len > 0 && b->data[b->len - 1] != '{')
		buf_add_char(b, ',');
}

void array_text(struct buf *b, const char *s)
{
	array_comma(b);
	if (*s == '\0')
		b->failed = true;
	for (const char *c = s; *c; c++) {
		bool plain = (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || (*c >= '0' && *c <= '9') || *c == '_' ||
			     *c == '.' || *c == '-';

		if (!plain)
			b->failed = true;
	}
	buf_add_str(b, s);
}

void array_i64(struct buf *b, int64_t v)
{
	array_comma(b);
	buf_printf(b, "%" PRId64, v);
}

void array_end(struct buf *b)
{
	buf_add_char(b, '}');
}

bool array_read_i64(const char *s, int64_t *out, size_t n)
{
	struct err ignored;

	if (*s++ != '{')
		return false;
	for (size_t i = 0; i < n; i++) {
		char number[24];
		size_t len = strcspn(s, ",}");

		if (len == 0 || len >= sizeof(number))
			return false;
		memcpy(number, s, len);
		number[len] = '\0';
		if (text_i64(number, INT64_MIN, INT64_MAX, &out[i], &ignored) != 0 || s[len] != (i + 1 == n ? '}' : ','))
			return false;
		s += len + 1;
	}
	return *s == '\0';
}

void col_text(const struct pg_rows *r, int row, int col, char *out, size_t size)
{
	if (!text_copy(out, size, pg_text(r, row, col)))
		log_warn("a column does not fit col=%d size=%zu", col, size);
}

bool col_bytes(const struct pg_rows *r, int row, int col, uint8_t *out, size_t n)
{
	size_t len = 0;
	uint8_t *bytes = pg_bytea(r, row, col, &len);
	bool fits = bytes && len == n;

	if (fits)
		memcpy(out, bytes, n);
	else
		memset(out, 0, n);
	free(bytes);
	return fits;
}
