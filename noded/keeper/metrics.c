/*
 * What keeper knows for metrics: holds the listener's address (bound here, so that a busy one stops a start and link's restarts do
 * not change it; listened on and read from by link alone), reads off what only can be read (VMs by state, their groups' memory and
 * CPU, room, disk) once a second, and tells link. Counting is done where things happen (stats.h). Keeper's loop; reads cgroupfs,
 * three seconds for a round of all VMs.
 */
#include "keeper/keeper_internal.h"

#include "common/clock.h"
#include "common/log.h"
#include "common/netlisten.h"
#include "common/text.h"
#include "jail/cgroup.h"
#include "spool.h"

#include <event2/event.h>
#include <signal.h>
#include <string.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#define ROUND_TICKS 3 /* each VM's group is read once in so many seconds */

/* --- counting ----------------------------------------------------------------------------------------------------------------- */

static enum stats_mode mode_of(const struct vm *vm)
{
	switch (vm->journal.start_mode) {
	case JOURNAL_CLONE: return STATS_CLONE;
	case JOURNAL_FROM_WARM: return STATS_WARM;
	case JOURNAL_COLD: break;
	}
	return STATS_COLD;
}

/* Its assignment came to an earlier noded. */
static bool counted_before(const struct vm *vm)
{
	return vm->recovered && vm->received_boot_ns == 0;
}

void metrics_started(struct vm *vm)
{
	struct keeper_stats *s = &vm->keeper->stats;

	if (vm->start_counted || counted_before(vm))
		return;
	vm->start_counted = true;
	s->starts[mode_of(vm)][STATS_START_OK]++;
	if (vm->received_boot_ns > 0)
		stats_took(&s->start[mode_of(vm)], (clock_boot_ns() - vm->received_boot_ns) / 1000000);
}

void metrics_not_started(struct vm *vm, bool failed)
{
	if (vm->start_counted || counted_before(vm) || vm->journal.kind != JOURNAL_RUN)
		return;
	vm->start_counted = true;
	vm->keeper->stats.starts[mode_of(vm)][failed ? STATS_START_FAILED : STATS_START_ENDED]++;
}

/* A process of a VM ended with this wait status (-1 where it is not known). */
void metrics_ended(struct vm *vm, enum slot_role role, int status, bool by_itself)
{
	static const enum stats_role roles[SLOT_ROLES] = {
		[SLOT_BROKER] = STATS_ROLE_BROKER, [SLOT_CHANNEL] = STATS_ROLE_CHANNEL, [SLOT_VMM] = STATS_ROLE_VMM
	};
	struct keeper_stats *s = &vm->keeper->stats;

	if (status >= 0 && WIFSIGNALED(status) && WTERMSIG(status) == SIGSYS)
		s->seccomp_kills[roles[role]]++;
	if (vm->proc[role].cgroup && cgroup_oom_kills(vm->proc[role].cgroup) > 0)
		s->oom_kills[roles[role]]++;
	if (by_itself)
		s->vmm_ended++;
}

/* --- reading ------------------------------------------------------------------------------------------------------------------ */

static enum stats_vm state_of(const struct vm *vm)
{
	if (vm->want.destroy || vm->want.end)
		return STATS_VM_ENDING;
	if (vm->journal.kind == JOURNAL_GOLDEN)
		return STATS_VM_GOLDEN;
	if (vm->journal.kind == JOURNAL_WARM)
		return STATS_VM_WARM;
	return vm->journal.state < JOURNAL_ASKED ? STATS_VM_STARTING : STATS_VM_RUNNING;
}

void metrics_look_at_vm(struct vm *vm)
{
	const struct cgroup *g = vm->proc[SLOT_VMM].cgroup;
	uint64_t cpu_us;

	if (!g) {
		vm->memory_bytes = 0;
		return;
	}
	vm->memory_bytes = cgroup_memory_now(g);
	cpu_us = cgroup_cpu_us(g);
	if (cpu_us > vm->cpu_us) {
		if (vm->cpu_us > 0 || !vm->recovered) /* what an earlier noded counted is not counted again */
			vm->keeper->stats.vm_cpu_us += cpu_us - vm->cpu_us;
		vm->cpu_us = cpu_us;
	}
}

static void look_at_vms(struct keeper *k)
{
	struct keeper_stats *s = &k->stats;
	uint32_t i = 0;

	memset(s->vms, 0, sizeof(s->vms));
	s->vm_memory_bytes = s->vm_memory_max_bytes = s->spool_bytes = 0;
	for (struct vm *vm = k->vms; vm; vm = vm->next) {
		if (i++ % ROUND_TICKS == k->metrics_ticks % ROUND_TICKS)
			metrics_look_at_vm(vm);
		if (!vm->seen.closed)
			s->vms[state_of(vm)]++;
		s->vm_memory_bytes += vm->memory_bytes;
		if (vm->memory_bytes > s->vm_memory_max_bytes)
			s->vm_memory_max_bytes = vm->memory_bytes;
		if (vm->spool_fd >= 0)
			s->spool_bytes += (uint64_t)SPOOL_BYTES;
	}
}

static void look_at_disk(struct keeper *k)
{
	struct statvfs v;

	if (statvfs(k->config->state_dir, &v) != 0)
		return;
	k->stats.disk_total_bytes = (uint64_t)v.f_blocks * v.f_frsize;
	/* By whole MiB: the last word on it is not worth a frame each second. */
	k->stats.disk_free_bytes = ((uint64_t)v.f_bavail * v.f_frsize) >> 20 << 20;
}

static void look(struct keeper *k)
{
	struct keeper_stats *s = &k->stats;
	const struct admission *a = &k->admission;

	look_at_vms(k);
	if (k->metrics_ticks % ROUND_TICKS == 0)
		look_at_disk(k);
	s->booting = k->booting;
	s->max_booting = k->max_booting;
	s->used_memory_mib = a->used_memory_mib;
	s->total_memory_mib = a->total_memory_mib;
	s->used_vcpus = a->used_vcpus;
	s->total_vcpus = a->total_vcpus;
	s->used_slots = a->used_slots;
	s->total_slots = a->total_slots;
	s->draining = k->draining;
	s->stopping = k->stopping;
}

/* --- to link ------------------------------------------------------------------------------------------------------------------ */

static void tell_stats(struct keeper *k)
{
	struct buf b = BUF_INIT(sizeof(k->stats) + 64);

	k->stats_told = k->stats;
	keeper_stats_encode(&k->stats, &b);
	if (!b.failed)
		link_side_send(k, RF_LINK_STATS, b.data, b.len);
	buf_free(&b);
}

void metrics_tell(struct keeper *k)
{
	struct role_host host = { .vmm = "" };
	struct buf b = BUF_INIT(1024);
	const int fd = k->metrics_fd;

	if (!k->link.frames)
		return;
	if (!text_fmt(host.image, sizeof(host.image), "%.64s", k->host.image_name) ||
			!text_fmt(host.vmm, sizeof(host.vmm), "%.64s", k->host.vmm.version) ||
			!text_fmt(host.isolation, sizeof(host.isolation), "%.15s", k->host.isolation) ||
			!text_fmt(host.jail, sizeof(host.jail), "%.128s", k->host.jail))
		return;
	role_host_encode(&host, &b);
	if (b.failed || !framed_send_fds(k->link.frames, RF_LINK_HOST, b.data, b.len, &fd, fd > 0 ? 1 : 0))
		log_error("link cannot be told what metrics say of this host");
	buf_free(&b);
	look(k);
	tell_stats(k);
}

static void on_tick(evutil_socket_t fd, short what, void *arg)
{
	struct keeper *k = arg;

	(void)fd;
	(void)what;
	k->metrics_ticks++;
	look(k);
	if (k->link.frames && memcmp(&k->stats, &k->stats_told, sizeof(k->stats)) != 0)
		tell_stats(k);
}

/* --- up and down -------------------------------------------------------------------------------------------------------------- */

int metrics_open(struct keeper *k, struct err *e)
{
	const struct timeval second = { .tv_sec = 1 };
	const char *listen = k->config->metrics_listen;
	uint16_t port;

	if (listen && *listen) {
		if (net_listen(listen, &k->metrics_fd, &port, e))
			return err_wrap(e, "metrics_listen (another noded on this host? give each its own address, or port 0)");
		if (net_listen_text(listen, port, k->metrics_address, sizeof(k->metrics_address), e))
			return -1;
		log_info("metrics address=%s", k->metrics_address);
	}
	k->metrics_timer = event_new(k->base, -1, EV_PERSIST, on_tick, k);
	if (!k->metrics_timer || event_add(k->metrics_timer, &second) != 0)
		return err_set(e, ERR_NOMEM, "no memory");
	return 0;
}

void metrics_close(struct keeper *k)
{
	if (k->metrics_timer)
		event_free(k->metrics_timer);
	if (k->metrics_fd > 0)
		close(k->metrics_fd);
}
