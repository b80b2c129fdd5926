/*
 * From the host's first frame to the acknowledgement after which user processes may start.
 */
#ifndef GUEST_SETUP_H
#define GUEST_SETUP_H

#include "channel.h"

#define SETUP_WORKDIR_MAX 128

struct setup {
	struct guest_setup request; /* prompt, files, limits; the entropy in it is wiped once it is used */
	char workdir[SETUP_WORKDIR_MAX];
};

/*
 * Answers the probe, takes time, entropy, request and files, makes the working directory and acknowledges. Blocks for the host as
 * long as the channel lives: a warm machine waits here for its run.
 */
int setup_receive(struct channel *ch, struct setup *s, struct err *e) EPH_MUST_CHECK;
/* Only answers the probe: for a machine that cannot work but must say why. */
int setup_answer_probe(struct channel *ch, struct err *e) EPH_MUST_CHECK;
void setup_free(struct setup *s);

#endif
