/*
 * Events (events.h). Owns the descriptor and the time of start.
 */
#include "events.h"

#include "common/buf.h"
#include "common/clock.h"
#include "common/json.h"

#include <fcntl.h>
#include <inttypes.h>
#include <unistd.h>

static int event_fd = -1;
static int64_t began;

int events_open(const char *path, int fd, struct err *e)
{
	began = clock_mono_ns();
	if (path)
		fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (path && fd < 0)
		return err_set_errno(e, "event monitor %s", path);
	if (fd < 0)
		return 0;
	if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) < 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
		return err_set_errno(e, "event monitor fd=%d", fd);
	event_fd = fd;
	return 0;
}

void event_raw(const char *bytes, size_t n)
{
	/* Nobody is told of an error, so that whoever reads must not believe that it sees every event. */
	if (event_fd >= 0 && write(event_fd, bytes, n) < 0)
		return;
}

void event_say(const char *source, const char *name, const char *key, const char *value)
{
	struct buf b = BUF_INIT(8192);
	struct jw w;
	int64_t age = clock_mono_ns() - began;

	buf_printf(&b, "{\n  \"timestamp\": {\n    \"secs\": %" PRId64 ",\n    \"nanos\": %" PRId64 "\n  },\n", age / 1000000000,
			age % 1000000000);
	buf_printf(&b, "  \"source\": \"%s\",\n  \"event\": \"%s\",\n  \"properties\": ", source, name);
	if (key) {
		buf_printf(&b, "{\n    \"%s\": ", key);
		jw_init(&w, &b);
		jw_str(&w, value);
		buf_add_str(&b, "\n  }");
	} else {
		buf_add_str(&b, "null");
	}
	buf_add_str(&b, "\n}\n\n");
	if (!b.failed)
		event_raw((const char *)b.data, b.len);
	buf_free(&b);
}
