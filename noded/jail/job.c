/*
 * Builds and codes job descriptions (job.h). Pure but for memory; called by keeper and by the jail stage.
 */
#include "jail/job.h"

#include "common/text.h"
#include "common/wire.h"

#include <stdlib.h>
#include <string.h>

#define JOB_MAGIC UINT32_C(0x334a5045) /* "EPJ3" */

static bool strings_add(char ***list, uint32_t *count, uint32_t max, const char *s)
{
	char **grown;
	char *copy;

	if (*count >= max)
		return false;
	copy = strdup(s);
	if (!copy)
		return false;
	/* One more than needed: argv and env end in NULL. */
	grown = realloc(*list, (*count + 2) * sizeof(*grown));
	if (!grown) {
		free(copy);
		return false;
	}
	grown[(*count)++] = copy;
	grown[*count] = NULL;
	*list = grown;
	return true;
}

bool jail_job_bind(struct jail_job *j, const char *source, const char *target, uint8_t flags)
{
	struct jail_bind b = { .flags = flags };
	struct jail_bind *grown;

	if (j->bind_count >= JAIL_BINDS_MAX)
		return false;
	grown = realloc(j->binds, (j->bind_count + 1) * sizeof(*grown));
	if (!grown)
		return false;
	j->binds = grown;
	b.source = strdup(source);
	b.target = strdup(target);
	if (!b.source || !b.target) {
		free(b.source);
		free(b.target);
		return false;
	}
	j->binds[j->bind_count++] = b;
	return true;
}

bool jail_job_link(struct jail_job *j, const char *target, const char *path)
{
	struct jail_link l = { .target = NULL };
	struct jail_link *grown;

	if (j->link_count >= JAIL_LINKS_MAX)
		return false;
	grown = realloc(j->links, (j->link_count + 1) * sizeof(*grown));
	if (!grown)
		return false;
	j->links = grown;
	l.target = strdup(target);
	l.path = strdup(path);
	if (!l.target || !l.path) {
		free(l.target);
		free(l.path);
		return false;
	}
	j->links[j->link_count++] = l;
	return true;
}

bool jail_job_listen(struct jail_job *j, uint32_t fd, const char *path)
{
	struct jail_listen l = { .fd = fd };

	if (j->listen_count >= JAIL_LISTENS_MAX)
		return false;
	l.path = strdup(path);
	if (!l.path)
		return false;
	j->listens[j->listen_count++] = l;
	return true;
}

bool jail_job_group(struct jail_job *j, const char *path)
{
	return strings_add(&j->groups, &j->group_count, JAIL_GROUPS_MAX, path);
}

bool jail_job_arg(struct jail_job *j, const char *arg)
{
	return strings_add(&j->argv, &j->argc, JAIL_ARGS_MAX, arg);
}

bool jail_job_env(struct jail_job *j, const char *env)
{
	return strings_add(&j->env, &j->env_count, JAIL_ENV_MAX, env);
}

static void strings_free(char **list, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		free(list[i]);
	free(list);
}

void jail_job_free(struct jail_job *j)
{
	for (uint32_t i = 0; i < j->bind_count; i++) {
		free(j->binds[i].source);
		free(j->binds[i].target);
	}
	for (uint32_t i = 0; i < j->link_count; i++) {
		free(j->links[i].target);
		free(j->links[i].path);
	}
	for (uint32_t i = 0; i < j->listen_count; i++)
		free(j->listens[i].path);
	free(j->binds);
	free(j->links);
	strings_free(j->groups, j->group_count);
	strings_free(j->argv, j->argc);
	strings_free(j->env, j->env_count);
	free(j->filter);
	*j = (struct jail_job){ .stdio_fd = -1 };
}

static void put_strings(struct buf *out, char *const *list, uint32_t count)
{
	wire_put_u32(out, count);
	for (uint32_t i = 0; i < count; i++)
		wire_put_str(out, list[i]);
}

void jail_job_encode(const struct jail_job *j, struct buf *out)
{
	wire_put_u32(out, JOB_MAGIC);
	wire_put_str(out, j->name);
	wire_put_bool(out, j->confined);
	wire_put_bool(out, j->self);
	wire_put_u8(out, j->landlock);
	wire_put_u32(out, j->uid);
	wire_put_u32(out, j->gid);
	wire_put_u32(out, j->group);
	wire_put_u32(out, j->nofile);
	wire_put_u64(out, j->fsize);
	wire_put_u32(out, j->memlock);
	wire_put_u32(out, (uint32_t)(j->stdio_fd + 1));
	wire_put_u32(out, j->fd_count);
	wire_put_str(out, j->root);
	wire_put_u32(out, j->bind_count);
	for (uint32_t i = 0; i < j->bind_count; i++) {
		wire_put_str(out, j->binds[i].source);
		wire_put_str(out, j->binds[i].target);
		wire_put_u8(out, j->binds[i].flags);
	}
	wire_put_u32(out, j->link_count);
	for (uint32_t i = 0; i < j->link_count; i++) {
		wire_put_str(out, j->links[i].target);
		wire_put_str(out, j->links[i].path);
	}
	wire_put_u32(out, j->listen_count);
	for (uint32_t i = 0; i < j->listen_count; i++) {
		wire_put_u32(out, j->listens[i].fd);
		wire_put_str(out, j->listens[i].path);
	}
	put_strings(out, j->groups, j->group_count);
	put_strings(out, j->argv, j->argc);
	put_strings(out, j->env, j->env_count);
	wire_put_bytes(out, j->filter, j->filter_len);
}

/* Reads `max` strings at most through `add`'s bound, so that a count is never an allocation. */
static void get_strings(struct wire_reader *r, char ***list, uint32_t *count, uint32_t max)
{
	uint32_t n = wire_count(r, max);

	for (uint32_t i = 0; i < n && !r->failed; i++) {
		char *s = wire_str(r, JAIL_ARG_MAX);

		if (s && !strings_add(list, count, max, s))
			wire_fail(r, "memory");
		free(s);
	}
}

static void get_binds(struct wire_reader *r, struct jail_job *j)
{
	uint32_t n = wire_count(r, JAIL_BINDS_MAX);

	for (uint32_t i = 0; i < n && !r->failed; i++) {
		char *source = wire_str(r, JAIL_PATH_MAX), *target = wire_str(r, JAIL_PATH_MAX);
		uint8_t flags = wire_u8(r);

		if (source && target && !jail_job_bind(j, source, target, flags))
			wire_fail(r, "memory");
		free(source);
		free(target);
	}
}

static void get_links(struct wire_reader *r, struct jail_job *j)
{
	uint32_t n = wire_count(r, JAIL_LINKS_MAX);

	for (uint32_t i = 0; i < n && !r->failed; i++) {
		char *target = wire_str(r, JAIL_PATH_MAX), *path = wire_str(r, JAIL_PATH_MAX);

		if (target && path && !jail_job_link(j, target, path))
			wire_fail(r, "memory");
		free(target);
		free(path);
	}
}

static void get_listens(struct wire_reader *r, struct jail_job *j)
{
	uint32_t n = wire_count(r, JAIL_LISTENS_MAX);

	for (uint32_t i = 0; i < n && !r->failed; i++) {
		uint32_t fd = wire_u32(r);
		char *path = wire_str(r, JAIL_PATH_MAX);

		if (!r->failed && fd >= j->fd_count)
			wire_fail(r, "listening descriptor");
		if (path && !r->failed && !jail_job_listen(j, fd, path))
			wire_fail(r, "memory");
		free(path);
	}
}

static void get_filter(struct wire_reader *r, struct jail_job *j)
{
	size_t n;
	const uint8_t *p = wire_bytes(r, JAIL_FILTER_MAX, &n);

	if (r->failed || n == 0)
		return;
	if (n % 8 != 0) {
		wire_fail(r, "filter");
		return;
	}
	j->filter = malloc(n);
	if (!j->filter) {
		wire_fail(r, "memory");
		return;
	}
	memcpy(j->filter, p, n);
	j->filter_len = (uint32_t)n;
}

int jail_job_decode(const void *p, size_t n, struct jail_job *out, struct err *e)
{
	struct wire_reader r;

	*out = (struct jail_job){ .stdio_fd = -1 };
	wire_read_init(&r, p, n);
	if (wire_u32(&r) != JOB_MAGIC)
		wire_fail(&r, "magic");
	wire_str_fixed(&r, out->name, sizeof(out->name));
	out->confined = wire_bool(&r);
	out->self = wire_bool(&r);
	out->landlock = wire_u8(&r);
	out->uid = wire_u32(&r);
	out->gid = wire_u32(&r);
	out->group = wire_u32(&r);
	out->nofile = wire_u32(&r);
	out->fsize = wire_u64(&r);
	out->memlock = wire_u32(&r);
	out->stdio_fd = (int32_t)wire_count(&r, JAIL_FDS_MAX + 4) - 1;
	out->fd_count = wire_count(&r, JAIL_FDS_MAX);
	wire_str_fixed(&r, out->root, sizeof(out->root));
	get_binds(&r, out);
	get_links(&r, out);
	get_listens(&r, out);
	get_strings(&r, &out->groups, &out->group_count, JAIL_GROUPS_MAX);
	get_strings(&r, &out->argv, &out->argc, JAIL_ARGS_MAX);
	get_strings(&r, &out->env, &out->env_count, JAIL_ENV_MAX);
	get_filter(&r, out);
	if (!r.failed && (out->argc == 0 || out->uid == 0 || out->gid == 0))
		wire_fail(&r, "argv, uid or gid");
	if (wire_end(&r, "jail job", e)) {
		jail_job_free(out);
		return -1;
	}
	return 0;
}
