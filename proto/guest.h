/*
 * The guest channel: one byte stream between `channel` on the host and guest-agent. Everything from the guest is hostile.
 *
 * Frame: u32 length of what follows (5..65536), u8 type, u32 stream, body. Little endian. The first malformed frame, a type that
 * is not for this direction or state, or credit overdrawn ends the run as worker_protocol_error.
 *
 * Order:  host PROBE{nonce} -> guest HELLO{nonce,...} -> host SETUP, SETUP_FILE*, SETUP_END -> guest SETUP_ACK -> guest EVENT*,
 * CALL on odd streams (1, 3, 5, ... each used once, one open at a time), host REPLY on the same stream -> guest RESULT, after
 * which the guest sends nothing. FATAL may come instead of anything after HELLO. STOP may come at any time after SETUP_ACK.
 *
 * Messages longer than a frame (CALL, REPLY, RESULT) are cut into *_DATA frames on their stream; the *_END frame (empty body)
 * says that the message is whole.
 *
 * Credit: each direction of each stream starts with GUEST_CREDIT bytes; the bodies of *_DATA, SETUP_FILE and EVENT frames count
 * against it; CREDIT{u32 bytes} gives back what was consumed. EVENT runs on stream 0, RESULT on stream 2, SETUP_FILE on stream 0 of
 * the other direction. A sender that has no credit waits: this is how a full spool or a rate limit slows a guest down.
 */
#ifndef PROTO_GUEST_H
#define PROTO_GUEST_H

#include "common/buf.h"
#include "common/error.h"

#include <stdbool.h>
#include <stdint.h>

#define GUEST_PROTOCOL 1
#define GUEST_PORT_NAME "ephemeral.0"
#define GUEST_VSOCK_PORT 1024 /* of the host (CID 2), where the VMM has no such port but a vsock */
#define GUEST_FRAME_MAX 65536 /* value of the length field */
#define GUEST_FRAME_HEAD 9    /* length + type + stream */
#define GUEST_BODY_MAX (GUEST_FRAME_MAX - 5)
#define GUEST_CREDIT (256 * 1024)
#define GUEST_RESULT_MAX (1024 * 1024) /* output; one byte more is sent so that the host can say output_too_large */
#define GUEST_NONCE_LEN 16
#define GUEST_ENTROPY_LEN 64
#define GUEST_FILES_MAX 32
#define GUEST_FILE_MAX (10 * 1024 * 1024)
#define GUEST_PATH_MAX 512
#define GUEST_PROMPT_MAX (128 * 1024)
#define GUEST_COMMAND_TEXT_MAX (16 * 1024) /* of a command shown in shell.started; longer ones are cut there */

enum guest_frame {
	/* host to guest */
	GF_PROBE = 1,
	GF_SETUP,
	GF_SETUP_FILE,
	GF_SETUP_END,
	GF_REPLY_DATA,
	GF_REPLY_END,
	GF_STOP,
	/* both */
	GF_CREDIT = 32,
	/* guest to host */
	GF_HELLO = 64,
	GF_SETUP_ACK,
	GF_CALL_DATA,
	GF_CALL_END,
	GF_EVENT,
	GF_RESULT_DATA,
	GF_RESULT_END,
	GF_FATAL,
};

/* Appends one whole frame. */
void guest_frame_put(struct buf *out, enum guest_frame type, uint32_t stream, const void *body, size_t n);

struct guest_frame_view {
	uint8_t type;
	uint32_t stream;
	const uint8_t *body;
	size_t n;
	size_t total; /* bytes of the whole frame: what to consume */
};
/* Looks at the front of p[0..n): 1 a frame is there, 0 more bytes are needed, -1 malformed. */
int guest_frame_next(const void *p, size_t n, struct guest_frame_view *out, struct err *e) EPH_MUST_CHECK;

struct guest_hello {
	uint8_t nonce[GUEST_NONCE_LEN];
	uint32_t protocol;
	char kernel[128]; /* uname -r */
	char agent[64];   /* version */
	uint32_t memory_mib;
};
void guest_hello_encode(const struct guest_hello *h, struct buf *out);
int guest_hello_decode(const void *p, size_t n, struct guest_hello *out, struct err *e) EPH_MUST_CHECK;

/* SETUP: everything but file contents. */
struct guest_setup {
	int64_t real_ns; /* wall clock to set */
	uint8_t entropy[GUEST_ENTROPY_LEN];
	bool shell;
	uint32_t max_model_calls;
	uint32_t tool_timeout_ms; /* the longest a tool call may take */
	char *prompt;
	struct guest_file {
		char path[GUEST_PATH_MAX + 1];
		uint64_t size;
	} * files; /* relative, no `..`, checked by both sides */
	uint32_t file_count;
};
void guest_setup_encode(const struct guest_setup *s, struct buf *out);
int guest_setup_decode(const void *p, size_t n, struct guest_setup *out, struct err *e) EPH_MUST_CHECK;
void guest_setup_free(struct guest_setup *s);
/* True when the path may be created below the working directory: relative, no empty, "." or ".." part, no NUL, clean UTF-8. */
bool guest_path_ok(const char *path);
/* SETUP may be longer than a frame (the prompt): it is cut into SETUP frames on stream 0 whose bodies are joined until SETUP_END
 * for the setup; SETUP_FILE body = u32 index, then bytes in order; SETUP_END body = u8: 0 ends the setup message, 1 ends the files
 * (sent also when there are none). SETUP frames do not count against credit (bounded by GUEST_SETUP_MAX). */
#define GUEST_SETUP_MAX (192 * 1024)

struct guest_setup_ack {
	bool reseeded, clock_set; /* both must be true, else the run ends */
	char workdir[128];
	char boot_id[64]; /* made after the reseed; what users see as this machine's boot id */
};
void guest_setup_ack_encode(const struct guest_setup_ack *a, struct buf *out);
int guest_setup_ack_decode(const void *p, size_t n, struct guest_setup_ack *out, struct err *e) EPH_MUST_CHECK;

/* EVENT: what the guest may put on the timeline. The broker makes the JSON. Strings are bytes: not trusted to be UTF-8. */
enum guest_event_kind { GE_SHELL_STARTED = 1, GE_SHELL_OUTPUT, GE_SHELL_EXITED, GE_TOOL_CALLED, GE_NOTE };
struct guest_event {
	enum guest_event_kind kind;
	char call_id[129];
	/* SHELL_STARTED: text = command. SHELL_OUTPUT: text = bytes, stream. TOOL_CALLED: name = tool, path, text = error or empty.
	 * NOTE: text. */
	const uint8_t *text; /* view into the decoded message, or the caller's when encoding; <= EVENT_TEXT_MAX */
	size_t text_len;
	uint8_t stream; /* 1 stdout, 2 stderr */
	char name[65];
	char path[GUEST_PATH_MAX + 1];
	int64_t bytes;   /* TOOL_CALLED: bytes read or written, -1 unknown */
	bool has_signal; /* SHELL_EXITED: code is a signal number */
	bool timed_out;
	int32_t code;
	uint32_t duration_ms;
	uint64_t cut_bytes;
};
void guest_event_encode(const struct guest_event *ev, struct buf *out);
/* Views in `out` point into p. */
int guest_event_decode(const void *p, size_t n, struct guest_event *out, struct err *e) EPH_MUST_CHECK;

/* CALL message: u8 kind, then the kind's own message (CALL_MODEL: model.h). REPLY: the same kind byte, then its reply. */
enum guest_call_kind { CALL_MODEL = 1 };

/* FATAL and STOP: clean UTF-8 text up to 1 KiB. */
#define GUEST_FATAL_MAX 1024

#endif
