/*
 * The link process: what link.c (keeper's frames), requests.c (what runs ask) and poll.c (the long poll, enrolment) share. One
 * loop; nng's threads end in peer.c.
 */
#ifndef LINK_INTERNAL_H
#define LINK_INTERNAL_H

#include "peer.h"
#include "runs.h"

#include "keeper/stats.h"
#include "noded/spool.h"

#include "common/framed.h"
#include "proto/role.h"

#include <event2/event.h>

#define POLLS_MAX 2 /* the second one is sent when there is news: controld answers the older at once */

struct run_entry {
	struct run_entry *next;
	struct link_run run;
	struct spool *spool; /* NULL until RF_LINK_VM */
	/* Counted against the free capacity until keeper's own figures have it. */
	uint32_t memory_mib, vcpus;
	bool pending;  /* handed to keeper, which has not said yet that it lives */
	bool astray;   /* keeper did not name it when it last named its runs */
	bool admitted; /* it lives; its share is in the next RF_LINK_CAPACITY */
};

struct capacity {
	bool known;
	uint32_t free_memory_mib, free_vcpus, free_slots;
	uint32_t total_memory_mib, total_vcpus, total_slots;
};

/* A request that is out. */
struct asked {
	uint8_t type;
	struct run_entry *run; /* NULL for polls and enrolment */
	int64_t sent_boot_ns;
};

struct metrics_http;

/* What keeper says of images, and what it wants of them. */
struct link_images {
	struct link_image state;
	bool known;        /* keeper has said the state */
	bool question_out; /* LINK_IMAGE is */
	int64_t after_ms;  /* CLOCK_BOOTTIME: no question before */
	bool piece_due, piece_out;
	struct link_image_blob piece;
};

struct link {
	struct event_base *base;
	struct framed *keeper;
	struct peers *peers; /* NULL until RF_LINK_INIT */
	struct role_link_init init;
	char node_id[ID_MAX]; /* "" until enrolled */
	struct run_entry *runs;
	uint32_t run_count;
	struct capacity capacity;
	bool draining;
	uint64_t told_command; /* highest command that keeper was told of */
	uint64_t last_command; /* ... and that it has carried out: only then controld may forget it */

	int polls; /* out */
	bool news; /* something changed since the last poll was made */
	uint32_t poll_failures;
	bool leased;           /* a lease was granted to this process once */
	uint32_t lease_ms;     /* how long it was */
	int64_t poll_after_ms; /* CLOCK_BOOTTIME: no poll before */
	int64_t news_after_ms; /* no second poll before */
	bool enrolling;
	struct link_images images;
	bool bye_due, bye_out; /* the host stops: nothing is asked any more */
	int64_t enrol_after_ms;
	struct event *pump_event; /* one turn of the pump, soon */

	/* metrics.c */
	struct metrics_http *metrics; /* NULL: off */
	struct role_host host;
	struct keeper_stats stats;                       /* as keeper told last */
	uint64_t requests[LINK_TYPES][LINK_RESULTS + 1]; /* by result; the last: no answer came */
	int64_t lease_deadline_boot_ns, polled_boot_ns;  /* 0 = none yet */
};

/* link.c */
void link_pump_soon(struct link *l);
bool link_to_keeper(struct link *l, uint8_t type, const void *body, size_t n);
void link_to_broker(struct link *l, const uint8_t token[TOKEN_LEN], uint8_t type, const void *body, size_t n);
struct run_entry *link_find(const struct link *l, const uint8_t token[TOKEN_LEN]);
/* NULL when the table is full or memory ran out. */
struct run_entry *link_add(struct link *l, const char *run_id, const uint8_t token[TOKEN_LEN]);
void link_token_frame(struct link *l, uint8_t type, const uint8_t token[TOKEN_LEN]);
void link_kill_all(struct link *l);

/* metrics.c: RF_LINK_HOST (takes the descriptors), RF_LINK_STATS, an answer (NULL: none came) */
void link_metrics_host(struct link *l, const uint8_t *body, size_t n, const int *fds, size_t fd_count);
void link_metrics_stats(struct link *l, const uint8_t *body, size_t n);
void link_metrics_answer(struct link *l, uint8_t type, const struct link_reply *reply);

/* requests.c */
void requests_pump(struct link *l);
void requests_answer(struct link *l, struct asked *a, const struct link_reply *reply);
void requests_reap(struct link *l); /* frees entries that are over */

/* images.c */
void images_pump(struct link *l);
int64_t images_next_ms(const struct link *l); /* when it wants to be pumped; 0 = not by time */
void images_answer(struct link *l, const struct asked *a, const struct link_reply *reply);
void images_state(struct link *l, const uint8_t *body, size_t n);
void images_ask(struct link *l, const uint8_t *body, size_t n);

/* poll.c */
void poll_pump(struct link *l);
void poll_answer(struct link *l, struct asked *a, const struct link_reply *reply);
void poll_obeyed(struct link *l, uint64_t id); /* keeper has carried a command out */
void poll_news(struct link *l);                /* controld should hear of something before the poll that is out comes back */
void enrol_pump(struct link *l);
void enrol_answer(struct link *l, const struct link_reply *reply);

#endif
