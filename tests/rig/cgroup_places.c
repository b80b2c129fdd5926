/*
 * Cases of cgroup_guest.h: the places in a pure version 2 hierarchy that noded may be started in, and what it does with them.
 */
#include "cgroup_guest.h"

#include "common/text.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

#define ALL "cpu memory pids" /* in the kernel's order */
#define SERVICE ROOT "/system.slice/noded.service"

static void has_limits(const char *dir)
{
	must(is(dir, "memory.max", "67108864"));
	must(is(dir, "memory.swap.max", "0"));
	must(is(dir, "memory.oom.group", "1"));
	must(is(dir, "pids.max", "16"));
	must(is(dir, "cpu.max", "150000 100000"));
}

/* Groups can be made in `place`, bear their limits, and can be removed. */
static void works_in(struct cgroups *c, const char *place)
{
	struct cgroup *g = make(c, "vm_1.tag", 64 * MIB, 16, 150);
	char path[CGROUP_PATH_MAX];

	must(text_fmt(path, sizeof path, "%s/vm_1.tag", place) && strcmp(path, cgroup_dir(g, 0)) == 0);
	must(is(place, "cgroup.subtree_control", ALL));
	has_limits(path);
	end(g);
	cgroups_free(c);
}

/* As systemd has it: controllers come down to a service that has Delegate=yes. */
static void make_service(const char *controllers)
{
	put(ROOT, "cgroup.subtree_control", "+cpu +memory +pids");
	make_dir(ROOT "/system.slice");
	if (controllers)
		put(ROOT "/system.slice", "cgroup.subtree_control", controllers);
	make_dir(SERVICE);
}

static void refused(const char *parent, const char *words)
{
	struct cgroups *c = NULL;
	struct err e;

	if (cgroups_open(parent, &c, &e) == 0)
		fail("cgroups_open(\"%s\") took what it must refuse", parent);
	if (!strstr(e.text, words))
		fail("cgroups_open(\"%s\") says \"%s\", without \"%s\"", parent, e.text, words);
}

/* The guest is what it is said to be. */
static void pure(void)
{
	char mounts[8192];

	must(stands_in(getpid(), "/"));
	must(!exists(ROOT "/cgroup.type"));
	must(is(ROOT, "cgroup.subtree_control", ""));
	must(cgroup_read("/proc/self/mountinfo", mounts, sizeof mounts) && !strstr(mounts, "- cgroup "));
}

static void true_root(void)
{
	works_in(open_at(""), ROOT);
	must(stands_in(getpid(), "/") && !exists(ROOT "/noded") && !exists(ROOT "/init"));
}

static void parent(void)
{
	works_in(open_at("/ephemeral/hosts/one"), ROOT "/ephemeral/hosts/one");
	works_in(open_at("/ephemeral/hosts/one"), ROOT "/ephemeral/hosts/one");
	must(is(ROOT "/ephemeral", "cgroup.subtree_control", ALL) && is(ROOT "/ephemeral/hosts", "cgroup.subtree_control", ALL));
	must(stands_in(getpid(), "/"));
}

static void parent_with_processes(void)
{
	pid_t other;

	make_dir(ROOT "/busy");
	other = park(ROOT "/busy");
	refused("/busy", "cgroup_parent /busy must not hold processes itself");
	must(stands_in(other, "/busy"));
}

static void service(void)
{
	make_service("+cpu +memory +pids");
	enter(SERVICE);
	works_in(open_at(""), SERVICE);
	must(stands_in(getpid(), "/system.slice/noded.service/noded"));
	/* The next noded finds the leaf there. */
	enter(SERVICE "/noded");
	put(SERVICE, "cgroup.subtree_control", "-cpu -memory -pids");
	enter(SERVICE);
	works_in(open_at(""), SERVICE);
	must(stands_in(getpid(), "/system.slice/noded.service/noded"));
}

static void service_without_delegation(void)
{
	make_service(NULL);
	enter(SERVICE);
	refused("", "the memory controller was not given to noded's group on cgroup v2, and is not on v1");
}

static void service_with_half(void)
{
	make_service("+pids +memory");
	enter(SERVICE);
	refused("", "the cpu controller was not given to noded's group");
}

/* A login's group holds others as well: they are not moved, and cgroup_parent helps. */
static void session(void)
{
	pid_t shell;

	make_service("+cpu +memory +pids");
	make_dir(ROOT "/system.slice/session-1.scope");
	shell = park(ROOT "/system.slice/session-1.scope");
	enter(ROOT "/system.slice/session-1.scope");
	refused("", "noded's own group holds other processes; set cgroup_parent");
	must(stands_in(shell, "/system.slice/session-1.scope"));
	works_in(open_at("/ephemeral"), ROOT "/ephemeral");
	must(stands_in(shell, "/system.slice/session-1.scope"));
}

/* A cgroup namespace that begins at /box, with its own view of the hierarchy; two others stand in its root. */
static void go_into_container(pid_t other[2])
{
	put(ROOT, "cgroup.subtree_control", "+cpu +memory +pids");
	make_dir(ROOT "/box");
	other[0] = park(ROOT "/box");
	other[1] = park(ROOT "/box");
	enter(ROOT "/box");
	must(unshare(CLONE_NEWCGROUP | CLONE_NEWNS) == 0);
	must(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0);
	must(umount2(ROOT, MNT_DETACH) == 0 && mount("cgroup2", ROOT, "cgroup2", 0, NULL) == 0);
	must(stands_in(getpid(), "/") && exists(ROOT "/cgroup.type"));
}

static void container(void)
{
	pid_t other[2];

	go_into_container(other);
	works_in(open_at(""), ROOT);
	must(stands_in(getpid(), "/noded") && stands_in(other[0], "/init") && stands_in(other[1], "/init"));
}

static void container_with_parent(void)
{
	pid_t other[2];

	go_into_container(other);
	works_in(open_at("/ephemeral"), ROOT "/ephemeral");
	must(stands_in(getpid(), "/init") && stands_in(other[0], "/init") && stands_in(other[1], "/init"));
}

/* The mount shows a part of the hierarchy, and the process sees its place in the whole. */
static void part_of_the_hierarchy(void)
{
	make_service("+cpu +memory +pids");
	enter(SERVICE);
	must(unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0);
	must(mount(ROOT "/system.slice", ROOT, NULL, MS_BIND, NULL) == 0);
	works_in(open_at(""), ROOT "/noded.service");
	must(stands_in(getpid(), "/system.slice/noded.service/noded"));
}

const struct cgroup_case place_cases[] = {
	{ "pure", pure },
	{ "true-root", true_root },
	{ "parent", parent },
	{ "parent-with-processes", parent_with_processes },
	{ "service", service },
	{ "service-without-delegation", service_without_delegation },
	{ "service-with-half", service_with_half },
	{ "session", session },
	{ "container", container },
	{ "container-with-parent", container_with_parent },
	{ "part-of-the-hierarchy", part_of_the_hierarchy },
	{ NULL, NULL },
};
