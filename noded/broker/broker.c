/*
 * The broker process: one run, one thread, one libevent loop. It has the run's secrets, its meter and its clock, and speaks to
 * keeper (which started it) and to channel (which speaks to the guest) over inherited socketpairs, and to the model provider over
 * HTTP. When keeper goes away, it goes on alone until the next one comes (alone.c) or its deadlines end the run.
 */
#include "broker_internal.h"

#include "noded/roles.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define NS_PER_MS INT64_C(1000000)
#define NS_PER_S INT64_C(1000000000)
#define METER_TICKS 5                   /* seconds between meters told without an event */
#define STALL_NS (300 * NS_PER_MS)      /* a deadline found so late was missed because we stood still */
#define STALL_READ_NS (100 * NS_PER_MS) /* time to read what came meanwhile */
#define COMPUTE_MARGIN_MS 5             /* the kill is ordered this much before the last affordable millisecond */
#define CHANNEL_QUEUE_MAX (2 * ROLE_FRAME_MAX)

/* --- clocks ------------------------------------------------------------------------------------------------------------------ */

static void arm_timer(struct broker *b)
{
	struct itimerspec when = { .it_interval = { 0, 0 } };
	int64_t first = 0, left;

	for (int i = 0; i < DL_COUNT; i++)
		if (b->deadlines[i] != 0 && (first == 0 || b->deadlines[i] < first))
			first = b->deadlines[i];
	if (first != 0) {
		/* Relative, because our clock may be shifted by a test; the 1 s tick catches what a shift moves nearer. */
		left = first - clock_boot_ns();
		if (left < 1)
			left = 1;
		when.it_value.tv_sec = left / NS_PER_S;
		when.it_value.tv_nsec = left % NS_PER_S;
	}
	if (timerfd_settime(b->timer_fd, 0, &when, NULL) != 0)
		log_error("timer not set run=%s errno=%d", b->a.run_id, errno);
}

void broker_deadline(struct broker *b, enum deadline which, int64_t at_ns)
{
	if (b->deadlines[which] == at_ns)
		return;
	b->deadlines[which] = at_ns;
	arm_timer(b);
}

int64_t broker_compute_ms(const struct broker *b)
{
	int64_t until = b->killed_ns != 0 ? b->killed_ns : clock_boot_ns();

	if (b->handover_ns == 0 || until <= b->handover_ns)
		return 0;
	return (until - b->handover_ns + NS_PER_MS - 1) / NS_PER_MS;
}

void broker_kill(struct broker *b)
{
	if (b->kill_fd < 0)
		return;
	if (pwrite(b->kill_fd, "1", 1, 0) != 1)
		log_error("cgroup.kill not written run=%s errno=%d", b->a.run_id, errno);
	else
		log_warn("vm killed by its broker run=%s", b->a.run_id);
}

void broker_give_up(struct broker *b)
{
	broker_kill(b);
	b->leaving = true;
	event_base_loopexit(b->base, NULL);
}

static void compute_over(struct broker *b)
{
	char cap[32], spent[32];

	text_dollars(b->meter.cap, cap);
	text_dollars(meter_spent(&b->meter, broker_compute_ms(b)), spent);
	session_end(b, ERRCODE_BUDGET_EXCEEDED, "The limit is %s, %s is spent, and it pays for no more compute.", cap, spent);
}

static void deadline_hit(struct broker *b, enum deadline which)
{
	switch (which) {
	case DL_BOOT:
		session_end(b, ERRCODE_VM_START_FAILED, "The guest did not say hello within %lld ms.", (long long)b->boot_limit_ms);
		break;
	case DL_SETUP:
		session_end(b, ERRCODE_WORKER_FAILED, "The worker did not take its setup within %d ms.", SETUP_DEADLINE_MS);
		break;
	case DL_TIMEOUT: session_end(b, ERRCODE_TIMED_OUT, "The run reached its timeout of %u s.", b->a.timeout_s); break;
	case DL_LEASE:
		session_end(b, ERRCODE_LEASE_EXPIRED, "The host lost contact with the control plane.");
		broker_kill(b);
		break;
	case DL_COMPUTE: compute_over(b); break;
	case DL_GRACE:
		if (b->vmm_text[0] != '\0')
			session_end(b, ERRCODE_VM_CRASHED, "%s", b->vmm_text);
		else
			session_end(b, ERRCODE_CHANNEL_LOST, "The channel process ended.");
		break;
	case DL_KILL:
		log_warn("keeper is slow to kill run=%s", b->a.run_id);
		broker_kill(b);
		break;
	case DL_SIGN:
		log_warn("no receipt signature run=%s", b->a.run_id);
		b->seen.is_signed = true;
		break;
	case DL_RATE: worker_drain(b); break;
	case DL_ALONE:
		log_error("no noded came back: leaving run=%s state=%s", b->a.run_id, run_state_name(b->state));
		broker_give_up(b);
		break;
	case DL_COUNT: break;
	}
}

/*
 * Found late, because this process stood still (SIGCONT ends the loop's wait, and timers come before sockets then): what the
 * deadline waits for may be in a socket, and is read first. Never so for what bounds money or authority: lease, compute, the run's
 * timeout.
 */
static bool read_first(struct broker *b, int which, int64_t now)
{
	if ((which != DL_BOOT && which != DL_SETUP && which != DL_SIGN) || now - b->deadlines[which] < STALL_NS)
		return false;
	b->deadlines[which] = now + STALL_READ_NS;
	return true;
}

static void check_deadlines(struct broker *b)
{
	int64_t now = clock_boot_ns();

	for (int i = 0; i < DL_COUNT; i++) {
		if (b->deadlines[i] == 0 || b->deadlines[i] > now || read_first(b, i, now))
			continue;
		b->deadlines[i] = 0;
		deadline_hit(b, (enum deadline)i);
	}
	session_advance(b);
	arm_timer(b);
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
	uint64_t count;

	(void)what;
	if (read(fd, &count, sizeof(count)) < 0 && errno != EAGAIN)
		log_odd("timerfd", __FILE__, __LINE__);
	check_deadlines(arg);
}

static void on_tick(evutil_socket_t fd, short what, void *arg)
{
	struct broker *b = arg;

	(void)fd;
	(void)what;
	check_deadlines(b);
	tally_tell(b);
	if (b->state == RUN_WORK && ++b->ticks % METER_TICKS == 0)
		(void)broker_meter_moved(b);
}

/* --- meter and link ---------------------------------------------------------------------------------------------------------- */

void broker_meter(const struct broker *b, int64_t *spent, int64_t *held)
{
	int64_t ms = broker_compute_ms(b);

	*spent = meter_spent(&b->meter, ms);
	*held = meter_held(&b->meter, ms);
}

static void compute_deadline(struct broker *b)
{
	int64_t limit_ms = meter_compute_limit_ms(&b->meter);

	if (b->handover_ns == 0 || b->killed_ns != 0 || limit_ms > INT64_MAX / NS_PER_MS / 4)
		broker_deadline(b, DL_COMPUTE, 0);
	else
		broker_deadline(b, DL_COMPUTE,
				b->handover_ns + 1 + (limit_ms > COMPUTE_MARGIN_MS ? limit_ms - COMPUTE_MARGIN_MS : 0) * NS_PER_MS);
}

/* As broker_meter; the spool's head learns for how much compute both sums pay. */
void broker_spooled_meter(struct broker *b, int64_t *spent, int64_t *held)
{
	broker_meter(b, spent, held);
	spool_compute(b->spool, meter_paid_ms(&b->meter, broker_compute_ms(b)));
}

bool broker_meter_moved(struct broker *b)
{
	struct buf body = BUF_INIT(32);
	int64_t spent, held;
	struct err e;
	bool ok = true;

	broker_spooled_meter(b, &spent, &held);
	if (spool_meter(b->spool, spent, held, &e) < 0) {
		session_spool_failed(b, &e);
		ok = false;
	}
	wire_put_i64(&body, spent);
	wire_put_i64(&body, held);
	if (b->keeper != NULL && !framed_send(b->keeper, RF_KEEPER_METER, body.data, body.len))
		ok = false;
	buf_free(&body);
	compute_deadline(b);
	broker_notify(b);
	return ok;
}

void broker_to_link(struct broker *b, uint8_t type, const void *body, size_t n)
{
	struct buf frame = BUF_INIT(ROLE_FRAME_MAX);

	if (b->keeper == NULL)
		return; /* said again to the next one, as far as it still matters then: session_say_again */
	wire_put_u8(&frame, type);
	wire_put_raw(&frame, body, n);
	if (frame.failed || !framed_send(b->keeper, RF_KEEPER_TO_LINK, frame.data, frame.len))
		log_error("frame for link lost run=%s type=%u", b->a.run_id, type);
	buf_free(&frame);
}

void broker_notify_now(struct broker *b)
{
	struct buf body = BUF_INIT(32);
	int64_t spent, held;

	b->notify_due = false;
	broker_meter(b, &spent, &held);
	wire_put_u64(&body, b->last_seq);
	wire_put_i64(&body, spent);
	wire_put_i64(&body, held);
	broker_to_link(b, RF_BL_EVENTS, body.data, body.len);
	buf_free(&body);
}

void broker_notify(struct broker *b)
{
	if (b->notify_due)
		return;
	b->notify_due = true;
	event_active(b->notify, EV_TIMEOUT, 0);
}

static void on_notify(evutil_socket_t fd, short what, void *arg)
{
	struct broker *b = arg;

	(void)fd;
	(void)what;
	if (b->notify_due && !b->leaving)
		broker_notify_now(b);
}

/* --- channel's frames --------------------------------------------------------------------------------------------------------- */

static void on_channel_frame(void *arg, uint8_t type, const uint8_t *body, size_t n, const int *fds, size_t fd_count)
{
	struct broker *b = arg;

	for (size_t i = 0; i < fd_count; i++)
		close(fds[i]);
	if (b->seen.assigned || b->seen.prepared)
		worker_frame(b, type, body, n);
	else if (type == RF_CB_VMM_UP)
		b->seen.vmm_up = true;
	session_advance(b);
}

static void on_channel_end(void *arg, const struct err *e)
{
	struct broker *b = arg;

	worker_channel_end(b, e);
	session_advance(b);
}

/* --- the process ------------------------------------------------------------------------------------------------------------- */

static int open_loop(struct broker *b, struct err *e)
{
	struct event_config *cfg = event_config_new();
	struct timeval second = { 1, 0 };

	if (cfg == NULL || event_config_set_flag(cfg, EVENT_BASE_FLAG_PRECISE_TIMER) != 0 ||
			(b->base = event_base_new_with_config(cfg)) == NULL) {
		if (cfg != NULL)
			event_config_free(cfg);
		return err_set(e, ERR_NOMEM, "no event loop");
	}
	event_config_free(cfg);
	b->timer_fd = timerfd_create(CLOCK_BOOTTIME, TFD_NONBLOCK | TFD_CLOEXEC);
	if (b->timer_fd < 0)
		return err_set_errno(e, "timerfd");
	b->timer = event_new(b->base, b->timer_fd, EV_READ | EV_PERSIST, on_timer, b);
	b->tick = event_new(b->base, -1, EV_PERSIST, on_tick, b);
	b->notify = event_new(b->base, -1, 0, on_notify, b);
	if (b->timer == NULL || b->tick == NULL || b->notify == NULL || event_add(b->timer, NULL) != 0 ||
			event_add(b->tick, &second) != 0)
		return err_set(e, ERR_NOMEM, "no memory for the loop's events");
	return 0;
}

static int open_all(struct broker *b, struct err *e)
{
	struct framed_options keeper = keeper_options(b, BROKER_FD_KEEPER);
	struct framed_options channel = { .fd = BROKER_FD_CHANNEL,
		.max_frame = ROLE_FRAME_MAX,
		.max_queued = CHANNEL_QUEUE_MAX,
		.on_frame = on_channel_frame,
		.on_end = on_channel_end,
		.arg = b };

	if (sodium_init() < 0)
		return err_set(e, ERR_INTERNAL, "libsodium does not start");
	b->kill_fd = fcntl(BROKER_FD_KILL, F_GETFD) >= 0 ? BROKER_FD_KILL : -1;
	if (open_loop(b, e) < 0 || alone_open(b, e) < 0)
		return -1;
	if (curlev_new(b->base, 4, &b->curl, e) < 0)
		return -1;
	if (framed_new(b->base, &keeper, &b->keeper, e) < 0 || framed_new(b->base, &channel, &b->channel, e) < 0)
		return -1;
	return 0;
}

static void close_all(struct broker *b)
{
	model_free(b->model); /* wipes the key */
	curlev_free(b->curl);
	framed_free(b->channel);
	framed_free(b->keeper);
	alone_close(b);
	worker_queue_free(b);
	files_free(b);
	events_free(b->events);
	spool_close(b->spool);
	buf_free(&b->output);
	assignment_free(&b->a);
	if (b->ra.secrets != NULL)
		sodium_memzero(b->ra.secrets, b->ra.secrets_len);
	role_broker_assign_free(&b->ra);
	if (b->timer != NULL)
		event_free(b->timer);
	if (b->tick != NULL)
		event_free(b->tick);
	if (b->notify != NULL)
		event_free(b->notify);
	if (b->timer_fd >= 0)
		close(b->timer_fd);
	if (b->base != NULL)
		event_base_free(b->base);
}

int broker_main(void)
{
	struct broker b = { .worker_t_ms = -1, .timer_fd = -1, .kill_fd = -1 };
	struct err e;
	int status = 0;

	b.queue_tail = &b.queue;
	(void)signal(SIGPIPE, SIG_IGN);
	(void)signal(SIGXFSZ, SIG_IGN);           /* a write that may not grow a file is an error to be reported, no death */
	(void)prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* also done by main: the key must never reach a core file */
	if (open_all(&b, &e) < 0) {
		log_error("broker does not start error=%s", e.text);
		status = 1;
	} else {
		event_base_dispatch(b.base);
	}
	close_all(&b);
	return status;
}
