/* Building a run's request. Called by cmd_run.c; may block on reading files and standard input. Keeps nothing. */
#include "request.h"

#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#define PROMPT_MAX ((size_t)128 * 1024)
#define FILES_MAX 32
#define FILE_BYTES_MAX ((size_t)10 * 1024 * 1024)

/* "-" is standard input. */
static int read_all(const char *path, size_t max, struct buf *b, struct err *e)
{
	bool input = strcmp(path, "-") == 0;
	int fd = input ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = 1;

	buf_init(b, max);
	if (fd < 0)
		return err_set_errno(e, "%s", path);
	while (n > 0) {
		uint8_t piece[16 * 1024];

		n = read(fd, piece, sizeof piece);
		if (n > 0 && !buf_add(b, piece, (size_t)n)) {
			n = -1;
			errno = EFBIG;
		}
	}
	if (n < 0)
		(void)err_set_errno(e, "%s", input ? "standard input" : path);
	if (n < 0 && b->failed)
		(void)err_set(e, ERR_LIMIT, "%s is over %zu KiB, the most that is taken", input ? "standard input" : path,
				max / 1024);
	if (!input)
		close(fd);
	return n < 0 ? -1 : 0;
}

/* Fields that an option sets; the same fields of --request are left out. */
static bool overridden(const struct args *a, const char *field)
{
	static const struct {
		const char *field, *option;
	} table[] = {
		{ "shell", "shell" },
		{ "web", "web" },
		{ "web", "allow-domain" },
		{ "files", "file" },
		{ "model", "model" },
		{ "max_cost_micros", "max-cost" },
		{ "max_cost_micros", "max-cost-micros" },
		{ "max_model_calls", "max-model-calls" },
		{ "timeout_seconds", "timeout" },
		{ "size", "size" },
		{ "metadata", "metadata" },
	};

	if (strcmp(field, "prompt") == 0)
		return a->word_count > 0;
	for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
		if (strcmp(table[i].field, field) == 0 && args_flag(a, table[i].option))
			return true;
	return false;
}

static int put_prompt(const struct args *a, struct jw *w, struct err *e)
{
	struct buf b;
	int rc = -1;

	if (a->word_count == 0)
		return 0;
	if (strcmp(a->words[0], "-") != 0) {
		if (!text_utf8_clean(a->words[0], strlen(a->words[0])))
			return err_set(e, ERR_INVALID, "the prompt is no valid UTF-8");
		jw_kstr(w, "prompt", a->words[0]);
		return 0;
	}
	if (read_all("-", PROMPT_MAX, &b, e) == 0) {
		if (b.len == 0)
			(void)err_set(e, ERR_INVALID, "standard input is empty; the prompt was to come from there");
		else if (!text_utf8_clean((const char *)b.data, b.len))
			(void)err_set(e, ERR_INVALID, "standard input is no valid UTF-8; a prompt is text");
		else
			rc = 0;
	}
	if (rc == 0)
		jw_kstrn(w, "prompt", (const char *)b.data, b.len);
	buf_free(&b);
	return rc;
}

static int put_number(const struct args *a, struct jw *w, const char *option, const char *field, int64_t max, struct err *e)
{
	const char *text = args_value(a, option);
	int64_t n;

	if (text == NULL)
		return 0;
	if (text_i64(text, 1, max, &n, e) != 0)
		return err_wrap(e, "--%s", option);
	jw_kint(w, field, n);
	return 0;
}

static int put_cost(const struct args *a, struct jw *w, struct err *e)
{
	const char *dollars = args_value(a, "max-cost");
	int64_t micros;

	if (dollars != NULL && args_value(a, "max-cost-micros") != NULL)
		return err_set(e, ERR_INVALID, "--max-cost and --max-cost-micros say the same: give one");
	if (dollars == NULL)
		return put_number(a, w, "max-cost-micros", "max_cost_micros", INT64_MAX, e);
	if (text_micros(dollars[0] == '$' ? dollars + 1 : dollars, &micros, e) != 0)
		return err_wrap(e, "--max-cost");
	if (micros < 1)
		return err_set(e, ERR_INVALID, "--max-cost: a cap is more than nothing");
	jw_kint(w, "max_cost_micros", micros);
	return 0;
}

static int put_metadata(const struct args *a, struct jw *w, struct err *e)
{
	const char *label;

	if (args_list(a, "metadata", 0) == NULL)
		return 0;
	jw_kobject(w, "metadata");
	for (size_t i = 0; (label = args_list(a, "metadata", i)) != NULL; i++) {
		const char *equals = strchr(label, '=');
		char key[512];

		if (equals == NULL || equals == label || !text_fmt(key, sizeof key, "%.*s", (int)(equals - label), label))
			return err_set(e, ERR_INVALID, "--metadata %s: it must be KEY=VALUE", label);
		for (size_t k = 0; k < i; k++)
			if (strncmp(args_list(a, "metadata", k), label, (size_t)(equals - label) + 1) == 0)
				return err_set(e, ERR_INVALID, "--metadata %s is given twice", key);
		jw_kstr(w, key, equals + 1);
	}
	jw_close(w);
	return 0;
}

static void put_web(const struct args *a, struct jw *w)
{
	const char *domain;

	if (args_list(a, "allow-domain", 0) == NULL) {
		if (args_flag(a, "web"))
			jw_kbool(w, "web", true);
		return;
	}
	jw_kobject(w, "web");
	jw_karray(w, "allow_domains");
	for (size_t i = 0; (domain = args_list(a, "allow-domain", i)) != NULL; i++)
		jw_str(w, domain);
	jw_close(w);
	jw_close(w);
}

/* The name a file gets in the working directory: NAME of NAME=PATH, a relative path as it is, else its last part. */
static void file_name(const char *arg, char *name, size_t size, const char **path)
{
	const char *equals = strchr(arg, '=');
	const char *slash;
	struct stat st;

	if (equals != NULL && equals != arg && stat(arg, &st) != 0) {
		*path = equals + 1;
		if (!text_fmt(name, size, "%.*s", (int)(equals - arg), arg))
			name[0] = '\0';
		return;
	}
	*path = arg;
	slash = strrchr(arg, '/');
	if (arg[0] == '/' || strstr(arg, "..") != NULL)
		arg = slash != NULL ? slash + 1 : arg;
	while (arg[0] == '.' && arg[1] == '/')
		arg += 2;
	if (!text_copy(name, size, arg))
		name[0] = '\0';
}

static int put_file(const char *arg, struct jw *w, struct err *e)
{
	char name[1024];
	const char *path;
	struct buf b, base64 = BUF_INIT(REQUEST_BODY_MAX);
	int rc = -1;

	file_name(arg, name, sizeof name, &path);
	if (name[0] == '\0')
		return err_set(e, ERR_INVALID, "--file %s: it must be PATH or NAME=PATH", arg);
	if (read_all(path, FILE_BYTES_MAX, &b, e) != 0)
		goto out;
	jw_object(w);
	jw_kstr(w, "path", name);
	if (text_utf8_clean((const char *)b.data, b.len)) {
		jw_kstrn(w, "content", b.len > 0 ? (const char *)b.data : "", b.len);
	} else if (text_b64(&base64, b.data, b.len)) {
		jw_kstrn(w, "content_base64", (const char *)base64.data, base64.len);
	} else {
		(void)err_set(e, ERR_LIMIT, "--file %s is too large for a request", arg);
		goto out;
	}
	jw_close(w);
	rc = 0;
out:
	buf_free(&b);
	buf_free(&base64);
	return rc;
}

static int put_files(const struct args *a, struct jw *w, struct err *e)
{
	const char *arg;

	if (args_list(a, "file", 0) == NULL)
		return 0;
	jw_karray(w, "files");
	for (size_t i = 0; (arg = args_list(a, "file", i)) != NULL; i++) {
		if (i == FILES_MAX)
			return err_set(e, ERR_LIMIT, "a run takes at most %d files", FILES_MAX);
		if (put_file(arg, w, e) != 0)
			return -1;
	}
	jw_close(w);
	return 0;
}

static int put_options(const struct args *a, struct jw *w, struct err *e)
{
	if (put_prompt(a, w, e) != 0)
		return -1;
	put_web(a, w);
	if (args_flag(a, "shell"))
		jw_kbool(w, "shell", true);
	if (args_value(a, "model") != NULL)
		jw_kstr(w, "model", args_value(a, "model"));
	if (args_value(a, "size") != NULL)
		jw_kstr(w, "size", args_value(a, "size"));
	if (put_number(a, w, "timeout", "timeout_seconds", INT32_MAX, e) != 0 ||
			put_number(a, w, "max-model-calls", "max_model_calls", INT32_MAX, e) != 0 || put_cost(a, w, e) != 0 ||
			put_metadata(a, w, e) != 0)
		return -1;
	return put_files(a, w, e);
}

/* The request of --request; NULL without the option. */
static int read_request(const struct args *a, struct json **out, struct err *e)
{
	const char *path = args_value(a, "request");
	struct buf b;
	int rc = -1;

	*out = NULL;
	if (path == NULL)
		return 0;
	if (strcmp(path, "-") == 0 && a->word_count > 0 && strcmp(a->words[0], "-") == 0)
		return err_set(e, ERR_INVALID, "the request and the prompt cannot both come from standard input");
	if (read_all(path, REQUEST_BODY_MAX, &b, e) == 0) {
		if (json_parse((const char *)b.data, b.len, out, e) != 0)
			(void)err_wrap(e, "%s", path);
		else if (json_type(*out) != JSON_OBJECT)
			(void)err_set(e, ERR_INVALID, "%s: a request is a JSON object", path);
		else
			rc = 0;
	}
	if (rc != 0) {
		json_free(*out);
		*out = NULL;
	}
	buf_free(&b);
	return rc;
}

static bool allows(const struct json *v)
{
	return v != NULL && (json_type(v) == JSON_BOOL ? json_as_bool(v) : json_type(v) == JSON_OBJECT);
}

int request_build(const struct args *a, struct buf *body, struct request_permissions *p, struct err *e)
{
	struct json *given;
	struct jw w;
	int rc;

	if (read_request(a, &given, e) != 0)
		return -1;
	if (given == NULL && a->word_count == 0)
		return err_set(e, ERR_INVALID,
				"what shall the agent do? Give a PROMPT (- reads it from standard input) or --request FILE");
	jw_init(&w, body);
	jw_object(&w);
	for (size_t i = 0; given != NULL && i < json_len(given); i++) {
		if (overridden(a, json_key(given, i)))
			continue;
		jw_key(&w, json_key(given, i));
		jw_json(&w, json_at(given, i));
	}
	rc = put_options(a, &w, e);
	if (rc == 0) {
		jw_close(&w);
		if (!jw_end(&w))
			rc = err_set(e, ERR_INVALID, "the request is over %zu MiB, or holds text that is no valid UTF-8",
					REQUEST_BODY_MAX >> 20);
	}
	p->shell = args_flag(a, "shell") || allows(json_get(given, "shell"));
	p->web = args_flag(a, "web") || args_flag(a, "allow-domain") || allows(json_get(given, "web"));
	json_free(given);
	return rc;
}
