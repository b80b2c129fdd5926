/* The key table of noded. Called at start and by -t, on the main thread; may block on the file. */
#include "noded/config.h"

#include "common/text.h"
#include "link/peer.h"

#include <stddef.h>
#include <string.h>

#define AT(field) offsetof(struct noded_config, field)
#define VMM_FILES_MAX 24
#define RUN_DIR_MAX 50 /* a socket path below it must stay under the 107 bytes of a unix address */

const struct config_key noded_keys[] = {
	{ .name = "state_dir",
			.type = CONFIG_STRING,
			.offset = AT(state_dir),
			.fallback = "/var/lib/ephemeral/node",
			.max = 512,
			.help = "directory of identity, journal and spools; one noded at a time" },
	{ .name = "run_dir",
			.type = CONFIG_STRING,
			.offset = AT(run_dir),
			.fallback = "/run/ephemeral/node",
			.max = RUN_DIR_MAX,
			.help = "directory for what lives as long as a VM; at most 50 bytes" },
	{ .name = "controld",
			.type = CONFIG_LIST,
			.offset = AT(controld),
			.optional = true,
			.max = 512,
			.help = "addresses of controld, tls+tcp://host:port, comma separated; default: those of the join token" },
	{ .name = "join_token_file",
			.type = CONFIG_STRING,
			.offset = AT(join_token_file),
			.optional = true,
			.max = 512,
			.help = "file with the join token of `ephemeral admin node token`; read until this node is enrolled" },
	{ .name = "node_name",
			.type = CONFIG_STRING,
			.offset = AT(node_name),
			.optional = true,
			.max = 64,
			.help = "name for people; default: the host name" },
	{ .name = "labels",
			.type = CONFIG_LIST,
			.offset = AT(labels),
			.fallback = "",
			.max = 512,
			.help = "labels of this node, a=b comma separated" },
	{ .name = "isolation",
			.type = CONFIG_ENUM,
			.offset = AT(isolation),
			.fallback = "auto",
			.choices = "auto|kvm|emulated",
			.help = "class that this node offers; auto: what the host has. kvm refuses to start without /dev/kvm" },
	{ .name = "emulation",
			.type = CONFIG_ENUM,
			.offset = AT(emulation),
			.fallback = "off",
			.choices = "off|allow",
			.help = "allow: without KVM run VMs emulated. Slower, and not sold as isolation" },
	{ .name = "kvm",
			.type = CONFIG_ENUM,
			.offset = AT(kvm),
			.fallback = "auto",
			.choices = "auto|off",
			.help = "off: do not use /dev/kvm even where it is" },
	{ .name = "image_dir",
			.type = CONFIG_STRING,
			.offset = AT(image_dir),
			.optional = true,
			.max = 512,
			.help = "directory with vmlinux, initramfs.cpio, rootfs.sqfs and image.json (deploy/guest-image/pack); "
				"default: "
				"noded fetches the image that controld names" },
	{ .name = "vmm",
			.type = CONFIG_ENUM,
			.offset = AT(vmm),
			.fallback = "auto",
			.choices = "auto|cloud-hypervisor|qemu",
			.help = "auto: Cloud Hypervisor where it and KVM are, else QEMU" },
	{ .name = "cloud_hypervisor",
			.type = CONFIG_STRING,
			.offset = AT(cloud_hypervisor),
			.fallback = "cloud-hypervisor",
			.max = 512,
			.help = "Cloud Hypervisor 53 or newer: a path, or a name that is looked for in PATH" },
	{ .name = "vmm_files",
			.type = CONFIG_LIST,
			.offset = AT(vmm_files),
			.fallback = "",
			.max = 2048,
			.help = "further absolute paths that the VMM finds read-only in its tree, comma separated: libraries of a "
				"dynamic build" },
	{ .name = "vmm_overhead_mib",
			.type = CONFIG_INT,
			.offset = AT(vmm_overhead_mib),
			.fallback = "0",
			.min = 0,
			.max = 65536,
			.help = "MiB that a VMM may use beside its guest's memory; 0: what was measured for it" },
	{ .name = "qemu",
			.type = CONFIG_STRING,
			.offset = AT(qemu),
			.fallback = "qemu-system-x86_64",
			.max = 512,
			.help = "QEMU: a path, or a name that is looked for in PATH" },
	{ .name = "cgroup_parent",
			.type = CONFIG_STRING,
			.offset = AT(cgroup_parent),
			.optional = true,
			.max = 256,
			.help = "group below which VMs' groups are made, from the root of each hierarchy; default: noded's own "
				"group" },
	{ .name = "uid_base",
			.type = CONFIG_INT,
			.offset = AT(uid_base),
			.fallback = "200000",
			.min = 1000,
			.max = 2000000000,
			.help = "first of 3 * max_vms user ids that nothing else uses; uid_base - 1 is link's" },
	{ .name = "max_vms",
			.type = CONFIG_INT,
			.offset = AT(max_vms),
			.fallback = "64",
			.min = 1,
			.max = 1024,
			.help = "VMs at once" },
	{ .name = "memory_mib",
			.type = CONFIG_INT,
			.offset = AT(memory_mib),
			.fallback = "0",
			.min = 0,
			.max = 16777216,
			.help = "MiB for VMs with their overhead; 0: what is available at start, less 1 GiB" },
	{ .name = "vcpus",
			.type = CONFIG_INT,
			.offset = AT(vcpus),
			.fallback = "0",
			.min = 0,
			.max = 65536,
			.help = "virtual CPUs of all VMs together; 0: eight for each CPU of the host" },
	{ .name = "max_concurrent_boots",
			.type = CONFIG_INT,
			.offset = AT(max_concurrent_boots),
			.fallback = "0",
			.min = 0,
			.max = 1024,
			.help = "VMs that boot at once, the others wait; 0: CPUs of the host" },
	{ .name = "boot_timeout_ms",
			.type = CONFIG_INT,
			.offset = AT(boot_timeout_ms),
			.fallback = "0",
			.min = 0,
			.max = 600000,
			.help = "ms from the VMM's exec to the guest's hello; 0: 10000 with KVM, 30000 emulated" },
	{ .name = "start_mode",
			.type = CONFIG_ENUM,
			.offset = AT(start_mode),
			.fallback = "auto",
			.choices = "auto|cold",
			.help = "auto: VMs go on from a snapshot of a booted one, where there is one, and boot otherwise; cold: "
				"all boot" },
	{ .name = "warm_min",
			.type = CONFIG_INT,
			.offset = AT(warm_min),
			.fallback = "0",
			.min = 0,
			.max = 1024,
			.help = "VMs that are kept booted for runs to come, whatever the demand; they give way to runs that need "
				"the "
				"room" },
	{ .name = "warm_max",
			.type = CONFIG_INT,
			.offset = AT(warm_max),
			.fallback = "0",
			.min = 0,
			.max = 1024,
			.help = "most VMs that are kept booted when runs come often; 0: as warm_min" },
	{ .name = "warm_ttl_seconds",
			.type = CONFIG_INT,
			.offset = AT(warm_ttl_seconds),
			.fallback = "3600",
			.min = 10,
			.max = 604800,
			.help = "seconds after which a booted VM that no run came for is replaced" },
	{ .name = "warm_memory_mib",
			.type = CONFIG_INT,
			.offset = AT(warm_memory_mib),
			.fallback = "512",
			.min = 128,
			.max = 16777216,
			.help = "MiB of the guests that warm_min keeps: what the usual run asks for" },
	{ .name = "warm_vcpus",
			.type = CONFIG_INT,
			.offset = AT(warm_vcpus),
			.fallback = "1",
			.min = 1,
			.max = 64,
			.help = "vcpus of the guests that warm_min keeps" },
	{ .name = "reconcile_seconds",
			.type = CONFIG_INT,
			.offset = AT(reconcile_seconds),
			.fallback = "60",
			.min = 1,
			.max = 3600,
			.help = "seconds between looks for what belongs to no VM: processes, groups, directories, records" },
	{ .name = "spool_keep_seconds",
			.type = CONFIG_INT,
			.offset = AT(spool_keep_seconds),
			.fallback = "600",
			.min = 0,
			.max = 86400,
			.help = "seconds that a run's events stay on this host after they were acknowledged" },
	{ .name = "metrics_listen",
			.type = CONFIG_STRING,
			.offset = AT(metrics_listen),
			.fallback = "127.0.0.1:9465",
			.max = 256,
			.help = "metrics for Prometheus, host:port without a key; empty = off" },
	{ .name = "insecure_no_jail",
			.type = CONFIG_BOOL,
			.offset = AT(insecure_no_jail),
			.fallback = "false",
			.help = "true: no namespaces and no file tree of its own for VMs; for hosts where neither can be had, "
				"never for production" },
	{ .name = "seccomp",
			.type = CONFIG_ENUM,
			.offset = AT(seccomp),
			.fallback = "enforce",
			.choices = "enforce|log",
			.help = "log: calls that a process' filter does not list are written to the kernel's log and done; to find "
				"out "
				"what a list lacks, never for production" },
	{ .name = "log_level",
			.type = CONFIG_ENUM,
			.offset = AT(log_level),
			.fallback = "info",
			.choices = "debug|info|warn|error",
			.help = "least level that is logged" },
	{ .name = "log_json",
			.type = CONFIG_BOOL,
			.offset = AT(log_json),
			.fallback = "false",
			.help = "true: log lines are JSON objects" },
};
const size_t noded_key_count = sizeof(noded_keys) / sizeof(noded_keys[0]);

static int absolute(const char *key, const char *path, struct err *e)
{
	if (path[0] == '/')
		return 0;
	return err_set(e, ERR_INVALID, "%s = %s must be an absolute path", key, path);
}

/* Here, and not first in link, which would be started again and again for a mistake that it cannot get over. */
static int check_controlds(const char *list, struct err *e)
{
	static const char scheme[] = "tls+tcp://";
	size_t count = 0;

	for (const char *s = list; *s != '\0';) {
		size_t n = strcspn(s, ", ");
		char address[513], host[256];
		uint16_t port;

		if (n > 0) {
			if (++count > PEER_ADDRESSES_MAX)
				return err_set(e, ERR_INVALID, "controld names more than %d addresses", PEER_ADDRESSES_MAX);
			if (!text_fmt(address, sizeof(address), "%.*s", (int)n, s))
				return err_set(e, ERR_INVALID, "controld = an address is longer than 512 bytes");
			if (strncmp(address, scheme, sizeof(scheme) - 1) != 0)
				return err_set(e, ERR_INVALID, "controld = %s must begin with %s", address, scheme);
			if (config_addr(address + sizeof(scheme) - 1, host, sizeof(host), &port, e) != 0)
				return err_wrap(e, "controld");
			if (host[0] == '\0' || port == 0)
				return err_set(e, ERR_INVALID, "controld = %s must name a host and a port from 1 to 65535",
						address);
		}
		s += n + (s[n] != '\0');
	}
	return 0;
}

static int check_vmm_files(const char *list, struct err *e)
{
	size_t count = 0;

	for (const char *s = list; *s != '\0';) {
		size_t n = strcspn(s, ", ");

		if (n > 0 && (s[0] != '/' || memmem(s, n, "/..", 3) != NULL || ++count > VMM_FILES_MAX))
			return err_set(e, ERR_INVALID, "vmm_files = %.*s: at most %d absolute paths without ..", (int)n, s,
					VMM_FILES_MAX);
		s += n + (s[n] != '\0');
	}
	return 0;
}

static int check(const struct noded_config *c, struct err *e)
{
	char host[256];
	uint16_t port;

	if (c->controld && check_controlds(c->controld, e))
		return -1;
	if (absolute("state_dir", c->state_dir, e) || absolute("run_dir", c->run_dir, e) ||
			(c->image_dir && *c->image_dir && absolute("image_dir", c->image_dir, e)))
		return -1;
	if (c->join_token_file && absolute("join_token_file", c->join_token_file, e))
		return -1;
	if (*c->metrics_listen && config_addr(c->metrics_listen, host, sizeof(host), &port, e) != 0)
		return err_wrap(e, "metrics_listen");
	if (c->cgroup_parent && *c->cgroup_parent && (c->cgroup_parent[0] != '/' || strstr(c->cgroup_parent, "..")))
		return err_set(e, ERR_INVALID, "cgroup_parent = %s must begin with / and hold no ..", c->cgroup_parent);
	if (c->vmm_files && check_vmm_files(c->vmm_files, e))
		return -1;
	if (c->vmm == CONFIG_VMM_CLOUD_HYPERVISOR && c->insecure_no_jail)
		return err_set(e, ERR_INVALID,
				"vmm = cloud-hypervisor and insecure_no_jail = true cannot both hold: it finds its sockets in a "
				"tree of "
				"its own; remove one of them, or set vmm = qemu");
	if (c->warm_max != 0 && c->warm_max < c->warm_min)
		return err_set(e, ERR_INVALID, "warm_max = %lld is below warm_min = %lld; raise it, or set it to 0",
				(long long)c->warm_max, (long long)c->warm_min);
	if (c->warm_min > c->max_vms)
		return err_set(e, ERR_INVALID, "warm_min = %lld is above max_vms = %lld", (long long)c->warm_min,
				(long long)c->max_vms);
	if (c->isolation == ISOLATION_KVM && c->kvm == KVM_OFF)
		return err_set(e, ERR_INVALID, "isolation = kvm and kvm = off cannot both hold; remove one of them");
	return 0;
}

int noded_config_load(
		const char *path, const char *const *overrides, size_t override_count, struct noded_config *out, struct err *e)
{
	*out = (struct noded_config){ .state_dir = NULL };
	if (config_load(noded_keys, noded_key_count, out, path, overrides, override_count, e) == 0 && check(out, e) == 0)
		return 0;
	noded_config_free(out);
	return -1;
}

void noded_config_free(struct noded_config *c)
{
	config_free(noded_keys, noded_key_count, c);
}
