/*
 * The API's socket (http.h). Owns the listener and its connections. Writing an answer may block for a second.
 */
#include "http.h"

#include "faults.h"

#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define HEAD_MAX 8192
#define LISTEN_BACKLOG 128

struct connection {
	int fd; /* -1: free */
	struct buf in;
};

static struct connection connections[HTTP_CONNECTIONS_MAX];
static int listener = -1;
static const char *own_path;
static http_handler *handle;
static void *handle_arg;

static int listen_at(const char *path, struct err *e)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	char lock_path[sizeof(at.sun_path) + 8];
	struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
	int held;

	if (!text_copy(at.sun_path, sizeof(at.sun_path), path) || !text_fmt(lock_path, sizeof(lock_path), "%s.lock", path))
		return err_set(e, ERR_INVALID, "%s is too long for a socket", path);
	held = open(lock_path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	if (held < 0)
		return err_set_errno(e, "%s", lock_path);
	if (fcntl(held, F_OFD_SETLK, &lock) != 0) {
		close(held);
		return err_set(e, ERR_CONFLICT, "ApiSocketInUse: %s", path);
	}
	unlink(path); /* of one that died: nobody else holds the lock */
	listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (listener < 0 || bind(listener, (struct sockaddr *)&at, sizeof(at)) != 0 || listen(listener, LISTEN_BACKLOG) != 0) {
		close(held);
		return err_set_errno(e, "API socket %s", path);
	}
	own_path = path;
	return 0; /* the lock is held to the end of this process */
}

int http_open(const char *path, int fd, http_handler *handler, void *arg, struct err *e)
{
	int listening = 0;
	socklen_t size = sizeof(listening);

	for (size_t i = 0; i < HTTP_CONNECTIONS_MAX; i++) {
		connections[i].fd = -1;
		buf_init(&connections[i].in, HEAD_MAX + HTTP_BODY_MAX);
	}
	handle = handler;
	handle_arg = arg;
	if (path)
		return listen_at(path, e);
	if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0 || !listening)
		return err_set(e, ERR_INVALID, "API socket fd=%d is no listening socket", fd);
	fcntl(fd, F_SETFD, FD_CLOEXEC);
	listener = fd;
	return 0;
}

void http_close(void)
{
	if (own_path)
		unlink(own_path);
}

static void drop(struct connection *c)
{
	close(c->fd);
	c->fd = -1;
	buf_free(&c->in);
}

static void send_all(struct connection *c, const struct buf *out)
{
	size_t sent = 0;

	while (sent < out->len) {
		ssize_t n = send(c->fd, out->data + sent, out->len - sent, MSG_NOSIGNAL);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return;
		sent += (size_t)n;
	}
}

static void answer(struct connection *c, const struct http_answer *a)
{
	struct buf out = BUF_INIT(4 * 1024 * 1024);

	if (fault_is("replies", "garbage"))
		buf_add_str(&out, "\1\2\3 this is no HTTP \377\r\n\r\n");
	else
		buf_printf(&out, "HTTP/1.1 %d \r\nServer: Cloud Hypervisor API\r\nConnection: keep-alive\r\n", a->status);
	if (a->body.len > 0)
		buf_printf(&out, "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n", a->body.len);
	else
		buf_add_str(&out, "\r\n");
	buf_add(&out, a->body.data, a->body.len);
	if (fault_is("replies", "huge"))
		for (int i = 0; i < 60000; i++)
			buf_add_str(&out, "more than was said of it ");
	if (fault_is("replies", "cut"))
		out.len /= 2;
	if (!out.failed)
		send_all(c, &out);
	buf_free(&out);
	if (fault_is("replies", "cut"))
		shutdown(c->fd, SHUT_RDWR);
}

/* --- requests ----------------------------------------------------------------------------------------------------------------- */

struct request {
	char method[16], path[256];
	size_t head, body; /* bytes */
	bool expects;      /* waits for 100 Continue */
};

/* What is wrong with the bytes is said in this program's words; what follows them is thrown away. */
static void refuse(struct connection *c, const char *why)
{
	struct http_answer a = { .status = 400, .body = BUF_INIT(1024) };

	buf_printf(&a.body, "{ \"error\": \"%s\" }", why);
	buf_reset(&c->in);
	answer(c, &a);
	buf_free(&a.body);
}

static const char *read_request_line(char *line, struct request *r)
{
	char *path = strchr(line, ' '), *version = path ? strchr(path + 1, ' ') : NULL;

	if (!version || strchr(version + 1, ' '))
		return "Invalid request line.";
	*path++ = '\0';
	*version++ = '\0';
	if (strcmp(line, "GET") != 0 && strcmp(line, "PUT") != 0 && strcmp(line, "PATCH") != 0)
		return "Invalid HTTP Method.";
	if (strcmp(version, "HTTP/1.1") != 0 && strcmp(version, "HTTP/1.0") != 0)
		return "Invalid HTTP Version.";
	if (strncmp(path, "http://localhost/", 17) == 0)
		path += 16;
	if (path[0] != '/' || !text_copy(r->path, sizeof(r->path), path) || !text_copy(r->method, sizeof(r->method), line))
		return "Invalid URI.";
	return NULL;
}

static const char *read_header(char *line, struct request *r)
{
	char *value = strchr(line, ':');
	struct err e;
	int64_t n;

	if (!value || value == line)
		return "Invalid header.";
	*value++ = '\0';
	value += strspn(value, " \t");
	if (strcasecmp(line, "Content-Length") == 0) {
		if (text_i64(value, 0, INT64_MAX, &n, &e))
			return "Invalid value. Key:Content-Length";
		if (n > HTTP_BODY_MAX)
			return "Request payload is larger than the limit of 51200 allowed by server.\nAll previous unanswered "
			       "requests will be "
			       "dropped.";
		r->body = (size_t)n;
	} else if (strcasecmp(line, "Transfer-Encoding") == 0 && strcasecmp(value, "identity") != 0) {
		return "Unsupported header. Key:Transfer-Encoding";
	} else if (strcasecmp(line, "Expect") == 0) {
		r->expects = strcasecmp(value, "100-continue") == 0;
	}
	return NULL;
}

/* 1: a whole head. 0: not yet. -1: refused. */
static int read_head(struct connection *c, struct request *r)
{
	uint8_t *end = c->in.len > 0 ? memmem(c->in.data, c->in.len, "\r\n\r\n", 4) : NULL;
	const char *why = NULL;
	char head[HEAD_MAX], *line = head;

	*r = (struct request){ .head = 0 };
	if (!end && c->in.len < HEAD_MAX)
		return 0;
	if (!end || (size_t)(end - c->in.data) + 4 >= sizeof(head)) {
		refuse(c, "Request head too long.");
		return -1;
	}
	r->head = (size_t)(end - c->in.data) + 4;
	memcpy(head, c->in.data, r->head - 2);
	head[r->head - 2] = '\0';
	for (bool first = true; !why && *line != '\0'; first = false) {
		char *next = strstr(line, "\r\n");

		*next = '\0';
		why = first ? read_request_line(line, r) : read_header(line, r);
		line = next + 2;
	}
	if (!why && memchr(head, '\0', 1) == head)
		why = "Invalid request line.";
	if (why)
		refuse(c, why);
	return why ? -1 : 1;
}

/* Answers what is whole. */
static void serve(struct connection *c)
{
	static const char go_on[] = "HTTP/1.1 100 \r\n\r\n";
	struct request r;

	while (c->fd >= 0 && c->in.len > 0 && read_head(c, &r) > 0) {
		struct http_answer a = { .status = 0, .body = BUF_INIT(2 * 1024 * 1024) };

		if (c->in.len < r.head + r.body) {
			if (r.expects && c->in.len == r.head)
				send(c->fd, go_on, sizeof(go_on) - 1, MSG_NOSIGNAL);
			return;
		}
		faults_log(r.method, r.path, c->in.data + r.head, r.body);
		handle(handle_arg, r.method, r.path, (const char *)c->in.data + r.head, r.body, &a);
		buf_consume(&c->in, r.head + r.body);
		if (a.status > 0)
			answer(c, &a);
		buf_free(&a.body);
	}
}

static void on_bytes(struct connection *c)
{
	uint8_t *room = buf_reserve(&c->in, 4096);
	ssize_t n;

	if (!room) {
		/* Less than that is left of the bound: no request is that long. */
		refuse(c, "Request too long.");
		return;
	}
	n = recv(c->fd, room, 4096, MSG_DONTWAIT);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		drop(c);
		return;
	}
	buf_commit(&c->in, (size_t)n);
	serve(c);
}

static void on_client(void)
{
	struct timeval wait = { .tv_sec = 1 };
	int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

	for (size_t i = 0; fd >= 0 && i < HTTP_CONNECTIONS_MAX; i++) {
		if (connections[i].fd >= 0)
			continue;
		setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait));
		connections[i].fd = fd;
		return;
	}
	if (fd >= 0)
		close(fd);
}

size_t http_poll(struct pollfd *out)
{
	size_t n = 0;

	out[n++] = (struct pollfd){ .fd = listener, .events = POLLIN };
	for (size_t i = 0; i < HTTP_CONNECTIONS_MAX; i++)
		if (connections[i].fd >= 0)
			out[n++] = (struct pollfd){ .fd = connections[i].fd, .events = POLLIN };
	return n;
}

void http_ready(const struct pollfd *fds, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		if (fds[i].revents == 0)
			continue;
		if (fds[i].fd == listener)
			on_client();
		for (size_t k = 0; k < HTTP_CONNECTIONS_MAX; k++)
			if (connections[k].fd >= 0 && connections[k].fd == fds[i].fd)
				on_bytes(&connections[k]);
	}
}
