/*
 * What makes this process the init of a machine: first mounts, kernel modules, kernel settings, power off.
 */
#ifndef GUEST_INIT_H
#define GUEST_INIT_H

#include "common/error.h"

struct boot_options {
	char channel[96]; /* "virtio:NAME", "vsock:PORT" */
	char bus[16];     /* "mmio" or "pci": which virtio transport's modules are loaded */
};

/* /dev, /proc, /sys; descriptors 0 to 2; reads the kernel command line. Must come first. */
int init_early(struct boot_options *o, struct err *e) EPH_MUST_CHECK;
/* Loads the modules that /modules.load names for these options, in its order, and frees their files. */
int init_modules(const struct boot_options *o, struct err *e) EPH_MUST_CHECK;
/* Host name, loopback device, kernel settings. Called with the final root in place; what fails here is logged, not fatal. */
void init_settings(void);
/* Never returns: ends every process and switches the machine off. */
void init_power_off(void) __attribute__((noreturn));

#endif
