/* A frame with one descriptor, written in one piece: what framed.h's peers send each other, for tests that play such a peer by
 * hand. */
#ifndef TEST_FD_FRAME_H
#define TEST_FD_FRAME_H

#include "common/buf.h"
#include "common/wire.h"

#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>

/* fd -1: none goes along. True when all of it was taken. */
static inline bool put_fd_frame(int sock, uint8_t type, const void *body, size_t n, int fd, size_t max)
{
	struct buf b = BUF_INIT(max + 16);
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = { .bytes = { 0 } };
	struct iovec iov;
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
	bool whole;

	wire_put_u32(&b, (uint32_t)n + 1);
	wire_put_u8(&b, type);
	wire_put_raw(&b, body, n);
	iov = (struct iovec){ b.data, b.len };
	if (fd >= 0) {
		msg.msg_control = control.bytes;
		msg.msg_controllen = sizeof(control.bytes);
		control.align.cmsg_level = SOL_SOCKET;
		control.align.cmsg_type = SCM_RIGHTS;
		control.align.cmsg_len = CMSG_LEN(sizeof(int));
		memcpy(CMSG_DATA(&control.align), &fd, sizeof(int));
	}
	whole = !b.failed && sendmsg(sock, &msg, MSG_NOSIGNAL) == (ssize_t)b.len;
	buf_free(&b);
	return whole;
}

#endif
