/*
 * State machine of the guest channel, host side (guest.h). Everything that comes in here is hostile; what goes out to the broker
 * was decoded and written again. Memory: one call (4 MiB), one reply (4 MiB), one result (1 MiB) at most.
 *
 *   silent -> probed -> hello -> setup -> ready -> working -> done
 *                          \________\_______\________\-----> fatal          (the agent gave up)
 *   any ----------------------------------------------------> broken        (the guest broke the protocol)
 */
#include "channel/guest.h"

#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "proto/model.h"
#include "proto/role.h"

#include <sodium.h>
#include <stdlib.h>
#include <string.h>

#define REPLY_CHUNK 32768 /* bytes of one REPLY_DATA frame, of one piece of a file */
/* The broker sends GUEST_CREDIT bytes of content beyond what it heard that went on; each piece has an index and a length here. */
#define FILES_WAITING_MAX (2 * GUEST_CREDIT)

enum state { GS_SILENT, GS_PROBED, GS_HELLO, GS_SETUP, GS_READY, GS_WORKING, GS_DONE, GS_FATAL, GS_BROKEN, GS_COUNT };
#define IN(s) (1U << GS_##s)

static const char *const state_names[GS_COUNT] = { "silent", "probed", "hello", "setup", "ready", "working", "done", "fatal",
	"broken" };

static const unsigned int legal_moves[GS_COUNT] = {
	[GS_SILENT] = IN(PROBED) | IN(BROKEN),
	[GS_PROBED] = IN(HELLO) | IN(BROKEN),
	[GS_HELLO] = IN(SETUP) | IN(FATAL) | IN(BROKEN),
	[GS_SETUP] = IN(READY) | IN(FATAL) | IN(BROKEN),
	[GS_READY] = IN(WORKING) | IN(FATAL) | IN(BROKEN),
	[GS_WORKING] = IN(DONE) | IN(FATAL) | IN(BROKEN),
	[GS_DONE] = IN(BROKEN),
	[GS_FATAL] = IN(BROKEN),
	[GS_BROKEN] = 0,
};

struct guest_peer {
	struct guest_peer_ops ops;
	enum state state;
	uint8_t nonce[GUEST_NONCE_LEN];
	uint32_t event_owed;   /* bytes of events that the broker has not taken yet: GUEST_CREDIT at most */
	uint32_t files_owed;   /* bytes of file frames that the guest has not taken yet: GUEST_CREDIT at most */
	struct buf files;      /* file frames that wait for credit: u32 length, body */
	size_t files_sent;     /* bytes of `files` */
	bool files_whole;      /* the broker has sent all; SETUP_END goes after the last one */
	uint32_t last_stream;  /* of the last call, 0 = none */
	bool call_open;        /* last_stream waits for its CALL_END or its reply */
	bool call_whole;       /* CALL_END was seen: the broker has it */
	uint32_t reply_credit; /* of last_stream, towards the guest */
	size_t reply_sent;     /* bytes of `reply` */
	struct buf call, reply, result;
	struct buf scratch; /* bodies for the broker */
	struct buf out;     /* frames for the guest */
};

struct guest_peer *guest_peer_new(const struct guest_peer_ops *ops)
{
	struct guest_peer *p = calloc(1, sizeof(*p));

	if (!p)
		return NULL;
	p->ops = *ops;
	buf_init(&p->call, MODEL_CALL_BYTES_MAX + 1);
	buf_init(&p->reply, MODEL_CALL_BYTES_MAX + 1);
	buf_init(&p->result, GUEST_RESULT_MAX + 1);
	buf_init(&p->files, FILES_WAITING_MAX);
	buf_init(&p->scratch, ROLE_FRAME_MAX);
	buf_init(&p->out, GUEST_SETUP_MAX + 65536);
	return p;
}

void guest_peer_free(struct guest_peer *p)
{
	if (!p)
		return;
	buf_free(&p->call);
	buf_free(&p->reply);
	buf_free(&p->result);
	buf_free(&p->files);
	buf_free(&p->scratch);
	buf_free(&p->out);
	free(p);
}

bool guest_peer_booting(const struct guest_peer *p)
{
	return p->state == GS_SILENT || p->state == GS_PROBED;
}

const char *guest_peer_state(const struct guest_peer *p)
{
	return state_names[p->state];
}

static void move(struct guest_peer *p, enum state to)
{
	check_abort(legal_moves[p->state] & (1U << to));
	log_debug("guest channel from=%s to=%s", state_names[p->state], state_names[to]);
	p->state = to;
}

static void put(struct guest_peer *p, enum guest_frame type, uint32_t stream, const void *body, size_t n)
{
	buf_reset(&p->out);
	guest_frame_put(&p->out, type, stream, body, n);
	check_abort(!p->out.failed);
	p->ops.send(p->ops.arg, p->out.data, p->out.len);
}

static void put_credit(struct guest_peer *p, uint32_t stream, size_t bytes)
{
	uint8_t body[4];

	for (unsigned int i = 0; i < 4; i++)
		body[i] = (uint8_t)(bytes >> (8 * i));
	put(p, GF_CREDIT, stream, body, sizeof(body));
}

static void emit_scratch(struct guest_peer *p, uint8_t type)
{
	check_abort(!p->scratch.failed);
	p->ops.emit(p->ops.arg, type, p->scratch.data, p->scratch.len);
}

/* --- from the guest ----------------------------------------------------------------------------------------------------------- */

static int take_hello(struct guest_peer *p, const struct guest_frame_view *f, struct err *e)
{
	struct guest_hello h;

	if (f->stream != 0)
		return err_set(e, ERR_PROTOCOL, "hello on stream %u", f->stream);
	if (guest_hello_decode(f->body, f->n, &h, e))
		return -1;
	if (sodium_memcmp(h.nonce, p->nonce, GUEST_NONCE_LEN) != 0)
		return err_set(e, ERR_PROTOCOL, "hello does not answer this probe");
	if (h.protocol != GUEST_PROTOCOL)
		return err_set(e, ERR_PROTOCOL,
				"the agent speaks protocol %u, this host %d: image and noded do not belong together", h.protocol,
				GUEST_PROTOCOL);
	move(p, GS_HELLO);
	buf_reset(&p->scratch);
	guest_hello_encode(&h, &p->scratch);
	emit_scratch(p, RF_CB_HELLO);
	return 0;
}

static int take_setup_ack(struct guest_peer *p, const struct guest_frame_view *f, struct err *e)
{
	struct guest_setup_ack a;

	if (f->stream != 0)
		return err_set(e, ERR_PROTOCOL, "setup acknowledgement on stream %u", f->stream);
	if (guest_setup_ack_decode(f->body, f->n, &a, e))
		return -1;
	move(p, GS_WORKING);
	buf_reset(&p->scratch);
	guest_setup_ack_encode(&a, &p->scratch);
	emit_scratch(p, RF_CB_SETUP_ACK);
	return 0;
}

static int take_event(struct guest_peer *p, const struct guest_frame_view *f, struct err *e)
{
	struct guest_event ev;

	if (f->stream != 0)
		return err_set(e, ERR_PROTOCOL, "event on stream %u", f->stream);
	if (f->n > GUEST_CREDIT - p->event_owed)
		return err_set(e, ERR_PROTOCOL, "events overdraw their credit");
	if (guest_event_decode(f->body, f->n, &ev, e))
		return -1;
	buf_reset(&p->scratch);
	guest_event_encode(&ev, &p->scratch);
	/* Credit counts the guest's bytes; the broker gives back what it was sent. One spelling, so they are the same. */
	if (p->scratch.len != f->n)
		return err_set(e, ERR_PROTOCOL, "event is not in its one spelling");
	p->event_owed += (uint32_t)f->n;
	emit_scratch(p, RF_CB_EVENT);
	return 0;
}

/* The next call opens the next odd stream; while it is open no other may begin. */
static int take_call_data(struct guest_peer *p, const struct guest_frame_view *f, struct err *e)
{
	if (!p->call_open) {
		uint32_t next = p->last_stream == 0 ? 1 : p->last_stream + 2;

		if (f->stream != next || next < p->last_stream)
			return err_set(e, ERR_PROTOCOL, "call on stream %u, the next one is %u", f->stream, next);
		p->last_stream = next;
		p->call_open = true;
		p->call_whole = false;
		p->reply_credit = GUEST_CREDIT;
		buf_reset(&p->call);
	}
	if (f->stream != p->last_stream || p->call_whole)
		return err_set(e, ERR_PROTOCOL, "call data on stream %u while the call of stream %u is open", f->stream,
				p->last_stream);
	if (f->n == 0 || !buf_add(&p->call, f->body, f->n))
		return err_set(e, ERR_PROTOCOL, "a call is 1 to %d bytes", MODEL_CALL_BYTES_MAX + 1);
	/* Into bounded memory of ours, so the guest may go on; at most GUEST_BODY_MAX is ever on its way. */
	put_credit(p, f->stream, f->n);
	return 0;
}

static int take_call_end(struct guest_peer *p, const struct guest_frame_view *f, struct err *e)
{
	struct model_call call;
	uint8_t kind;

	if (!p->call_open || p->call_whole || f->stream != p->last_stream || f->n != 0)
		return err_set(e, ERR_PROTOCOL, "end of a call that is not open, on stream %u", f->stream);
	kind = p->call.data[0]; /* call_open means that there was data */
	if (kind != CALL_MODEL)
		return err_set(e, ERR_PROTOCOL, "call of kind %u", kind);
	if (model_call_decode(p->call.data + 1, p->call.len - 1, &call, e))
		return -1;
	buf_reset(&p->scratch);
	wire_put_u32(&p->scratch, f->stream);
	wire_put_u8(&p->scratch, kind);
	model_call_encode(&call, &p->scratch);
	model_call_free(&call);
	buf_free(&p->call);
	if (p->scratch.failed)
		return err_set(e, ERR_PROTOCOL, "call is too long");
	p->call_whole = true;
	emit_scratch(p, RF_CB_CALL);
	return 0;
}

static int take_result_data(struct guest_peer *p, const struct guest_frame_view *f, struct err *e)
{
	if (f->stream != 2)
		return err_set(e, ERR_PROTOCOL, "result on stream %u", f->stream);
	if (p->call_open)
		return err_set(e, ERR_PROTOCOL, "result while a call is open");
	if (f->n == 0 || !buf_add(&p->result, f->body, f->n))
		return err_set(e, ERR_PROTOCOL, "a result has at most %d bytes", GUEST_RESULT_MAX + 1);
	put_credit(p, 2, f->n);
	return 0;
}

static int take_result_end(struct guest_peer *p, const struct guest_frame_view *f, struct err *e)
{
	if (f->stream != 2 || f->n != 0 || p->call_open)
		return err_set(e, ERR_PROTOCOL, "end of a result on stream %u", f->stream);
	move(p, GS_DONE);
	p->ops.emit(p->ops.arg, RF_CB_RESULT, p->result.data, p->result.len);
	buf_free(&p->result);
	return 0;
}

static int take_fatal(struct guest_peer *p, const struct guest_frame_view *f, struct err *e)
{
	const char *text = (const char *)f->body;

	if (f->stream != 0 || f->n > GUEST_FATAL_MAX || !text_utf8_clean(text, f->n))
		return err_set(e, ERR_PROTOCOL, "fatal text is not clean UTF-8 of at most %d bytes", GUEST_FATAL_MAX);
	move(p, GS_FATAL);
	buf_reset(&p->scratch);
	wire_put_bytes(&p->scratch, text, f->n);
	emit_scratch(p, RF_CB_FATAL);
	return 0;
}

static void pump_reply(struct guest_peer *p);
static void pump_files(struct guest_peer *p);

static int take_credit(struct guest_peer *p, const struct guest_frame_view *f, struct err *e)
{
	struct wire_reader r;
	uint32_t bytes;

	wire_read_init(&r, f->body, f->n);
	bytes = wire_u32(&r);
	if (wire_end(&r, "credit", e))
		return -1;
	if (f->stream == 0) {
		if (bytes == 0 || bytes > p->files_owed)
			return err_set(e, ERR_PROTOCOL, "credit for files that were not sent");
		p->files_owed -= bytes;
		pump_files(p);
		return 0;
	}
	if (f->stream % 2 == 0 || f->stream > p->last_stream)
		return err_set(e, ERR_PROTOCOL, "credit for stream %u", f->stream);
	if (f->stream < p->last_stream || !p->call_open)
		return 0; /* of a reply that is whole: credit and reply crossed */
	if (bytes == 0 || bytes > GUEST_CREDIT - p->reply_credit)
		return err_set(e, ERR_PROTOCOL, "credit for bytes that were not sent");
	p->reply_credit += bytes;
	pump_reply(p);
	return 0;
}

/* Who may come when: a frame that is not in its states is malformed whatever it holds. */
static const struct frame_rule {
	uint8_t type;
	unsigned int states;
	int (*take)(struct guest_peer *p, const struct guest_frame_view *f, struct err *e);
	const char *name;
} rules[] = {
	{ GF_HELLO, IN(PROBED), take_hello, "hello" },
	{ GF_SETUP_ACK, IN(READY), take_setup_ack, "setup_ack" },
	{ GF_EVENT, IN(WORKING), take_event, "event" },
	{ GF_CALL_DATA, IN(WORKING), take_call_data, "call_data" },
	{ GF_CALL_END, IN(WORKING), take_call_end, "call_end" },
	{ GF_RESULT_DATA, IN(WORKING), take_result_data, "result_data" },
	{ GF_RESULT_END, IN(WORKING), take_result_end, "result_end" },
	{ GF_FATAL, IN(HELLO) | IN(SETUP) | IN(READY) | IN(WORKING), take_fatal, "fatal" },
	{ GF_CREDIT, IN(SETUP) | IN(READY) | IN(WORKING), take_credit, "credit" },
};

static int take(struct guest_peer *p, const struct guest_frame_view *f, struct err *e)
{
	for (size_t i = 0; i < sizeof(rules) / sizeof(rules[0]); i++) {
		if (rules[i].type != f->type)
			continue;
		if (!(rules[i].states & (1U << p->state)))
			return err_set(e, ERR_PROTOCOL, "%s while the channel is %s", rules[i].name, state_names[p->state]);
		return rules[i].take(p, f, e);
	}
	return err_set(e, ERR_PROTOCOL, "frame of type %u", f->type);
}

int guest_peer_feed(struct guest_peer *p, const uint8_t *bytes, size_t n, size_t *used, struct err *e)
{
	*used = 0;
	while (p->state != GS_BROKEN) {
		struct guest_frame_view f;
		int rc = guest_frame_next(bytes + *used, n - *used, &f, e);

		if (rc == 0)
			return 0;
		if (rc < 0 || take(p, &f, e)) {
			move(p, GS_BROKEN);
			return -1;
		}
		*used += f.total;
	}
	*used = n;
	return 0;
}

/* --- from the broker ---------------------------------------------------------------------------------------------------------- */

static int need(const struct guest_peer *p, unsigned int states, const char *what, struct err *e)
{
	if (states & (1U << p->state))
		return 0;
	return err_set(e, ERR_CONFLICT, "broker asked for %s while the channel is %s", what, state_names[p->state]);
}

/* Nothing is left to say to a guest that broke the protocol or gave up; the broker may not know it yet. */
static bool over(const struct guest_peer *p)
{
	return p->state == GS_BROKEN || p->state == GS_FATAL || p->state == GS_DONE;
}

int guest_peer_probe(struct guest_peer *p, const uint8_t nonce[GUEST_NONCE_LEN], struct err *e)
{
	if (over(p))
		return 0;
	if (need(p, IN(SILENT), "a probe", e))
		return -1;
	memcpy(p->nonce, nonce, GUEST_NONCE_LEN);
	move(p, GS_PROBED);
	put(p, GF_PROBE, 0, nonce, GUEST_NONCE_LEN);
	return 0;
}

int guest_peer_setup(struct guest_peer *p, const uint8_t *setup, size_t n, struct err *e)
{
	static const uint8_t setup_is_whole = 0;

	if (over(p))
		return 0;
	if (need(p, IN(HELLO), "a setup", e))
		return -1;
	if (n > GUEST_SETUP_MAX)
		return err_set(e, ERR_LIMIT, "setup of %zu bytes", n);
	move(p, GS_SETUP);
	for (size_t at = 0; at < n;) {
		size_t part = n - at < REPLY_CHUNK ? n - at : REPLY_CHUNK;

		put(p, GF_SETUP, 0, setup + at, part);
		at += part;
	}
	put(p, GF_SETUP_END, 0, &setup_is_whole, 1);
	return 0;
}

/* Passes pieces on as far as the guest has credit, and tells the broker how much content went: it may send as much again. */
static void pump_files(struct guest_peer *p)
{
	uint32_t content = 0;

	while (p->files_sent < p->files.len) {
		const uint8_t *at = p->files.data + p->files_sent;
		uint32_t body;

		memcpy(&body, at, sizeof(body));
		if (body > GUEST_CREDIT - p->files_owed)
			break;
		p->files_owed += body;
		put(p, GF_SETUP_FILE, 0, at + sizeof(body), body);
		p->files_sent += sizeof(body) + body;
		content += body - 4; /* less the index */
	}
	buf_consume(&p->files, p->files_sent);
	p->files_sent = 0;
	if (content > 0) {
		buf_reset(&p->scratch);
		wire_put_u32(&p->scratch, content);
		emit_scratch(p, RF_CB_FILE_CREDIT);
	}
	if (p->files_whole && p->files.len == 0 && p->state == GS_SETUP) {
		static const uint8_t files_are_whole = 1;

		move(p, GS_READY);
		put(p, GF_SETUP_END, 0, &files_are_whole, 1);
	}
}

int guest_peer_file(struct guest_peer *p, uint32_t index, const uint8_t *bytes, size_t n, struct err *e)
{
	uint32_t body = (uint32_t)n + 4;

	if (over(p))
		return 0;
	if (need(p, IN(SETUP), "a file", e))
		return -1;
	if (n == 0 || n > REPLY_CHUNK || p->files_whole)
		return err_set(e, ERR_CONFLICT, "broker sends a piece of %zu bytes of a file", n);
	if (!buf_add(&p->files, &body, sizeof(body)))
		return err_set(e, ERR_CONFLICT, "broker overdraws the credit of files");
	wire_put_u32(&p->files, index);
	wire_put_raw(&p->files, bytes, n);
	if (p->files.failed)
		return err_set(e, ERR_CONFLICT, "broker overdraws the credit of files");
	pump_files(p);
	return 0;
}

int guest_peer_files_end(struct guest_peer *p, struct err *e)
{
	if (over(p))
		return 0;
	if (need(p, IN(SETUP), "the end of files", e))
		return -1;
	p->files_whole = true;
	pump_files(p);
	return 0;
}

/* Sends as much of the reply as there is credit for. */
static void pump_reply(struct guest_peer *p)
{
	while (p->reply_sent < p->reply.len && p->reply_credit > 0) {
		size_t part = p->reply.len - p->reply_sent;

		if (part > REPLY_CHUNK)
			part = REPLY_CHUNK;
		if (part > p->reply_credit)
			part = p->reply_credit;
		p->reply_credit -= (uint32_t)part;
		put(p, GF_REPLY_DATA, p->last_stream, p->reply.data + p->reply_sent, part);
		p->reply_sent += part;
	}
	if (p->reply.len > 0 && p->reply_sent == p->reply.len) {
		put(p, GF_REPLY_END, p->last_stream, NULL, 0);
		buf_free(&p->reply);
		p->reply_sent = 0;
		p->call_open = false;
	}
}

int guest_peer_reply(struct guest_peer *p, uint32_t stream, uint8_t kind, const uint8_t *reply, size_t n, struct err *e)
{
	if (over(p))
		return 0;
	if (need(p, IN(WORKING), "a reply", e))
		return -1;
	if (!p->call_open || !p->call_whole || stream != p->last_stream || p->reply.len > 0)
		return err_set(e, ERR_CONFLICT, "broker replies on stream %u, where no call waits", stream);
	if (!buf_add_char(&p->reply, (char)kind) || !buf_add(&p->reply, reply, n))
		return err_set(e, ERR_LIMIT, "reply of %zu bytes", n);
	p->reply_sent = 0;
	pump_reply(p);
	return 0;
}

void guest_peer_event_credit(struct guest_peer *p, uint32_t bytes)
{
	/* Never more than what is owed: the guest would call it a protocol error. */
	if (bytes > p->event_owed)
		bytes = p->event_owed;
	if (bytes == 0)
		return;
	p->event_owed -= bytes;
	if (p->state == GS_WORKING)
		put_credit(p, 0, bytes);
}

void guest_peer_stop(struct guest_peer *p, const char *text)
{
	size_t n = strlen(text);

	if (p->state == GS_WORKING)
		put(p, GF_STOP, 0, text, text_utf8_border(text, n < GUEST_FATAL_MAX ? n : GUEST_FATAL_MAX));
}
