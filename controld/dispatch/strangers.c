/*
 * Connections that never speak. nng 1.5.2 waits for ever for the first bytes of a TLS handshake, so that anybody who reaches the
 * port could hold descriptors and memory without end. nng does not show such connections; the kernel does: every five seconds the
 * sockets of this process that belong to the link's address and to no pipe are looked at, and one that is seen for the third time
 * is shut down, which nng takes as the end of the connection. On the loop; reads /proc/self/fd, which does not block.
 */
#include "internal.h"

#include "common/log.h"
#include "common/text.h"

#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>

#define SCANS_MAX 3 /* of SWEEPS_PER_SCAN seconds each */
#define SWEEPS_PER_SCAN 5
#define STRANGERS_MAX 65536 /* more are shut down at once */

/* The far end of a connection; IPv4 as mapped IPv6. */
struct far_end {
	uint8_t bytes[18];
};

struct stranger {
	struct far_end from; /* first member: compared as one */
	uint32_t scans;
};

struct strangers {
	struct stranger *list; /* sorted, of the last scan */
	size_t count;
	uint32_t sweeps;
};

struct scan {
	struct far_end *known; /* of pipes, sorted */
	size_t known_count;
	struct stranger *found;
	size_t found_count, found_room;
	uint32_t shut;
};

static int compare(const void *a, const void *b)
{
	return memcmp(a, b, sizeof(struct far_end));
}

static bool split_addr(const struct sockaddr_storage *sa, uint8_t addr[16], uint16_t *port)
{
	const struct sockaddr_in *v4 = (const struct sockaddr_in *)(const void *)sa;
	const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)(const void *)sa;

	memset(addr, 0, 16);
	if (sa->ss_family == AF_INET) {
		addr[10] = addr[11] = 0xff;
		memcpy(addr + 12, &v4->sin_addr, 4);
		*port = ntohs(v4->sin_port);
		return true;
	}
	if (sa->ss_family != AF_INET6)
		return false;
	memcpy(addr, &v6->sin6_addr, 16);
	*port = ntohs(v6->sin6_port);
	return true;
}

static bool far_end_of(const struct sockaddr_storage *sa, struct far_end *out)
{
	uint16_t port;

	if (!split_addr(sa, out->bytes, &port))
		return false;
	memcpy(out->bytes + 16, &port, 2);
	return true;
}

bool strangers_far_end(nng_pipe pipe, uint8_t out[18])
{
	struct sockaddr_storage sa = { .ss_family = AF_UNSPEC };
	struct sockaddr_in *v4 = (struct sockaddr_in *)(void *)&sa;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)(void *)&sa;
	struct far_end from;
	nng_sockaddr far;

	if (nng_pipe_get_addr(pipe, NNG_OPT_REMADDR, &far) != 0)
		return false;
	if (far.s_family == NNG_AF_INET) {
		v4->sin_family = AF_INET;
		v4->sin_port = far.s_in.sa_port; /* network order on both sides */
		memcpy(&v4->sin_addr, &far.s_in.sa_addr, 4);
	} else if (far.s_family == NNG_AF_INET6) {
		v6->sin6_family = AF_INET6;
		v6->sin6_port = far.s_in6.sa_port;
		memcpy(&v6->sin6_addr, far.s_in6.sa_addr, 16);
	}
	if (!far_end_of(&sa, &from))
		return false;
	memcpy(out, from.bytes, sizeof(from.bytes));
	return true;
}

/* A connection of the link: its near end is the address that we listen on. */
static bool is_ours(const struct dispatch *d, int fd, struct far_end *out)
{
	struct sockaddr_storage near = { .ss_family = AF_UNSPEC }, far = near;
	socklen_t near_len = sizeof(near), far_len = sizeof(far);
	uint8_t addr[16], bound[16];
	uint16_t port, bound_port;

	if (getsockname(fd, (struct sockaddr *)&near, &near_len) != 0 || !split_addr(&near, addr, &port) || port != d->port)
		return false;
	if (!d->bound_any && (!split_addr(&d->bound, bound, &bound_port) || memcmp(addr, bound, 16) != 0))
		return false;
	return getpeername(fd, (struct sockaddr *)&far, &far_len) == 0 && far_end_of(&far, out);
}

static bool make_room(struct scan *s)
{
	size_t room = s->found_room ? s->found_room * 2 : 64;
	struct stranger *more;

	if (s->found_count < s->found_room)
		return true;
	if (room > STRANGERS_MAX)
		return false;
	more = realloc(s->found, room * sizeof(*more));
	if (!more)
		return false;
	s->found = more;
	s->found_room = room;
	return true;
}

static void look_at(struct dispatch *d, struct scan *s, int fd)
{
	const struct strangers *before = d->strangers;
	const struct stranger *old;
	struct stranger now = { .scans = 1 };

	if (!is_ours(d, fd, &now.from) ||
			(s->known_count > 0 && bsearch(&now.from, s->known, s->known_count, sizeof(*s->known), compare)))
		return;
	old = before->count == 0 ? NULL : bsearch(&now, before->list, before->count, sizeof(*before->list), compare);
	if (old)
		now.scans = old->scans + 1;
	if (now.scans < SCANS_MAX && make_room(s)) {
		s->found[s->found_count++] = now;
	} else {
		shutdown(fd, SHUT_RDWR);
		s->shut++;
	}
}

/* False also when the far end of a pipe is not known: then nobody can be told from it. */
static bool collect_known(struct dispatch *d, struct scan *s)
{
	struct pipe *p;

	s->known = calloc(d->pipe_count + 1, sizeof(*s->known));
	if (!s->known)
		return false;
	for (size_t i = 0; i < DISPATCH_PIPE_BUCKETS; i++) {
		LIST_FOREACH(p, &d->pipes[i], entry)
		{
			if (!p->has_far)
				return false;
			memcpy(s->known[s->known_count++].bytes, p->far, sizeof(p->far));
		}
	}
	if (s->known_count > 0)
		qsort(s->known, s->known_count, sizeof(*s->known), compare);
	return true;
}

static void scan(struct dispatch *d)
{
	struct scan s = { .found = NULL };
	DIR *dir = opendir("/proc/self/fd");
	struct dirent *entry;
	struct err e;
	int64_t fd;

	if (dir && collect_known(d, &s)) {
		while ((entry = readdir(dir)) != NULL) {
			if (text_i64(entry->d_name, 0, INT32_MAX, &fd, &e) == 0 && fd != dirfd(dir))
				look_at(d, &s, (int)fd);
		}
		if (s.found_count > 0)
			qsort(s.found, s.found_count, sizeof(*s.found), compare);
		free(d->strangers->list);
		d->strangers->list = s.found;
		d->strangers->count = s.found_count;
		s.found = NULL;
		if (s.shut > 0)
			log_warn("link connections that never spoke are shut count=%u", s.shut);
	}
	if (dir)
		closedir(dir);
	free(s.found);
	free(s.known);
}

void strangers_sweep(struct dispatch *d)
{
	if (!d->strangers)
		d->strangers = calloc(1, sizeof(*d->strangers));
	if (d->strangers && ++d->strangers->sweeps % SWEEPS_PER_SCAN == 0)
		scan(d);
}

void strangers_free(struct dispatch *d)
{
	if (d->strangers)
		free(d->strangers->list);
	free(d->strangers);
	d->strangers = NULL;
}
