/* What the files of the channel role share: its one struct. Nobody outside channel/ includes this. */
#ifndef NODED_CHANNEL_INTERNAL_H
#define NODED_CHANNEL_INTERNAL_H

#include "channel/console.h"
#include "channel/control.h"
#include "channel/guest.h"
#include "common/framed.h"

#include <event2/bufferevent.h>
#include <event2/util.h>

#define SNAPSHOT_FDS_MAX 4
#define GUEST_READ_MAX (GUEST_FRAME_MAX + 4 + 65536)

struct channel {
	struct event_base *base;
	struct framed *broker;
	struct guest_peer *guest;
	struct vmm_plan plan;
	struct control *control;
	struct console *console;
	struct bufferevent *guest_stream; /* NULL while the guest has not connected */
	struct bufferevent *control_stream;
	struct event *guest_listener; /* NULL: its stream was there from the start, or has come */
	struct event *events;         /* pipe of the VMM's events; NULL = has none */
	struct evbuffer *early;       /* for the guest, until it has connected */
	struct event *answer;         /* deadline of what the VMM was asked last */
	const char *asked;            /* what that is */
	int snapshot_fds[SNAPSHOT_FDS_MAX];
	size_t snapshot_fd_count;
	bool guest_paused;
	bool guest_over; /* broke the protocol: its stream is not read any more */
	bool guest_deaf; /* takes nothing of what it was sent, and it is too much to keep */
	bool control_over;
	int status;
};

/* channel.c */
void channel_stop(struct channel *c, int status);
void channel_to_broker(void *arg, uint8_t type, const void *body, size_t n);
void channel_to_broker_text(struct channel *c, uint8_t type, const char *text);
/* Owns fd when it succeeds; NULL: it is no stream, or memory ran out. */
struct bufferevent *channel_stream(struct channel *c, int fd, bufferevent_data_cb on_read, size_t read_max);
void channel_on_guest_read(struct bufferevent *bev, void *arg);

/* vmm_side.c */
int vmm_side_open_control(struct channel *c, struct err *e) EPH_MUST_CHECK;
int vmm_side_open_events(struct channel *c, struct err *e) EPH_MUST_CHECK;
void vmm_side_broke(struct channel *c, const char *why); /* the VMM cannot be controlled any more */
void vmm_side_on_connect(evutil_socket_t fd, short what, void *arg);
int vmm_side_snapshot(struct channel *c, const int *fds, size_t fd_count, struct err *e) EPH_MUST_CHECK;
void vmm_side_quit(struct channel *c); /* keeper may be gone as well, and nobody else would see to its end */
void vmm_side_close_listener(struct channel *c);
void vmm_side_close_fds(struct channel *c);

#endif
