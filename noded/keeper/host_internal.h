/* Shared by host.c and image.c. */
#ifndef NODED_KEEPER_HOST_INTERNAL_H
#define NODED_KEEPER_HOST_INTERNAL_H

#include "keeper/host.h"

/* Opens and checks the image's files; fills paths, descriptors, hash and name. */
int host_open_image(struct host *h, const char *dir, struct err *e) EPH_MUST_CHECK;

#endif
