/* link: noded_core */
/* The directory of a golden VM of Cloud Hypervisor: whose it is while the VM writes to it, what is left of it for clones, and files
 * in it that are not what they should be. Needs root, as keeper does; does nothing without. */
#include "unit.h"

#include "common/text.h"
#include "vmm/ch_config.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define CONFIG                                                                                                                     \
	"{\"cpus\":{\"nested\":false},\"memory\":{\"size\":0,\"shared\":false,\"zones\":[{\"id\":\"m0\",\"file\":\"/g/"            \
	"memory\",\"shared\":true,\"size\":1}]},\"pvpanic\":true}"

static char top[64], dir[128];

static const char *at(const char *name)
{
	static char path[256];

	assert_true(text_fmt(path, sizeof(path), "%s/%s", dir, name));
	return path;
}

static void put(const char *name, const char *text)
{
	int fd = open(at(name), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

	assert_true(fd >= 0);
	assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
	close(fd);
}

/* As a golden VM leaves it. */
static void fresh(void)
{
	const struct vmm_params p = { .start = VMM_GOLDEN, .memory_mib = 3, .vcpus = 1, .golden_dir = dir, .uid = 23456 };
	struct err e;

	assert_true(text_copy(top, sizeof(top), "/tmp/eph-golden-XXXXXX"));
	assert_non_null(mkdtemp(top));
	assert_true(text_fmt(dir, sizeof(dir), "%s/g", top));
	assert_int_equal(ch_golden_begin(&p, &e), 0);
	assert_int_equal(ch_golden_begin(&p, &e), -1); /* never one that is there */
	put("snapshot/config.json", CONFIG);
	put("snapshot/state.json", "{}");
}

static void gone(void)
{
	static const char *const names[] = { "snapshot/config.json", "snapshot/config.json.new", "snapshot/state.json",
		"snapshot/x", "memory" };

	for (size_t i = 0; i < COUNT(names); i++)
		unlink(at(names[i]));
	rmdir(at("snapshot/d"));
	rmdir(at("snapshot"));
	rmdir(dir);
	assert_int_equal(rmdir(top), 0);
}

static void is(const char *name, uid_t uid, mode_t mode)
{
	struct stat st;

	assert_int_equal(lstat(at(name), &st), 0);
	if (st.st_uid != uid || (st.st_mode & 07777) != mode)
		fail_msg("%s is of %u, mode %o", name, st.st_uid, st.st_mode & 07777);
}

static void whose_it_is(void **state)
{
	char text[1024] = "";
	struct stat st;
	struct err e;
	int fd;

	(void)state;
	fresh();
	is(".", 23456, 0700);
	is("memory", 23456, 0600);
	is("snapshot", 23456, 0700);
	assert_int_equal(stat(at("memory"), &st), 0);
	assert_int_equal(st.st_size, 3 << 20);
	if (ch_golden_seal(dir, &e))
		fail_msg("%s", e.text);
	is(".", 0, 0555);
	is("memory", 0, 0444);
	is("snapshot", 0, 0555);
	is("snapshot/config.json", 0, 0444);
	is("snapshot/state.json", 0, 0444);
	fd = open(at("snapshot/config.json"), O_RDONLY | O_CLOEXEC);
	assert_true(fd >= 0 && read(fd, text, sizeof(text) - 1) > 0);
	close(fd);
	/* The zone is private, and nothing else is changed. */
	assert_non_null(strstr(text, "\"file\":\"/g/memory\",\"shared\":false,\"size\":1"));
	assert_non_null(strstr(text, "\"cpus\":{\"nested\":false}"));
	assert_non_null(strstr(text, "\"pvpanic\":true"));
	assert_null(strstr(text, "\"shared\":true"));
	gone();
}

static void spoil(int how)
{
	static char big[300 * 1024];
	char second[128];

	memset(big, ' ', sizeof(big) - 1);
	unlink(at("snapshot/config.json"));
	switch (how) {
	case 0: break;
	case 1: assert_int_equal(symlink("/etc/passwd", at("snapshot/config.json")), 0); break;
	case 2: assert_int_equal(mkfifo(at("snapshot/config.json"), 0666), 0); break;
	case 3: put("snapshot/config.json", big); break;
	case 4: put("snapshot/config.json", "{\"memory\":"); break;
	case 5: put("snapshot/config.json", ""); break;
	case 6:
		put("snapshot/config.json", CONFIG);
		assert_int_equal(symlink("/etc/passwd", at("snapshot/x")), 0);
		break;
	case 7:
		put("snapshot/config.json", CONFIG);
		assert_int_equal(mkdir(at("snapshot/d"), 0700), 0);
		break;
	case 8:
		put("snapshot/config.json", CONFIG);
		assert_true(text_fmt(second, sizeof(second), "%s/second", top));
		assert_int_equal(link(at("memory"), second), 0);
		break;
	default:
		put("snapshot/config.json", CONFIG);
		put("snapshot/config.json.new", "in the way");
		break;
	}
}

static void what_is_none(void **state)
{
	struct err e;

	(void)state;
	for (int how = 0; how < 10; how++) {
		fresh();
		spoil(how);
		if (ch_golden_seal(dir, &e) != -1)
			fail_msg("case %d was taken", how);
		assert_true(strlen(e.text) > 10);
		unlink(at("../second"));
		gone();
	}
	assert_int_equal(ch_golden_seal("/tmp/eph-golden-none", &e), -1);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(whose_it_is),
		cmocka_unit_test(what_is_none),
	};

	if (geteuid() != 0) {
		puts("root is needed: nothing was tested");
		return 0;
	}
	return cmocka_run_group_tests(tests, NULL, NULL);
}
