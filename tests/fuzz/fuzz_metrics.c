/* Metrics: the Accept header of whoever scrapes, texts in labels and help, and what a broker says that it counted. */
/* reads: common/metrics.c noded/keeper/stats.c */
/* reached: 55 % of lines, 45 % of branches; the rest writes histograms and tables */
/* link: noded_core */
#include "fuzz.h"

#include "common/metrics.h"
#include "noded/keeper/stats.h"

#include <strings.h>

static bool names_openmetrics(const char *s)
{
	for (; *s; s++)
		if (strncasecmp(s, "application/openmetrics-text", 28) == 0)
			return true;
	return false;
}

/* Takes the escapes out of a label's value up to its closing quote; what comes after it. */
static const char *unescape(const char *p, struct buf *out)
{
	for (; *p != '"'; p++) {
		must(*p != '\0' && *p != '\n');
		if (*p == '\\') {
			p++;
			must(*p == '\\' || *p == '"' || *p == 'n');
			buf_add_char(out, *p == 'n' ? '\n' : *p);
		} else {
			buf_add_char(out, *p);
		}
	}
	return p + 1;
}

/* Whatever a text holds: one line a sample, and what is read back is what was written. */
static void text_in_labels(const char *text, enum metrics_format format)
{
	const struct metrics_family family = { "f", METRICS_GAUGE, NULL, text };
	const struct metrics_label labels[] = { { "a", text }, { "b", text } };
	struct buf out = BUF_INIT(1 << 20), back = BUF_INIT(1 << 20);
	struct metrics m;
	const char *p;

	metrics_init(&m, &out, format);
	metrics_begin(&m, &family);
	metrics_value(&m, labels, 2, -5, 1);
	metrics_end(&m);
	p = buf_cstr(&out);
	must(p && strncmp(p, "# HELP f ", 9) == 0);
	p = strchr(p, '\n');
	must(p && strncmp(p, "\n# TYPE f gauge\nf{a=\"", 21) == 0);
	p = unescape(p + 21, &back);
	must(strcmp(buf_cstr(&back), text) == 0 && strncmp(p, ",b=\"", 4) == 0);
	buf_reset(&back);
	p = unescape(p + 4, &back);
	must(strcmp(buf_cstr(&back), text) == 0 && strncmp(p, "} -0.5\n", 7) == 0);
	must(strcmp(p + 7, format == METRICS_OPENMETRICS ? "# EOF\n" : "") == 0);
	buf_free(&out);
	buf_free(&back);
}

static void of_a_broker(const uint8_t *data, size_t n)
{
	struct stats_broker sum = { .over_hold = 1 }, before = sum, added = { .over_hold = 0 };
	struct buf again = BUF_INIT(65536);
	struct err e;

	if (stats_broker_add(data, n, &sum, &e) != 0) {
		must(memcmp(&sum, &before, sizeof(sum)) == 0);
		return;
	}
	must(stats_broker_add(data, n, &added, &e) == 0);
	stats_broker_encode(&added, &again);
	must(again.len == n && memcmp(again.data, data, n) == 0);
	buf_free(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	char *text = malloc(n + 1);

	must(text != NULL);
	for (size_t i = 0; i < n; i++)
		text[i] = (char)(data[i] ? data[i] : '0');
	text[n] = '\0';
	if (metrics_accepted(text) == METRICS_OPENMETRICS)
		must(names_openmetrics(text));
	text_in_labels(text, METRICS_TEXT);
	text_in_labels(text, METRICS_OPENMETRICS);
	of_a_broker(data, n);
	free(text);
	return 0;
}
