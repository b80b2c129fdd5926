/*
 * The agent's end of the guest channel: frames in and out, credit, and the waits that go with them.
 *
 * One channel, one thread. Nothing here blocks but channel_wait and the functions that say so; those end when the host closes the
 * channel or asks to stop (ERR_UNAVAILABLE), or breaks the protocol (ERR_PROTOCOL).
 */
#ifndef GUEST_CHANNEL_H
#define GUEST_CHANNEL_H

#include "proto/guest.h"

#include <poll.h>

/* Most bytes of events that may wait for credit. The last part is kept for events other than output: those are never lost. */
#define CHANNEL_EVENTS_MAX (2 * 1024 * 1024)
#define CHANNEL_EVENTS_KEPT (128 * 1024)

struct channel;

/* transport: what transport_parse takes (transport.h). Waits a bounded time for the driver of the port, or for the host. */
int channel_open(const char *transport, struct channel **out, struct err *e) EPH_MUST_CHECK;

/* Who takes frames that are not credit or stop. NULL: none is legal now. The view is valid during the call only. */
typedef int channel_frame_fn(void *ctx, const struct guest_frame_view *f, struct err *e);
void channel_set_handler(struct channel *ch, channel_frame_fn *fn, void *ctx);

/* For a poll loop: what to wait for; then hand over what came. channel_serve never blocks. */
struct pollfd channel_pollfd(const struct channel *ch);
int channel_serve(struct channel *ch, short revents, struct err *e) EPH_MUST_CHECK;
/* Waits at most timeout_ms (-1: as long as the channel lives) for the channel to do something. */
int channel_wait(struct channel *ch, int timeout_ms, struct err *e) EPH_MUST_CHECK;

/* Queues a frame that needs no credit. */
void channel_put(struct channel *ch, enum guest_frame type, uint32_t stream, const void *body, size_t n);
/* Gives back credit for n received bytes of a stream, in few frames. */
void channel_consumed(struct channel *ch, uint32_t stream, size_t n);
/* Opens a stream for sending and receiving with fresh credit. Streams 0 and 2 are always open. */
void channel_open_stream(struct channel *ch, uint32_t stream);
/* Sends a message as data frames and an end frame; blocks for credit. */
int channel_send_message(struct channel *ch, uint32_t stream, enum guest_frame data, enum guest_frame end, const void *p, size_t n,
		struct err *e) EPH_MUST_CHECK;

/* Queues an event; it leaves as credit allows. False when it would pass CHANNEL_EVENTS_MAX: the caller counts what is lost. */
bool channel_event(struct channel *ch, const struct guest_event *ev);
size_t channel_events_waiting(const struct channel *ch);
/* Blocks until at most `left` bytes of events wait; 0 means that what comes next cannot overtake them. */
int channel_flush_events(struct channel *ch, size_t left, struct err *e) EPH_MUST_CHECK;

/* Nothing more is to be said: waits until the host closes the channel or asks to stop, at most timeout_ms. */
void channel_wait_end(struct channel *ch, int64_t timeout_ms);

/* Says why the agent cannot go on, and waits a short time for it to leave. The channel is of no use afterwards. */
void channel_fatal(struct channel *ch, const char *text);

#endif
