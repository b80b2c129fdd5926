/*
 * The fields of a VM's configuration with their types, bounds and defaults, in the order in which `vm.info` shows them. A field
 * that the real program has and that nothing of ours may send (a network card, a shared directory, a passed-through device) stands
 * as FIELD_REFUSED.
 */
#include "config.h"

#define U8 0, 255
#define U16 0, 65535
#define U32 0, 4294967295
#define U64 0, INT64_MAX
#define NONE 0, 0

#define BOOL_(n, d)                                                                                                                \
	{                                                                                                                          \
		n, FIELD_BOOL, d, NONE, NULL, NULL                                                                                 \
	}
#define INT_(n, d, range)                                                                                                          \
	{                                                                                                                          \
		n, FIELD_INT, d, range, NULL, NULL                                                                                 \
	}
#define TEXT_(n, d)                                                                                                                \
	{                                                                                                                          \
		n, FIELD_TEXT, d, NONE, NULL, NULL                                                                                 \
	}
#define ENUM_(n, d, w)                                                                                                             \
	{                                                                                                                          \
		n, FIELD_ENUM, d, NONE, w, NULL                                                                                    \
	}
#define OBJECT_(n, d, s)                                                                                                           \
	{                                                                                                                          \
		n, FIELD_OBJECT, d, NONE, NULL, s                                                                                  \
	}
#define LIST_(n, d, s)                                                                                                             \
	{                                                                                                                          \
		n, FIELD_LIST, d, NONE, NULL, s                                                                                    \
	}
#define REFUSED_(n)                                                                                                                \
	{                                                                                                                          \
		n, FIELD_REFUSED, "null", NONE, NULL, NULL                                                                         \
	}
#define END_                                                                                                                       \
	{                                                                                                                          \
		NULL, FIELD_END, NULL, NONE, NULL, NULL                                                                            \
	}

static const char *const core_scheduling[] = { "Vm", "Vcpu", "Off", NULL };
static const char *const console_modes[] = { "Off", "Pty", "Tty", "File", "Socket", "Null", NULL };
static const char *const image_types[] = { "FixedVhd", "Qcow2", "Raw", "Vhdx", "Unknown", NULL };
static const char *const granularities[] = { "ByteRange", "Full", NULL };
static const char *const restore_modes[] = { "Copy", "OnDemand", NULL };
static const char *const hotplug_methods[] = { "Acpi", "VirtioMem", NULL };

static const struct field topology[] = { INT_("threads_per_core", NULL, U16), INT_("cores_per_die", NULL, U16),
	INT_("dies_per_package", NULL, U16), INT_("packages", NULL, U16), END_ };
static const struct field features[] = { BOOL_("amx", "false"), END_ };

static const struct field cpus[] = { INT_("boot_vcpus", NULL, U32), INT_("max_vcpus", NULL, U32),
	OBJECT_("topology", "null", topology), BOOL_("kvm_hyperv", "false"), INT_("max_phys_bits", "46", U8), REFUSED_("affinity"),
	OBJECT_("features", "{}", features), BOOL_("nested", "true"), ENUM_("core_scheduling", "\"Vm\"", core_scheduling), END_ };

static const struct field zones[] = { TEXT_("id", NULL), INT_("size", NULL, U64), TEXT_("file", "null"), BOOL_("shared", "false"),
	BOOL_("hugepages", "false"), INT_("hugepage_size", "null", U64), INT_("host_numa_node", "null", U32),
	INT_("hotplug_size", "null", U64), INT_("hotplugged_size", "null", U64), BOOL_("prefault", "false"),
	BOOL_("reserve", "false"), BOOL_("mergeable", "false"), END_ };

static const struct field memory[] = { INT_("size", NULL, U64), BOOL_("mergeable", "false"),
	ENUM_("hotplug_method", "\"Acpi\"", hotplug_methods), INT_("hotplug_size", "null", U64),
	INT_("hotplugged_size", "null", U64), BOOL_("shared", "false"), BOOL_("hugepages", "false"),
	INT_("hugepage_size", "null", U64), BOOL_("prefault", "false"), BOOL_("reserve", "false"), LIST_("zones", "null", zones),
	BOOL_("thp", "true"), END_ };

static const struct field payload[] = { TEXT_("firmware", "null"), TEXT_("kernel", "null"), TEXT_("cmdline", "null"),
	TEXT_("initramfs", "null"), END_ };

static const struct field bucket[] = { INT_("size", NULL, U64), INT_("one_time_burst", "null", U64), INT_("refill_time", NULL, U64),
	END_ };
static const struct field limiter[] = { OBJECT_("bandwidth", "null", bucket), OBJECT_("ops", "null", bucket), END_ };

static const struct field disk[] = { TEXT_("path", "null"), BOOL_("readonly", "false"), BOOL_("direct", "false"),
	BOOL_("iommu", "false"), INT_("num_queues", "1", U16), INT_("queue_size", "128", U16), BOOL_("vhost_user", "false"),
	TEXT_("vhost_socket", "null"), TEXT_("rate_limit_group", "null"), OBJECT_("rate_limiter_config", "null", limiter),
	TEXT_("id", "null"), BOOL_("disable_io_uring", "false"), BOOL_("disable_aio", "false"), INT_("pci_segment", "0", U16),
	INT_("pci_device_id", "null", U8), TEXT_("serial", "null"), REFUSED_("queue_affinity"), BOOL_("backing_files", "false"),
	BOOL_("sparse", "true"), ENUM_("image_type", "\"Unknown\"", image_types),
	ENUM_("lock_granularity", "\"ByteRange\"", granularities), END_ };

static const struct field rng[] = { TEXT_("src", NULL), BOOL_("iommu", "false"), TEXT_("id", "null"), INT_("pci_segment", "0", U16),
	INT_("pci_device_id", "null", U8), END_ };
static const struct field balloon[] = { INT_("size", NULL, U64), BOOL_("deflate_on_oom", "false"),
	BOOL_("free_page_reporting", "false"), BOOL_("iommu", "false"), TEXT_("id", "null"), INT_("pci_segment", "0", U16),
	INT_("pci_device_id", "null", U8), END_ };
static const struct field serial[] = { TEXT_("file", "null"), ENUM_("mode", NULL, console_modes), TEXT_("socket", "null"), END_ };
static const struct field console[] = { TEXT_("file", "null"), ENUM_("mode", NULL, console_modes), BOOL_("iommu", "false"),
	TEXT_("socket", "null"), TEXT_("id", "null"), INT_("pci_segment", "0", U16), INT_("pci_device_id", "null", U8), END_ };
static const struct field debug_console[] = { TEXT_("file", "null"), ENUM_("mode", NULL, console_modes),
	INT_("iobase", "null", U16), END_ };
static const struct field vsock[] = { INT_("cid", NULL, U32), TEXT_("socket", NULL), BOOL_("iommu", "false"), TEXT_("id", "null"),
	INT_("pci_segment", "0", U16), INT_("pci_device_id", "null", U8), END_ };
static const struct field landlock[] = { TEXT_("path", NULL), TEXT_("access", NULL), END_ };

const struct field config_vm[] = { OBJECT_("cpus", "{\"boot_vcpus\":1,\"max_vcpus\":1}", cpus),
	OBJECT_("memory", "{\"size\":536870912}", memory), OBJECT_("payload", NULL, payload), REFUSED_("rate_limit_groups"),
	LIST_("disks", "null", disk), REFUSED_("net"), OBJECT_("rng", "{\"src\":\"/dev/urandom\"}", rng),
	OBJECT_("balloon", "null", balloon), REFUSED_("fs"), REFUSED_("generic_vhost_user"), REFUSED_("pmem"),
	OBJECT_("serial", "{\"mode\":\"Null\"}", serial), OBJECT_("console", "{\"mode\":\"Tty\"}", console),
	OBJECT_("debug_console", "{\"mode\":\"Off\",\"iobase\":233}", debug_console), REFUSED_("devices"), REFUSED_("user_devices"),
	REFUSED_("vdpa"), OBJECT_("vsock", "null", vsock), REFUSED_("numa"), BOOL_("iommu", "false"), BOOL_("watchdog", "false"),
	BOOL_("pvpanic", "false"), REFUSED_("pci_segments"), REFUSED_("platform"), REFUSED_("tpm"),
	BOOL_("landlock_enable", "false"), LIST_("landlock_rules", "null", landlock), END_ };

const struct field config_restore[] = { TEXT_("source_url", NULL), BOOL_("prefault", "false"),
	ENUM_("memory_restore_mode", "\"Copy\"", restore_modes), BOOL_("resume", "false"), END_ };

const struct field config_snapshot[] = { TEXT_("destination_url", NULL), END_ };
