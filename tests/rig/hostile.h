/* What a hostile guest is made of: the port as raw bytes, and one function for each attack. Only for tests. */
#ifndef RIG_HOSTILE_H
#define RIG_HOSTILE_H

#include "common/buf.h"
#include "proto/guest.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* When an attack gets the machine. */
enum hostile_when {
	WHEN_PROBED,  /* instead of the hello */
	WHEN_SETUP,   /* after the setup came, instead of its acknowledgement */
	WHEN_WORKING, /* after the acknowledgement, instead of the first model call */
};

struct hostile {
	int fd;
	uint8_t nonce[GUEST_NONCE_LEN];
	uint64_t calls; /* model calls sent */
};

struct attack {
	const char *name;
	enum hostile_when when;
	void (*run)(struct hostile *h);
};

/* By its name; NULL when there is none. */
const struct attack *attack_find(const char *name);

/* Writes all of it, as fast as the host takes it; never reads. */
void hostile_write(struct hostile *h, const void *p, size_t n);
void hostile_frame(struct hostile *h, enum guest_frame type, uint32_t stream, const void *body, size_t n);
void hostile_hello(struct hostile *h, const uint8_t nonce[GUEST_NONCE_LEN]);
void hostile_ack(struct hostile *h, const char *workdir, const char *boot_id);
/* Reads until a frame of this type came; its body is in `body`. */
void hostile_until(struct hostile *h, uint8_t type, struct buf *body);
/* Reads for ever and does nothing with it. */
void hostile_idle(struct hostile *h) __attribute__((noreturn));

#endif
