/* Writer of metrics texts (metrics.h). Pure. */
#include "metrics.h"

#include <inttypes.h>
#include <string.h>
#include <strings.h>

/* --- which of the two --------------------------------------------------------------------------------------------------------- */

struct range {
	const char *type, *version; /* "" = not said */
	size_t type_len, version_len;
	int q; /* thousandths; -1 = not a number */
};

static bool is(const char *p, size_t n, const char *word)
{
	return n == strlen(word) && strncasecmp(p, word, n) == 0;
}

/* A weight of 0 to 1 with up to three decimals, in thousandths; -1 for anything else. */
static int q_value(const char *p, size_t n)
{
	int value, scale = 100;

	if (n == 0 || n > 5 || (p[0] != '0' && p[0] != '1') || (n > 1 && p[1] != '.'))
		return -1;
	value = (p[0] - '0') * 1000;
	for (size_t i = 2; i < n; i++, scale /= 10) {
		if (p[i] < '0' || p[i] > '9')
			return -1;
		value += (p[i] - '0') * scale;
	}
	return value <= 1000 ? value : -1;
}

static void trim(const char **p, size_t *n)
{
	while (*n > 0 && (**p == ' ' || **p == '\t')) {
		(*p)++;
		(*n)--;
	}
	while (*n > 0 && ((*p)[*n - 1] == ' ' || (*p)[*n - 1] == '\t'))
		(*n)--;
}

static void take_parameter(struct range *r, const char *p, size_t n)
{
	const char *value = memchr(p, '=', n);
	size_t name_len, value_len;

	if (!value)
		return;
	name_len = (size_t)(value - p);
	value++;
	value_len = n - name_len - 1;
	trim(&p, &name_len);
	trim(&value, &value_len);
	if (value_len >= 2 && value[0] == '"' && value[value_len - 1] == '"') {
		value++;
		value_len -= 2;
	}
	if (is(p, name_len, "q"))
		r->q = q_value(value, value_len);
	else if (is(p, name_len, "version")) {
		r->version = value;
		r->version_len = value_len;
	}
}

/* One media range up to the next comma; *p moves beyond it. */
static struct range next_range(const char **p)
{
	size_t whole = strcspn(*p, ","), n = strcspn(*p, ",;");
	struct range r = { .type = *p, .type_len = n, .version = "", .q = 1000 };
	const char *end = *p + whole, *at = *p + n;

	trim(&r.type, &r.type_len);
	while (at < end) {
		at++; /* the semicolon */
		n = strcspn(at, ",;");
		{
			const char *param = at;
			size_t len = n;

			trim(&param, &len);
			take_parameter(&r, param, len);
		}
		at += n;
	}
	*p = *end == ',' ? end + 1 : end;
	return r;
}

static bool version_is(const struct range *r, const char *a, const char *b)
{
	return r->version_len == 0 || is(r->version, r->version_len, a) || is(r->version, r->version_len, b);
}

enum metrics_format metrics_accepted(const char *accept)
{
	int open = 0, plain = -1, any_text = -1, any = -1, text;

	while (accept && *accept) {
		struct range r = next_range(&accept);

		if (r.q < 0)
			continue;
		if (is(r.type, r.type_len, "application/openmetrics-text") && version_is(&r, "1.0.0", "0.0.1"))
			open = r.q > open ? r.q : open;
		else if (is(r.type, r.type_len, "text/plain") && version_is(&r, "0.0.4", "0.0.4"))
			plain = r.q > plain ? r.q : plain;
		else if (is(r.type, r.type_len, "text/*"))
			any_text = r.q;
		else if (is(r.type, r.type_len, "*/*"))
			any = r.q;
	}
	text = plain >= 0 ? plain : any_text >= 0 ? any_text : any;
	return open > 0 && open >= text ? METRICS_OPENMETRICS : METRICS_TEXT;
}

const char *metrics_content_type(enum metrics_format format)
{
	return format == METRICS_OPENMETRICS ? "application/openmetrics-text; version=1.0.0; charset=utf-8"
					     : "text/plain; version=0.0.4; charset=utf-8";
}

/* --- writing ------------------------------------------------------------------------------------------------------------------ */

void metrics_init(struct metrics *m, struct buf *out, enum metrics_format format)
{
	*m = (struct metrics){ .out = out, .format = format };
}

static const char *suffix(const struct metrics_family *f)
{
	return f->type == METRICS_COUNTER ? "_total" : f->type == METRICS_INFO ? "_info" : "";
}

static const char *type_name(const struct metrics *m)
{
	switch (m->family->type) {
	case METRICS_COUNTER: return "counter";
	case METRICS_HISTOGRAM: return "histogram";
	case METRICS_INFO: return m->format == METRICS_OPENMETRICS ? "info" : "gauge";
	case METRICS_GAUGE: break;
	}
	return "gauge";
}

/* Both formats escape backslash and newline; a label's value, and OpenMetrics' help, the quote as well. */
static void put_escaped(struct metrics *m, const char *text, bool quote)
{
	for (const char *p = text; *p; p++) {
		if (*p == '\\')
			buf_add_str(m->out, "\\\\");
		else if (*p == '\n')
			buf_add_str(m->out, "\\n");
		else if (*p == '"' && quote)
			buf_add_str(m->out, "\\\"");
		else
			buf_add_char(m->out, *p);
	}
}

/* In the older format a family is named as its samples are. */
void metrics_begin(struct metrics *m, const struct metrics_family *family)
{
	const bool open = m->format == METRICS_OPENMETRICS;
	const char *more = open ? "" : suffix(family);

	m->family = family;
	buf_printf(m->out, "# HELP %s%s ", family->name, more);
	put_escaped(m, family->help, open);
	buf_printf(m->out, "\n# TYPE %s%s %s\n", family->name, more, type_name(m));
	if (open && family->unit)
		buf_printf(m->out, "# UNIT %s %s\n", family->name, family->unit);
}

static void put_label(struct metrics *m, bool first, const char *name, const char *value)
{
	buf_printf(m->out, "%s%s=\"", first ? "{" : ",", name);
	put_escaped(m, value, true);
	buf_add_char(m->out, '"');
}

/* value / 10^decimals, without more digits than it needs. `point`: a whole number has ".0", as OpenMetrics wants bounds. */
static void put_number(struct metrics *m, int64_t value, unsigned decimals, bool point)
{
	uint64_t magnitude = value < 0 ? -(uint64_t)value : (uint64_t)value, unit = 1, rest;

	for (unsigned i = 0; i < decimals; i++)
		unit *= 10;
	rest = magnitude % unit;
	while (decimals > 0 && rest % 10 == 0) {
		rest /= 10;
		decimals--;
	}
	buf_printf(m->out, "%s%" PRIu64, value < 0 ? "-" : "", magnitude / unit);
	if (decimals > 0)
		buf_printf(m->out, ".%0*" PRIu64, (int)decimals, rest);
	else if (point)
		buf_add_str(m->out, ".0");
}

static void put_name(struct metrics *m, const char *more, const struct metrics_label *labels, size_t n)
{
	buf_printf(m->out, "%s%s", m->family->name, more);
	for (size_t i = 0; i < n; i++)
		put_label(m, i == 0, labels[i].name, labels[i].value);
}

void metrics_value(struct metrics *m, const struct metrics_label *labels, size_t n, int64_t value, unsigned decimals)
{
	put_name(m, suffix(m->family), labels, n);
	buf_add_str(m->out, n > 0 ? "} " : " ");
	put_number(m, value, decimals, false);
	buf_add_char(m->out, '\n');
}

void metrics_plain(struct metrics *m, int64_t value, unsigned decimals)
{
	metrics_value(m, NULL, 0, value, decimals);
}

void metrics_each(struct metrics *m, const char *label, const char *const *names, size_t n, const uint64_t *values)
{
	for (size_t i = 0; i < n; i++) {
		struct metrics_label l = { .name = label, .value = names[i] };

		metrics_value(m, &l, 1, (int64_t)values[i], 0);
	}
}

void metrics_each2(struct metrics *m, const char *a, const char *const *a_names, size_t an, const char *b,
		const char *const *b_names, size_t bn, const uint64_t *values)
{
	for (size_t i = 0; i < an; i++)
		for (size_t j = 0; j < bn; j++) {
			struct metrics_label l[] = { { .name = a, .value = a_names[i] }, { .name = b, .value = b_names[j] } };

			metrics_value(m, l, 2, (int64_t)values[i * bn + j], 0);
		}
}

static void put_bucket(struct metrics *m, const struct metrics_label *labels, size_t n, const uint32_t *bound_ms, uint64_t count)
{
	put_name(m, "_bucket", labels, n);
	buf_printf(m->out, "%sle=\"", n > 0 ? "," : "{");
	if (bound_ms)
		put_number(m, *bound_ms, 3, true);
	else
		buf_add_str(m->out, "+Inf");
	buf_printf(m->out, "\"} %" PRIu64 "\n", count);
}

void metrics_times(struct metrics *m, const struct metrics_label *labels, size_t n, const uint32_t *bounds_ms, size_t bounds,
		const uint64_t *bucket, uint64_t sum_ms)
{
	uint64_t count = 0;

	for (size_t i = 0; i <= bounds; i++) {
		count += bucket[i];
		put_bucket(m, labels, n, i < bounds ? &bounds_ms[i] : NULL, count);
	}
	put_name(m, "_sum", labels, n);
	buf_add_str(m->out, n > 0 ? "} " : " ");
	put_number(m, (int64_t)sum_ms, 3, false);
	buf_add_char(m->out, '\n');
	put_name(m, "_count", labels, n);
	buf_printf(m->out, "%s%" PRIu64 "\n", n > 0 ? "} " : " ", count);
}

void metrics_end(struct metrics *m)
{
	if (m->format == METRICS_OPENMETRICS)
		buf_add_str(m->out, "# EOF\n");
}

void metrics_took(const uint32_t *bounds_ms, size_t bounds, uint64_t *bucket, uint64_t *sum_ms, int64_t ms)
{
	size_t i = 0;

	if (ms < 0)
		ms = 0;
	while (i < bounds && ms > bounds_ms[i])
		i++;
	bucket[i]++;
	*sum_ms += (uint64_t)ms;
}
