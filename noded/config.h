/* Configuration of noded: one struct, one table (config.c). Read by keeper only; the other roles get what they need in frames. */
#ifndef NODED_CONFIG_H
#define NODED_CONFIG_H

#include "common/config.h"

#include <stdbool.h>
#include <stdint.h>

enum config_emulation { EMULATION_OFF, EMULATION_ALLOW };
enum config_kvm { KVM_AUTO, KVM_OFF };
enum config_vmm { CONFIG_VMM_AUTO, CONFIG_VMM_CLOUD_HYPERVISOR, CONFIG_VMM_QEMU };
enum config_isolation { ISOLATION_AUTO, ISOLATION_KVM, ISOLATION_EMULATED };

enum config_seccomp { CONFIG_SECCOMP_ENFORCE, CONFIG_SECCOMP_LOG };

enum config_start_mode { START_MODE_AUTO, START_MODE_COLD };

struct noded_config {
	char *state_dir, *run_dir;
	char *controld, *join_token_file, *node_name, *labels;
	int64_t isolation, emulation, kvm; /* the enums above */
	char *image_dir;
	int64_t vmm; /* enum config_vmm */
	char *qemu, *cloud_hypervisor, *vmm_files;
	int64_t vmm_overhead_mib;
	char *cgroup_parent;
	int64_t uid_base, max_vms, memory_mib, vcpus;
	int64_t max_concurrent_boots, boot_timeout_ms, spool_keep_seconds, reconcile_seconds;
	int64_t start_mode; /* enum config_start_mode */
	int64_t warm_min, warm_max, warm_ttl_seconds, warm_memory_mib, warm_vcpus;
	bool insecure_no_jail;
	int64_t seccomp;   /* enum config_seccomp */
	int64_t log_level; /* enum log_level */
	char *metrics_listen;
	bool log_json;
};

extern const struct config_key noded_keys[];
extern const size_t noded_key_count;

/* Loads and checks what no single key can say. */
int noded_config_load(const char *path, const char *const *overrides, size_t override_count, struct noded_config *out,
		struct err *e) EPH_MUST_CHECK;
void noded_config_free(struct noded_config *c);

#endif
