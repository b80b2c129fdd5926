/* Files and directories of images below state_dir/images (images.h). Small and blocking, as files.h. */
#ifndef NODED_KEEPER_IMAGE_STORE_H
#define NODED_KEEPER_IMAGE_STORE_H

#include "keeper/host.h"

#include "common/error.h"
#include "common/ids.h"

#include <stdint.h>

extern const char *const image_file_names[IMAGE_FILES];

/* Removes incoming/. */
void image_store_clear(const char *dir);
/* A new file in incoming/, writable; -1 with e, also when the disk has no room for `size` bytes. */
int image_store_create(const char *dir, int file, uint64_t size, struct err *e) EPH_MUST_CHECK;
/* A file of this hash by name in one of two images, of this size: open for reading, or -1. Its bytes are still to be checked. */
int image_store_find(const char *dir, const char *current, const char *wanted, const uint8_t sha256[SHA256_LEN], uint64_t size,
		int file);
/* What is open there gets a name in incoming/ too. */
int image_store_link(const char *dir, int fd, int file, struct err *e) EPH_MUST_CHECK;
/* This file of an image (-1: all of them) is not to be used any more. */
void image_store_distrust(const char *dir, const char *name, int file);
/* incoming/ is whole: describes it, gives it its name and makes it the current one. */
int image_store_place(
		const char *dir, const char *name, const uint8_t sha256[IMAGE_FILES][SHA256_LEN], struct err *e) EPH_MUST_CHECK;
/* The name that `current` holds; false when there is none. */
bool image_store_current(const char *dir, char name[65]);
/* Keeps this image and the newest other one. */
void image_store_prune(const char *dir, const char *name);

#endif
