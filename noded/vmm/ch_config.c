/* Writes a VM's configuration (ch_config.h). Field by field, with the reason where the default is another. Pure. */
#include "vmm/ch_config.h"

#include "common/json.h"
#include "common/text.h"
#include "proto/guest.h"
#include "vmm/cmdline.h"

#define MIB (INT64_C(1) << 20)
#define FD_PATH(out, fd) text_fmt((out), sizeof(out), "/proc/self/fd/%d", (int)(fd))
#define STRING(x) #x
#define TEXT_OF(x) STRING(x)

static void cpus(struct jw *w, const struct vmm_params *p)
{
	jw_kobject(w, "cpus");
	jw_kint(w, "boot_vcpus", p->vcpus);
	jw_kint(w, "max_vcpus", p->vcpus);
	jw_kbool(w, "nested", false);        /* default true: VMX or SVM for the guest */
	jw_kstr(w, "core_scheduling", "Vm"); /* no other VM's thread on the same core */
	jw_close(w);
}

/* Of a golden VM memory is a file, that its clones map privately: what they do not change they share, with no copy at the start. */
static void zone(struct jw *w, const struct vmm_params *p)
{
	jw_karray(w, "zones");
	jw_object(w);
	jw_kstr(w, "id", "m0");
	jw_kint(w, "size", p->memory_mib * MIB);
	jw_kstr(w, "file", CH_MEMORY);
	jw_kbool(w, "shared", p->start == VMM_GOLDEN);
	jw_kbool(w, "hugepages", false);
	jw_kbool(w, "mergeable", false);
	jw_kbool(w, "prefault", false);
	jw_close(w);
	jw_close(w);
}

static void memory(struct jw *w, const struct vmm_params *p)
{
	jw_kobject(w, "memory");
	jw_kint(w, "size", p->start == VMM_COLD ? p->memory_mib * MIB : 0);
	jw_kbool(w, "shared", false);
	jw_kbool(w, "hugepages", false);
	jw_kbool(w, "mergeable", false); /* pages shared between tenants are a side channel */
	jw_kbool(w, "thp", false);       /* default true: a fault may compact memory first, and takes 2 MiB for a byte */
	jw_kbool(w, "prefault", false);
	jw_kbool(w, "reserve", false);
	if (p->start != VMM_COLD)
		zone(w, p);
	jw_close(w);
}

static bool payload(struct jw *w, const struct vmm_host *host)
{
	char kernel[32], initramfs[32], line[1024];

	if (!FD_PATH(kernel, CH_FD_KERNEL) || !FD_PATH(initramfs, CH_FD_INITRAMFS) ||
			!vmm_cmdline(host, "eph.bus=pci eph.channel=vsock:" TEXT_OF(GUEST_VSOCK_PORT), line, sizeof(line)))
		return false;
	jw_kobject(w, "payload");
	jw_kstr(w, "kernel", kernel);
	jw_kstr(w, "initramfs", initramfs);
	jw_kstr(w, "cmdline", line);
	jw_close(w);
	return true;
}

static bool disks(struct jw *w)
{
	char path[32];

	if (!FD_PATH(path, CH_FD_ROOTFS))
		return false;
	jw_karray(w, "disks");
	jw_object(w);
	jw_kstr(w, "id", "root");
	jw_kstr(w, "path", path);
	jw_kbool(w, "readonly", true);
	jw_kbool(w, "direct", false);        /* the page cache is shared by all VMs of an image */
	jw_kstr(w, "image_type", "Raw");     /* default: guesses from the content */
	jw_kbool(w, "backing_files", false); /* an image that names other files names none of this host */
	jw_kint(w, "num_queues", 1);
	jw_kint(w, "queue_size", 128);
	jw_close(w);
	jw_close(w);
	return true;
}

/* The console is the pipe to channel, which keeps its end. Serial, because it speaks before any driver is loaded. */
static bool devices(struct jw *w)
{
	char console[32];

	if (!FD_PATH(console, CH_FD_CONSOLE))
		return false;
	jw_kobject(w, "vsock");
	jw_kstr(w, "id", "vsock0");
	jw_kint(w, "cid", 3); /* of no meaning on the host: the device is in the VMM alone */
	jw_kstr(w, "socket", CH_VSOCK);
	jw_close(w);
	jw_kobject(w, "rng");
	jw_kstr(w, "src", "/dev/urandom");
	jw_close(w);
	jw_kobject(w, "serial");
	jw_kstr(w, "mode", "File");
	jw_kstr(w, "file", console);
	jw_close(w);
	jw_kobject(w, "console"); /* default: the VMM's own terminal, for reading and writing */
	jw_kstr(w, "mode", "Off");
	jw_close(w);
	return true;
}

int ch_config(const struct vmm_host *host, const struct vmm_params *p, struct buf *out, struct err *e)
{
	struct jw w;
	bool ok;

	jw_init(&w, out);
	jw_object(&w);
	cpus(&w, p);
	memory(&w, p);
	ok = payload(&w, host) && disks(&w) && devices(&w);
	jw_kbool(&w, "iommu", false);
	jw_kbool(&w, "watchdog", false); /* would restart the guest in place */
	jw_kbool(&w, "pvpanic", true);   /* a dying kernel says so */
	/* The jail confines the whole process; this would confine a part of its threads, by rules that cannot name a descriptor. */
	jw_kbool(&w, "landlock_enable", false);
	jw_close(&w);
	if (!ok || !jw_end(&w) || out->failed)
		return err_set(e, ERR_LIMIT, "the VM's configuration is longer than %d bytes", VMM_PLAN_BODY_MAX);
	return 0;
}
