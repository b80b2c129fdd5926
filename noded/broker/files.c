/*
 * The run's files on their way from controld to the guest: asked for by hash in pieces, passed on as far as the guest takes them,
 * one piece in memory at a time, checked against hash and size. On the broker's thread.
 */
#include "broker_internal.h"

#include "common/text.h"
#include "common/wire.h"

static void files_go(struct broker *b);

static void fail(struct broker *b, const char *why)
{
	session_end(b, ERRCODE_INTERNAL, "File %u of the run could not be fetched: %s.", b->files.index + 1, why);
}

static void ask(struct broker *b)
{
	struct buf body = BUF_INIT(64);

	wire_put_raw(&body, b->a.files[b->files.index].sha256, SHA256_LEN);
	wire_put_u64(&body, b->files.offset);
	b->files.asked = true;
	broker_to_link(b, RF_BL_BLOB, body.data, body.len);
	buf_free(&body);
}

void files_ask_again(struct broker *b)
{
	if (b->files.asked)
		ask(b);
}

/* Sends what is in hand as far as credit goes. False when the channel does not take it. */
static bool pass_on(struct broker *b)
{
	struct files *f = &b->files;

	while (f->chunk_sent < f->chunk.len && f->credit > 0) {
		struct buf body = BUF_INIT(FILE_PIECE + 8);
		size_t n = f->chunk.len - f->chunk_sent;
		bool ok;

		if (n > FILE_PIECE)
			n = FILE_PIECE;
		if (n > f->credit)
			n = (size_t)f->credit;
		wire_put_u32(&body, f->index);
		wire_put_raw(&body, f->chunk.data + f->chunk_sent, n);
		ok = !body.failed && framed_send(b->channel, RF_CH_FILE, body.data, body.len);
		buf_free(&body);
		if (!ok)
			return false;
		f->chunk_sent += n;
		f->credit -= n;
	}
	return true;
}

static bool file_whole(struct broker *b)
{
	uint8_t hash[SHA256_LEN];

	crypto_hash_sha256_final(&b->files.hash, hash);
	if (memcmp(hash, b->a.files[b->files.index].sha256, sizeof(hash)) != 0) {
		fail(b, "its content does not have the hash that it was stored under");
		return false;
	}
	b->files.index++;
	b->files.offset = 0;
	crypto_hash_sha256_init(&b->files.hash);
	return true;
}

static void files_go(struct broker *b)
{
	struct files *f = &b->files;

	if (!pass_on(b)) {
		session_end(b, ERRCODE_CHANNEL_LOST, "The channel does not take frames.");
		return;
	}
	if (f->chunk_sent < f->chunk.len || f->asked || f->over)
		return;
	buf_free(&f->chunk);
	f->chunk_sent = 0;
	while (f->index < b->a.file_count && f->offset == b->a.files[f->index].size)
		if (!file_whole(b))
			return;
	if (f->index < b->a.file_count) {
		ask(b);
		return;
	}
	f->over = true;
	if (!framed_send(b->channel, RF_CH_FILES_END, NULL, 0))
		session_end(b, ERRCODE_CHANNEL_LOST, "The channel does not take frames.");
}

int files_start(struct broker *b, struct err *e)
{
	b->files.credit = GUEST_CREDIT;
	buf_init(&b->files.chunk, LINK_BLOB_MAX);
	crypto_hash_sha256_init(&b->files.hash);
	for (uint32_t i = 0; i < b->a.file_count; i++)
		if (!guest_path_ok(b->a.files[i].path) || b->a.files[i].size > GUEST_FILE_MAX)
			return err_set(e, ERR_INVALID, "file %u of the run has a path or size that is not allowed", i + 1);
	files_go(b);
	return 0;
}

void files_blob(struct broker *b, const uint8_t *body, size_t n)
{
	struct files *f = &b->files;
	struct wire_reader r;
	uint64_t total;
	const uint8_t *p;
	size_t len;

	if (b->state != RUN_SETUP || !f->asked)
		return; /* the answer to a question that an end has overtaken */
	f->asked = false;
	wire_read_init(&r, body, n);
	total = wire_u64(&r);
	p = wire_bytes(&r, LINK_BLOB_MAX, &len);
	if (r.failed || r.left != 0 || total == 0) {
		fail(b, total == 0 && !r.failed ? "controld does not have it" : "the answer is malformed");
	} else if (total != b->a.files[f->index].size || len == 0 || len > total - f->offset) {
		fail(b, "its size is not what the run was given");
	} else if (!buf_add(&f->chunk, p, len)) {
		fail(b, "no memory");
	} else {
		crypto_hash_sha256_update(&f->hash, p, len);
		f->offset += len;
		files_go(b);
	}
}

void files_credit(struct broker *b, uint32_t bytes)
{
	b->files.credit += bytes;
	if (b->files.credit > GUEST_FILES_MAX * (uint64_t)GUEST_FILE_MAX)
		b->files.credit = GUEST_FILES_MAX * (uint64_t)GUEST_FILE_MAX;
	files_go(b);
}

void files_free(struct broker *b)
{
	buf_free(&b->files.chunk);
}
