/*
 * Finds where this host lets noded make groups. Three kinds of host: all controllers on v2 (systemd of today), all limits on v1
 * with v2 beside it for killing, and a container whose cgroup namespace begins at a group of its own. Called once at start by
 * keeper, as root.
 *
 * On v2 a group hands controllers to its children only while no process stands in it. noded therefore goes into a leaf of its own
 * below its group; below a namespace's root, which is a container's, everything else there is moved into a leaf as well.
 */
#include "jail/cgroup_internal.h"

#include "common/log.h"
#include "common/text.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ROOM_TRIES 5 /* processes fork while they are moved */
#define FIX "set cgroup_parent (for example /ephemeral), or run noded as a systemd service with Delegate=yes"

static const char *const ctl_names[CGROUP_CTL_COUNT] = { "memory", "pids", "cpu" };

static int join(const char *dir, const char *name, char *out, size_t size, struct err *e)
{
	return text_fmt(out, size, "%s/%s", dir, name) ? 0 : err_set(e, ERR_LIMIT, "cgroup path is too long: %s/%s", dir, name);
}

static bool word_in(const char *list, const char *word)
{
	size_t n = strlen(word);

	for (const char *p = list; (p = strstr(p, word)) != NULL; p += n)
		if ((p == list || p[-1] == ' ') && (p[n] == ' ' || p[n] == '\n' || p[n] == '\0'))
			return true;
	return false;
}

/* The root of the whole hierarchy has no type, and no rule about processes. */
static bool is_true_root(const char *dir)
{
	char path[CGROUP_PATH_MAX + 32], type[64];

	return !text_fmt(path, sizeof(path), "%s/cgroup.type", dir) || !cgroup_read(path, type, sizeof(type));
}

/* Puts every process that stands in `dir` itself into the leaf dir/init. */
static int make_room(const char *dir, struct err *e)
{
	static char procs[65536];
	char leaf[CGROUP_PATH_MAX], path[CGROUP_PATH_MAX + 32];

	if (join(dir, "init", leaf, sizeof(leaf), e) || join(dir, "cgroup.procs", path, sizeof(path), e))
		return -1;
	if (mkdir(leaf, 0755) != 0 && errno != EEXIST)
		return err_set_errno(e, "make %s", leaf);
	log_warn("cgroups: moving the processes of the namespace's root group into a leaf path=%s", leaf);
	for (int i = 0; i < ROOM_TRIES; i++) {
		if (!cgroup_read(path, procs, sizeof(procs)) || procs[0] == '\0')
			return 0;
		for (char *line = procs; *line;) {
			char *end = strchrnul(line, '\n');
			bool last = *end == '\0';

			*end = '\0';
			if (*line && cgroup_write(leaf, "cgroup.procs", line, e) && e->sys != ESRCH)
				return -1;
			line = last ? end : end + 1;
		}
	}
	return 0;
}

/* Passes one controller on to the children of `dir`. */
static int enable(const char *dir, const char *point, enum cgroup_ctl ctl, struct err *e)
{
	char word[16];

	if (!text_fmt(word, sizeof(word), "+%s", ctl_names[ctl]))
		return err_set(e, ERR_INTERNAL, "name");
	if (cgroup_write(dir, "cgroup.subtree_control", word, e) == 0)
		return 0;
	if (e->sys != EBUSY || strcmp(dir, point) != 0 || is_true_root(dir))
		return -1;
	return make_room(dir, e) || cgroup_write(dir, "cgroup.subtree_control", word, e) ? -1 : 0;
}

/* What `dir` itself was given: bits of enum cgroup_ctl. */
static unsigned int controllers(const char *dir)
{
	char path[CGROUP_PATH_MAX + 32], text[512];
	unsigned int found = 0;

	if (!text_fmt(path, sizeof(path), "%s/cgroup.controllers", dir) || !cgroup_read(path, text, sizeof(text)))
		return 0;
	for (int i = 0; i < CGROUP_CTL_COUNT; i++)
		if (word_in(text, ctl_names[i]))
			found |= 1U << i;
	return found;
}

static int enable_all(const char *dir, const char *point, struct err *e)
{
	unsigned int have = controllers(dir);

	for (int i = 0; i < CGROUP_CTL_COUNT; i++)
		if ((have & (1U << i)) && enable(dir, point, (enum cgroup_ctl)i, e))
			return -1;
	return 0;
}

/* Makes point + parent, every level of it, passing controllers down where the hierarchy has them (v2). */
static int make_parent(const char *point, const char *parent, bool v2, char *out, struct err *e)
{
	if (v2 && enable_all(point, point, e))
		return -1;
	for (const char *p = parent; *p;) {
		size_t n = 1 + strcspn(p + 1, "/");

		if (!text_fmt(out, CGROUP_PATH_MAX, "%s%.*s", point, (int)(p - parent + (ptrdiff_t)n), parent))
			return err_set(e, ERR_LIMIT, "cgroup_parent %s is too long", parent);
		if (mkdir(out, 0755) != 0 && errno != EEXIST)
			return err_set_errno(e, "make cgroup_parent %s", out);
		if (v2 && enable_all(out, point, e))
			return err_wrap(e, "cgroup_parent %s must not hold processes itself", parent);
		p += n;
	}
	return 0;
}

/* noded's own group: it goes into a leaf, then the group can have children with limits. */
static int use_own(const char *point, const char *own, struct err *e)
{
	char leaf[CGROUP_PATH_MAX], pid[24];

	if (controllers(own) == 0)
		return 0; /* nothing is limited on v2 here */
	if (!is_true_root(own)) {
		if (join(own, "noded", leaf, sizeof(leaf), e) || !text_fmt(pid, sizeof(pid), "%d", (int)getpid()))
			return -1;
		if (mkdir(leaf, 0755) != 0 && errno != EEXIST)
			return err_set_errno(e, "make %s", leaf);
		if (cgroup_write(leaf, "cgroup.procs", pid, e))
			return -1;
	}
	if (enable_all(own, point, e))
		return err_wrap(e, "noded's own group holds other processes; " FIX);
	return 0;
}

static int find_one(const char *self, const char *mounts, const char *controller, const char *parent, char *out, struct err *e)
{
	char point[CGROUP_PATH_MAX], root[CGROUP_PATH_MAX], path[CGROUP_PATH_MAX];
	const char *shown = *controller ? controller : "cgroup2";
	bool v2 = *controller == '\0';

	if (!cgroup_parse_mount(mounts, controller, point, root, sizeof(point)))
		return err_set(e, ERR_NOT_FOUND, "no %s hierarchy is mounted%s", shown,
				v2 ? "; VMs are killed by it: mount -t cgroup2 none /sys/fs/cgroup/unified" : "");
	if (parent && *parent)
		return make_parent(point, parent, v2, out, e);
	if (!cgroup_parse_self(self, controller, path, sizeof(path)) || !cgroup_join(point, root, path, out, CGROUP_PATH_MAX))
		return err_set(e, ERR_INVALID, "cannot tell noded's own group in the %s hierarchy", shown);
	return v2 ? use_own(point, out, e) : 0;
}

static void describe(struct cgroups *c)
{
	char v1[40] = "";
	size_t len = 0;

	for (int i = 0; i < CGROUP_CTL_COUNT; i++)
		if (c->v1[i][0] && text_fmt(v1 + len, sizeof(v1) - len, " %s", ctl_names[i]))
			len += strlen(v1 + len);
	if (!text_fmt(c->text, sizeof(c->text), "v2%s%s", len ? " + v1" : "", v1))
		c->text[0] = '\0';
}

int cgroup_find(struct cgroups *c, const char *parent, struct err *e)
{
	static char mounts[256 * 1024];
	char self[8192];
	unsigned int v2;

	if (!cgroup_read("/proc/self/cgroup", self, sizeof(self)) || !cgroup_read("/proc/self/mountinfo", mounts, sizeof(mounts)))
		return err_set(e, ERR_NOT_FOUND, "cannot read /proc/self/cgroup and mountinfo: mount /proc");
	if (find_one(self, mounts, "", parent, c->v2, e))
		return err_wrap(e, "cgroup v2");
	v2 = controllers(c->v2);
	for (int i = 0; i < CGROUP_CTL_COUNT; i++) {
		c->on_v2[i] = (v2 & (1U << i)) != 0;
		if (!c->on_v2[i] && find_one(self, mounts, ctl_names[i], parent, c->v1[i], e))
			return err_wrap(e, "the %s controller was not given to noded's group on cgroup v2, and is not on v1; " FIX,
					ctl_names[i]);
	}
	describe(c);
	return 0;
}
