/*
 * Metrics as text: Prometheus 0.0.4 and OpenMetrics 1.0. A daemon keeps its figures in structs of its own and has a table of
 * families; when it is scraped it walks the table and writes the samples with the calls below. Nothing is registered, nothing
 * is allocated when something is counted, and what a label may say is an array of names, so that its values are bounded by
 * construction. Not thread-safe; never blocks.
 */
#ifndef EPH_METRICS_H
#define EPH_METRICS_H

#include "buf.h"

#include <stdbool.h>
#include <stdint.h>

enum metrics_format { METRICS_TEXT, METRICS_OPENMETRICS };
enum metrics_type { METRICS_COUNTER, METRICS_GAUGE, METRICS_HISTOGRAM, METRICS_INFO };

struct metrics_family {
	const char *name; /* with the unit at its end, without _total or _info: those are the format's */
	enum metrics_type type;
	const char *unit; /* "seconds", "bytes"; NULL = none. A histogram's is always seconds */
	const char *help; /* one sentence, for the text and the page of metrics */
};

struct metrics_label {
	const char *name;
	const char *value; /* clean UTF-8; escaped here */
};

struct metrics {
	struct buf *out;
	enum metrics_format format;
	const struct metrics_family *family; /* the one begun last */
};

/* What the client likes best of the two by its Accept header (NULL: none): OpenMetrics only where it is named. */
enum metrics_format metrics_accepted(const char *accept);
const char *metrics_content_type(enum metrics_format format);

void metrics_init(struct metrics *m, struct buf *out, enum metrics_format format);
/* A family begins: its samples follow, and no other family's until the next one. Each once. */
void metrics_begin(struct metrics *m, const struct metrics_family *family);
/* One sample: value / 10^decimals. Labels may be NULL when there are none. An info's value is 1. */
void metrics_value(struct metrics *m, const struct metrics_label *labels, size_t n, int64_t value, unsigned decimals);
/* A sample without labels. */
void metrics_plain(struct metrics *m, int64_t value, unsigned decimals);
/* One sample for each name of a label; with two labels, values[i * bn + j]. */
void metrics_each(struct metrics *m, const char *label, const char *const *names, size_t n, const uint64_t *values);
void metrics_each2(struct metrics *m, const char *a, const char *const *a_names, size_t an, const char *b,
		const char *const *b_names, size_t bn, const uint64_t *values);
/* A histogram: bucket[i] counts what is at most bounds_ms[i] and above the one before, bucket[n] the rest. */
void metrics_times(struct metrics *m, const struct metrics_label *labels, size_t n, const uint32_t *bounds_ms, size_t bounds,
		const uint64_t *bucket, uint64_t sum_ms);
void metrics_end(struct metrics *m); /* after the last family */

/* Counts one observation in such a histogram; below 0 counts as 0. */
void metrics_took(const uint32_t *bounds_ms, size_t bounds, uint64_t *bucket, uint64_t *sum_ms, int64_t ms);

#endif
