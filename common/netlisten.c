/* A socket bound for a listener (netlisten.h). Called at start; looking a host name up may block. */
#include "netlisten.h"

#include "config.h"
#include "netaddr.h"
#include "text.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int bind_one(const struct addrinfo *a)
{
	int on = 1, off = 0;
	int fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return -1;
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)); /* inherited by what it accepts: 40 ms a reply otherwise */
	if (a->ai_family == AF_INET6)
		setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
	if (bind(fd, a->ai_addr, a->ai_addrlen) == 0)
		return fd;
	close(fd);
	return -1;
}

int net_listen_text(const char *listen, uint16_t port, char *out, size_t size, struct err *e)
{
	char host[256];
	uint16_t asked;
	bool v6;

	if (config_addr(listen, host, sizeof(host), &asked, e) != 0)
		return -1;
	v6 = strchr(host, ':') != NULL;
	if (text_fmt(out, size, "%s%s%s:%u", v6 ? "[" : "", host, v6 ? "]" : "", (unsigned)port))
		return 0;
	return err_set(e, ERR_LIMIT, "listen address %s is too long", listen);
}

int net_listen_port(int fd, uint16_t *port, struct err *e)
{
	struct sockaddr_storage ss;
	socklen_t len = sizeof(ss);

	if (getsockname(fd, (struct sockaddr *)&ss, &len) != 0)
		return err_set_errno(e, "address of a listener");
	*port = net_addr_port((struct sockaddr *)&ss);
	return 0;
}

int net_listen(const char *listen, int *out, uint16_t *bound_port, struct err *e)
{
	struct addrinfo hints = { .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV };
	struct addrinfo *list = NULL;
	char host[256], service[16];
	uint16_t port;
	int fd = -1, rc;

	if (config_addr(listen, host, sizeof(host), &port, e) != 0)
		return err_wrap(e, "listen");
	if (!text_fmt(service, sizeof(service), "%u", (unsigned)port))
		return err_set(e, ERR_INTERNAL, "listen %s", listen);
	rc = getaddrinfo(host[0] ? host : NULL, service, &hints, &list);
	if (rc != 0)
		return err_set(e, ERR_INVALID, "listen %s: %s", listen, gai_strerror(rc));
	/* For all addresses IPv6 first: one such socket takes IPv4 as well. */
	for (int pass = 0; pass < 2 && fd < 0; pass++) {
		for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
			if (host[0] || (pass == 0) == (a->ai_family == AF_INET6))
				fd = bind_one(a);
		}
	}
	if (fd < 0)
		err_set_errno(e, "listen %s", listen);
	freeaddrinfo(list);
	if (fd < 0)
		return -1;
	if (net_listen_port(fd, bound_port, e) != 0) {
		close(fd);
		return -1;
	}
	*out = fd;
	return 0;
}
