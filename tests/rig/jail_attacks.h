/* Attacks of a program that stands in a jailed process' place. Each is run in a process of its own, which it may not survive. */
#ifndef RIG_JAIL_ATTACKS_H
#define RIG_JAIL_ATTACKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum attack_place { AT_BROKER = 1, AT_CHANNEL = 2, AT_VMM = 4, AT_ALL = 7 };

struct attack {
	const char *name;
	unsigned int places; /* where it is tried */
	bool walls;          /* must be refused by something else than the filter as well */
	bool harmless;       /* no attack: must be done, or the test proves nothing */
	/* 0: it was done; else the errno that it was refused with. `port` is one that listens on 127.0.0.1 and is listed. */
	int (*run)(uint16_t port);
};

extern const struct attack attacks[];
extern const size_t attack_count;

#endif
