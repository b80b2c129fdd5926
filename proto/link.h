/*
 * Node link: what a node (link role) and a controld say to each other over nng REQ/REP, tls+tcp. The node asks, controld answers.
 *
 * Request:  u8 version (1), u8 type, u64 request_id, str node_id, u32 context, u64 counter, bytes body, 64 bytes signature.
 *   signature = Ed25519(node key, "ephemeral/link/1" || challenge[32] || node_id || context u32 || counter u64 || type u8 ||
 * SHA-256(body)) The challenge is the pipe's own (LINK_CHALLENGE gives it); counter grows per context on a pipe. CHALLENGE and
 * ENROL are not signed this way (signature zero); ENROL proves its key inside. Reply:    u8 version, u8 type, u64 request_id, u8
 * result (enum link_result), body. Result other than LINK_OK: body = str text. Whole message <= LINK_MESSAGE_MAX. All at least once
 * and idempotent.
 */
#ifndef PROTO_LINK_H
#define PROTO_LINK_H

#include "assignment.h"

#define LINK_VERSION 1
#define LINK_MESSAGE_MAX (2 * 1024 * 1024)
#define LINK_EVENTS_MAX 256 /* records in one EVENTS request */
#define LINK_EVENTS_BYTES_MAX (512 * 1024)
#define LINK_BLOB_MAX (256 * 1024)
#define LINK_RUNS_MAX 1024 /* tokens held in one NEXT */
#define LINK_ASSIGN_MAX 16 /* assignments in one answer */
#define LINK_COMMANDS_MAX 256
#define LINK_POLL_MS 10000

enum link_type {
	LINK_CHALLENGE = 1,
	LINK_ENROL,
	LINK_NEXT,
	LINK_START,
	LINK_EVENTS,
	LINK_FINISH,
	LINK_REFUSE,
	LINK_BLOB,
	LINK_IMAGE,
	LINK_IMAGE_BLOB,
	LINK_BYE,
	LINK_TYPES
};
enum link_result {
	LINK_OK = 0,
	LINK_BAD,         /* malformed; never send it again */
	LINK_UNAUTHENTIC, /* signature, challenge or counter: ask for a new challenge */
	LINK_REVOKED,     /* the node was revoked or removed: kill everything */
	LINK_BUSY,        /* try again later */
	LINK_RESULTS
};
/* Names for metrics and logs; index 0 of the types is no type. */
extern const char *const link_type_names[LINK_TYPES];
extern const char *const link_result_names[LINK_RESULTS + 1]; /* the last: no answer came */
/* Fencing answer to every write for a run. */
enum fence {
	FENCE_APPLIED = 1,
	FENCE_DUPLICATE,
	FENCE_STALE,
	FENCE_UNKNOWN,
	FENCE_GAP /* EVENTS: expected_seq says what is wanted */
};

struct link_request {
	uint8_t type;
	uint64_t request_id;
	char node_id[ID_MAX];
	uint32_t context;
	uint64_t counter;
	const uint8_t *body; /* view */
	size_t body_len;
	uint8_t signature[64];
};
/* Digest to sign: writes the message that Ed25519 signs into out (bounded, < 256 bytes). */
size_t link_signed_message(const struct link_request *r, const uint8_t challenge[32], uint8_t out[256]);
void link_request_encode(const struct link_request *r, struct buf *out);
int link_request_decode(const void *p, size_t n, struct link_request *out, struct err *e) EPH_MUST_CHECK;
struct link_reply {
	uint8_t type;
	uint64_t request_id;
	uint8_t result;
	const uint8_t *body; /* view */
	size_t body_len;
};
void link_reply_encode(const struct link_reply *r, struct buf *out);
int link_reply_decode(const void *p, size_t n, struct link_reply *out, struct err *e) EPH_MUST_CHECK;

struct link_challenge_reply {
	uint8_t challenge[32];
	int64_t server_time_ms;
};

/* ENROL: the secret of a join token, once; answer gives the node its id. */
struct link_enrol {
	char secret[64];                                     /* ephnt_... */
	char name[65];                                       /* host name, for people */
	uint8_t sign_key[32], seal_key[32], receipt_key[32]; /* Ed25519, X25519, Ed25519 */
	uint8_t seal_sig[64], receipt_sig[64]; /* by sign_key over "ephemeral/seal-key/1"||key and "ephemeral/receipt-key/1"||key */
	uint8_t proof[64];                     /* by sign_key over "ephemeral/enrol/1"||challenge||secret */
	char isolation[16];                    /* "kvm" | "emulated" */
	char labels[513];                      /* "a=b,c=d" */
};
struct link_enrol_reply {
	char node_id[ID_MAX];
	uint8_t certificate[64]; /* root key over "ephemeral/node/1"||node_id||sign_key */
	uint8_t root_key[32];
};

struct link_held {
	char run_id[ID_MAX];
	uint8_t token[TOKEN_LEN];
	int64_t spent_micros, held_micros; /* cumulative meter */
};
struct link_next {
	uint64_t epoch;                                   /* of this node process; grows with each start */
	uint32_t free_memory_mib, free_vcpus, free_slots; /* what may still be admitted */
	uint32_t total_memory_mib, total_vcpus, total_slots;
	char isolation[16];
	bool draining;
	uint64_t last_command; /* highest command id finished with */
	uint32_t wait_ms;      /* longest to park, <= LINK_POLL_MS */
	struct link_held *held;
	uint32_t held_count;
};
struct link_assign {
	uint8_t *assignment;
	uint8_t *sealed;
	uint32_t assignment_len;
	uint32_t sealed_len;
};
enum link_command_kind {
	LINK_CMD_CANCEL = 1,
	LINK_CMD_KILL /* token unknown or stale here: destroy, report nothing */,
	LINK_CMD_DRAIN,
	LINK_CMD_UNDRAIN
};
struct link_command {
	uint64_t id;
	uint8_t kind;
	char run_id[ID_MAX];
	uint8_t token[TOKEN_LEN];
};
struct link_next_reply {
	uint32_t lease_ms; /* 0 = not renewed */
	struct link_assign *assigns;
	uint32_t assign_count;
	struct link_command *commands;
	uint32_t command_count;
};

struct link_start {
	char run_id[ID_MAX];
	uint8_t token[TOKEN_LEN];
};
struct link_start_reply {
	uint8_t fence;
};

struct link_record {
	uint16_t type;
	const uint8_t *bytes;
	uint32_t len;
}; /* type = enum event_type */
struct link_events {
	char run_id[ID_MAX];
	uint8_t token[TOKEN_LEN];
	int64_t spent_micros, held_micros;
	uint64_t first_seq;
	struct link_record *records; /* owned array, views into the message */
	uint32_t record_count;
};
struct link_events_reply {
	uint8_t fence;
	uint64_t expected_seq; /* next seq wanted */
};

struct link_finish {
	char run_id[ID_MAX];
	uint8_t token[TOKEN_LEN];
	struct run_end end;
};
struct link_finish_reply {
	uint8_t fence;
	uint64_t expected_seq; /* FENCE_GAP: events missing before last_seq */
};

/* The run did not start here. failed = it counts as an attempt (the VM did not come up); else a refusal (no room, draining). */
struct link_refuse {
	char run_id[ID_MAX];
	uint8_t token[TOKEN_LEN];
	bool failed;
	uint32_t code;
	char reason[513];
};
struct link_refuse_reply {
	uint8_t fence;
};

struct link_blob {
	char run_id[ID_MAX];
	uint8_t token[TOKEN_LEN];
	uint8_t sha256[SHA256_LEN];
	uint64_t offset;
};
struct link_blob_reply {
	uint64_t total;
	const uint8_t *bytes;
	uint32_t len;
}; /* view */

/*
 * IMAGE: what the node starts VMs from, and how it is doing; the answer is what it shall have. Asked every LINK_IMAGE_MS by nodes
 * whose image is controld's affair. The name of an image is the hash over its three files (link_image_hash). IMAGE_BLOB is answered
 * as BLOB is (struct link_blob_reply): a piece of a file of any image, LINK_BLOB_MAX at a multiple of that.
 */
#define LINK_IMAGE_MS 10000
#define LINK_IMAGE_FILES 3 /* kernel, initramfs, rootfs */
#define LINK_IMAGE_BYTES_MAX (UINT64_C(8) << 30)
struct link_image {
	char current[65]; /* hex; "" = none */
	char state[17];   /* ready, fetching, failed, none, local */
	char note[257];
};
struct link_image_reply {
	bool wanted; /* false: none was set for this node; the rest is zero */
	uint8_t sha256[LINK_IMAGE_FILES][SHA256_LEN];
	uint64_t size[LINK_IMAGE_FILES];
	uint8_t signature[64]; /* by the root key over link_image_message: link cannot make an image up */
};
struct link_image_blob {
	uint8_t sha256[SHA256_LEN];
	uint64_t offset;
};
/* The node stops and holds nothing any more. The answer is empty. */
struct link_bye {
	uint64_t epoch;
};
/* "ephemeral/image/1" || node_id || image hash. Returns the length. */
size_t link_image_message(const char *node_id, const uint8_t hash[SHA256_LEN], uint8_t out[128]);
/* SHA-256 over "kernel HEX\ninitramfs HEX\nrootfs HEX\n". */
void link_image_hash(const uint8_t sha256[LINK_IMAGE_FILES][SHA256_LEN], uint8_t out[SHA256_LEN]);

#define LINK_CODEC(name)                                                                                                           \
	void link_##name##_encode(const struct link_##name *m, struct buf *out);                                                   \
	int link_##name##_decode(const void *p, size_t n, struct link_##name *out, struct err *e) EPH_MUST_CHECK;
LINK_CODEC(challenge_reply)
LINK_CODEC(enrol)
LINK_CODEC(enrol_reply)
LINK_CODEC(next)
LINK_CODEC(next_reply)
LINK_CODEC(start)
LINK_CODEC(start_reply)
LINK_CODEC(events)
LINK_CODEC(events_reply)
LINK_CODEC(finish)
LINK_CODEC(finish_reply)
LINK_CODEC(refuse)
LINK_CODEC(refuse_reply)
LINK_CODEC(blob)
LINK_CODEC(blob_reply)
LINK_CODEC(image)
LINK_CODEC(image_reply)
LINK_CODEC(image_blob)
LINK_CODEC(bye)
#undef LINK_CODEC
void link_next_free(struct link_next *m);
void link_next_reply_free(struct link_next_reply *m);
void link_events_free(struct link_events *m);
void link_finish_free(struct link_finish *m);

/*
 * Join token: what an operator hands to a host, kept in a file. Text: ephnt_<43 characters>.<base64url of the rest>; the rest is
 * {addresses, CA certificate in PEM, expiry}. The whole CA stands in it (nng 1.5 cannot fetch a chain it does not trust yet), so
 * that its hash needs no second way.
 */
struct join_token {
	char secret[64];
	char addresses[513]; /* "tls+tcp://host:port" separated by commas */
	char ca_pem[4097];
	int64_t expires_ms;
};
bool join_token_print(const struct join_token *t, struct buf *out);
int join_token_parse(const char *s, struct join_token *out, struct err *e) EPH_MUST_CHECK;

#endif
