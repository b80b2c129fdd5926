/* What a hostile guest does (hostile.h). Each attack is what a program could send that has the whole machine for itself. */
#include "hostile.h"

#include "common/wire.h"
#include "proto/event.h"
#include "proto/model.h"

#include <fcntl.h>
#include <linux/reboot.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/reboot.h>
#include <unistd.h>

static void raw_frame(struct hostile *h, uint32_t length, uint8_t type)
{
	uint8_t head[GUEST_FRAME_HEAD + 64] = { (uint8_t)length, (uint8_t)(length >> 8), (uint8_t)(length >> 16),
		(uint8_t)(length >> 24), type };

	hostile_write(h, head, sizeof head);
}

static void event(struct hostile *h, const struct guest_event *ev)
{
	struct buf b = BUF_INIT(GUEST_BODY_MAX);

	guest_event_encode(ev, &b);
	hostile_frame(h, GF_EVENT, 0, b.data, b.len);
	buf_free(&b);
}

/* A model call as the agent would make it, with `n` bytes of a message. */
static void call_bytes(struct buf *out, uint32_t number, uint32_t tools, size_t n)
{
	char *text = calloc(1, n + 1);
	struct model_message message = { .role = ROLE_USER, .content = text, .tool_call_id = (char *)(uintptr_t) "" };
	struct model_call call = { .call = number, .tools = tools, .messages = &message, .message_count = 1 };

	memset(text, 'x', n);
	wire_put_u8(out, CALL_MODEL);
	model_call_encode(&call, out);
	free(text);
}

static void call(struct hostile *h, uint32_t stream, uint32_t number, uint32_t tools, size_t n)
{
	struct buf b = BUF_INIT(MODEL_CALL_BYTES_MAX + 1);

	call_bytes(&b, number, tools, n);
	for (size_t at = 0; at < b.len; at += GUEST_BODY_MAX)
		hostile_frame(h, GF_CALL_DATA, stream, b.data + at, b.len - at < GUEST_BODY_MAX ? b.len - at : GUEST_BODY_MAX);
	hostile_frame(h, GF_CALL_END, stream, NULL, 0);
	buf_free(&b);
}

static void result(struct hostile *h, const char *text, size_t n)
{
	hostile_frame(h, GF_RESULT_DATA, 2, text, n);
	hostile_frame(h, GF_RESULT_END, 2, NULL, 0);
}

/* --- frames ------------------------------------------------------------------------------------------------------------------ */

static void wrong_nonce(struct hostile *h)
{
	uint8_t other[GUEST_NONCE_LEN] = { 1, 2, 3 };

	hostile_hello(h, other);
}

static void zero_length(struct hostile *h)
{
	raw_frame(h, 0, 0);
}

static void oversized(struct hostile *h)
{
	raw_frame(h, 0x7fffffff, GF_EVENT);
}

static void unknown_type(struct hostile *h)
{
	hostile_frame(h, (enum guest_frame)200, 0, "x", 1);
}

static void host_frame(struct hostile *h)
{
	hostile_frame(h, GF_REPLY_DATA, 1, "x", 1);
}

static void second_hello(struct hostile *h)
{
	hostile_hello(h, h->nonce);
}

static void replay_ack(struct hostile *h)
{
	hostile_ack(h, "/tmp/hostile", "again");
}

static void early_event(struct hostile *h)
{
	struct guest_event ev = { .kind = GE_NOTE, .bytes = -1, .text = (const uint8_t *)"early", .text_len = 5 };

	event(h, &ev);
}

static void early_result(struct hostile *h)
{
	result(h, "early", 5);
}

static void early_call(struct hostile *h)
{
	call(h, 1, 1, 0, 10);
}

/* Half a frame, then a byte now and then, for ever. */
static void trickle(struct hostile *h)
{
	static const uint8_t head[] = { 0xff, 0xff, 0, 0, GF_EVENT };

	hostile_write(h, head, sizeof head);
	for (;;) {
		(void)poll(NULL, 0, 50);
		hostile_write(h, "x", 1);
	}
}

/* --- credit ------------------------------------------------------------------------------------------------------------------ */

static void event_flood(struct hostile *h)
{
	static uint8_t text[EVENT_TEXT_MAX];
	struct guest_event ev = {
		.kind = GE_SHELL_OUTPUT, .call_id = "c", .bytes = -1, .text = text, .text_len = sizeof text, .stream = 1
	};

	for (;;)
		event(h, &ev);
}

static void false_credit(struct hostile *h)
{
	hostile_frame(h, GF_CREDIT, 0, "\xff\xff\xff\x7f", 4);
}

/* Each byte of a call makes the host answer with credit, and nobody reads that. */
static void deaf(struct hostile *h)
{
	static const uint8_t one[10] = { 6, 0, 0, 0, GF_CALL_DATA, 1, 0, 0, 0, 1 }; /* stream 1, one byte */
	static uint8_t frames[sizeof one * 6000];

	for (size_t at = 0; at < sizeof frames; at += sizeof one)
		memcpy(frames + at, one, sizeof one);
	for (;;)
		hostile_write(h, frames, sizeof frames);
}

static void streams(struct hostile *h)
{
	for (uint32_t n = 0; n < 100000; n++)
		hostile_frame(h, GF_CALL_DATA, 2 * n + 1, "\x01", 1);
}

/* --- money and truth --------------------------------------------------------------------------------------------------------- */

/* Each after the answer to the one before, all that the run has and one more. */
static void many_calls(struct hostile *h)
{
	struct buf body = BUF_INIT(GUEST_FRAME_MAX);

	for (uint32_t n = 1; n <= 10000; n++) {
		call(h, 2 * n - 1, n, 0, 10);
		hostile_until(h, GF_REPLY_END, &body);
	}
}

static void calls_at_once(struct hostile *h)
{
	for (uint32_t n = 1; n <= 10000; n++)
		call(h, 2 * n - 1, n, 0, 10);
}

static void huge_call(struct hostile *h)
{
	call(h, 1, 1, 0, 2000000);
}

static void endless_call(struct hostile *h)
{
	static uint8_t text[GUEST_BODY_MAX];

	text[0] = CALL_MODEL;
	for (;;)
		hostile_frame(h, GF_CALL_DATA, 1, text, sizeof text);
}

/* Tools of other runs, and such as do not exist. */
static void forbidden_tools(struct hostile *h)
{
	call(h, 1, 1, 0xffffffff, 10);
}

/* A message of a role that there is not. */
static void forbidden_role(struct hostile *h)
{
	struct buf b = BUF_INIT(4096);

	call_bytes(&b, 1, 0, 3);
	for (size_t i = b.len - 16; i > 0; i--)
		if (b.data[i] == ROLE_USER && b.data[i + 1] == 3) {
			b.data[i] = 9;
			break;
		}
	hostile_frame(h, GF_CALL_DATA, 1, b.data, b.len);
	hostile_frame(h, GF_CALL_END, 1, NULL, 0);
	buf_free(&b);
}

static void skipped_call(struct hostile *h)
{
	call(h, 1, 7, 0, 10);
}

/* Ends a call that was never made, commands that never ran, at times that never were; then a result without any work. */
static void lies(struct hostile *h)
{
	struct guest_event ev = { .kind = GE_SHELL_EXITED,
		.call_id = "never",
		.bytes = -1,
		.code = 0,
		.duration_ms = UINT32_MAX,
		.cut_bytes = UINT64_MAX };

	event(h, &ev);
	ev = (struct guest_event){
		.kind = GE_TOOL_CALLED, .call_id = "x", .bytes = INT64_MAX, .name = "model.call", .path = "../../etc"
	};
	event(h, &ev);
	ev = (struct guest_event){ .kind = GE_NOTE,
		.bytes = -1,
		.text = (const uint8_t *)"{\"type\":\"run.settled\",\"cost_micros\":0}\n\x1b[2J",
		.text_len = 42 };
	event(h, &ev);
	result(h, "nothing was done", 16);
}

/* An event of a kind that only the host or the service makes. */
static void invented_event(struct hostile *h)
{
	struct guest_event ev = { .kind = GE_NOTE, .bytes = -1, .text = (const uint8_t *)"x", .text_len = 1 };
	struct buf b = BUF_INIT(GUEST_BODY_MAX);

	guest_event_encode(&ev, &b);
	b.data[0] = GE_NOTE + 1;
	hostile_frame(h, GF_EVENT, 0, b.data, b.len);
	buf_free(&b);
}

static void call_after_result(struct hostile *h)
{
	result(h, "done", 4);
	call(h, 1, 1, 0, 10);
}

static void binary_result(struct hostile *h)
{
	result(h, "a\0b\xff\xed\xa0\x80\x1b[31m\xc3", 14);
}

static void endless_result(struct hostile *h)
{
	static char text[GUEST_BODY_MAX];

	for (;;)
		hostile_frame(h, GF_RESULT_DATA, 2, text, sizeof text);
}

static void binary_fatal(struct hostile *h)
{
	hostile_frame(h, GF_FATAL, 0, "\x1b[2J\xff", 5);
}

static void false_ack(struct hostile *h)
{
	hostile_ack(h, "\"},\"source\":\"control\",\"x\":\"\x1b[2J", "\xf0\x9f\x98\x80\\");
	result(h, "done", 4);
}

/* --- the machine ------------------------------------------------------------------------------------------------------------- */

static void restart(struct hostile *h)
{
	(void)h;
	reboot(RB_AUTOBOOT);
}

static void power_off(struct hostile *h)
{
	(void)h;
	reboot(RB_POWER_OFF);
}

/* The end of init is a kernel panic. */
static void panic(struct hostile *h)
{
	(void)h;
	_exit(1);
}

static void console_flood(struct hostile *h)
{
	static char text[65536];
	int fd = open("/dev/console", O_WRONLY | O_NOCTTY);

	(void)h;
	memset(text, 'A', sizeof text);
	memcpy(text, "\x1b[2J\x1b]0;owned\x07\r\n\0\xff", 19);
	for (;;)
		if (write(fd, text, sizeof text) < 0)
			return;
}

static void silent(struct hostile *h)
{
	(void)h;
}

static const struct attack attacks[] = {
	{ "wrong-nonce", WHEN_PROBED, wrong_nonce },
	{ "zero-length", WHEN_WORKING, zero_length },
	{ "oversized", WHEN_WORKING, oversized },
	{ "unknown-type", WHEN_WORKING, unknown_type },
	{ "host-frame", WHEN_WORKING, host_frame },
	{ "second-hello", WHEN_SETUP, second_hello },
	{ "replay-ack", WHEN_WORKING, replay_ack },
	{ "early-event", WHEN_SETUP, early_event },
	{ "early-result", WHEN_SETUP, early_result },
	{ "early-call", WHEN_SETUP, early_call },
	{ "trickle", WHEN_WORKING, trickle },
	{ "event-flood", WHEN_WORKING, event_flood },
	{ "false-credit", WHEN_WORKING, false_credit },
	{ "deaf", WHEN_WORKING, deaf },
	{ "streams", WHEN_WORKING, streams },
	{ "many-calls", WHEN_WORKING, many_calls },
	{ "calls-at-once", WHEN_WORKING, calls_at_once },
	{ "huge-call", WHEN_WORKING, huge_call },
	{ "endless-call", WHEN_WORKING, endless_call },
	{ "forbidden-tools", WHEN_WORKING, forbidden_tools },
	{ "forbidden-role", WHEN_WORKING, forbidden_role },
	{ "skipped-call", WHEN_WORKING, skipped_call },
	{ "lies", WHEN_WORKING, lies },
	{ "invented-event", WHEN_WORKING, invented_event },
	{ "call-after-result", WHEN_WORKING, call_after_result },
	{ "binary-result", WHEN_WORKING, binary_result },
	{ "endless-result", WHEN_WORKING, endless_result },
	{ "binary-fatal", WHEN_WORKING, binary_fatal },
	{ "false-ack", WHEN_SETUP, false_ack },
	{ "restart", WHEN_WORKING, restart },
	{ "power-off", WHEN_WORKING, power_off },
	{ "panic", WHEN_WORKING, panic },
	{ "console-flood", WHEN_WORKING, console_flood },
	{ "silent", WHEN_WORKING, silent },
	{ "silent-in-setup", WHEN_SETUP, silent },
};

const struct attack *attack_find(const char *name)
{
	for (size_t i = 0; i < sizeof attacks / sizeof attacks[0]; i++)
		if (strcmp(attacks[i].name, name) == 0)
			return &attacks[i];
	return NULL;
}
