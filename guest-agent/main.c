/*
 * guest-agent: the init of a microVM and the agent in it. One process, one thread, no libevent: one poll loop at a time.
 *
 * Order: first mounts, modules, channel, final root, settings, cgroups; then setup by the host, then the agent loop, then power
 * off. Whatever cannot be mended is told to the host as a FATAL frame, and the machine goes off.
 */
#include "cgroup.h"
#include "channel.h"
#include "children.h"
#include "common/log.h"
#include "init.h"
#include "loop.h"
#include "mounts.h"
#include "setup.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* What must work before the host can be told of anything that does not. */
static int open_channel(struct channel **ch, struct err *e)
{
	struct boot_options options;

	if (init_early(&options, e) < 0 || init_modules(&options, e) < 0)
		return -1;
	return channel_open(options.channel, ch, e);
}

/* Returns the descriptor that tells of ended children. */
static int prepare(struct err *e)
{
	if (mounts_enter_root(e) < 0)
		return -1;
	init_settings();
	if (cgroup_init(e) < 0)
		return -1;
	return children_init(e);
}

/* A machine that cannot work still answers the probe, so that the host learns why from FATAL instead of from a deadline. */
static void work(struct channel *ch)
{
	struct setup setup = { .workdir = "" };
	struct err e, broken;
	int sigchld_fd = prepare(&broken);
	int rc;

	if (sigchld_fd < 0) {
		log_error("machine not usable error=\"%s\"", broken.text);
		rc = setup_answer_probe(ch, &e);
		if (rc == 0)
			channel_fatal(ch, broken.text);
		return;
	}
	rc = setup_receive(ch, &setup, &e);
	if (rc == 0)
		rc = loop_run(ch, sigchld_fd, &setup, &e);
	if (rc < 0)
		log_error("agent ends error=\"%s\"", e.text);
	if (rc < 0 && e.code != ERR_UNAVAILABLE)
		channel_fatal(ch, e.text);
	setup_free(&setup);
}

int main(void)
{
	struct channel *ch = NULL;
	struct err e;

	if (getpid() != 1) {
		fputs("guest-agent is the init of a microVM; it cannot be started by hand.\n", stderr);
		return 2;
	}
	log_init("guest-agent", LOG_LEVEL_INFO, false);
	if (open_channel(&ch, &e) < 0)
		log_error("no channel error=\"%s\"", e.text);
	else
		work(ch);
	init_power_off();
}
