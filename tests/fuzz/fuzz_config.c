/* Configuration files, and addresses. The file is in memory: no disk is touched. */
/* reads: common/config.c */
/* reached: 84 % of lines, 74 % of branches; the rest is help, files that cannot be read, tables that are wrong */
#include "fuzz.h"

#include "config.h"
#include "text.h"

#include <sys/mman.h>
#include <unistd.h>

struct config {
	char *text, *list;
	int64_t number, choice;
	bool on;
};

static const struct config_key keys[] = {
	{ .name = "text",
			.type = CONFIG_STRING,
			.offset = offsetof(struct config, text),
			.optional = true,
			.max = 50,
			.help = "text" },
	{ .name = "list",
			.type = CONFIG_LIST,
			.offset = offsetof(struct config, list),
			.fallback = "",
			.secret = true,
			.help = "list" },
	{ .name = "number",
			.type = CONFIG_INT,
			.offset = offsetof(struct config, number),
			.fallback = "1",
			.min = -5,
			.max = 500,
			.help = "number" },
	{ .name = "choice",
			.type = CONFIG_ENUM,
			.offset = offsetof(struct config, choice),
			.fallback = "a",
			.choices = "a|bc|d",
			.help = "choice" },
	{ .name = "on", .type = CONFIG_BOOL, .offset = offsetof(struct config, on), .fallback = "off", .help = "switch" },
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct config c = { 0 };
	int fd = memfd_create("config", MFD_CLOEXEC);
	char path[64], host[32], *line = strndup((const char *)data, n);
	const char *override = line;
	uint16_t port;
	struct err e;

	must(fd >= 0 && line && write(fd, data, n) == (ssize_t)n);
	must(text_fmt(path, sizeof(path), "/proc/self/fd/%d", fd));
	if (config_load(keys, sizeof(keys) / sizeof(keys[0]), &c, path, NULL, 0, &e) == 0) {
		must(c.number >= -5 && c.number <= 500 && c.choice >= 0 && c.choice <= 2);
		must(!c.text || (strlen(c.text) <= 50 && text_utf8_clean(c.text, strlen(c.text))));
		must(c.list);
	}
	config_free(keys, sizeof(keys) / sizeof(keys[0]), &c);
	memset(&c, 0, sizeof(c));
	if (config_load(keys, sizeof(keys) / sizeof(keys[0]), &c, NULL, &override, 1, &e) == 0)
		must(c.number >= -5 && c.number <= 500);
	config_free(keys, sizeof(keys) / sizeof(keys[0]), &c);
	if (config_addr(line, host, sizeof(host), &port, &e) == 0)
		must(strlen(host) < sizeof(host));
	free(line);
	close(fd);
	return 0;
}
