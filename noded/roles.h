/*
 * The roles of noded: one executable, entered again by exec for each process (`noded --role NAME`), so that no role ever runs in a
 * copy of another's memory. keeper is what plain `noded` becomes; it starts every other role through the jail stage.
 *
 * main.c parses `--role NAME [--log-level L] [--log-json]`, calls log_init, makes itself undumpable and calls the entry point.
 * Roles read no configuration file: what they need comes in frames on their first descriptor. The numbers below are fixed.
 */
#ifndef NODED_ROLES_H
#define NODED_ROLES_H

/* link: own uid, host network. */
#define LINK_FD_KEEPER 3 /* frames (common/framed.h) to keeper */

/* broker: own uid, host network, one per VM. */
#define BROKER_FD_KEEPER 3  /* frames to keeper */
#define BROKER_FD_CHANNEL 4 /* frames to channel */
#define BROKER_FD_CTL 5     /* listening unix socket in a directory of root's alone: the way in for a keeper that comes later */
#define BROKER_FD_KILL 6    /* the VMM's cgroup.kill, write only: "1" kills the VM whether or not keeper lives */

/* channel: own uid, no network, one per VM. */
#define CHANNEL_FD_BROKER 3  /* frames to broker; of a golden VM, which has none, to keeper */
#define CHANNEL_FD_GUEST 4   /* byte stream to the guest, or the listening socket that its one stream comes from */
#define CHANNEL_FD_CONTROL 5 /* byte stream to the VMM: its monitor (QMP), or its API's socket */
#define CHANNEL_FD_CONSOLE 6 /* pipe: the VM's console and the VMM's stdout and stderr */
#define CHANNEL_FD_PLAN 7    /* sealed memfd: which VMM, and how it is to start (vmm/plan.h) */
#define CHANNEL_FD_EVENTS 8  /* pipe: events of the VMM; Cloud Hypervisor only */

/* jail stage: root until it execs. */
#define JAIL_FD_JOB 3    /* sealed memfd with one job description (jail/job.h) */
#define JAIL_FD_STATUS 4 /* pipe: empty at EOF = exec'd, else the text of what failed */
#define JAIL_FD_FIRST 5  /* descriptor JAIL_FD_FIRST + i becomes descriptor 3 + i of what is exec'd */

/* Each returns the exit status of its process. */
int link_main(void);
int broker_main(void);
int channel_main(void);
int jail_main(void);

#endif
