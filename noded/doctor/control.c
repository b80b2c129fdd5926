/*
 * `noded doctor` on time, enrolment and the way to each controld: name, connection, TLS against the pinned authority, an answer and
 * the time in it. Each address is tried in a child with a deadline, because a name server or a handshake may hang; nng and its
 * threads are in that child alone.
 */
#include "doctor/doctor_internal.h"

#include "common/buf.h"
#include "common/clock.h"
#include "common/text.h"
#include "keeper/identity.h"
#include "link/peer.h"
#include "vmm/probe.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netdb.h>
#include <nng/nng.h>
#include <nng/protocol/reqrep0/req.h>
#include <nng/supplemental/tls/tls.h>
#include <nng/transport/tls/tls.h>
#include <poll.h>
#include <signal.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/timex.h>
#include <sys/wait.h>
#include <unistd.h>

#define ADDRESS_MS 10000 /* for all of one address */
#define CONNECT_MS 3000
#define ANSWER_MS 3000
#define SKEW_MS 5000 /* beyond it times that people see are wrong */

/* --- time ----------------------------------------------------------------------------------------------------------------------
 */

static void look_at_clock(struct doctor *d)
{
	struct timex t = { .modes = 0 };
	int state = adjtimex(&t);

	if (state < 0 || state == TIME_ERROR || (t.status & STA_UNSYNC))
		doctor_say(d, "clock", FINDING_WARN, "run an NTP client (chrony, systemd-timesyncd)",
				"the kernel does not say that the clock is synchronised; leases do not depend on it, times that "
				"people "
				"see do");
	else
		doctor_say(d, "clock", FINDING_OK, NULL, "synchronised, within %ld ms", t.maxerror / 1000);
}

/* --- enrolment -----------------------------------------------------------------------------------------------------------------
 */

struct way {
	char addresses[1024];
	char ca_pem[4097];
};

static bool is_there(const char *dir, const char *name)
{
	char path[1024];

	return text_fmt(path, sizeof(path), "%s/%s", dir, name) && access(path, F_OK) == 0;
}

/* identity_open makes keys where there are none, so it is called where there are. */
static bool by_identity(struct doctor *d, struct way *way)
{
	struct role_link_init *init = calloc(1, sizeof(*init));
	struct identity *id = NULL;
	struct err e;
	bool enrolled = false;

	if (!init || identity_open(d->config->state_dir, &id, &e)) {
		doctor_say(d, "enrolment", FINDING_FAIL, "do what it says, or remove the file and enrol this host again", "%s",
				init ? e.text : "no memory");
		free(init);
		return false;
	}
	if (identity_enrolled(id)) {
		identity_fill(id, init);
		enrolled = text_copy(way->addresses, sizeof(way->addresses), init->addresses) &&
			   text_copy(way->ca_pem, sizeof(way->ca_pem), init->ca_pem);
		doctor_say(d, "enrolment", FINDING_OK, NULL, "enrolled as %s", identity_node_id(id));
	}
	identity_free(id);
	sodium_memzero(init, sizeof(*init));
	free(init);
	return enrolled;
}

static bool by_token(struct doctor *d, struct way *way)
{
	static const char mend[] = "make a token with `ephemeral admin node token`, put it into a file and set join_token_file";
	const char *path = d->config->join_token_file;
	struct join_token *token = calloc(1, sizeof(*token));
	struct err e = { .code = ERR_NOMEM };
	char *text = NULL;
	bool ok = false;

	if (!path || !*path)
		doctor_say(d, "enrolment", FINDING_FAIL, mend, "this host is not enrolled, and there is no join token");
	else if (!token || identity_read_token(path, &text, token, &e))
		doctor_say(d, "enrolment", FINDING_FAIL, mend, "not enrolled: %s", token ? e.text : "no memory");
	else {
		ok = text_copy(way->addresses, sizeof(way->addresses), token->addresses) &&
		     text_copy(way->ca_pem, sizeof(way->ca_pem), token->ca_pem);
		doctor_say(d, "enrolment", FINDING_OK, NULL, "not yet; the token in %s is good", path);
	}
	if (text)
		sodium_memzero(text, strlen(text));
	free(text);
	if (token)
		sodium_memzero(token, sizeof(*token));
	free(token);
	return ok;
}

/* --- one address, in the child -------------------------------------------------------------------------------------------------
 */

/* What the child says: a letter (o, w, F), then found, a line break, and mend. */
static void tell(int out, char state, const char *mend, const char *fmt, ...) EPH_PRINTF(4, 5);

static void tell(int out, char state, const char *mend, const char *fmt, ...)
{
	char text[1024];
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	if (n >= 0)
		(void)dprintf(out, "%c%s\n%s", state, text, mend);
}

static int connect_one(const struct addrinfo *a)
{
	int fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), error = 0;
	struct pollfd p = { .fd = fd, .events = POLLOUT };
	socklen_t size = sizeof(error);

	if (fd < 0)
		return errno;
	if (connect(fd, a->ai_addr, a->ai_addrlen) != 0 && errno != EINPROGRESS)
		error = errno;
	else if (poll(&p, 1, CONNECT_MS) != 1)
		error = ETIMEDOUT;
	else
		(void)getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
	close(fd);
	return error;
}

/* 0 somebody takes connections there. */
static int try_connect(const char *address, int out)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *list = NULL;
	char host[256], service[8];
	uint16_t port;
	struct err e;
	int rc;

	if (config_addr(address + strlen("tls+tcp://"), host, sizeof(host), &port, &e) ||
			!text_fmt(service, sizeof(service), "%u", (unsigned)port)) {
		tell(out, 'F', "correct the address", "%s: %s", address, e.text);
		return -1;
	}
	rc = getaddrinfo(host, service, &hints, &list);
	if (rc != 0) {
		tell(out, 'F', "correct the name or this host's name servers (/etc/resolv.conf)", "%s: the name is not found: %s",
				address, gai_strerror(rc));
		return -1;
	}
	rc = ETIMEDOUT;
	for (const struct addrinfo *a = list; a && rc != 0; a = a->ai_next)
		rc = connect_one(a);
	freeaddrinfo(list);
	if (rc == 0)
		return 0;
	tell(out, 'F',
			rc == ECONNREFUSED ? "start controld there, or correct the address"
					   : "look at routes and firewalls between this host and controld",
			"%s: no connection: %s", address, strerror(rc));
	return -1;
}

static int dial(nng_socket *s, const char *address, const char *ca)
{
	nng_tls_config *tls;
	nng_dialer dialer;
	int rc = nng_tls_config_alloc(&tls, NNG_TLS_MODE_CLIENT);

	if (rc != 0)
		return rc;
	rc = nng_req0_open(s);
	if (rc == 0)
		rc = nng_tls_config_ca_chain(tls, ca, NULL);
	if (rc == 0)
		rc = nng_tls_config_server_name(tls, PEER_SERVER_NAME);
	if (rc == 0)
		rc = nng_tls_config_auth_mode(tls, NNG_TLS_AUTH_MODE_REQUIRED);
	if (rc == 0)
		rc = nng_dialer_create(&dialer, *s, address);
	if (rc == 0)
		rc = nng_dialer_set_ptr(dialer, NNG_OPT_TLS_CONFIG, tls);
	if (rc == 0)
		rc = nng_dialer_start(dialer, 0);
	return rc;
}

/* Asks for a challenge, as link does; the controld's time, or 0. */
static int64_t ask_time(nng_socket s)
{
	struct link_request r = {
		.type = LINK_CHALLENGE, .request_id = 1, .context = 1, .counter = 1, .body = (const uint8_t *)""
	};
	struct link_challenge_reply c;
	struct link_reply reply;
	struct buf b = BUF_INIT(4096);
	uint8_t *answer = NULL;
	size_t n = 0;
	struct err e;
	bool ok;

	link_request_encode(&r, &b);
	ok = !b.failed && nng_socket_set_ms(s, NNG_OPT_SENDTIMEO, ANSWER_MS) == 0 &&
	     nng_socket_set_ms(s, NNG_OPT_RECVTIMEO, ANSWER_MS) == 0 && nng_send(s, b.data, b.len, 0) == 0 &&
	     nng_recv(s, &answer, &n, NNG_FLAG_ALLOC) == 0;
	buf_free(&b);
	if (!ok)
		return 0;
	ok = link_reply_decode(answer, n, &reply, &e) == 0 && reply.result == LINK_OK &&
	     link_challenge_reply_decode(reply.body, reply.body_len, &c, &e) == 0;
	nng_free(answer, n);
	return ok ? c.server_time_ms : 0;
}

static void try_address(const char *address, const char *ca, int out)
{
	nng_socket s;
	int64_t began, skew, theirs;
	int rc;

	if (try_connect(address, out) != 0)
		return;
	rc = dial(&s, address, ca);
	if (rc != 0) {
		tell(out, 'F',
				"correct the address; if controld's authority was replaced, remove this host's state and enrol it "
				"again",
				"%s: what answers is not the controld that this host knows: %s", address, nng_strerror(rc));
		return;
	}
	began = clock_real_ms();
	theirs = ask_time(s);
	if (theirs == 0) {
		tell(out, 'F', "look at controld's log and at its database", "%s: TLS is good, but there is no answer within %d s",
				address, ANSWER_MS / 1000);
		return;
	}
	skew = theirs - (began + (clock_real_ms() - began) / 2);
	if (skew > SKEW_MS || skew < -SKEW_MS)
		tell(out, 'w', "set this host's clock, or controld's", "%s: answers; its clock is %" PRId64 " s %s of this host's",
				address, (skew < 0 ? -skew : skew) / 1000, skew < 0 ? "behind" : "ahead");
	else
		tell(out, 'o', "", "%s: answers, TLS by the pinned authority, clocks agree", address);
}

/* --- all addresses -------------------------------------------------------------------------------------------------------------
 */

static void look_at_address(struct doctor *d, const char *address, const char *ca)
{
	char text[2048], *line;
	int fds[2];
	pid_t pid;

	if (pipe2(fds, O_CLOEXEC) != 0 || (pid = fork()) < 0) {
		doctor_say(d, "controld", FINDING_FAIL, "free processes and descriptors", "%s: not tried: %s", address,
				strerror(errno));
		return;
	}
	if (pid == 0) {
		try_address(address, ca, fds[1]);
		_exit(0);
	}
	close(fds[1]);
	vmm_read_output(fds[0], ADDRESS_MS, text, sizeof(text));
	close(fds[0]);
	kill(pid, SIGKILL);
	while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		continue;
	line = strchr(text, '\n');
	if (!line) {
		doctor_say(d, "controld", FINDING_FAIL, "look at name servers, firewalls and what listens at that address",
				"%s: connected, and no answer within %d s", address, ADDRESS_MS / 1000);
		return;
	}
	*line = '\0';
	doctor_say(d, "controld",
			text[0] == 'o'   ? FINDING_OK
			: text[0] == 'w' ? FINDING_WARN
					 : FINDING_FAIL,
			line + 1, "%s", text + 1);
}

void doctor_look_at_control(struct doctor *d)
{
	struct way way = { .addresses = "" };
	const char *s;

	look_at_clock(d);
	if (!(is_there(d->config->state_dir, "identity.key") && is_there(d->config->state_dir, "node") ? by_identity(d, &way)
												       : by_token(d, &way)))
		return;
	s = d->config->controld && *d->config->controld ? d->config->controld : way.addresses;
	while (*s != '\0') {
		size_t n = strcspn(s, ", ");
		char address[513];

		if (n > 0 && text_fmt(address, sizeof(address), "%.*s", (int)n, s))
			look_at_address(d, address, way.ca_pem);
		s += n + (s[n] != '\0');
	}
}
