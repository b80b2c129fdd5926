/* One exchange of an operator's verb. Called by cmd_admin.c, cmd_member.c and cmd_catalog.c; blocks; keeps nothing. */
#include "admin.h"

#include "api.h"
#include "cli.h"
#include "common/text.h"
#include "term.h"

#define BODY_MAX ((size_t)64 * 1024)

void admin_begin(struct admin_body *o)
{
	buf_init(&o->b, BODY_MAX);
	jw_init(&o->w, &o->b);
	jw_object(&o->w);
}

int admin_use(const struct err *e)
{
	term_complain("%s", e->text);
	return CLI_USE;
}

int admin_ask(const struct args *a, const char *method, const char *path, struct admin_body *o, const char *key,
		void (*show)(const struct json *))
{
	struct api api;
	struct api_call call = { .method = method, .path = path, .idempotency_key = key };
	struct answer answer = { .json = NULL };
	int rc = api_open_operator(&api, a);

	if (rc == CLI_OK && o != NULL) {
		jw_close(&o->w);
		if (!jw_end(&o->w)) {
			term_complain("a value is too long, or no valid UTF-8");
			rc = CLI_USE;
		}
		call.body = &o->b;
	}
	if (rc == CLI_OK) {
		rc = api_ask(&api, &call, &answer);
		if (rc == CLI_OK && api.json)
			(void)api_print_json(&answer);
		else if (rc == CLI_OK && show != NULL)
			show(answer.json);
		answer_free(&answer);
	}
	if (o != NULL)
		buf_free(&o->b);
	api_close(&api);
	return rc;
}

bool admin_path(char out[ADMIN_PATH_MAX], const char *prefix, const char *word, const char *suffix)
{
	struct buf b = BUF_INIT(ADMIN_PATH_MAX - 1);
	bool ok;

	buf_add_str(&b, prefix);
	while (*word != '\0') {
		char piece[256];
		size_t n = strcspn(word, "/");

		if (!text_fmt(piece, sizeof piece, "%.*s", (int)n, word)) {
			buf_free(&b);
			return false;
		}
		api_query(&b, piece);
		word += n;
		if (*word == '/') {
			buf_add_char(&b, '/');
			word++;
		}
	}
	buf_add_str(&b, suffix);
	ok = !b.failed && buf_cstr(&b) != NULL && text_copy(out, ADMIN_PATH_MAX, buf_cstr(&b));
	buf_free(&b);
	return ok;
}

int admin_bad_word(const char *what)
{
	term_complain("that is too long to be %s", what);
	return CLI_USE;
}

bool admin_no_slash(const char *id)
{
	return id[0] != '\0' && strchr(id, '/') == NULL;
}

int admin_count(const struct args *a, struct jw *w, const char *option, const char *field, int64_t min, struct err *e)
{
	const char *text = args_value(a, option);
	int64_t n;

	if (text == NULL)
		return 0;
	if (text_i64(text, min, INT64_MAX, &n, e) != 0)
		return err_wrap(e, "--%s", option);
	jw_kint(w, field, n);
	return 0;
}
