/* Gives out slots and finds who uses their ids (slots.h). Keeper's thread; reads of /proc do not block. */
#include "keeper/slots.h"

#include "common/text.h"

#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

struct slots {
	uint32_t uid_base, count, free_count, next;
	bool taken[]; /* count of them */
};

int slots_new(uint32_t uid_base, uint32_t count, struct slots **out, struct err *e)
{
	struct slots *s = calloc(1, sizeof(*s) + count * sizeof(s->taken[0]));

	*out = s;
	if (!s)
		return err_set(e, ERR_NOMEM, "no memory");
	s->uid_base = uid_base;
	s->count = s->free_count = count;
	return 0;
}

void slots_free(struct slots *s)
{
	free(s);
}

int slots_take(struct slots *s)
{
	for (uint32_t i = 0; i < s->count; i++) {
		uint32_t slot = (s->next + i) % s->count;

		if (s->taken[slot])
			continue;
		s->taken[slot] = true;
		s->free_count--;
		s->next = (slot + 1) % s->count;
		return (int)slot;
	}
	return -1;
}

bool slots_hold(struct slots *s, uint32_t slot)
{
	if (slot >= s->count)
		return false;
	if (!s->taken[slot]) {
		s->taken[slot] = true;
		s->free_count--;
	}
	return true;
}

void slots_give(struct slots *s, uint32_t slot)
{
	if (slot >= s->count || !s->taken[slot])
		return;
	s->taken[slot] = false;
	s->free_count++;
}

uint32_t slots_free_count(const struct slots *s)
{
	return s->free_count;
}

uint32_t slots_count(const struct slots *s)
{
	return s->count;
}

uint32_t slots_uid(const struct slots *s, uint32_t slot, enum slot_role role)
{
	return s->uid_base + slot * SLOT_ROLES + (uint32_t)role;
}

/* The value of "Key:\t..." at the beginning of a line. */
static const char *field(const char *text, const char *key)
{
	size_t n = strlen(key);

	for (const char *line = text; line; line = strchr(line, '\n'), line = line ? line + 1 : NULL)
		if (strncmp(line, key, n) == 0)
			return line + n + strspn(line + n, "\t ");
	return NULL;
}

bool slots_parse_status(const char *text, uint32_t *uid, char *state)
{
	const char *u = field(text, "Uid:"), *s = field(text, "State:");
	char *end;
	unsigned long value;

	if (!u || !s || *s == '\0')
		return false;
	value = strtoul(u, &end, 10);
	if (end == u || value > UINT32_MAX)
		return false;
	*uid = (uint32_t)value;
	*state = *s;
	return true;
}

static bool read_status(const char *pid, char *out, size_t size)
{
	char path[64];
	ssize_t n;
	int fd;

	if (!text_fmt(path, sizeof(path), "/proc/%s/status", pid))
		return false;
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	n = read(fd, out, size - 1);
	close(fd);
	if (n <= 0)
		return false;
	out[n] = '\0';
	return true;
}

void slots_scan(const struct slots *s, void (*found)(void *arg, uint32_t slot, int pid), void *arg)
{
	DIR *d = opendir("/proc");
	struct dirent *entry;
	char text[4096], state;
	uint32_t uid;

	if (!d)
		return;
	while ((entry = readdir(d)) != NULL) {
		if (entry->d_name[0] < '0' || entry->d_name[0] > '9' || !read_status(entry->d_name, text, sizeof(text)) ||
				!slots_parse_status(text, &uid, &state))
			continue;
		if (uid < s->uid_base || uid - s->uid_base >= s->count * SLOT_ROLES || state == 'Z' || state == 'X')
			continue;
		found(arg, (uid - s->uid_base) / SLOT_ROLES, (int)strtol(entry->d_name, NULL, 10));
	}
	closedir(d);
}
