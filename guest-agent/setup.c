/*
 * Setup of a run. Owns the request while it comes in. Called once by main, on the only thread, before any user process exists: so
 * nothing in the writable layer can be changed behind its back. Blocks in channel_wait only.
 *
 *   PROBE --probe/hello--> REQUEST --setup*, end 0: clock, entropy, folder--> FILES --file*, end 1: ack--> READY
 *
 * No random byte is drawn, and the boot id is not read, before the host's entropy is in: a machine that was cloned would draw the
 * same ones as its twin.
 */
#include "setup.h"

#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "confine.h"
#include "fsutil.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <linux/random.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#define WORKDIR_TRIES 100

enum setup_state { SETUP_PROBE, SETUP_REQUEST, SETUP_FILES, SETUP_READY };

struct intake {
	struct channel *ch;
	struct setup *out;
	enum setup_state state;
	struct buf message; /* the setup message as it comes in */
	int scratch;        /* the working directory */
	uint32_t file;      /* the one that is being written, from 0 */
	int file_fd;        /* -1: not open yet */
	uint64_t file_done; /* bytes of it */
	bool reseeded, clock_set;
};

/* --- probe ------------------------------------------------------------------------------------------------------------------- */

static int take_probe(struct intake *in, const struct guest_frame_view *f, struct err *e)
{
	struct guest_hello hello = { .protocol = GUEST_PROTOCOL };
	struct buf body = BUF_INIT(1024);
	struct utsname u;
	long kib = fs_meminfo_kib("MemTotal");

	if (f->n != GUEST_NONCE_LEN)
		return err_set(e, ERR_PROTOCOL, "probe of %zu bytes", f->n);
	memcpy(hello.nonce, f->body, GUEST_NONCE_LEN);
	if (uname(&u) < 0 || !text_copy(hello.kernel, sizeof hello.kernel, u.release) ||
			!text_copy(hello.agent, sizeof hello.agent, EPHEMERAL_VERSION))
		return err_set(e, ERR_INTERNAL, "kernel release or version does not fit");
	hello.memory_mib = kib > 0 ? (uint32_t)(kib / 1024) : 0;
	guest_hello_encode(&hello, &body);
	channel_put(in->ch, GF_HELLO, 0, body.data, body.len);
	buf_free(&body);
	in->state = SETUP_REQUEST;
	return 0;
}

/* --- clock and randomness ---------------------------------------------------------------------------------------------------- */

static bool set_clock(int64_t real_ns)
{
	struct timespec ts = { .tv_sec = real_ns / 1000000000, .tv_nsec = real_ns % 1000000000 };

	if (real_ns > 0 && clock_settime(CLOCK_REALTIME, &ts) == 0)
		return true;
	log_error("clock not set errno=%d", errno);
	return false;
}

/* Mixes the host's bytes in, counts them as `bits` of entropy, and makes the kernel's generator start anew from the pool. */
static bool reseed(uint8_t entropy[GUEST_ENTROPY_LEN], int bits)
{
	union {
		struct rand_pool_info info;
		uint8_t bytes[sizeof(struct rand_pool_info) + GUEST_ENTROPY_LEN];
	} pool;
	AUTO_FD int fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);
	bool ok;

	memset(&pool, 0, sizeof pool);
	pool.info.entropy_count = bits;
	pool.info.buf_size = GUEST_ENTROPY_LEN;
	memcpy(pool.bytes + sizeof pool.info, entropy, GUEST_ENTROPY_LEN);
	ok = fd >= 0 && ioctl(fd, RNDADDENTROPY, &pool) == 0 && ioctl(fd, RNDRESEEDCRNG) == 0;
	if (!ok)
		log_error("randomness not reseeded errno=%d", errno);
	explicit_bzero(&pool, sizeof pool);
	explicit_bzero(entropy, GUEST_ENTROPY_LEN);
	return ok;
}

/* --- the working directory --------------------------------------------------------------------------------------------------- */

static bool random_name(char out[7])
{
	static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
	uint8_t byte;

	for (size_t i = 0; i < 6;) {
		if (getrandom(&byte, 1, 0) != 1)
			return false;
		if (byte < 4 * 62) /* the largest multiple of 62: no letter is likelier than another */
			out[i++] = letters[byte % 62];
	}
	out[6] = '\0';
	return true;
}

static int make_workdir(struct intake *in, struct err *e)
{
	char name[7], parent[64];

	for (int i = 0; i < WORKDIR_TRIES; i++) {
		if (!random_name(name) || !text_fmt(parent, sizeof parent, "/tmp/ephemeral-run-%s", name))
			return err_set(e, ERR_INTERNAL, "no name for the working directory");
		if (mkdir(parent, 0755) == 0)
			break;
		if (errno != EEXIST || i == WORKDIR_TRIES - 1)
			return err_set_errno(e, "make %s", parent);
	}
	if (!text_fmt(in->out->workdir, sizeof in->out->workdir, "%s/scratch", parent))
		return err_set(e, ERR_INTERNAL, "name of the working directory");
	if (mkdir(in->out->workdir, 0755) < 0 || chown(in->out->workdir, WORKER_UID, WORKER_UID) < 0)
		return err_set_errno(e, "make %s", in->out->workdir);
	in->scratch = open(in->out->workdir, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (in->scratch < 0)
		return err_set_errno(e, "open %s", in->out->workdir);
	return 0;
}

/* --- files ------------------------------------------------------------------------------------------------------------------- */

static int open_beneath(int dir, const char *path, uint64_t flags, uint64_t mode)
{
	struct open_how how = { .flags = flags | O_CLOEXEC, .mode = mode, .resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS };

	return (int)syscall(SYS_openat2, dir, path, &how, sizeof how);
}

/* Makes the folders above a file, each owned by the worker. The path is one that guest_path_ok accepts. */
static int make_parents(int scratch, const char *path, struct err *e)
{
	char part[GUEST_PATH_MAX + 1];

	if (!text_copy(part, sizeof part, path))
		return err_set(e, ERR_LIMIT, "file path is too long");
	for (char *slash = strchr(part, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
		*slash = '\0';
		if (mkdirat(scratch, part, 0755) < 0 && errno != EEXIST)
			return err_set_errno(e, "make folder %s", part);
		AUTO_FD int fd = open_beneath(scratch, part, O_RDONLY | O_DIRECTORY, 0);
		if (fd < 0 || fchown(fd, WORKER_UID, WORKER_UID) < 0)
			return err_set_errno(e, "make folder %s", part);
		*slash = '/';
	}
	return 0;
}

static int open_file(struct intake *in, struct err *e)
{
	const char *path = in->out->request.files[in->file].path;

	if (make_parents(in->scratch, path, e) < 0)
		return -1;
	in->file_fd = open_beneath(in->scratch, path, O_WRONLY | O_CREAT | O_EXCL, 0644);
	if (in->file_fd < 0 || fchown(in->file_fd, WORKER_UID, WORKER_UID) < 0)
		return err_set_errno(e, "make file %s", path);
	in->file_done = 0;
	return 0;
}

/* Goes past every file that is whole, empty ones included. */
static int next_files(struct intake *in, struct err *e)
{
	const struct guest_setup *s = &in->out->request;

	while (in->file < s->file_count) {
		if (in->file_fd < 0 && open_file(in, e) < 0)
			return -1;
		if (in->file_done < s->files[in->file].size)
			return 0;
		close(in->file_fd);
		in->file_fd = -1;
		in->file++;
	}
	return 0;
}

static int take_file(struct intake *in, const struct guest_frame_view *f, struct err *e)
{
	const struct guest_setup *s = &in->out->request;
	struct wire_reader r;
	uint32_t index;

	wire_read_init(&r, f->body, f->n);
	index = wire_u32(&r);
	if (r.failed || index != in->file || in->file >= s->file_count)
		return err_set(e, ERR_PROTOCOL, "bytes of file %u came when file %u was expected", index, in->file);
	if (r.left > s->files[index].size - in->file_done)
		return err_set(e, ERR_PROTOCOL, "file %s has more bytes than announced", s->files[index].path);
	for (size_t done = 0; done < r.left;) {
		ssize_t n = write(in->file_fd, r.p + done, r.left - done);

		if (n <= 0)
			return err_set_errno(e, "write file %s", s->files[index].path);
		done += (size_t)n;
	}
	in->file_done += r.left;
	channel_consumed(in->ch, 0, f->n);
	return next_files(in, e);
}

/* --- rehearsal --------------------------------------------------------------------------------------------------------------- */

/*
 * Once before the request comes, everything that it will need of the kernel is done with nothing in it: an emulated machine that
 * was just cloned has none of that code translated, and a warm one has the time. What is drawn here is thrown away, no entropy is
 * counted, and the boot id stays unread.
 */
static void rehearse(void)
{
	static const char dir[] = "/tmp/.rehearsal", below[] = "/tmp/.rehearsal/scratch", file[] = "/tmp/.rehearsal/scratch/file";
	struct guest_setup_ack ack = { .workdir = "/tmp/rehearsal", .boot_id = "0" };
	struct buf body = BUF_INIT(1024);
	char uuid[64];
	struct timespec now;
	uint8_t zero[GUEST_ENTROPY_LEN] = { 0 }, byte;
	struct err e;

	if (clock_gettime(CLOCK_REALTIME, &now) == 0)
		(void)set_clock((int64_t)now.tv_sec * 1000000000 + now.tv_nsec);
	(void)reseed(zero, 0);
	(void)!getrandom(&byte, 1, GRND_NONBLOCK);
	(void)!fs_read(AT_FDCWD, "/proc/sys/kernel/random/uuid", uuid, sizeof uuid, &e);
	if (mkdir(dir, 0700) == 0 && mkdir(below, 0755) == 0 && chown(below, WORKER_UID, WORKER_UID) == 0) {
		AUTO_FD int fd = open(file, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);

		(void)!write(fd, "x", 1);
		unlink(file);
	}
	rmdir(below);
	rmdir(dir);
	guest_setup_ack_encode(&ack, &body);
	buf_free(&body);
}

/* --- order ------------------------------------------------------------------------------------------------------------------- */

static int end_request(struct intake *in, struct err *e)
{
	struct guest_setup *s = &in->out->request;

	if (guest_setup_decode(in->message.data, in->message.len, s, e) < 0)
		return -1;
	explicit_bzero(in->message.data, in->message.len);
	buf_free(&in->message);
	in->clock_set = set_clock(s->real_ns);
	in->reseeded = reseed(s->entropy, GUEST_ENTROPY_LEN * 8);
	if (make_workdir(in, e) < 0)
		return -1;
	in->state = SETUP_FILES;
	return next_files(in, e);
}

static int end_files(struct intake *in, struct err *e)
{
	struct guest_setup_ack ack = { .reseeded = in->reseeded, .clock_set = in->clock_set };
	struct buf body = BUF_INIT(1024);

	if (in->file < in->out->request.file_count)
		return err_set(e, ERR_PROTOCOL, "file %s is not whole", in->out->request.files[in->file].path);
	if (!text_copy(ack.workdir, sizeof ack.workdir, in->out->workdir))
		return err_set(e, ERR_INTERNAL, "name of the working directory");
	if (fs_read(AT_FDCWD, "/proc/sys/kernel/random/boot_id", ack.boot_id, sizeof ack.boot_id, e) < 0)
		return -1;
	guest_setup_ack_encode(&ack, &body);
	channel_put(in->ch, GF_SETUP_ACK, 0, body.data, body.len);
	buf_free(&body);
	in->state = SETUP_READY;
	return 0;
}

static int take_end(struct intake *in, const struct guest_frame_view *f, struct err *e)
{
	if (f->n == 1 && f->body[0] == 0 && in->state == SETUP_REQUEST)
		return end_request(in, e);
	if (f->n == 1 && f->body[0] == 1 && in->state == SETUP_FILES)
		return end_files(in, e);
	return err_set(e, ERR_PROTOCOL, "end of setup out of order");
}

static int on_frame(void *ctx, const struct guest_frame_view *f, struct err *e)
{
	struct intake *in = ctx;

	if (f->type == GF_PROBE && in->state == SETUP_PROBE)
		return take_probe(in, f, e);
	if (f->type == GF_SETUP && in->state == SETUP_REQUEST) {
		if (!buf_add(&in->message, f->body, f->n))
			return err_set(e, ERR_LIMIT, "setup is over %d bytes", GUEST_SETUP_MAX);
		return 0;
	}
	if (f->type == GF_SETUP_END)
		return take_end(in, f, e);
	if (f->type == GF_SETUP_FILE && in->state == SETUP_FILES)
		return take_file(in, f, e);
	return err_set(e, ERR_PROTOCOL, "frame of type %u is not expected in setup", f->type);
}

static int intake_until(struct channel *ch, struct setup *s, enum setup_state wanted, struct err *e)
{
	struct intake in = { .ch = ch, .out = s, .state = SETUP_PROBE, .scratch = -1, .file_fd = -1 };
	int rc = 0;

	*s = (struct setup){ .workdir = "" };
	buf_init(&in.message, GUEST_SETUP_MAX);
	channel_set_handler(ch, on_frame, &in);
	while (rc == 0 && in.state < wanted) {
		bool probed = in.state > SETUP_PROBE;

		rc = channel_wait(ch, -1, e);
		if (rc == 0 && !probed && in.state > SETUP_PROBE && wanted == SETUP_READY)
			rehearse(); /* the hello is on its way */
	}
	channel_set_handler(ch, NULL, NULL);
	fd_cleanup(&in.file_fd);
	fd_cleanup(&in.scratch);
	buf_free(&in.message);
	return rc;
}

int setup_receive(struct channel *ch, struct setup *s, struct err *e)
{
	return intake_until(ch, s, SETUP_READY, e);
}

int setup_answer_probe(struct channel *ch, struct err *e)
{
	struct setup unused;
	int rc = intake_until(ch, &unused, SETUP_REQUEST, e);

	setup_free(&unused);
	return rc;
}

void setup_free(struct setup *s)
{
	guest_setup_free(&s->request);
}
