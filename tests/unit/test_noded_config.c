/* noded's configuration: what is wrong is said at the start, by the key's name, and not found out by a role later. */
/* link: noded_core */
#include "unit.h"

#include "noded/config.h"

static int load(const char *setting, struct err *e)
{
	const char *overrides[] = { "image_dir=/nowhere", setting };
	struct noded_config c;
	int rc = noded_config_load(NULL, overrides, 2, &c, e);

	if (rc == 0)
		noded_config_free(&c);
	return rc;
}

static void controld_addresses(void **state)
{
	static const char *const good[] = { "controld=tls+tcp://10.0.0.1:7443",
		"controld=tls+tcp://[::1]:7443, tls+tcp://control.example:1" };
	static const char *const bad[] = { "controld=127.0.0.1:7443", "controld=tcp://127.0.0.1:7443",
		"controld=tls+tcp://127.0.0.1", "controld=tls+tcp://127.0.0.1:0", "controld=tls+tcp://127.0.0.1:65536",
		"controld=tls+tcp://:7443", "controld=tls+tcp://a:1,b:2" };
	struct err e;

	(void)state;
	for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
		assert_int_equal(load(good[i], &e), 0);
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		assert_int_equal(load(bad[i], &e), -1);
		assert_non_null(strstr(e.text, "controld"));
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(controld_addresses) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
