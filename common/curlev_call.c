/*
 * One outward request: turning it into curl options, judging addresses, bounding what comes back, naming what went wrong. Called
 * by curlev.c and by curl on the loop's thread. Owns the easy handle, the header list and the copy of the body.
 */
#include "curlev_internal.h"

#include "netaddr.h"
#include "text.h"

#include <arpa/inet.h>
#include <linux/tcp.h> /* struct tcp_info whole */
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define REPLY_HEAD_MAX (128 * 1024) /* bytes of all header lines of a reply, 1xx included */
#define REQUEST_HEADERS_MAX 128
#define URL_MAX 16384
#define RAW_SLACK (1024 * 1024) /* bytes of a reply beyond four times its bound: head, chunk sizes, TLS */

/* --- addresses ---------------------------------------------------------------------------------------------------------- */

static bool allowed(struct curl_call *call, const struct sockaddr *sa, socklen_t len)
{
	bool ok = call->req.allow_addr ? call->req.allow_addr(call->req.arg, sa, len) : net_is_global(sa);

	if (!ok) {
		call->refused = true;
		net_addr_text(sa, call->refused_addr);
	}
	return ok;
}

/* Each address that a name has comes through here right before connect(2), so that nothing can change in between. */
static curl_socket_t open_socket(void *arg, curlsocktype purpose, struct curl_sockaddr *a)
{
	if (purpose != CURLSOCKTYPE_IPCXN || !allowed(arg, &a->addr, (socklen_t)a->addrlen))
		return CURL_SOCKET_BAD;
	return socket(a->family, a->socktype | SOCK_CLOEXEC, a->protocol);
}

/*
 * Right before a request's first byte, also when curl begins again by itself. A pooled connection may have been opened for a call
 * with wider rights: its address is judged again for this one. And a body of which curl has taken a byte is not begun again, see
 * set_method.
 */
static int before_request(void *arg, char *remote, char *local, int remote_port, int local_port)
{
	struct curl_call *call = arg;
	struct sockaddr_in in = { .sin_family = AF_INET, .sin_port = htons((uint16_t)remote_port) };
	struct sockaddr_in6 in6 = { .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)remote_port) };

	(void)local;
	(void)local_port;
	if (call->body_at > 0) {
		err_set(&call->error, ERR_UNAVAILABLE, "the connection was closed in the middle of the request");
		return CURL_PREREQFUNC_ABORT;
	}
	if (inet_pton(AF_INET, remote, &in.sin_addr) == 1)
		return allowed(arg, (struct sockaddr *)(void *)&in, sizeof(in)) ? CURL_PREREQFUNC_OK : CURL_PREREQFUNC_ABORT;
	if (inet_pton(AF_INET6, remote, &in6.sin6_addr) == 1)
		return allowed(arg, (struct sockaddr *)(void *)&in6, sizeof(in6)) ? CURL_PREREQFUNC_OK : CURL_PREREQFUNC_ABORT;
	return CURL_PREREQFUNC_ABORT;
}

/* --- the reply ---------------------------------------------------------------------------------------------------------- */

/* "HTTP/1.1 200 OK": the status, or 0. */
static int status_of(const char *line, size_t n)
{
	const char *space = memchr(line, ' ', n);
	int status = 0;

	if (!space || n - (size_t)(space - line) < 4)
		return 0;
	for (int i = 1; i <= 3; i++) {
		if (space[i] < '0' || space[i] > '9')
			return 0;
		status = status * 10 + (space[i] - '0');
	}
	return status;
}

static void header(struct curl_call *call, const char *line, size_t n)
{
	const char *colon = memchr(line, ':', n), *value;
	size_t left;

	if (!colon || !call->req.on_header)
		return;
	value = colon + 1;
	left = n - (size_t)(value - line);
	while (left > 0 && (*value == ' ' || *value == '\t')) {
		value++;
		left--;
	}
	while (left > 0 && (value[left - 1] == ' ' || value[left - 1] == '\t'))
		left--;
	call->req.on_header(call->req.arg, line, (size_t)(colon - line), value, left);
}

static size_t on_header_line(char *line, size_t size, size_t count, void *arg)
{
	struct curl_call *call = arg;
	size_t all = size * count, n = all;

	if (call->cancelled)
		return 0;
	call->head_bytes += all;
	if (call->head_bytes > REPLY_HEAD_MAX) {
		err_set(&call->error, ERR_LIMIT, "the head of the reply is larger than %d bytes", REPLY_HEAD_MAX);
		return 0;
	}
	while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r'))
		n--;
	if (call->head_over)
		return all;
	if (n >= 5 && memcmp(line, "HTTP/", 5) == 0 && call->status == 0) {
		int status = status_of(line, n);

		if (status >= 200) {
			call->status = status;
			if (call->req.on_head)
				call->req.on_head(call->req.arg, status);
		}
	} else if (n == 0) {
		call->head_over = call->status != 0;
	} else if (call->status != 0) {
		header(call, line, n);
	}
	return call->cancelled ? 0 : all;
}

static size_t on_body(char *p, size_t size, size_t count, void *arg)
{
	struct curl_call *call = arg;
	size_t n = size * count;

	if (call->cancelled)
		return 0;
	if (call->want_paused) {
		call->is_paused = true;
		return CURL_WRITEFUNC_PAUSE; /* curl keeps the bytes and offers them again */
	}
	if ((uint64_t)n > (uint64_t)(call->req.max_body - call->received)) {
		err_set(&call->error, ERR_LIMIT, "the reply is larger than %lld bytes", (long long)call->req.max_body);
		return 0;
	}
	call->received += (int64_t)n;
	if (call->req.on_data && !call->req.on_data(call->req.arg, (const uint8_t *)p, n)) {
		if (!call->cancelled && call->error.code == ERR_NONE)
			err_set(&call->error, ERR_PROTOCOL, "the reply was refused by its reader");
		return 0;
	}
	return call->cancelled ? 0 : n;
}

/* All that its connection has received so far; -1 when there is none. */
static int64_t raw_received(int fd)
{
	struct tcp_info info = { 0 };
	socklen_t n = sizeof(info);

	if (fd < 0 || getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &n) != 0 ||
			n < offsetof(struct tcp_info, tcpi_bytes_received) + sizeof(info.tcpi_bytes_received))
		return -1;
	return (int64_t)info.tcpi_bytes_received;
}

/*
 * Heads and bodies are counted where they come out of curl. What it drops by itself, a chunk's extension that does not end for
 * one, is seen at the socket only.
 */
static int on_progress(void *arg, curl_off_t all_in, curl_off_t in, curl_off_t all_out, curl_off_t out)
{
	struct curl_call *call = arg;
	int64_t raw, most;

	(void)all_in;
	(void)in;
	(void)all_out;
	(void)out;
	raw = raw_received(call->fd);
	if (raw < 0)
		return 0;
	if (call->raw_before < 0 || call->status == 0)
		call->raw_before = raw; /* of earlier calls on this connection; head lines are counted by themselves */
	most = call->req.max_body < INT64_MAX / 8 ? 4 * call->req.max_body + RAW_SLACK : INT64_MAX;
	if (raw - call->raw_before <= most)
		return 0;
	err_set(&call->error, ERR_LIMIT, "the reply is larger than %lld bytes as it is sent", (long long)most);
	return 1;
}

static enum err_code code_of(CURLcode result)
{
	switch (result) {
	case CURLE_OPERATION_TIMEDOUT: return ERR_TIMEOUT;
	case CURLE_FILESIZE_EXCEEDED: return ERR_LIMIT;
	case CURLE_UNSUPPORTED_PROTOCOL:
	case CURLE_URL_MALFORMAT:
	case CURLE_LOGIN_DENIED: return ERR_INVALID;
	case CURLE_OUT_OF_MEMORY: return ERR_NOMEM;
	case CURLE_PEER_FAILED_VERIFICATION: return ERR_DENIED; /* it cannot prove who it is, and will not next time */
	case CURLE_WEIRD_SERVER_REPLY:
	case CURLE_BAD_CONTENT_ENCODING: return ERR_PROTOCOL;
	case CURLE_BAD_FUNCTION_ARGUMENT:
	case CURLE_UNKNOWN_OPTION: return ERR_INTERNAL;
	default: return ERR_UNAVAILABLE;
	}
}

bool curl_call_outcome(struct curl_call *call, CURLcode result, struct err *e)
{
	struct buf safe = BUF_INIT(300);
	const char *said = call->curl_says[0] ? call->curl_says : curl_easy_strerror(result);

	if (call->error.code != ERR_NONE) {
		*e = call->error;
		return true;
	}
	if (result == CURLE_OK)
		return false;
	if (call->refused && (result == CURLE_COULDNT_CONNECT || result == CURLE_ABORTED_BY_CALLBACK)) {
		err_set(e, ERR_DENIED, "the address %s may not be called", call->refused_addr);
		return true;
	}
	if (result == CURLE_FILESIZE_EXCEEDED) {
		err_set(e, ERR_LIMIT, "the reply is larger than %lld bytes", (long long)call->req.max_body);
		return true;
	}
	if (result == CURLE_OUT_OF_MEMORY && !call->head_over && call->received == 0) {
		/* curl says so of a header line above its own bound too, and nothing tells the two apart. */
		err_set(e, ERR_LIMIT, "the head of the reply has a line of over %d bytes, or memory ran out", CURL_MAX_HTTP_HEADER);
		return true;
	}
	text_safe(&safe, said, strlen(said) < 200 ? strlen(said) : 200, false); /* a server's words may be in it */
	err_set(e, code_of(result), "%.*s", (int)safe.len, safe.data ? (const char *)safe.data : "");
	buf_free(&safe);
	return true;
}

/* --- the request -------------------------------------------------------------------------------------------------------- */

static bool is_token(const char *s, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		char c = s[i];

		if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
				    (c && strchr("!#$%&'*+-.^_`|~", c))))
			return false;
	}
	return n > 0;
}

static bool is_name(const char *line, size_t n, const char *name)
{
	return n == strlen(name) && strncasecmp(line, name, n) == 0;
}

static bool append(struct curl_call *call, const char *line)
{
	struct curl_slist *longer = curl_slist_append(call->headers, line);

	if (longer)
		call->headers = longer;
	return longer != NULL;
}

/* One header line of the caller. An empty value needs curl's own spelling, or curl would drop the header. */
static int add_header(struct curl_call *call, const char *line, struct err *e)
{
	const char *colon = strchr(line, ':');
	size_t name = colon ? (size_t)(colon - line) : 0;
	char empty[256];

	if (!colon || !is_token(line, name))
		return err_set(e, ERR_INVALID, "http: a header is not \"Name: value\"");
	for (const char *p = colon; *p; p++) {
		if (((unsigned char)*p < 0x20 && *p != '\t') || *p == 0x7f)
			return err_set(e, ERR_INVALID, "http: the header %.*s holds a control character",
					(int)(name < 64 ? name : 64), line);
	}
	if (is_name(line, name, "Content-Length") || is_name(line, name, "Transfer-Encoding") || is_name(line, name, "Expect"))
		return err_set(e, ERR_INVALID, "http: the header %.*s is set by us alone", (int)name, line);
	if (colon[1 + strspn(colon + 1, " \t")] == '\0') {
		if (!text_fmt(empty, sizeof(empty), "%.*s;", (int)(name < 300 ? name : 300), line))
			return err_set(e, ERR_LIMIT, "http: a header name is too long");
		line = empty;
	}
	return append(call, line) ? 0 : err_set(e, ERR_NOMEM, "http: no memory");
}

static int add_headers(struct curl_call *call, const struct curl_request *req, struct err *e)
{
	bool accept = false, type = false;

	if (req->header_count > REQUEST_HEADERS_MAX)
		return err_set(e, ERR_LIMIT, "http: more than %d headers", REQUEST_HEADERS_MAX);
	for (size_t i = 0; i < req->header_count; i++) {
		if (add_header(call, req->headers[i], e) != 0)
			return -1;
		accept = accept || strncasecmp(req->headers[i], "Accept:", 7) == 0;
		type = type || strncasecmp(req->headers[i], "Content-Type:", 13) == 0;
	}
	/* Nothing that the caller did not ask for: these would be curl's own. */
	if (!append(call, "Expect:") || (!accept && !append(call, "Accept:")) || (!type && !append(call, "Content-Type:")))
		return err_set(e, ERR_NOMEM, "http: no memory");
	return 0;
}

static int check_url(const char *url, struct err *e)
{
	size_t n = strlen(url);

	if (strncasecmp(url, "https://", 8) != 0 && strncasecmp(url, "http://", 7) != 0)
		return err_set(e, ERR_INVALID, "http: the URL must begin with https:// or http://");
	if (n > URL_MAX)
		return err_set(e, ERR_LIMIT, "http: the URL is longer than %d bytes", URL_MAX);
	for (size_t i = 0; i < n; i++) {
		if ((unsigned char)url[i] <= 0x20 || (unsigned char)url[i] >= 0x7f)
			return err_set(e, ERR_INVALID, "http: byte %zu of the URL must be percent-encoded", i);
	}
	return 0;
}

#define SET(option, value)                                                                                                         \
	do {                                                                                                                       \
		if (rc == CURLE_OK)                                                                                                \
			rc = curl_easy_setopt(call->easy, (option), (value));                                                      \
	} while (0)

/* The restrictions that no caller can lift. */
static CURLcode restrict_call(struct curl_call *call)
{
	CURLcode rc = CURLE_OK;

	SET(CURLOPT_PROTOCOLS_STR, "http,https");
	SET(CURLOPT_REDIR_PROTOCOLS_STR, "http,https"); /* none can be named; redirects are off anyway */
	SET(CURLOPT_FOLLOWLOCATION, 0L);
	SET(CURLOPT_PROXY, ""); /* also not the one in the environment */
	SET(CURLOPT_NETRC, (long)CURL_NETRC_IGNORED);
	SET(CURLOPT_DISALLOW_USERNAME_IN_URL, 1L);
	SET(CURLOPT_PATH_AS_IS, 1L); /* the bytes that were checked are the bytes that are sent */
	SET(CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
	SET(CURLOPT_HTTP09_ALLOWED, 0L);
	SET(CURLOPT_SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);
	SET(CURLOPT_NOSIGNAL, 1L);
	SET(CURLOPT_QUICK_EXIT, 1L); /* cancelling does not wait for a resolver that hangs */
	SET(CURLOPT_TCP_NODELAY, 1L);
	SET(CURLOPT_TCP_KEEPALIVE, 1L);
	SET(CURLOPT_OPENSOCKETFUNCTION, open_socket);
	SET(CURLOPT_OPENSOCKETDATA, call);
	SET(CURLOPT_XFERINFOFUNCTION, on_progress);
	SET(CURLOPT_XFERINFODATA, call);
	SET(CURLOPT_NOPROGRESS, 0L);
	SET(CURLOPT_PREREQFUNCTION, before_request);
	SET(CURLOPT_PREREQDATA, call);
	return rc;
}

/* curl takes the body from us, piece by piece, once. */
static size_t give_body(char *out, size_t size, size_t count, void *arg)
{
	struct curl_call *call = arg;
	size_t n = size * count, left = call->req.body_len - call->body_at;

	if (n > left)
		n = left;
	if (n > 0)
		memcpy(out, (const char *)call->body + call->body_at, n);
	call->body_at += n;
	return n;
}

/*
 * Method and body. When a pooled connection turns out dead, curl sends the request again by itself. That must never be a second
 * call that nobody paid for or asked for. With a body it cannot be: curl may begin again only while it has taken nothing of the
 * body (before_request; and there is no callback by which it could go back), and a head without its body is no request. Without a
 * body, anything but GET, HEAD and OPTIONS gets a connection of its own.
 */
static CURLcode set_method(struct curl_call *call, const struct curl_request *req)
{
	bool safe = strcmp(req->method, "GET") == 0 || strcmp(req->method, "HEAD") == 0 || strcmp(req->method, "OPTIONS") == 0;
	bool wants_length =
			strcmp(req->method, "POST") == 0 || strcmp(req->method, "PUT") == 0 || strcmp(req->method, "PATCH") == 0;
	CURLcode rc = CURLE_OK;

	if (strcmp(req->method, "HEAD") == 0) {
		SET(CURLOPT_NOBODY, 1L);
		return rc;
	}
	if (req->body_len > 0) {
		SET(CURLOPT_POST, 1L);
		SET(CURLOPT_READFUNCTION, give_body);
		SET(CURLOPT_READDATA, call);
		SET(CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)req->body_len);
	} else if (wants_length) {
		SET(CURLOPT_POST, 1L);
		SET(CURLOPT_POSTFIELDS, "");
		SET(CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)0);
	}
	if (strcmp(req->method, "GET") != 0 || req->body_len > 0)
		SET(CURLOPT_CUSTOMREQUEST, req->method);
	if (!safe && req->body_len == 0)
		SET(CURLOPT_FRESH_CONNECT, 1L);
	return rc;
}

static CURLcode set_rest(struct curl_call *call, const struct curl_request *req)
{
	CURLcode rc = CURLE_OK;

	SET(CURLOPT_URL, req->url);
	SET(CURLOPT_PRIVATE, (void *)call);
	SET(CURLOPT_ERRORBUFFER, call->curl_says);
	SET(CURLOPT_HTTPHEADER, call->headers);
	SET(CURLOPT_HEADERFUNCTION, on_header_line);
	SET(CURLOPT_HEADERDATA, call);
	SET(CURLOPT_WRITEFUNCTION, on_body);
	SET(CURLOPT_WRITEDATA, call);
	SET(CURLOPT_CONNECTTIMEOUT_MS, (long)req->connect_timeout_ms);
	SET(CURLOPT_TIMEOUT_MS, (long)req->timeout_ms);
	if (req->ca_file)
		SET(CURLOPT_CAINFO, req->ca_file);
	if (req->max_body > 0 && strcmp(req->method, "HEAD") != 0)
		SET(CURLOPT_MAXFILESIZE_LARGE, (curl_off_t)req->max_body);
	return rc;
}

int curl_call_make(const struct curl_request *req, struct curl_call **out, struct err *e)
{
	struct curl_call *call;
	CURLcode rc;

	*out = NULL;
	if (!is_token(req->method, strlen(req->method)) || strcmp(req->method, "CONNECT") == 0)
		return err_set(e, ERR_INVALID, "http: \"%.20s\" is not a method that can be sent", req->method);
	if (req->timeout_ms <= 0 || req->connect_timeout_ms <= 0 || req->max_body < 0 || !req->on_done)
		return err_set(e, ERR_INTERNAL, "http: a call needs its timeouts, a bound for the reply and on_done");
	if (check_url(req->url, e) != 0)
		return -1;
	call = calloc(1, sizeof(*call));
	if (!call)
		return err_set(e, ERR_NOMEM, "http: no memory");
	call->req = *req;
	call->raw_before = call->fd = -1;
	call->easy = curl_easy_init();
	call->body = req->body_len > 0 ? malloc(req->body_len) : NULL;
	if (!call->easy || (req->body_len > 0 && !call->body)) {
		err_set(e, ERR_NOMEM, "http: no memory");
		goto fail;
	}
	if (call->body)
		memcpy(call->body, req->body, req->body_len);
	if (add_headers(call, req, e) != 0)
		goto fail;
	rc = restrict_call(call);
	rc = rc == CURLE_OK ? set_method(call, req) : rc;
	rc = rc == CURLE_OK ? set_rest(call, req) : rc;
	if (rc != CURLE_OK) {
		err_set(e, code_of(rc) == ERR_NOMEM ? ERR_NOMEM : ERR_INTERNAL, "http: %s", curl_easy_strerror(rc));
		goto fail;
	}
	call->req.method = call->req.url = call->req.ca_file = NULL;
	call->req.headers = NULL;
	call->req.body = NULL;
	*out = call;
	return 0;
fail:
	curl_call_dispose(call);
	return -1;
}

void curl_call_dispose(struct curl_call *call)
{
	if (call->easy)
		curl_easy_cleanup(call->easy);
	curl_slist_free_all(call->headers);
	if (call->body)
		explicit_bzero(call->body, call->req.body_len);
	free(call->body);
	free(call);
}
