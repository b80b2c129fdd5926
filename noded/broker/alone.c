/*
 * The broker's life without keeper, which was killed, is being upgraded, or stopped for a moment: the run goes on, its events go to
 * the spool, its deadlines hold, the VM is killed by the broker's own descriptor. A later keeper connects to the socket that the
 * first one made for this, says what only it can know, and is told again everything that waits for an answer. On the broker's
 * thread; nothing blocks.
 *
 * Who may connect: root. The socket stands in a directory that nobody else enters, the peer's user id is checked all the same, and
 * the nonce says that it is the keeper that has this VM in its journal.
 */
#include "broker_internal.h"

#include "noded/roles.h"

#include "common/clock.h"
#include "common/log.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define NS_PER_S INT64_C(1000000000)
/* After the lease's end the VM is dead and the run lost, but what it cost is known here alone: kept as long as spools usually are.
 */
#define ALONE_NS (600 * NS_PER_S)
#define WARM_NS (60 * NS_PER_S) /* a VM without a run has no lease */

static void on_connect(evutil_socket_t fd, short what, void *arg)
{
	struct broker *b = arg;
	struct ucred peer = { .uid = (uid_t)-1 };
	socklen_t len = sizeof(peer);
	struct framed_options opt;
	struct err e;
	int c = accept4(fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	(void)what;
	if (c < 0)
		return; /* it has gone again */
	if (getsockopt(c, SOL_SOCKET, SO_PEERCRED, &peer, &len) != 0 || peer.uid != 0) {
		log_error("somebody who is not root wants to be keeper run=%s uid=%u", b->a.run_id, (unsigned int)peer.uid);
		close(c);
		return;
	}
	if (b->suitor != NULL)
		framed_free(b->suitor); /* a keeper that died before it spoke; the newest counts */
	b->suitor = NULL;
	opt = keeper_options(b, c);
	if (framed_new(b->base, &opt, &b->suitor, &e) < 0)
		log_error("a new keeper cannot be heard run=%s error=%s", b->a.run_id, e.text);
}

int alone_open(struct broker *b, struct err *e)
{
	socklen_t len = sizeof(int);
	int listens = 0;

	if (getsockopt(BROKER_FD_CTL, SOL_SOCKET, SO_ACCEPTCONN, &listens, &len) != 0 || !listens)
		return 0;
	if (fcntl(BROKER_FD_CTL, F_SETFL, O_NONBLOCK) != 0)
		return err_set_errno(e, "the socket for a later keeper");
	b->ctl = event_new(b->base, BROKER_FD_CTL, EV_READ | EV_PERSIST, on_connect, b);
	return b->ctl != NULL ? 0 : err_set(e, ERR_NOMEM, "no memory for the loop's events");
}

void alone_close(struct broker *b)
{
	if (b->suitor != NULL)
		framed_free(b->suitor);
	if (b->ctl != NULL)
		event_free(b->ctl);
}

/* Without its run only keeper can give it one; a VM that still boots for nobody is not worth waiting for. */
static bool can_go_on(const struct broker *b)
{
	return b->ctl != NULL && b->identity.vm[0] != '\0' && b->state != RUN_OVER && (b->seen.assigned || b->state == RUN_READY);
}

bool alone_begin(struct broker *b)
{
	int64_t now = clock_boot_ns(), from = b->deadlines[DL_LEASE];

	if (!can_go_on(b) || event_add(b->ctl, NULL) != 0)
		return false;
	framed_free(b->keeper);
	b->keeper = NULL;
	broker_deadline(b, DL_SIGN, 0); /* the next keeper signs */
	broker_deadline(b, DL_ALONE, (from > now ? from : now) + (b->seen.assigned ? ALONE_NS : WARM_NS));
	if (b->state == RUN_DESTROY && !b->seen.gone)
		broker_kill(b); /* the order may have been lost */
	log_info("going on without keeper run=%s state=%s", b->a.run_id, run_state_name(b->state));
	return true;
}

static uint32_t state_bits(const struct broker *b)
{
	uint32_t bits = 0;

	if (b->seen.assigned)
		bits |= ADOPTED_ASSIGNED;
	if (b->seen.hello)
		bits |= ADOPTED_READY;
	if (b->seen.start_asked)
		bits |= ADOPTED_ASKED;
	if (b->state >= RUN_DESTROY || b->seen.ending || b->seen.fenced)
		bits |= ADOPTED_ENDING;
	return bits;
}

static bool answer(struct broker *b)
{
	struct role_adopted m = { .version = ADOPT_VERSION,
		.state = state_bits(b),
		.boot_ns = b->boot_ns,
		.lease_deadline_boot_ns = b->deadlines[DL_LEASE] };
	struct buf body = BUF_INIT(512);
	int fd = b->spool != NULL ? spool_descriptor(b->spool) : -1;
	bool sent;

	memcpy(m.vm, b->identity.vm, sizeof(m.vm));
	if (b->seen.assigned)
		memcpy(m.token, b->a.token, TOKEN_LEN);
	role_adopted_encode(&m, &body);
	sent = !body.failed && framed_send_fds(b->suitor, RF_KEEPER_ADOPTED, body.data, body.len, &fd, fd >= 0 ? 1 : 0);
	buf_free(&body);
	return sent;
}

void alone_suitor_left(struct broker *b)
{
	framed_free(b->suitor);
	b->suitor = NULL;
}

void alone_frame(struct broker *b, uint8_t type, const uint8_t *body, size_t n)
{
	struct role_adopt m;
	struct err e;
	bool known;

	if (type != RF_BROKER_ADOPT || role_adopt_decode(body, n, &m, &e) < 0) {
		log_error("a new keeper does not say who it is run=%s type=%u", b->a.run_id, type);
		alone_suitor_left(b);
		return;
	}
	known = m.version == ADOPT_VERSION && sodium_memcmp(m.nonce, b->identity.nonce, sizeof(m.nonce)) == 0;
	/* One of another version is told so, and decides. */
	if ((m.version == ADOPT_VERSION && !known) || !answer(b) || !known) {
		log_error("a new keeper is not followed run=%s version=%u known=%d", b->a.run_id, m.version, known);
		framed_flush(b->suitor, 200);
		alone_suitor_left(b);
		return;
	}
	b->keeper = b->suitor;
	b->suitor = NULL;
	event_del(b->ctl);
	broker_deadline(b, DL_ALONE, 0);
	if (m.lease_deadline_boot_ns > b->deadlines[DL_LEASE] && b->deadlines[DL_LEASE] != 0)
		broker_deadline(b, DL_LEASE, m.lease_deadline_boot_ns);
	log_info("a new keeper took over run=%s state=%s", b->a.run_id, run_state_name(b->state));
	session_say_again(b);
}
