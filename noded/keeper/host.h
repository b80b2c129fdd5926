/* What keeper finds out about this host before it starts: everything that a VM needs, each thing with a clear error. */
#ifndef NODED_KEEPER_HOST_H
#define NODED_KEEPER_HOST_H

#include "jail/cgroup.h"
#include "jail/egress.h"
#include "noded/config.h"
#include "proto/assignment.h"
#include "vmm/vmm.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

enum image_file { IMAGE_KERNEL, IMAGE_INITRAMFS, IMAGE_ROOTFS, IMAGE_FILES };

struct host {
	struct cgroups *cgroups;
	const struct vmm_driver *driver;
	struct vmm_host vmm;
	char binary[1024];
	char image_path[IMAGE_FILES][1024];
	int image_fd[IMAGE_FILES]; /* of the very files that were hashed; what the jail binds */
	uint8_t image_hash[SHA256_LEN];
	char image_name[65];                 /* hash in hex; "" = there is no image, and image_note says why */
	struct stat image_stat[IMAGE_FILES]; /* when they were checked */
	bool image_stored;                   /* below state_dir, by images.c: nothing else touches them */
	char image_note[257];
	const char *isolation;     /* "kvm" | "emulated" */
	const char *jail;          /* "full", or what is missing */
	uint32_t cpus, memory_mib; /* of the host; memory: available when it was looked at */
	char boot_id[40];
	int64_t boot_timeout_ms;
	struct egress *egress; /* connect filters of brokers; NULL = none (insecure_no_jail) */
};

/* One thing that a start needs. They are checked in this order; `noded doctor` runs each of them by itself, so none may rely on an
 * earlier one having been good. */
struct host_step {
	const char *name;
	int (*check)(const struct noded_config *config, struct host *h, struct err *e);
	const char *mend; /* what an operator does where it fails */
};
extern const struct host_step host_steps[];
extern const size_t host_step_count;

/* A host of which nothing is known yet: what the steps fill, and host_close takes. */
void host_init(const struct noded_config *config, struct host *out);
/* Blocks for up to a second (hashing the image, measuring the clock, asking QEMU for its version). */
int host_open(const struct noded_config *config, struct host *out, struct err *e) EPH_MUST_CHECK;
void host_close(struct host *h);
/* The files behind the descriptors are still the ones that were checked, and still there. Cheap: no byte of them is read. */
int host_image_unchanged(const struct host *h, struct err *e) EPH_MUST_CHECK;
/* From now on VMs start from dir/name, whose hashes the caller has checked. On failure nothing has changed. */
int host_switch_image(struct host *h, const char *dir, const char *name, struct err *e) EPH_MUST_CHECK;
void host_drop_image(struct host *h);

bool host_cpu_has(const char *flag); /* a word of the line `flags` of /proc/cpuinfo: "vmx", "hypervisor" */

#endif
