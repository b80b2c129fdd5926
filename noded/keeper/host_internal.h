/* Shared by host.c and image.c. */
#ifndef NODED_KEEPER_HOST_INTERNAL_H
#define NODED_KEEPER_HOST_INTERNAL_H

#include "keeper/host.h"

/* Opens and checks the image's files; fills paths, descriptors, hash and name. */
int host_open_image(struct host *h, const char *dir, struct err *e) EPH_MUST_CHECK;
/* The image that state_dir/images has, as above; when there is none that is whole, image_note says why, and that is no failure. */
void host_open_stored_image(struct host *h, const char *state_dir);

#endif
