/* Event types and the exact bytes of an event (event.h). Pure; the hash is in event_hash.c so that a guest needs no libsodium. */
#include "event.h"

#include "common/json.h"
#include "common/text.h"

#include <string.h>

static const struct {
	const char *text;
	unsigned sources;
} types[EV_COUNT] = {
#define X(name, text_, sources_, data_) [EV_##name] = { .text = (text_), .sources = (sources_) },
	EVENT_TABLE(X)
#undef X
};

const char *event_type_text(enum event_type t)
{
	return t < EV_COUNT ? types[t].text : "unknown";
}

enum event_type event_type_parse(const char *text)
{
	for (unsigned i = 0; i < EV_COUNT; i++)
		if (strcmp(types[i].text, text) == 0)
			return (enum event_type)i;
	return EV_COUNT;
}

bool event_type_allows(enum event_type t, enum event_source s)
{
	return t < EV_COUNT && (types[t].sources & (unsigned)s) != 0;
}

const char *event_source_text(enum event_source s)
{
	switch (s) {
	case EVENT_CONTROL: return "control";
	case EVENT_HOST: return "host";
	case EVENT_GUEST: return "guest";
	}
	return "unknown";
}

static enum event_source source_parse(const char *s)
{
	if (strcmp(s, "host") == 0)
		return EVENT_HOST;
	if (strcmp(s, "guest") == 0)
		return EVENT_GUEST;
	return EVENT_CONTROL;
}

/* Everything up to the data; at = queued_at + t. */
static bool put_envelope(struct buf *out, const struct event_head *head)
{
	char at[32];

	text_time_ms(head->queued_at_ms + head->t_ms, at);
	return buf_printf(out,
			"{\"run_id\":\"%s\",\"seq\":%llu,\"at\":\"%s\",\"t\":%lld.%03d,\"source\":\"%s\",\"type\":\"%s\","
			"\"data\":",
			head->run_id, (unsigned long long)head->seq, at, (long long)(head->t_ms / 1000), (int)(head->t_ms % 1000),
			event_source_text(head->source), event_type_text(head->type));
}

bool event_make(struct buf *out, const struct event_head *head, const void *data, size_t data_len)
{
	size_t before = out->len;

	if (!put_envelope(out, head) || !buf_add(out, data, data_len) || !buf_add_char(out, '}'))
		return false;
	if (out->len - before > EVENT_BYTES_MAX) {
		out->len = before;
		return false;
	}
	return true;
}

/* "12.345" -> 12345; -1 when it is not of that form. */
static int64_t t_parse(const char *s)
{
	const char *dot = strchr(s, '.');
	struct err e;
	int64_t seconds, ms;
	char whole[16];

	if (!dot || strlen(dot) != 4 || (size_t)(dot - s) >= sizeof(whole))
		return -1;
	memcpy(whole, s, (size_t)(dot - s));
	whole[dot - s] = '\0';
	if (text_i64(whole, 0, INT64_C(100000000), &seconds, &e) || text_i64(dot + 1, 0, 999, &ms, &e))
		return -1;
	return seconds * 1000 + ms;
}

static const char *const key_order[] = { "run_id", "seq", "at", "t", "source", "type", "data" };
#define KEY_COUNT (sizeof(key_order) / sizeof(key_order[0]))

/* Fills `head` with what the members say. */
static int check_members(const struct json *v, const char *run_id, uint64_t seq, struct event_head *head, struct err *e)
{
	int64_t at_ms, t_ms;
	const char *s;

	if (json_type(v) != JSON_OBJECT || json_len(v) != KEY_COUNT)
		return err_set(e, ERR_PROTOCOL, "event: not an object of %zu members", KEY_COUNT);
	for (size_t i = 0; i < KEY_COUNT; i++)
		if (strcmp(json_key(v, i), key_order[i]) != 0)
			return err_set(e, ERR_PROTOCOL, "event: member %zu is not \"%s\"", i + 1, key_order[i]);
	s = json_get_text(v, "run_id");
	if (!s || strcmp(s, run_id) != 0)
		return err_set(e, ERR_PROTOCOL, "event: run_id is another run's");
	if (json_get_int(v, "seq", -1) != (int64_t)seq)
		return err_set(e, ERR_PROTOCOL, "event: seq is not %llu", (unsigned long long)seq);
	if (json_type(json_get(v, "t")) != JSON_DECIMAL || (t_ms = t_parse(json_as_text(json_get(v, "t")))) < 0)
		return err_set(e, ERR_PROTOCOL, "event: t is not seconds with three decimals");
	s = json_get_text(v, "at");
	if (!s || !text_parse_time_ms(s, &at_ms))
		return err_set(e, ERR_PROTOCOL, "event: at is not a time");
	s = json_get_text(v, "type");
	*head = (struct event_head){ .run_id = run_id, .seq = seq, .t_ms = t_ms, .queued_at_ms = at_ms - t_ms };
	head->type = s ? event_type_parse(s) : EV_COUNT;
	if (head->type == EV_COUNT)
		return err_set(e, ERR_PROTOCOL, "event: type is not in the table");
	s = json_get_text(v, "source");
	head->source = s ? source_parse(s) : EVENT_CONTROL;
	if (head->source == EVENT_CONTROL || !event_type_allows(head->type, head->source))
		return err_set(e, ERR_PROTOCOL, "event: source may not write %s", event_type_text(head->type));
	if (json_type(json_get(v, "data")) != JSON_OBJECT)
		return err_set(e, ERR_PROTOCOL, "event: data is not an object");
	return 0;
}

/*
 * The bytes are served as they are, and readers find the type in them without a parser: an envelope with a space or an escape more
 * says the same as JSON, but is not what event_make writes, and would let `data` pass for the envelope.
 */
static int check_spelling(const void *bytes, size_t n, const struct event_head *head, struct err *e)
{
	struct buf want = BUF_INIT(1024);
	bool same = put_envelope(&want, head) && want.len + 3 <= n && memcmp(bytes, want.data, want.len) == 0 &&
		    ((const char *)bytes)[want.len] == '{' && memcmp((const char *)bytes + n - 2, "}}", 2) == 0;

	buf_free(&want);
	return same ? 0 : err_set(e, ERR_PROTOCOL, "event: its envelope is not spelled as it must be");
}

int event_check(const void *bytes, size_t n, const char *run_id, uint64_t seq, enum event_type *type, int64_t *t_ms, struct err *e)
{
	struct event_head head;
	struct json *v = NULL;
	int rc;

	if (n > EVENT_BYTES_MAX)
		return err_set(e, ERR_LIMIT, "event: %zu bytes, the limit is %d", n, EVENT_BYTES_MAX);
	if (memchr(bytes, '\n', n) || memchr(bytes, '\r', n))
		return err_set(e, ERR_PROTOCOL, "event: holds a line break");
	if (json_parse(bytes, n, &v, e))
		return err_wrap(e, "event");
	rc = check_members(v, run_id, seq, &head, e);
	json_free(v);
	if (rc || check_spelling(bytes, n, &head, e))
		return -1;
	*type = head.type;
	*t_ms = head.t_ms;
	return 0;
}
