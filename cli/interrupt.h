/* Ctrl-C as something one can wait for: after interrupt_install the signal only makes a descriptor readable. One process, one
 * thread. */
#ifndef CLI_INTERRUPT_H
#define CLI_INTERRUPT_H

#include <stdbool.h>
#include <stdint.h>

void interrupt_install(void); /* SIGINT, SIGTERM, SIGHUP; a second Ctrl-C ends the process at once */
bool interrupt_seen(void);
int interrupt_fd(void); /* readable once a signal came; -1 before interrupt_install */
/* Waits; false when a signal came meanwhile. */
bool interrupt_sleep_ms(int64_t ms);

#endif
