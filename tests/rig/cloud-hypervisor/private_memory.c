/*
 * Preloaded into QEMU where its memory is a file that is mapped privately and may not be written to: QEMU asks for the right to
 * write all the same, which a clone must not have, because the file is every other clone's memory too. So what is refused for
 * writing is opened for reading; the private mapping needs no more.
 *
 * A library of its own (private-memory.so, beside the stand-in); runs in QEMU alone.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <unistd.h>

int open64(const char *path, int flags, ...);
int open(const char *path, int flags, ...);
/* What the two become under _FORTIFY_SOURCE. */
int __open64_2(const char *path, int flags);
int __open_2(const char *path, int flags);

static int open_or_read(const char *path, int flags, unsigned int mode)
{
	long fd = syscall(SYS_openat, AT_FDCWD, path, flags, mode);

	if (fd < 0 && errno == EACCES && (flags & O_ACCMODE) == O_RDWR)
		fd = syscall(SYS_openat, AT_FDCWD, path, (flags & ~O_ACCMODE) | O_RDONLY, mode);
	return (int)fd;
}

static unsigned int mode_of(int flags, va_list ap)
{
	return (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(ap, unsigned int) : 0;
}

int open64(const char *path, int flags, ...)
{
	unsigned int mode;
	va_list ap;

	va_start(ap, flags);
	mode = mode_of(flags, ap);
	va_end(ap);
	return open_or_read(path, flags, mode);
}

int open(const char *path, int flags, ...)
{
	unsigned int mode;
	va_list ap;

	va_start(ap, flags);
	mode = mode_of(flags, ap);
	va_end(ap);
	return open_or_read(path, flags, mode);
}

int __open64_2(const char *path, int flags)
{
	return open_or_read(path, flags, 0);
}

int __open_2(const char *path, int flags)
{
	return open_or_read(path, flags, 0);
}
