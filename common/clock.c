/*
 * Clocks. Thread-safe: reads the kernel's clocks and, in test builds only, an offset file that is read again when its
 * modification time or size changes. Never blocks on anything but that file.
 */
#include "clock.h"

#include <time.h>

#ifdef EPHEMERAL_TEST_CLOCK

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

/* What the file said last. Tests replace the file by rename, so that a half-written one is never read. */
static struct {
	pthread_mutex_t lock;
	struct timespec mtime;
	ino_t inode;
	int64_t real_ms, boot_ms;
} offsets = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void read_offsets(int fd)
{
	char text[128], *end, *boot_end;
	int64_t real_ms, boot_ms;
	ssize_t n = read(fd, text, sizeof(text) - 1);

	if (n <= 0)
		return;
	text[n] = '\0';
	real_ms = strtoll(text, &end, 10);
	boot_ms = strtoll(end, &boot_end, 10);
	if (end == text || boot_end == end)
		return;
	offsets.real_ms = real_ms;
	offsets.boot_ms = boot_ms;
}

static void current_offsets(int64_t *real_ms, int64_t *boot_ms)
{
	const char *path = getenv("EPHEMERAL_CLOCK_FILE");
	struct stat st;

	*real_ms = *boot_ms = 0;
	if (!path)
		return;
	pthread_mutex_lock(&offsets.lock);
	if (stat(path, &st) == 0 && (st.st_ino != offsets.inode || st.st_mtim.tv_sec != offsets.mtime.tv_sec ||
						    st.st_mtim.tv_nsec != offsets.mtime.tv_nsec)) {
		int fd = open(path, O_RDONLY | O_CLOEXEC);

		if (fd >= 0) {
			read_offsets(fd);
			close(fd);
			offsets.inode = st.st_ino;
			offsets.mtime = st.st_mtim;
		}
	}
	*real_ms = offsets.real_ms;
	*boot_ms = offsets.boot_ms;
	pthread_mutex_unlock(&offsets.lock);
}

#else

static void current_offsets(int64_t *real_ms, int64_t *boot_ms)
{
	*real_ms = *boot_ms = 0;
}

#endif

static int64_t now_ns(clockid_t id)
{
	struct timespec ts;

	/* Cannot fail: the clocks exist on every kernel that we run on. */
	clock_gettime(id, &ts);
	return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

int64_t clock_real_ms(void)
{
	int64_t real_ms, boot_ms;

	current_offsets(&real_ms, &boot_ms);
	return now_ns(CLOCK_REALTIME) / 1000000 + real_ms;
}

int64_t clock_boot_ns(void)
{
	int64_t real_ms, boot_ms;

	current_offsets(&real_ms, &boot_ms);
	return now_ns(CLOCK_BOOTTIME) + boot_ms * 1000000;
}

int64_t clock_boot_ms(void)
{
	return clock_boot_ns() / 1000000;
}

int64_t clock_mono_ns(void)
{
	return now_ns(CLOCK_MONOTONIC);
}
