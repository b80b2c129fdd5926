/*
 * Fetches images and switches between them (images.h). A file is taken from an image that is here already where it has the same
 * hash (kernels rarely change, and a rollback fetches nothing), else piece by piece through link. Errors pause with a backoff and
 * go on where they were; a wrong hash or a full disk starts over. Keeper's loop; blocks for one piece.
 */
#include "keeper/images.h"

#include "keeper/host_internal.h"
#include "keeper/keeper_internal.h"

#include "common/clock.h"
#include "common/json.h"
#include "common/log.h"
#include "common/text.h"
#include "common/wire.h"
#include "keeper/files.h"
#include "keeper/image_store.h"

#include <errno.h>
#include <event2/event.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sodium.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAUSE_MIN_MS 1000
#define PAUSE_MAX_MS 60000
#define ASK_LIMIT_MS 30000 /* link answers, or gives up, long before */
#define TELL_EVERY (UINT64_C(16) << 20)

enum source { SOURCE_NONE, SOURCE_HERE, SOURCE_LINK };

struct images {
	struct keeper *k;
	bool remote; /* false: image_dir is set */
	char dir[600];
	char want[65]; /* "" = nothing was said */
	struct link_image_reply manifest;
	/* The fetch under way; want differs from what the host has. */
	bool fetching;
	int file;
	enum source source;
	int from, into;    /* descriptors; -1 = closed */
	uint64_t at, done; /* in this file, in all */
	bool asked;        /* link was, for the piece at `at` */
	int pause_ms;
	crypto_hash_sha256_state sha;
	struct event *timer; /* the next step, or the end of a pause, or of waiting for link */
	char state[17], note[257];
	uint64_t told; /* `done` when link was told last */
};

/* --- what is said ------------------------------------------------------------------------------------------------------------ */

static void tell(struct images *m)
{
	struct link_image said = { .current = "" };
	struct buf b = BUF_INIT(1024);

	if (!text_copy(said.current, sizeof(said.current), m->k->host.image_name) ||
			!text_copy(said.state, sizeof(said.state), m->state) || !text_copy(said.note, sizeof(said.note), m->note))
		return;
	link_image_encode(&said, &b);
	if (!b.failed)
		link_side_send(m->k, RF_LINK_IMAGE, b.data, b.len);
	buf_free(&b);
}

static void set_state(struct images *m, const char *state, const char *note)
{
	char text[sizeof(m->note)];

	if (!text_fmt(text, sizeof(text), "%.250s", note))
		text[0] = '\0';
	text[text_utf8_border(text, strlen(text))] = '\0';
	if (strcmp(m->state, state) == 0 && strcmp(m->note, text) == 0)
		return;
	if (!text_copy(m->state, sizeof(m->state), state) || !text_copy(m->note, sizeof(m->note), text))
		return;
	tell(m);
}

static uint64_t whole(const struct images *m)
{
	uint64_t n = 0;

	for (int i = 0; i < IMAGE_FILES; i++)
		n += m->manifest.size[i];
	return n;
}

static void say_progress(struct images *m)
{
	char note[64];

	m->told = m->done;
	if (text_fmt(note, sizeof(note), "%" PRIu64 " of %" PRIu64 " MiB", m->done >> 20, whole(m) >> 20))
		set_state(m, "fetching", note);
}

/* --- steps ------------------------------------------------------------------------------------------------------------------- */

static void next_in(struct images *m, int ms)
{
	const struct timeval tv = { .tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000 };

	event_add(m->timer, &tv);
}

static void close_both(struct images *m)
{
	if (m->from >= 0)
		close(m->from);
	if (m->into >= 0)
		close(m->into);
	m->from = m->into = -1;
	m->source = SOURCE_NONE;
}

static void stop_fetching(struct images *m)
{
	close_both(m);
	event_del(m->timer);
	m->fetching = m->asked = false;
	image_store_clear(m->dir);
}

/* Tried again after a pause. `over`: from the first byte. */
static void pause_for(struct images *m, const char *why, bool over)
{
	log_warn("image=%.12s not here yet reason=\"%s\" retry_ms=%d", m->want, why, m->pause_ms);
	set_state(m, "failed", why);
	if (over) {
		close_both(m);
		image_store_clear(m->dir);
		m->file = 0;
		m->done = 0;
	}
	m->asked = false;
	next_in(m, m->pause_ms);
	m->pause_ms = m->pause_ms * 2 < PAUSE_MAX_MS ? m->pause_ms * 2 : PAUSE_MAX_MS;
}

static void ask_link(struct images *m)
{
	struct link_image_blob ask = { .offset = m->at };
	struct buf b = BUF_INIT(64);

	memcpy(ask.sha256, m->manifest.sha256[m->file], SHA256_LEN);
	link_image_blob_encode(&ask, &b);
	m->asked = true;
	if (!b.failed)
		link_side_send(m->k, RF_LINK_IMAGE_ASK, b.data, b.len);
	buf_free(&b);
	next_in(m, ASK_LIMIT_MS);
}

static void switch_to_it(struct images *m)
{
	struct host *h = &m->k->host;
	struct err e;

	if (image_store_place(m->dir, m->want, m->manifest.sha256, &e) || host_switch_image(h, m->dir, m->want, &e)) {
		pause_for(m, e.text, true);
		return;
	}
	stop_fetching(m);
	m->pause_ms = PAUSE_MIN_MS;
	log_info("image=%.12s is what new VMs start from", h->image_name);
	image_store_prune(m->dir, h->image_name);
	m->state[0] = '\0'; /* another image: it is told although it is as ready as the one before */
	set_state(m, "ready", "");
	pool_image_changed(m->k);
	metrics_tell(m->k);
	keeper_changed(m->k);
}

static void file_done(struct images *m)
{
	uint8_t hash[SHA256_LEN];
	struct err e;
	bool here = m->source == SOURCE_HERE;

	crypto_hash_sha256_final(&m->sha, hash);
	if (memcmp(hash, m->manifest.sha256[m->file], SHA256_LEN) != 0) {
		if (here) { /* damaged here: from controld, then */
			m->done -= m->at;
			close_both(m);
			image_store_distrust(m->dir, m->want, m->file);
			next_in(m, 0);
			return;
		}
		pause_for(m, "a file came that is not what its SHA-256 says", true);
		return;
	}
	if (here ? image_store_link(m->dir, m->from, m->file, &e) : fchmod(m->into, 0444) != 0 && err_set_errno(&e, "chmod")) {
		pause_for(m, e.text, true);
		return;
	}
	close_both(m);
	m->file++;
	next_in(m, 0);
}

static void begin_file(struct images *m)
{
	struct err e;

	m->at = 0;
	crypto_hash_sha256_init(&m->sha);
	m->from = image_store_find(
			m->dir, m->k->host.image_name, m->want, m->manifest.sha256[m->file], m->manifest.size[m->file], m->file);
	if (m->from >= 0) {
		m->source = SOURCE_HERE;
		next_in(m, 0);
		return;
	}
	m->into = image_store_create(m->dir, m->file, m->manifest.size[m->file], &e);
	if (m->into < 0) {
		pause_for(m, e.text, true);
		return;
	}
	m->source = SOURCE_LINK;
	say_progress(m);
	ask_link(m);
}

/* A file that is here already is read through, one piece a turn. */
static void read_here(struct images *m)
{
	uint8_t piece[65536];
	ssize_t n = pread(m->from, piece, sizeof(piece), (off_t)m->at);

	if (n < 0) {
		pause_for(m, strerror(errno), true);
		return;
	}
	crypto_hash_sha256_update(&m->sha, piece, (size_t)n);
	m->at += (uint64_t)n;
	m->done += (uint64_t)n;
	if (n == 0 || m->at >= m->manifest.size[m->file])
		file_done(m);
	else
		next_in(m, 0);
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
	struct images *m = arg;

	(void)fd;
	(void)what;
	if (m->file == IMAGE_FILES)
		switch_to_it(m);
	else if (m->source == SOURCE_NONE)
		begin_file(m);
	else if (m->source == SOURCE_HERE)
		read_here(m);
	else if (m->asked)
		pause_for(m, "no answer of controld", false);
	else
		ask_link(m);
}

/* --- from link ---------------------------------------------------------------------------------------------------------------- */

static bool write_all(int fd, const uint8_t *p, size_t n, uint64_t at)
{
	while (n > 0) {
		ssize_t done = pwrite(fd, p, n, (off_t)at);

		if (done < 0 && errno == EINTR)
			continue;
		if (done <= 0)
			return false;
		p += done;
		n -= (size_t)done;
		at += (uint64_t)done;
	}
	return true;
}

int images_piece(struct images *m, const uint8_t *body, size_t n, struct err *e)
{
	struct wire_reader r;
	uint64_t offset, total, size, left;
	const uint8_t *bytes;
	size_t len;
	struct err full;

	wire_read_init(&r, body, n);
	offset = wire_u64(&r);
	total = wire_u64(&r);
	bytes = wire_bytes(&r, LINK_BLOB_MAX, &len);
	if (wire_end(&r, "piece of an image", e))
		return -1;
	if (!m->fetching || m->source != SOURCE_LINK || !m->asked || offset != m->at)
		return 0; /* of a fetch that was given up */
	size = m->manifest.size[m->file];
	left = size - m->at;
	if (total != size || len != (left < LINK_BLOB_MAX ? left : LINK_BLOB_MAX)) {
		pause_for(m,
				total == 0 ? "controld does not answer, or has not got this file"
					   : "controld has another file of this hash",
				false);
		return 0;
	}
	m->asked = false;
	if (!write_all(m->into, bytes, len, m->at)) {
		err_set_errno(&full, "write into %s", m->dir);
		pause_for(m, full.text, true);
		return 0;
	}
	crypto_hash_sha256_update(&m->sha, bytes, len);
	m->at += len;
	m->done += len;
	if (m->at == size) {
		file_done(m);
	} else {
		if (m->done - m->told >= TELL_EVERY)
			say_progress(m);
		ask_link(m);
	}
	return 0;
}

int images_wanted(struct images *m, const uint8_t *body, size_t n, struct err *e)
{
	struct link_image_reply reply;
	uint8_t hash[SHA256_LEN];
	char name[65];

	if (link_image_reply_decode(body, n, &reply, e))
		return -1;
	if (!m->remote || !reply.wanted)
		return 0;
	link_image_hash((const uint8_t(*)[SHA256_LEN])reply.sha256, hash);
	if (!identity_image_signed(m->k->identity, hash, reply.signature))
		return err_set(e, ERR_DENIED, "an image that the deployment's root key did not sign for this node");
	text_hex(hash, sizeof(hash), name);
	if (strcmp(name, m->want) == 0 && m->fetching)
		return 0;
	if (strcmp(name, m->k->host.image_name) == 0) {
		if (m->fetching)
			stop_fetching(m); /* another one was wanted meanwhile */
		set_state(m, "ready", "");
		return 0;
	}
	stop_fetching(m);
	memcpy(m->want, name, sizeof(m->want));
	m->manifest = reply;
	m->fetching = true;
	m->file = 0;
	m->done = m->told = 0;
	m->pause_ms = PAUSE_MIN_MS;
	log_info("image=%.12s is wanted, mib=%" PRIu64, m->want, whole(m) >> 20);
	next_in(m, 0);
	return 0;
}

void images_new_link(struct images *m)
{
	if (!m)
		return;
	tell(m);
	if (m->fetching && m->asked)
		ask_link(m);
}

/* --- use ---------------------------------------------------------------------------------------------------------------------- */

bool images_usable(struct images *m, struct err *e)
{
	struct host *h = &m->k->host;
	char note[257];
	const bool had = h->image_name[0] != '\0';

	if (had && host_image_unchanged(h, e) == 0)
		return true;
	if (!had) {
		err_set(e, ERR_NOT_FOUND, "this host has no guest image yet: %s",
				m->remote ? m->note[0] ? m->note : "none is in use for it (ephemeral admin image use)" : m->note);
		return false;
	}
	log_error("the guest image is damaged: no VM starts from it error=\"%s\"", e->text);
	if (m->remote) {
		image_store_distrust(m->dir, h->image_name, -1);
		host_drop_image(h); /* link's next question brings it again */
		pool_image_changed(m->k);
		set_state(m, "none", e->text);
	} else {
		host_drop_image(h);
		pool_image_changed(m->k);
		if (!text_fmt(note, sizeof(note), "%.200s; mend it and restart noded", e->text))
			note[0] = '\0';
		set_state(m, "failed", note);
	}
	keeper_changed(m->k);
	return false;
}

int images_open(struct keeper *k, struct images **out, struct err *e)
{
	struct images *m = calloc(1, sizeof(*m));

	if (!m)
		return err_set(e, ERR_NOMEM, "no memory");
	*out = m;
	m->k = k;
	m->from = m->into = -1;
	m->remote = !k->config->image_dir || !*k->config->image_dir;
	m->pause_ms = PAUSE_MIN_MS;
	m->timer = event_new(k->base, -1, 0, on_timer, m);
	if (!m->timer)
		return err_set(e, ERR_NOMEM, "no memory");
	if (!text_copy(m->state, sizeof(m->state),
			    !m->remote              ? "local"
			    : k->host.image_name[0] ? "ready"
						    : "none") ||
			!text_copy(m->note, sizeof(m->note), k->host.image_note))
		return err_set(e, ERR_LIMIT, "the image's state is too long");
	if (!m->remote)
		return 0;
	if (!text_fmt(m->dir, sizeof(m->dir), "%s/images", k->config->state_dir))
		return err_set(e, ERR_LIMIT, "state_dir is too long");
	if (files_mkdir(m->dir, 0755, e))
		return -1;
	image_store_clear(m->dir);
	if (k->host.image_name[0])
		image_store_prune(m->dir, k->host.image_name);
	else
		log_warn("no guest image here: no run is taken until controld has given one reason=\"%s\"", k->host.image_note);
	return 0;
}

void images_free(struct images *m)
{
	if (!m)
		return;
	close_both(m);
	if (m->timer)
		event_free(m->timer);
	free(m);
}
