/*
 * The images of this host: which one new VMs start from, fetching another, keeping two. Pieces come through link, which is believed
 * nothing: a file counts only when all of its bytes, as they were written here, give the hash that its name says. Keeper's loop;
 * writes and hashes one piece a turn (256 KiB, about 1 ms).
 *
 *   state_dir/images/current       name of the image that VMs start from
 *   state_dir/images/<hash>/       root's, files 0444: vmlinux, initramfs.cpio, rootfs.sqfs, image.json; at most two
 *   state_dir/images/incoming/     what is being fetched; removed at each start
 *
 * Nothing is synced to the disk: what a crash tears is found by the hash at the next start, and fetched again.
 */
#ifndef NODED_KEEPER_IMAGES_H
#define NODED_KEEPER_IMAGES_H

#include "common/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct images;
struct keeper;

/* After host_open. With image_dir set, images are not fetched and this only says what there is. */
int images_open(struct keeper *k, struct images **out, struct err *e) EPH_MUST_CHECK;
void images_free(struct images *m); /* NULL is fine */

/* Whether a VM may start now: there is an image, and its files are the very ones that were checked (size, times, inode; before each
 * start, so it is cheap). One that is not any more is given up: no capacity is offered until it is there again. */
bool images_usable(struct images *m, struct err *e);

/* link_side.c */
void images_new_link(struct images *m); /* says the state, and asks again for what was on its way */
int images_wanted(struct images *m, const uint8_t *body, size_t n, struct err *e) EPH_MUST_CHECK; /* RF_KEEPER_IMAGE */
int images_piece(struct images *m, const uint8_t *body, size_t n, struct err *e) EPH_MUST_CHECK;  /* RF_KEEPER_IMAGE_BLOB */

#endif
