/*
 * JSON text into an immutable tree. yajl reads the tokens; depth, duplicate keys, sizes and strings are checked here. Values are
 * collected on one growing stack and moved into the document's arena when their container closes, so that a document is a few
 * large blocks and freeing it never recurses. Called on any thread with bounded bytes; takes time in proportion to them.
 */
#include "json_internal.h"

#include "text.h"

#include <stdlib.h>
#include <string.h>
#include <yajl/yajl_parse.h>

#define JSON_BYTES_MAX (256u * 1024 * 1024)
#define JSON_VALUES_MAX 1000000u /* 32 bytes each: what a body of "1,1,1,..." may cost us */
#define JSON_NUMBER_MAX 256      /* characters */
#define CHUNK_BYTES (16 * 1024)

struct chunk {
	struct chunk *next;
	size_t used, size;
	_Alignas(struct json) char bytes[];
};

/* json_parse hands out &root, so root stands first. */
struct document {
	struct json root;
	struct chunk *chunks;
};

/* An open array or object. */
struct frame {
	uint32_t start; /* where its entries begin on the stack */
	bool is_object;
	const char *key; /* the member being read; NULL before the first */
};

struct parser {
	struct document *doc;
	struct json *stack;
	uint32_t count, cap;
	uint32_t total; /* values of the whole document */
	struct frame frames[JSON_DEPTH_MAX];
	uint32_t depth;
	bool failed;
	struct err *e;
};

static void *arena(struct document *doc, size_t n, bool aligned)
{
	struct chunk *c = doc->chunks;
	size_t at = c ? c->used : 0;

	if (aligned)
		at = (at + _Alignof(struct json) - 1) & ~(_Alignof(struct json) - 1);
	if (!c || at > c->size || n > c->size - at) {
		size_t size = n > CHUNK_BYTES ? n : CHUNK_BYTES;

		c = malloc(sizeof(*c) + size);
		if (!c)
			return NULL;
		c->size = size;
		c->next = doc->chunks;
		doc->chunks = c;
		at = 0;
	}
	c->used = at + n;
	return c->bytes + at;
}

static const char *keep(struct parser *p, const unsigned char *s, size_t n)
{
	char *copy = arena(p->doc, n + 1, false);

	if (!copy) {
		p->failed = true;
		err_set(p->e, ERR_NOMEM, "no memory for JSON of this size");
		return NULL;
	}
	if (n > 0)
		memcpy(copy, s, n);
	copy[n] = '\0';
	return copy;
}

static void put_pointer_key(struct buf *b, const char *key)
{
	struct buf safe = BUF_INIT(256);

	text_safe(&safe, key, strlen(key) < 60 ? strlen(key) : 60, false);
	for (size_t i = 0; i < safe.len; i++) {
		if (safe.data[i] == '~')
			buf_add_str(b, "~0");
		else if (safe.data[i] == '/')
			buf_add_str(b, "~1");
		else
			buf_add_char(b, (char)safe.data[i]);
	}
	buf_free(&safe);
}

/* JSON pointer of where the parser stands, for messages; cut when it is long. */
static void pointer(const struct parser *p, char out[256])
{
	struct buf b = BUF_INIT(255);
	size_t shown;

	for (uint32_t i = 0; i < p->depth && !b.failed; i++) {
		const struct frame *f = &p->frames[i];
		uint32_t end = i + 1 < p->depth ? p->frames[i + 1].start : p->count;

		if (f->is_object && !f->key)
			break;
		buf_add_char(&b, '/');
		if (f->is_object)
			put_pointer_key(&b, f->key);
		else
			buf_printf(&b, "%u", (unsigned)(end - f->start));
	}
	/* put_pointer_key adds byte by byte, so that the bound may have cut a character. */
	shown = b.len > 0 ? text_utf8_border((const char *)b.data, b.len > 240 ? 240 : b.len) : 0;
	if (!text_fmt(out, 256, "\"%.*s%s\"", (int)shown, b.data ? (const char *)b.data : "", b.failed ? "..." : ""))
		out[0] = '\0';
	buf_free(&b);
}

static int fail(struct parser *p, enum err_code code, const char *what)
{
	char at[256];

	if (p->failed)
		return 0;
	pointer(p, at);
	err_set(p->e, code, "%s: %s", at, what);
	p->failed = true;
	return 0;
}

/* Puts a finished value on the stack (or makes it the root). Returns yajl's "go on". */
static int push(struct parser *p, struct json v)
{
	if (++p->total > JSON_VALUES_MAX)
		return fail(p, ERR_LIMIT, "more than 1000000 values in one document");
	if (p->depth > 0 && p->frames[p->depth - 1].is_object)
		v.key = p->frames[p->depth - 1].key;
	if (p->count == p->cap) {
		uint32_t cap = p->cap ? p->cap * 2 : 32;
		struct json *grown = realloc(p->stack, cap * sizeof(*grown));

		if (!grown)
			return fail(p, ERR_NOMEM, "no memory for JSON of this size");
		p->stack = grown;
		p->cap = cap;
	}
	p->stack[p->count++] = v;
	return 1;
}

static int on_null(void *arg)
{
	return push(arg, (struct json){ .type = JSON_NULL });
}

static int on_bool(void *arg, int v)
{
	return push(arg, (struct json){ .type = JSON_BOOL, .boolean = v != 0 });
}

static int on_number(void *arg, const char *s, size_t n)
{
	struct parser *p = arg;
	struct json v = { .type = JSON_DECIMAL, .len = (uint32_t)n };
	struct err ignored;

	if (n > JSON_NUMBER_MAX)
		return fail(p, ERR_LIMIT, "a number of more than 256 characters");
	v.text = keep(p, (const unsigned char *)s, n);
	if (!v.text)
		return 0;
	if (text_i64(v.text, INT64_MIN, INT64_MAX, &v.integer, &ignored) == 0)
		v.type = JSON_INT;
	return push(p, v);
}

static int on_string(void *arg, const unsigned char *s, size_t n)
{
	struct parser *p = arg;
	struct json v = { .type = JSON_STRING, .len = (uint32_t)n, .text = keep(p, s, n) };

	return v.text ? push(p, v) : 0;
}

static int open_frame(struct parser *p, bool is_object)
{
	if (p->depth == JSON_DEPTH_MAX)
		return fail(p, ERR_LIMIT, "nested deeper than 64 levels");
	p->frames[p->depth++] = (struct frame){ .start = p->count, .is_object = is_object };
	return 1;
}

static int on_object(void *arg)
{
	return open_frame(arg, true);
}

static int on_array(void *arg)
{
	return open_frame(arg, false);
}

static int on_key(void *arg, const unsigned char *s, size_t n)
{
	struct parser *p = arg;
	const char *key = keep(p, s, n);

	p->frames[p->depth - 1].key = key;
	return key != NULL;
}

/* A key that stands twice, or NULL. Few keys are compared directly; many are sorted, so that a hostile object costs n log n. */
static const char *duplicate(const struct json *v, bool *no_memory)
{
	uint32_t *order;
	const char *found = NULL;

	*no_memory = false;
	if (v->len <= 12) {
		for (uint32_t i = 1; i < v->len; i++) {
			for (uint32_t j = 0; j < i; j++) {
				if (strcmp(v->items[i].key, v->items[j].key) == 0)
					return v->items[i].key;
			}
		}
		return NULL;
	}
	order = json_sorted(v);
	if (!order) {
		*no_memory = true;
		return NULL;
	}
	for (uint32_t i = 1; i < v->len && !found; i++) {
		if (strcmp(v->items[order[i - 1]].key, v->items[order[i]].key) == 0)
			found = v->items[order[i]].key;
	}
	free(order);
	return found;
}

static int on_close(void *arg)
{
	struct parser *p = arg;
	struct frame *f = &p->frames[p->depth - 1];
	uint32_t n = p->count - f->start;
	struct json v = { .type = f->is_object ? JSON_OBJECT : JSON_ARRAY, .len = n };
	bool no_memory = false;

	if (n > 0) {
		struct json *items = arena(p->doc, n * sizeof(*items), true);

		if (!items)
			return fail(p, ERR_NOMEM, "no memory for JSON of this size");
		memcpy(items, p->stack + f->start, n * sizeof(*items));
		v.items = items;
	}
	if (f->is_object) {
		const char *twice = duplicate(&v, &no_memory);

		if (no_memory)
			return fail(p, ERR_NOMEM, "no memory for JSON of this size");
		if (twice) {
			f->key = twice;
			return fail(p, ERR_INVALID, "this key stands twice in its object; remove one of them");
		}
	}
	p->count = f->start;
	p->depth--;
	return push(p, v);
}

static const yajl_callbacks callbacks = {
	.yajl_null = on_null,
	.yajl_boolean = on_bool,
	.yajl_number = on_number,
	.yajl_string = on_string,
	.yajl_start_map = on_object,
	.yajl_map_key = on_key,
	.yajl_end_map = on_close,
	.yajl_start_array = on_array,
	.yajl_end_array = on_close,
};

/* `at` is how far yajl came. */
static int syntax_error(struct parser *p, yajl_handle h, const char *s, size_t n, size_t at)
{
	unsigned char *said = yajl_get_error(h, 0, (const unsigned char *)s, n);
	const char *text = said ? (const char *)said : "not JSON";
	char where[256];

	pointer(p, where);
	err_set(p->e, ERR_INVALID, "not valid JSON near byte %zu, in %s: %.*s", at < n ? at : n, where, (int)strcspn(text, "\n"),
			text);
	if (said)
		yajl_free_error(h, said);
	return -1;
}

static int run(struct parser *p, const char *s, size_t n)
{
	yajl_handle h = yajl_alloc(&callbacks, NULL, p);
	yajl_status status;
	size_t at = n;
	int rc = 0;

	if (!h)
		return err_set(p->e, ERR_NOMEM, "no memory for JSON of this size");
	status = yajl_parse(h, (const unsigned char *)s, n);
	if (status == yajl_status_ok)
		status = yajl_complete_parse(h); /* fails at the end of the text, whatever it counts then */
	else
		at = yajl_get_bytes_consumed(h);
	if (p->failed)
		rc = -1;
	else if (status != yajl_status_ok)
		rc = syntax_error(p, h, s, n, at);
	else if (p->count != 1 || p->depth != 0)
		rc = err_set(p->e, ERR_INVALID, "not valid JSON: there is no value");
	yajl_free(h);
	return rc;
}

int json_parse(const char *s, size_t n, struct json **out, struct err *e)
{
	struct parser p = { .e = e };
	int rc;

	*out = NULL;
	if (n > JSON_BYTES_MAX)
		return err_set(e, ERR_LIMIT, "JSON of more than %u bytes", JSON_BYTES_MAX);
	if (json_scan(s, n, e) != 0)
		return -1;
	p.doc = calloc(1, sizeof(*p.doc));
	if (!p.doc)
		return err_set(e, ERR_NOMEM, "no memory for JSON of this size");
	rc = run(&p, s, n);
	if (rc == 0) {
		p.doc->root = p.stack[0];
		*out = &p.doc->root;
	} else {
		json_free(&p.doc->root);
	}
	free(p.stack);
	return rc;
}

void json_free(struct json *root)
{
	struct document *doc = (struct document *)(void *)root;
	struct chunk *c, *next;

	if (!doc)
		return;
	for (c = doc->chunks; c; c = next) {
		next = c->next;
		free(c);
	}
	free(doc);
}
