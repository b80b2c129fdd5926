/*
 * What the command reads of a service and of its own file: events as lines, an answer's members as text, an events page cut into
 * the bytes of its events, a problem, the saved logins, a URL. First byte: which of them.
 *
 * Nothing that is shown may move the terminal: it is clean UTF-8, and escaping it once more changes nothing. The cut page has
 * exactly the elements that the parser sees.
 */
/* link: ephcli */
/* reads: cli/timeline.c cli/raw.c cli/saved.c cli/show.c */
/* reached: 90 % of lines, 76 % of branches; the rest is memory, a disk that fails, widths of a terminal */
#include "fuzz_dir.h"

#include "cli/api.h"
#include "cli/raw.h"
#include "cli/show.h"
#include "cli/timeline.h"
#include "common/text.h"

#include <fcntl.h>
#include <sys/stat.h>

static void harmless(const void *p, size_t n)
{
	struct buf again = BUF_INIT(64 << 20);

	must(text_utf8_clean(n ? p : "", n));
	must(text_safe(&again, n ? p : "", n, true));
	must(again.len == n && (n == 0 || memcmp(again.data, p, n) == 0));
	buf_free(&again);
}

static void event(const struct json *doc)
{
	struct buf parts = BUF_INIT(4096);

	for (unsigned form = 0; form < 4; form++) {
		const struct timeline t = { .width = form & 1 ? 40 : 112, .full = form & 2 };
		struct buf out = BUF_INIT(8 << 20);

		timeline_event(&t, doc, &out);
		harmless(out.data, out.len);
		must(out.len == 0 || out.data[out.len - 1] == '\n');
		buf_free(&out);
	}
	timeline_parts(json_get(doc, "data"), &parts);
	harmless(parts.data, parts.len);
	buf_free(&parts);
	must(timeline_t(doc) >= 0);
	(void)timeline_kind(doc);
	(void)timeline_doing(doc);
}

/* --- what is printed: standard output and error are memory meanwhile -------------------------------------------------------------
 */

static void printed(const struct json *doc, const uint8_t *p, size_t n)
{
	static const struct show_column columns[] = { { "A", "id", 10, SHOW_TEXT }, { "B", "cost_micros", 8, SHOW_COST },
		{ "C", "created_at", 19, SHOW_TIME }, { "D", "name", 12, SHOW_COUNT } };
	const struct api api = { .url = "http://127.0.0.1:8080", .source = API_KEY_SAVED };
	struct http_response r = { .status = 400, .retry_after_s = 3 };
	FILE *out = stdout, *err = stderr;
	char *text[2] = { NULL, NULL };
	size_t len[2] = { 0, 0 };

	stdout = open_memstream(&text[0], &len[0]);
	stderr = open_memstream(&text[1], &len[1]);
	if (doc) {
		show_table(json_get(doc, "data") ? json_get(doc, "data") : doc, columns, 4, true);
		show_money("Money", doc, "cost_micros");
		show_count("Count", doc, "t");
		show_field("Name", json_get_text(doc, "name"));
	}
	buf_init(&r.body, n + 1);
	must(buf_add(&r.body, p, n));
	must(api_problem(&api, &r) != 0);
	buf_free(&r.body);
	fclose(stdout);
	fclose(stderr);
	stdout = out;
	stderr = err;
	harmless(text[0], len[0]);
	harmless(text[1], len[1]);
	free(text[0]);
	free(text[1]);
}

/* --- the page
 * ---------------------------------------------------------------------------------------------------------------------- */

struct page {
	const struct json *array;
	size_t count;
};

static bool on_element(void *arg, const char *bytes, size_t n)
{
	struct page *page = arg;
	struct buf want = BUF_INIT(8 << 20), got = BUF_INIT(8 << 20);
	struct json *v;
	struct err e;

	must(page->array && page->count < json_len(page->array));
	must(json_parse(bytes, n, &v, &e) == 0);
	must(json_canonical(v, &got) && json_canonical(json_at(page->array, page->count), &want));
	must(got.len == want.len && memcmp(got.data, want.data, got.len) == 0);
	page->count++;
	json_free(v);
	buf_free(&want);
	buf_free(&got);
	return true;
}

static void page(const struct json *doc, const char *p, size_t n)
{
	struct page page = { .array = json_get(doc, "data") };

	if (raw_member_array(p, n, "data", on_element, &page))
		must(json_type(page.array) == JSON_ARRAY && page.count == json_len(page.array));
	else /* it reads keys as they are spelled */
		must(!page.array || json_type(page.array) != JSON_ARRAY || memchr(p, '\\', n));
}

/* --- the file of logins, a URL
 * ----------------------------------------------------------------------------------------------------- */

static void saved(const uint8_t *p, size_t n)
{
	static struct saved s, again;
	char path[4096];
	struct err e;
	int fd;

	if (fuzz_dir_made()) {
		must(setenv("XDG_CONFIG_HOME", fuzz_dir, 1) == 0 && text_fmt(path, sizeof(path), "%s/ephemeral", fuzz_dir) &&
				mkdir(path, 0700) == 0);
	}
	must(saved_path(path, sizeof(path), &e) == 0);
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	must(fd >= 0 && write(fd, p, n) == (ssize_t)n);
	close(fd);
	if (saved_load(&s, &e) == 0) {
		must(s.count <= SAVED_LOGINS_MAX);
		must(saved_store(&s, &e) == 0 && saved_load(&again, &e) == 0);
		must(again.count == s.count && strcmp(again.current, s.current) == 0);
		for (size_t i = 0; i < s.count; i++)
			must(strcmp(saved_key(&again, s.logins[i].url), s.logins[i].key) == 0);
	} else {
		harmless(e.text, strlen(e.text));
	}
	must(unlink(path) == 0);
}

static void url(const uint8_t *p, size_t n)
{
	char *text = strndup((const char *)p, n), out[SAVED_URL_MAX], twice[SAVED_URL_MAX];
	struct buf query = BUF_INIT(1 << 20);
	struct err e;

	must(text);
	if (saved_url(text, out, &e) == 0) {
		must(!strpbrk(out, "@?#\\ \"<>") && out[strlen(out) - 1] != '/');
		must(saved_url(out, twice, &e) == 0 && strcmp(out, twice) == 0);
	}
	api_query(&query, text);
	for (size_t i = 0; i < query.len; i++)
		must(strchr("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~%", query.data[i]));
	buf_free(&query);
	free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n)
{
	struct json *doc = NULL;
	struct err e;

	if (n < 1)
		return 0;
	switch (p[0] % 8) {
	case 6: saved(p + 1, n - 1); return 0;
	case 7: url(p + 1, n - 1); return 0;
	default: break;
	}
	if (json_parse((const char *)p + 1, n - 1, &doc, &e) != 0)
		doc = NULL;
	if (p[0] % 8 < 3 && doc)
		event(doc);
	else if (p[0] % 8 == 3 && doc)
		page(doc, (const char *)p + 1, n - 1);
	else if (p[0] % 8 > 3)
		printed(doc, p + 1, n - 1);
	json_free(doc);
	return 0;
}
