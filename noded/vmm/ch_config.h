/*
 * What the files of the Cloud Hypervisor driver share. Its configuration of a VM, as vm.create takes it and as vm.info must
 * show it: every default that matters is written out, because the program ignores what it does not know and its defaults are made
 * for trusted guests.
 *
 * Pure; used by the driver.
 */
#ifndef NODED_VMM_CH_CONFIG_H
#define NODED_VMM_CH_CONFIG_H

#include "vmm/vmm.h"

#include "common/buf.h"

/* The VMM's descriptors, in the order of the driver's open. */
enum ch_fd { CH_FD_API = 3, CH_FD_EVENTS, CH_FD_CONSOLE, CH_FD_KERNEL, CH_FD_INITRAMFS, CH_FD_ROOTFS, CH_FD_GUEST };

#define CH_VSOCK "/v/vsock"       /* in the VMM's tree; the guest's connection comes to CH_VSOCK_PORT */
#define CH_GOLDEN "/g"            /* a golden VM's directory in the tree of it and of its clones */
#define CH_MEMORY "/g/memory"     /* the guest's memory */
#define CH_SNAPSHOT "/g/snapshot" /* what vm.snapshot writes */

int ch_config(const struct vmm_host *host, const struct vmm_params *p, struct buf *out, struct err *e) EPH_MUST_CHECK;

/* ch_golden.c: vmm_driver's golden_begin and golden_seal. */
int ch_golden_begin(const struct vmm_params *p, struct err *e) EPH_MUST_CHECK;
int ch_golden_seal(const char *dir, struct err *e) EPH_MUST_CHECK;

#endif
