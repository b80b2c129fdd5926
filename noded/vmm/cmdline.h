/* The guest kernel's command line, as far as it is the same under every VMM. Pure. */
#ifndef NODED_VMM_CMDLINE_H
#define NODED_VMM_CMDLINE_H

#include "vmm/vmm.h"

/* `devices`: what only this driver's machine needs. False: it does not fit. */
bool vmm_cmdline(const struct vmm_host *host, const char *devices, char *out, size_t size) EPH_MUST_CHECK;

#endif
