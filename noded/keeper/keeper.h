/*
 * keeper: noded's main process, the only root, one libevent loop, one thread, no socket but socketpairs to its own children. It
 * holds the node's identity, starts and reaps every process, keeps the journal, gives out uids, memory and places, kills and cleans
 * up.
 */
#ifndef NODED_KEEPER_KEEPER_H
#define NODED_KEEPER_KEEPER_H

#include "noded/config.h"

/* Runs until SIGTERM or SIGINT. check_only: checks everything that a start checks, prints what was found, returns. ready_fd: gets
 * one JSON line when VMs can be started (-1 = none). 0 = ended as asked, -1 = could not start or go on (logged). */
int keeper_main(const struct noded_config *config, bool check_only, int ready_fd);

#endif
