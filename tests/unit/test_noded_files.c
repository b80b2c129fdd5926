/* keeper's whole-or-nothing files: in which order a store goes to the disk, so that no crash of the machine leaves half of one. */
/* link: noded_core */
#include "unit.h"

#include "common/text.h"
#include "keeper/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static char steps[256];

static void note(const char *step)
{
	size_t n = strlen(steps);

	assert_true(text_fmt(steps + n, sizeof(steps) - n, "%s%s", n > 0 ? " " : "", step));
}

/* In place of the C library's, for everything that is linked into this program. */
int fsync(int fd)
{
	struct stat st;

	assert_int_equal(fstat(fd, &st), 0);
	note(S_ISDIR(st.st_mode) ? "sync-folder" : st.st_size == 5 ? "sync-file" : "sync-half-a-file");
	return (int)syscall(SYS_fsync, fd);
}

int rename(const char *from, const char *to)
{
	note("rename");
	return (int)syscall(SYS_rename, from, to);
}

static void stores_in_order(void **state)
{
	char dir[] = "/tmp/eph-test-files-XXXXXX", path[128];
	struct buf got = BUF_INIT(64);
	struct err e;

	(void)state;
	assert_non_null(mkdtemp(dir));
	assert_true(text_fmt(path, sizeof(path), "%s/name", dir));
	for (int i = 0; i < 2; i++) { /* new, and over an old one */
		steps[0] = '\0';
		assert_ok(files_store(dir, "name", "bytes", 5, 0600, &e));
		assert_string_equal(steps, "sync-file rename sync-folder");
	}
	assert_ok(files_load(path, &got, &e));
	assert_memory_equal(got.data, "bytes", 5);
	steps[0] = '\0';
	assert_ok(files_remove(dir, "name", &e));
	assert_string_equal(steps, "sync-folder");
	assert_int_equal(access(path, F_OK), -1);
	buf_free(&got);
	assert_int_equal(rmdir(dir), 0); /* no temporary file is left either */
}

static mode_t mode_of(const char *path)
{
	struct stat st;

	assert_int_equal(stat(path, &st), 0);
	return st.st_mode & 07777;
}

/* On a host without them, as keeper and with any other umask: what lies above is not ours alone. */
static void makes_directories(void **state)
{
	const mode_t masks[] = { 077, 002, 0 };
	char dir[] = "/tmp/eph-test-files-XXXXXX", above[64], path[128];
	struct err e;

	(void)state;
	assert_non_null(mkdtemp(dir));
	assert_true(text_fmt(above, sizeof(above), "%s/ephemeral", dir));
	assert_true(text_fmt(path, sizeof(path), "%s/node", above));
	for (size_t i = 0; i < sizeof(masks) / sizeof(masks[0]); i++) {
		mode_t before = umask(masks[i]);

		assert_ok(files_mkdir(path, 0700, &e));
		assert_ok(files_mkdir(path, 0700, &e));
		umask(before);
		assert_int_equal(mode_of(above), 0755);
		assert_int_equal(mode_of(path), 0700);
		assert_int_equal(rmdir(path), 0);
		assert_int_equal(rmdir(above), 0);
	}
	/* As systemd makes it (RuntimeDirectory=), and as nobody should. */
	assert_int_equal(mkdir(above, 0755), 0);
	assert_int_equal(chmod(above, 0755), 0);
	assert_ok(files_mkdir(above, 0700, &e));
	assert_int_equal(chmod(above, 0775), 0);
	assert_int_equal(files_mkdir(above, 0700, &e), -1);
	assert_non_null(strstr(e.text, "chmod go-w"));
	assert_int_equal(rmdir(above), 0);
	assert_int_equal(rmdir(dir), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(stores_in_order),
		cmocka_unit_test(makes_directories),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
