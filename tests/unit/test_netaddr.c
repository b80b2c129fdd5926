/* Which addresses may be dialled. */
#include "unit.h"

#include "netaddr.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/un.h>

static struct sockaddr_storage make(const char *text, uint16_t port)
{
	struct sockaddr_storage ss = { 0 };
	struct sockaddr_in *in = (struct sockaddr_in *)&ss;
	struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)&ss;

	if (inet_pton(AF_INET, text, &in->sin_addr) == 1) {
		in->sin_family = AF_INET;
		in->sin_port = htons(port);
	} else {
		assert_int_equal(inet_pton(AF_INET6, text, &in6->sin6_addr), 1);
		in6->sin6_family = AF_INET6;
		in6->sin6_port = htons(port);
	}
	return ss;
}

static void test_global(void **state)
{
	static const char *const no[] = {
		"0.0.0.0",
		"0.1.2.3",
		"10.0.0.1",
		"10.255.255.255",
		"100.64.0.0",
		"100.127.255.255",
		"100.100.100.200",
		"127.0.0.1",
		"127.255.255.255",
		"169.254.169.254",
		"172.16.0.1",
		"172.31.255.255",
		"192.0.0.1",
		"192.0.2.1",
		"192.88.99.1",
		"192.168.0.1",
		"198.18.0.1",
		"198.19.255.255",
		"198.51.100.1",
		"203.0.113.1",
		"224.0.0.1",
		"239.255.255.255",
		"240.0.0.1",
		"255.255.255.255",
		"::",
		"::1",
		"::ffff:127.0.0.1",
		"::ffff:10.0.0.1",
		"::ffff:169.254.169.254",
		"::127.0.0.1",
		"64:ff9b::8.8.8.8",
		"64:ff9b:1::1",
		"100::1",
		"2001::1",
		"2001:2::1",
		"2001:10::1",
		"2001:20::1",
		"2001:db8::1",
		"2002:7f00:1::",
		"2002:808:808::1",
		"3fff::1",
		"3fff:fff::1",
		"fc00::1",
		"fd00:ec2::254",
		"fe80::1",
		"fec0::1",
		"ff02::1",
		"4000::1",
	};
	static const char *const yes[] = { "1.1.1.1", "8.8.8.8", "100.63.255.255", "100.128.0.0", "172.15.255.255", "172.32.0.0",
		"192.0.1.1", "198.17.255.255", "198.20.0.0", "223.255.255.255", "::ffff:8.8.8.8", "2001:200::1",
		"2001:4860:4860::8888", "2606:4700::1111", "2a00:1450::1", "3ffe::1", "3fff:1000::1" };

	(void)state;
	for (size_t i = 0; i < COUNT(no); i++) {
		struct sockaddr_storage ss = make(no[i], 443);

		if (net_is_global((struct sockaddr *)&ss))
			fail_msg("%s counts as global", no[i]);
	}
	for (size_t i = 0; i < COUNT(yes); i++) {
		struct sockaddr_storage ss = make(yes[i], 443);

		if (!net_is_global((struct sockaddr *)&ss))
			fail_msg("%s does not count as global", yes[i]);
	}
}

static void test_text(void **state)
{
	struct sockaddr_storage four = make("1.2.3.4", 65535), six = make("fe80::1", 1);
	struct sockaddr_un un = { .sun_family = AF_UNIX };
	char out[64];

	(void)state;
	net_addr_text((struct sockaddr *)&four, out);
	assert_string_equal(out, "1.2.3.4:65535");
	net_addr_text((struct sockaddr *)&six, out);
	assert_string_equal(out, "[fe80::1]:1");
	assert_int_equal(net_addr_port((struct sockaddr *)&six), 1);
	net_addr_text((struct sockaddr *)&un, out);
	assert_string_equal(out, "family-1");
	assert_false(net_is_global((struct sockaddr *)&un));
	assert_int_equal(net_addr_port((struct sockaddr *)&un), 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = { cmocka_unit_test(test_global), cmocka_unit_test(test_text) };

	return cmocka_run_group_tests(tests, NULL, NULL);
}
