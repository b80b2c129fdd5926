/* Configuration files: every complaint names file, line, key and remedy. */
#include "unit.h"

#include "config.h"

#include <unistd.h>

struct config {
	char *listen, *secret, *list, *optional;
	int64_t count, mode;
	bool on;
};

static const struct config_key keys[] = {
	{ .name = "listen",
			.type = CONFIG_STRING,
			.offset = offsetof(struct config, listen),
			.fallback = "127.0.0.1:8080",
			.max = 20,
			.help = "address" },
	{ .name = "secret",
			.type = CONFIG_STRING,
			.offset = offsetof(struct config, secret),
			.secret = true,
			.min = 3,
			.help = "a secret" },
	{ .name = "names",
			.type = CONFIG_LIST,
			.offset = offsetof(struct config, list),
			.fallback = "",
			.reloadable = true,
			.help = "names" },
	{ .name = "note", .type = CONFIG_STRING, .offset = offsetof(struct config, optional), .optional = true, .help = "a note" },
	{ .name = "max_runs",
			.type = CONFIG_INT,
			.offset = offsetof(struct config, count),
			.fallback = "5",
			.min = 1,
			.max = 100,
			.help = "runs" },
	{ .name = "mode",
			.type = CONFIG_ENUM,
			.offset = offsetof(struct config, mode),
			.fallback = "auto",
			.choices = "auto|kvm|emulated",
			.help = "mode" },
	{ .name = "verbose", .type = CONFIG_BOOL, .offset = offsetof(struct config, on), .fallback = "off", .help = "talk" },
};

/* Loads `text` as a file; the path is cut out of the message. */
static int load(const char *text, size_t n, const char *override, struct config *c, struct err *e)
{
	char path[] = "/tmp/eph-config-XXXXXX";
	int fd = mkstemp(path), rc;

	assert_true(fd >= 0);
	assert_int_equal(write(fd, text, n), (ssize_t)n);
	close(fd);
	memset(c, 0, sizeof(*c));
	rc = config_load(keys, COUNT(keys), c, path, &override, override ? 1 : 0, e);
	unlink(path);
	return rc;
}

static void test_refused(void **state)
{
	static const struct {
		const char *text, *override;
		const char *says;
	} cases[] = {
		{ "secret = abc\nlisten\n", NULL, ":2: \"listen\" is not `key = value`" },
		{ "secret = abc\nmaxruns = 5\n", NULL, ":2: unknown key \"maxruns\"; did you mean \"max_runs\"?" },
		{ "secret = abc\nzzzzzzzz = 5\n", NULL, "`help config` lists all keys" },
		{ "secret = abc\n\n# c\nmax_runs = 101\n", NULL, ":4: max_runs: must be a whole number from 1 to 100" },
		{ "secret = abc\nmax_runs = 1x\n", NULL, "from 1 to 100" },
		{ "secret = abc\nmax_runs =\n", NULL, "from 1 to 100" },
		{ "secret = abc\nmode = KVM\n", NULL, "mode must be one of auto|kvm|emulated" },
		{ "secret = abc\nmode = auto|kvm\n", NULL, "one of" },
		{ "secret = abc\nverbose = maybe\n", NULL, "verbose must be on or off" },
		{ "secret = abc\nlisten = 123456789012345678901\n", NULL, "at most 20" },
		{ "secret = ab\n", NULL, "at least 3" },
		{ "secret = abc\nmode = kvm\nmode = auto\n", NULL, ":3: mode stands in line 2 already" },
		{ "listen = x\n", NULL, "secret is missing and has no default" },
		{ "secret = abc\n = 5\n", NULL, "unknown key \"\"" },
		{ "secret = \xff\n", NULL, "UTF-8" },
		{ "secret = abc\n", "max_runs", "command line: \"max_runs\" is not" },
		{ "secret = abc\n", "max_run=3", "did you mean" },
		{ "secret = abc\n", "max_runs=0", "command line: max_runs" },
	};

	(void)state;
	for (size_t i = 0; i < COUNT(cases); i++) {
		struct config c;
		struct err e;

		if (load(cases[i].text, strlen(cases[i].text), cases[i].override, &c, &e) == 0)
			fail_msg("case %zu was taken", i);
		if (!strstr(e.text, cases[i].says))
			fail_msg("case %zu: no \"%s\" in: %s", i, cases[i].says, e.text);
		config_free(keys, COUNT(keys), &c);
	}
}

static void test_files(void **state)
{
	static char big[300 * 1024];
	struct config c = { 0 };
	struct err e;

	(void)state;
	assert_int_equal(config_load(keys, COUNT(keys), &c, "/nonexistent/config", NULL, 0, &e), -1);
	assert_non_null(strstr(e.text, "/nonexistent/config: No such file"));
	config_free(keys, COUNT(keys), &c);
	memset(big, '#', sizeof(big));
	assert_int_equal(load(big, sizeof(big), NULL, &c, &e), -1);
	assert_int_equal(e.code, ERR_LIMIT);
	config_free(keys, COUNT(keys), &c);
	assert_int_equal(load("secret = a\0bc\n", 14, NULL, &c, &e), -1);
	assert_non_null(strstr(e.text, "NUL"));
	config_free(keys, COUNT(keys), &c);
}

static void test_good(void **state)
{
	static const char text[] = "# comment\n\tsecret=s = 1 # no comment here\r\n\n names =  a, b \nmax_runs = 7\nmode = "
				   "emulated\nverbose = yes";
	struct config c;
	struct err e;

	(void)state;
	assert_ok(load(text, sizeof(text) - 1, "max_runs = 9", &c, &e));
	assert_string_equal(c.secret, "s = 1 # no comment here");
	assert_string_equal(c.list, "a, b");
	assert_string_equal(c.listen, "127.0.0.1:8080");
	assert_null(c.optional);
	assert_int_equal(c.count, 9);
	assert_int_equal(c.mode, 2);
	assert_true(c.on);
	config_free(keys, COUNT(keys), &c);
	assert_null(c.secret);
}

static void test_help(void **state)
{
	struct buf b = BUF_INIT(10000);

	(void)state;
	config_help(keys, COUNT(keys), &b);
	assert_non_null(strstr(buf_cstr(&b), "max_runs\n    runs\n    number from 1 to 100; default: 5; needs a restart"));
	assert_non_null(strstr(buf_cstr(&b), "; required"));
	assert_non_null(strstr(buf_cstr(&b), "list, comma separated; default: (empty); read again at a reload"));
	buf_free(&b);
}

static void test_addr(void **state)
{
	static const char *const bad[] = { "", "localhost", "::1:80", "[::1]", "[::1]80", "a:65536", "a:-1", "a:", "[a:80", "a]:80",
		"a b:80", "http://a:80" };
	char host[64];
	uint16_t port;
	struct err e;

	(void)state;
	for (size_t i = 0; i < COUNT(bad); i++) {
		if (config_addr(bad[i], host, sizeof(host), &port, &e) == 0)
			fail_msg("%s was taken", bad[i]);
	}
	assert_ok(config_addr("[::1]:8080", host, sizeof(host), &port, &e));
	assert_string_equal(host, "::1");
	assert_int_equal(port, 8080);
	assert_ok(config_addr(":0", host, sizeof(host), &port, &e));
	assert_string_equal(host, "");
	assert_ok(config_addr("a.example:65535", host, sizeof(host), &port, &e));
	assert_int_equal(port, 65535);
	assert_int_equal(config_addr("a.example:1", host, 4, &port, &e), -1);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_refused), cmocka_unit_test(test_files),
		cmocka_unit_test(test_good), cmocka_unit_test(test_help), cmocka_unit_test(test_addr) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
