/*
 * The seam between keeper and a virtual machine monitor: what a driver must say so that the jail can start its VMM and channel can
 * control it. A driver never starts or stops anything itself: start is the jail's exec, stop is the kill of the cgroup, and control
 * is channel's, by the plan that the driver writes (plan.h).
 *
 * Keeper calls these at start (probe) and once a VM (open, then describe). probe spawns the VMM's `--version` and waits up to 5 s;
 * open makes descriptors and does not block; describe is pure.
 */
#ifndef NODED_VMM_VMM_H
#define NODED_VMM_VMM_H

#include "jail/job.h"
#include "vmm/plan.h"
#include "vmm/wires.h"

#include <stdbool.h>
#include <stdint.h>

/* What this host offers, found once at start. */
struct vmm_host {
	const char *binary;    /* absolute path of the VMM */
	char version[65];      /* "qemu 7.2.22" */
	bool kvm;              /* else emulation */
	uint32_t kvm_gid;      /* group that may open the host's own /dev/kvm, for VMMs without a tree; 0 = none */
	uint64_t tsc_khz;      /* of this host's TSC; 0 = not needed or unknown */
	const char *files;     /* further paths that the VMM finds in its tree, read-only; absolute, comma separated; NULL = none */
	uint32_t overhead_mib; /* set by the operator instead of the driver's own; 0 = the driver's */
};

struct vmm_params {
	enum vmm_start start;
	uint32_t memory_mib;
	uint32_t vcpus;
	/* The very files whose hashes were checked, open for reading; the VMM opens them again as /proc/self/fd/N. */
	int kernel_fd, initramfs_fd, rootfs_fd;
	/* Golden and clone with QEMU: memory and state of devices; -1 = cold. */
	int ram_fd, state_fd;
	/* Golden and clone with Cloud Hypervisor: keeper's path of the snapshot's directory; NULL = cold. */
	const char *golden_dir;
	uint32_t uid;       /* of the VMM */
	uint32_t answer_ms; /* the longest that an answer of its API may take */
	const char *dir;    /* keeper's directory of this VM, root's alone, for sockets that need a name for a moment */
};

struct vmm_driver {
	const char *name;
	enum vmm_kind kind;
	bool boot_again; /* known to wedge in a boot now and then: a run whose VMM did not boot gets a second one */
	/* Is the binary there and of a version that we know? Fills version. */
	int (*probe)(struct vmm_host *host, struct err *e);
	/* Every descriptor of VMM and channel, the plan among them. What is in the lists is the caller's to close, also on failure.
	 */
	int (*open)(const struct vmm_host *host, const struct vmm_params *p, struct vmm_wires *wires, struct err *e);
	/* argv, and every file of the host that the VMM needs, into the job; which of its descriptors is its stdio. */
	int (*describe)(const struct vmm_host *host, const struct vmm_params *p, struct jail_job *job, struct err *e);
	/* Snapshots that are files: the directory (new, for the VMM's uid) before a golden VM starts; and when its snapshot is made
	 * and it is gone, all of it root's and unchangeable, fit for clones. Both block on small files. NULL: snapshots are
	 * descriptors. */
	int (*golden_begin)(const struct vmm_params *p, struct err *e);
	int (*golden_seal)(const char *dir, struct err *e);
	/* Memory beyond the guest's own that the VMM's cgroup may use. */
	uint32_t (*overhead_mib)(const struct vmm_host *host);
	/* Threads and helpers: pids limit of the cgroup for this many vcpus. */
	uint32_t (*pids)(uint32_t vcpus);
};

extern const struct vmm_driver vmm_qemu, vmm_cloud_hypervisor;

/* Binds of host->files. */
bool vmm_bind_files(const struct vmm_host *host, struct jail_job *job) EPH_MUST_CHECK;

/* Host TSC frequency by 50 ms of rdtsc against CLOCK_MONOTONIC_RAW; blocks that long; 0 where there is no TSC. */
uint64_t vmm_measure_tsc_khz(void);

#endif
