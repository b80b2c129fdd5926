/* Reads event records (ch_events.h). Owns one record at most. Pure. */
#include "channel/ch_events.h"

#include "common/json.h"

#include <stdbool.h>
#include <string.h>

#define RECORD_MAX 8192
#define RECORDS_MAX 10000 /* a quiet machine says twenty; after these nobody listens any more */
#define STARTS_MAX 8      /* places in the rest of a cut record where the next may begin */

void ch_events_init(struct ch_events *v)
{
	*v = (struct ch_events){ .records = 0 };
	buf_init(&v->record, RECORD_MAX);
}

void ch_events_free(struct ch_events *v)
{
	buf_free(&v->record);
}

static const char *meaning(const struct json *v)
{
	static const struct {
		const char *source, *event, *name;
	} known[] = {
		{ "vm", "rebooting", "RESET" }, /* in place: the same VMM would boot its guest again */
		{ "vm", "shutdown", "SHUTDOWN" },
		{ "guest", "panic", "GUEST_PANICKED" },
	};
	const char *source = json_get_text(v, "source"), *event = json_get_text(v, "event");

	for (size_t i = 0; source && event && i < sizeof(known) / sizeof(known[0]); i++)
		if (strcmp(source, known[i].source) == 0 && strcmp(event, known[i].event) == 0)
			return known[i].name;
	return NULL;
}

/* False: these bytes are no record. */
static bool take(const char *bytes, size_t n, void (*on_event)(void *arg, const char *name), void *arg)
{
	struct json *v;
	struct err e;
	const char *name;

	if (json_parse(bytes, n, &v, &e))
		return false;
	name = meaning(v);
	json_free(v);
	if (name)
		on_event(arg, name);
	return true;
}

/* A record that was cut runs into the next one, which begins at a brace somewhere in it. */
static void take_record(const char *bytes, size_t n, void (*on_event)(void *arg, const char *name), void *arg)
{
	for (int i = 0; i < STARTS_MAX && n > 0; i++) {
		const char *next;

		if (take(bytes, n, on_event, arg))
			return;
		next = memchr(bytes + 1, '{', n - 1);
		if (!next)
			return;
		n -= (size_t)(next - bytes);
		bytes = next;
	}
}

void ch_events_feed(struct ch_events *v, const char *bytes, size_t n, void (*on_event)(void *arg, const char *name), void *arg)
{
	for (size_t i = 0; i < n && v->records < RECORDS_MAX; i++) {
		bool end = bytes[i] == '\n' && v->record.len > 0 && v->record.data[v->record.len - 1] == '\n';

		if (!end && buf_add_char(&v->record, bytes[i]))
			continue;
		/* Whole, or too long to be one: its last bytes may still be the begin of another, which is lost with it. */
		if (end && v->record.len > 1) {
			v->records++;
			take_record((const char *)v->record.data, v->record.len, on_event, arg);
		}
		buf_reset(&v->record);
	}
}
