/* The jail's pure parts: where a process stands in the cgroup hierarchies, and the job description. */
/* link: noded_core */
#include "unit.h"

#include "common/text.h"
#include "jail/cgroup.h"
#include "jail/job.h"
#include "vmm/vmm.h"

static const char hybrid_self[] = "9:name=systemd:/\n8:pids:/a/b\n4:memory:/process/x:y\n1:cpu,cpuacct:/c\n0::/u\n";
static const char hybrid_mounts[] =
		"20 1 0:5 / /proc rw - proc proc rw\n"
		"30 29 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
		"31 29 0:31 /process /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
		"32 29 0:32 / /sys/fs/cgroup/with\\040space rw master:1 propagate_from:2 - cgroup cgroup rw,pids\n"
		"33 29 0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n";

static void cgroup_self(void **state)
{
	char out[CGROUP_PATH_MAX];

	(void)state;
	assert_true(cgroup_parse_self(hybrid_self, "memory", out, sizeof(out)));
	assert_string_equal(out, "/process/x:y");
	assert_true(cgroup_parse_self(hybrid_self, "cpu", out, sizeof(out)));
	assert_string_equal(out, "/c");
	assert_true(cgroup_parse_self(hybrid_self, "", out, sizeof(out)));
	assert_string_equal(out, "/u");
	assert_false(cgroup_parse_self(hybrid_self, "cpuset", out, sizeof(out)));
	assert_false(cgroup_parse_self(hybrid_self, "mem", out, sizeof(out)));
	assert_false(cgroup_parse_self("", "", out, sizeof(out)));
	assert_false(cgroup_parse_self("nonsense\n", "memory", out, sizeof(out)));
	assert_false(cgroup_parse_self(hybrid_self, "memory", out, 5));
}

static void cgroup_mounts(void **state)
{
	char point[CGROUP_PATH_MAX], root[CGROUP_PATH_MAX];

	(void)state;
	assert_true(cgroup_parse_mount(hybrid_mounts, "", point, root, sizeof(point)));
	assert_string_equal(point, "/sys/fs/cgroup/unified");
	assert_true(cgroup_parse_mount(hybrid_mounts, "cpu", point, root, sizeof(point)));
	assert_string_equal(point, "/sys/fs/cgroup/cpu,cpuacct");
	assert_true(cgroup_parse_mount(hybrid_mounts, "memory", point, root, sizeof(point)));
	assert_string_equal(root, "/process");
	assert_true(cgroup_parse_mount(hybrid_mounts, "pids", point, root, sizeof(point)));
	assert_string_equal(point, "/sys/fs/cgroup/with space");
	assert_false(cgroup_parse_mount(hybrid_mounts, "cpuset", point, root, sizeof(point)));
	assert_false(cgroup_parse_mount("1 2 3\n\n - cgroup2\n", "", point, root, sizeof(point)));
	/* A line that does not fit leaves both as the one before it said; what is no octal escape stays as it is. */
	assert_true(cgroup_parse_mount("1 2 0:3 /r /p rw - cgroup2 cgroup2 rw\n"
				       "1 2 0:3 /rrrrrrrrrrrrrrrr /q rw - cgroup2 cgroup2 rw\n",
			"", point, root, 8));
	assert_string_equal(point, "/p");
	assert_string_equal(root, "/r");
	assert_true(cgroup_parse_mount("1 2 0:3 / /\\0zz rw - cgroup2 cgroup2 rw\n", "", point, root, sizeof(point)));
	assert_string_equal(point, "/\\0zz");
}

static void cgroup_joined(void **state)
{
	char out[CGROUP_PATH_MAX];

	(void)state;
	assert_true(cgroup_join("/m", "/", "/a/b", out, sizeof(out)));
	assert_string_equal(out, "/m/a/b");
	assert_true(cgroup_join("/m", "/", "/", out, sizeof(out)));
	assert_string_equal(out, "/m");
	assert_true(cgroup_join("/m", "/a", "/a/b", out, sizeof(out)));
	assert_string_equal(out, "/m/b");
	assert_true(cgroup_join("/m", "/a", "/a", out, sizeof(out)));
	assert_string_equal(out, "/m");
	assert_true(cgroup_join("/m", "/a", "/ab", out, sizeof(out)));
	assert_string_equal(out, "/m");
	assert_true(cgroup_join("/m", "/", "/../..", out, sizeof(out)));
	assert_string_equal(out, "/m");
	assert_false(cgroup_join("/m", "/", "/a", out, 3));
}

static void fill(struct jail_job *j)
{
	*j = (struct jail_job){ .confined = true,
		.self = true,
		.uid = 200002,
		.gid = 200002,
		.nofile = 64,
		.stdio_fd = 5,
		.fd_count = 3,
		.landlock = JAIL_LANDLOCK | JAIL_LANDLOCK_NO_BIND };
	assert_true(text_copy(j->name, sizeof(j->name), "vmm"));
	assert_true(text_copy(j->root, sizeof(j->root), "/run/x"));
	assert_true(jail_job_bind(j, "/usr/lib", "/usr/lib", JAIL_BIND_OPTIONAL));
	assert_true(jail_job_link(j, "usr/lib", "/lib"));
	assert_true(jail_job_listen(j, 2, "/v/vsock_1024"));
	assert_true(jail_job_group(j, "/sys/fs/cgroup/memory/x/cgroup.procs"));
	assert_true(jail_job_arg(j, "/usr/bin/qemu"));
	assert_true(jail_job_arg(j, "-m"));
	assert_true(jail_job_env(j, "PATH=/"));
	j->filter = calloc(1, 16);
	j->filter_len = 16;
}

static void job_round_trip(void **state)
{
	struct buf b = BUF_INIT(JAIL_JOB_MAX);
	struct jail_job in, out;
	struct err e;

	(void)state;
	fill(&in);
	jail_job_encode(&in, &b);
	assert_int_equal(jail_job_decode(b.data, b.len, &out, &e), 0);
	assert_true(out.confined && out.self);
	assert_int_equal(out.uid, 200002);
	assert_int_equal(out.stdio_fd, 5);
	assert_int_equal(out.argc, 2);
	assert_string_equal(out.argv[1], "-m");
	assert_null(out.argv[2]);
	assert_string_equal(out.binds[0].source, "/usr/lib");
	assert_string_equal(out.links[0].path, "/lib");
	assert_int_equal(out.filter_len, 16);
	assert_int_equal(out.listen_count, 1);
	assert_int_equal(out.listens[0].fd, 2);
	assert_string_equal(out.listens[0].path, "/v/vsock_1024");
	jail_job_free(&out);
	for (size_t n = 0; n < b.len; n++)
		assert_int_equal(jail_job_decode(b.data, n, &out, &e), -1);
	jail_job_free(&in);
	buf_free(&b);
}

/* No job may run as root, or without a program. */
static void job_refuses(void **state)
{
	struct buf b = BUF_INIT(JAIL_JOB_MAX);
	struct jail_job in, out;
	struct err e;

	(void)state;
	fill(&in);
	in.uid = 0;
	jail_job_encode(&in, &b);
	assert_int_equal(jail_job_decode(b.data, b.len, &out, &e), -1);
	buf_reset(&b);
	in.uid = 5;
	in.gid = 0;
	jail_job_encode(&in, &b);
	assert_int_equal(jail_job_decode(b.data, b.len, &out, &e), -1);
	buf_reset(&b);
	in.gid = 5;
	in.fd_count = 2; /* and listens on the third */
	jail_job_encode(&in, &b);
	assert_int_equal(jail_job_decode(b.data, b.len, &out, &e), -1);
	jail_job_free(&in);
	buf_free(&b);
}

static void job_bounds(void **state)
{
	struct jail_job j = { .stdio_fd = -1 };

	(void)state;
	for (int i = 0; i < JAIL_ARGS_MAX; i++)
		assert_true(jail_job_arg(&j, "x"));
	assert_false(jail_job_arg(&j, "x"));
	for (int i = 0; i < JAIL_BINDS_MAX; i++)
		assert_true(jail_job_bind(&j, "/a", "/b", 0));
	assert_false(jail_job_bind(&j, "/a", "/b", 0));
	jail_job_free(&j);
}

static bool has_arg(const struct jail_job *j, const char *flag, const char *part)
{
	for (uint32_t i = 0; i + 1 < j->argc; i++)
		if (strcmp(j->argv[i], flag) == 0 && strstr(j->argv[i + 1], part) != NULL)
			return true;
	return false;
}

/* What must stand in every command line of a VMM. */
static void qemu_command(void **state)
{
	struct vmm_host host = { .binary = "/usr/bin/qemu-system-x86_64", .tsc_khz = 2600000 };
	struct vmm_params p = { .start = VMM_COLD, .memory_mib = 512, .vcpus = 2, .ram_fd = -1, .state_fd = -1 };
	struct jail_job j = { .confined = true, .stdio_fd = -1 };
	struct err e;

	(void)state;
	assert_int_equal(vmm_qemu.describe(&host, &p, &j, &e), 0);
	assert_true(has_arg(&j, "-sandbox", "spawn=deny"));
	assert_true(has_arg(&j, "-append", "tsc_early_khz=2600000"));
	assert_true(has_arg(&j, "-accel", "tcg"));
	assert_true(has_arg(&j, "-drive", "readonly=on"));
	for (uint32_t i = 0; i < j.argc; i++)
		assert_null(strstr(j.argv[i], "netdev"));
	assert_int_equal(j.group, 0);
	jail_job_free(&j);
	host.kvm = true;
	host.kvm_gid = 107;
	j.confined = true;
	assert_int_equal(vmm_qemu.describe(&host, &p, &j, &e), 0);
	assert_true(has_arg(&j, "-accel", "kvm"));
	assert_false(has_arg(&j, "-append", "tsc_early_khz"));
	assert_int_equal(j.group, 0); /* a node of its own, no group */
	jail_job_free(&j);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(cgroup_self),
		cmocka_unit_test(cgroup_mounts),
		cmocka_unit_test(cgroup_joined),
		cmocka_unit_test(job_round_trip),
		cmocka_unit_test(job_refuses),
		cmocka_unit_test(job_bounds),
		cmocka_unit_test(qemu_command),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
