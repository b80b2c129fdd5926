/* Gives out slots and finds who uses their ids (slots.h). Keeper's thread; reads of /proc do not block. */
#include "keeper/slots.h"

#include "common/text.h"

#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

enum slot_state { SLOT_FREE, SLOT_TAKEN, SLOT_FOREIGN /* a process that is not ours has its ids */ };

struct slots {
	uint32_t uid_base, count, free_count, next;
	enum slot_state state[]; /* count of them */
};

static void set_state(struct slots *s, uint32_t slot, enum slot_state to)
{
	if (s->state[slot] == SLOT_FREE)
		s->free_count--;
	if (to == SLOT_FREE)
		s->free_count++;
	s->state[slot] = to;
}

int slots_new(uint32_t uid_base, uint32_t count, struct slots **out, struct err *e)
{
	struct slots *s = calloc(1, sizeof(*s) + count * sizeof(s->state[0]));

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

		if (s->state[slot] != SLOT_FREE)
			continue;
		set_state(s, slot, SLOT_TAKEN);
		s->next = (slot + 1) % s->count;
		return (int)slot;
	}
	return -1;
}

bool slots_hold(struct slots *s, uint32_t slot)
{
	if (slot >= s->count)
		return false;
	set_state(s, slot, SLOT_TAKEN);
	return true;
}

void slots_give(struct slots *s, uint32_t slot)
{
	if (slot < s->count && s->state[slot] == SLOT_TAKEN)
		set_state(s, slot, SLOT_FREE);
}

bool slots_taken(const struct slots *s, uint32_t slot)
{
	return slot < s->count && s->state[slot] == SLOT_TAKEN;
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

bool slots_uid_of(int32_t pid, uint32_t *uid)
{
	char text[4096], name[16], state;

	return text_fmt(name, sizeof(name), "%d", (int)pid) && read_status(name, text, sizeof(text)) &&
	       slots_parse_status(text, uid, &state);
}

static void mark(struct slots *s, uint32_t uid, char state)
{
	uint32_t slot = (uid - s->uid_base) / SLOT_ROLES;

	if (uid < s->uid_base || slot >= s->count || state == 'Z' || state == 'X')
		return;
	if (s->state[slot] == SLOT_FREE)
		set_state(s, slot, SLOT_FOREIGN);
}

uint32_t slots_look(struct slots *s)
{
	DIR *d = opendir("/proc");
	struct dirent *entry;
	uint32_t foreign = 0, uid;
	char text[4096], state;

	if (!d)
		return 0;
	for (uint32_t i = 0; i < s->count; i++)
		if (s->state[i] == SLOT_FOREIGN)
			set_state(s, i, SLOT_FREE);
	while ((entry = readdir(d)) != NULL)
		if (entry->d_name[0] >= '0' && entry->d_name[0] <= '9' && read_status(entry->d_name, text, sizeof(text)) &&
				slots_parse_status(text, &uid, &state))
			mark(s, uid, state);
	closedir(d);
	for (uint32_t i = 0; i < s->count; i++)
		foreign += s->state[i] == SLOT_FOREIGN;
	return foreign;
}
