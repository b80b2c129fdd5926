/*
 * Faults (faults.h). Owns their text and the socket of the log.
 */
#include "faults.h"

#include "common/buf.h"
#include "common/text.h"

#include <fcntl.h>
#include <libgen.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define FAULTS_MAX 16

static struct {
	char name[32], value[256];
} faults[FAULTS_MAX];
static size_t count;
static int log_fd = -1;

bool beside_program(const char *name, char *out, size_t size)
{
	char self[4096];
	ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

	if (n <= 0)
		return false;
	self[n] = '\0';
	return text_fmt(out, size, "%s/%s", dirname(self), name);
}

static void open_log(void)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };

	if (!beside_program("log.sock", to.sun_path, sizeof(to.sun_path)) || access(to.sun_path, W_OK) != 0)
		return;
	log_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (log_fd >= 0 && connect(log_fd, (struct sockaddr *)&to, sizeof(to)) != 0) {
		close(log_fd);
		log_fd = -1;
	}
}

static void take_line(char *line)
{
	char *equals = strchr(line, '=');
	size_t n = equals ? (size_t)(equals - line) : 0;
	const char *value = equals ? equals + 1 : "";

	while (n > 0 && line[n - 1] == ' ')
		n--;
	while (*value == ' ')
		value++;
	if (n > 0 && count < FAULTS_MAX && text_fmt(faults[count].name, sizeof(faults[count].name), "%.*s", (int)n, line) &&
			text_copy(faults[count].value, sizeof(faults[count].value), value))
		count++;
}

void faults_load(void)
{
	char path[4096], text[4096], *line = text;
	ssize_t n;
	int fd;

	open_log();
	fd = beside_program("faults", path, sizeof(path)) ? open(path, O_RDONLY | O_CLOEXEC) : -1;
	if (fd < 0)
		return;
	n = read(fd, text, sizeof(text) - 1);
	close(fd);
	text[n > 0 ? n : 0] = '\0';
	while (*line != '\0') {
		char *end = line + strcspn(line, "\n");
		bool last = *end == '\0';

		*end = '\0';
		take_line(line);
		line = last ? end : end + 1;
	}
}

const char *fault(const char *name)
{
	for (size_t i = 0; i < count; i++)
		if (strcmp(faults[i].name, name) == 0)
			return faults[i].value;
	return NULL;
}

bool fault_is(const char *name, const char *word)
{
	const char *value = fault(name);
	size_t n = strlen(word);

	while (value && *value != '\0') {
		size_t part = strcspn(value, " ");

		if (part == n && memcmp(value, word, n) == 0)
			return true;
		value += part + strspn(value + part, " ");
	}
	return false;
}

int fault_number(const char *name)
{
	const char *value = fault(name);
	struct err e;
	int64_t n;

	return value && text_i64(value, 0, 1000000, &n, &e) == 0 ? (int)n : 0;
}

void faults_log(const char *method, const char *path, const void *body, size_t n)
{
	struct buf b = BUF_INIT(256 * 1024);

	if (log_fd < 0)
		return;
	buf_printf(&b, "%s %s\n", method, path);
	buf_add(&b, body, n);
	/* A test that does not read loses what it did not read. */
	if (!b.failed && send(log_fd, b.data, b.len, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
		fprintf(stderr, "stand-in: the log is full\n");
	buf_free(&b);
}
