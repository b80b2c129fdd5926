/* Sealed memory files (sealed.h). */
#include "jail/sealed.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

int sealed_close(int fd, const char *what, struct err *e)
{
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) != 0)
		return err_set_errno(e, "seal %s", what);
	return 0;
}

int sealed_file(const char *what, const struct buf *b, struct err *e)
{
	int fd;

	if (b->failed)
		return err_set(e, ERR_LIMIT, "%s is too long", what);
	fd = memfd_create(what, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return err_set_errno(e, "memory file for %s", what);
	if (write(fd, b->data, b->len) != (ssize_t)b->len)
		err_set_errno(e, "write %s", what);
	else if (sealed_close(fd, what, e) == 0)
		return fd;
	close(fd);
	return -1;
}
