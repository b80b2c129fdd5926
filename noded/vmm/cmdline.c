/*
 * Kernel command line (cmdline.h). panic=-1 with reboot=t: a crash restarts the machine at once, which every driver takes as its
 * end. The rest saves boot time or is the only setting that works on an emulated machine; each was measured.
 */
#include "vmm/cmdline.h"

#include "common/text.h"

#include <inttypes.h>

bool vmm_cmdline(const struct vmm_host *host, const char *devices, char *out, size_t size)
{
	char tsc[48] = "";

	if (!host->kvm && host->tsc_khz > 0 && !text_fmt(tsc, sizeof(tsc), " tsc_early_khz=%" PRIu64, host->tsc_khz))
		return false;
	return text_fmt(out, size,
			"quiet console=ttyS0 panic=-1 reboot=t%s cryptomgr.notests random.trust_cpu=on %s nokaslr "
			"rcupdate.rcu_expedited=1 audit=0 apparmor=0 %s",
			tsc, host->kvm ? "no_timer_check" : "mitigations=off", devices);
}
