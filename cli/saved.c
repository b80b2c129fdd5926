/* The saved logins: reading, changing, writing (new file, fsync, rename). Used by api.c and cmd_account.c. May block on the disk.
 */
#include "saved.h"

#include "common/json.h"
#include "common/text.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_MAX_BYTES ((size_t)128 * 1024)
#define PATH_BYTES 4096

/* Directory that holds ours, without a slash at the end. */
static int config_home(char *out, size_t size, struct err *e)
{
	const char *xdg = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
	const struct passwd *pw;

	if (xdg != NULL && xdg[0] == '/')
		return text_copy(out, size, xdg) ? 0 : err_set(e, ERR_INVALID, "XDG_CONFIG_HOME is too long");
	if (home == NULL || home[0] != '/') {
		pw = getpwuid(getuid());
		home = pw != NULL ? pw->pw_dir : NULL;
	}
	if (home == NULL || home[0] != '/')
		return err_set(e, ERR_INVALID, "no home directory: set HOME, or XDG_CONFIG_HOME, or EPHEMERAL_API_KEY");
	return text_fmt(out, size, "%s/.config", home) ? 0 : err_set(e, ERR_INVALID, "HOME is too long");
}

int saved_path(char *out, size_t size, struct err *e)
{
	char home[PATH_BYTES];

	if (config_home(home, sizeof home, e) != 0)
		return -1;
	return text_fmt(out, size, "%s/ephemeral/config.json", home)
			       ? 0
			       : err_set(e, ERR_INVALID, "the path of the configuration is too long");
}

int saved_url(const char *url, char out[SAVED_URL_MAX], struct err *e)
{
	const char *host;
	size_t len, scheme;

	if (!text_copy(out, SAVED_URL_MAX, url))
		return err_set(e, ERR_INVALID, "the URL is longer than %d characters", SAVED_URL_MAX - 1);
	scheme = strncasecmp(url, "http://", 7) == 0 ? 7 : strncasecmp(url, "https://", 8) == 0 ? 8 : 0;
	host = url + scheme;
	if (scheme == 0 || host[0] == '\0' || host[0] == '/')
		return err_set(e, ERR_INVALID,
				"\"%.60s\" is no URL of a service: it must begin with http:// or https:// and name a host",
				strpbrk(url, "@?") ? "(not shown: it may hold a password)" : url);
	for (const char *p = url; *p != '\0'; p++)
		if ((unsigned char)*p <= ' ' || (unsigned char)*p >= 0x7f || strchr("@?#\\\"<>", *p) != NULL)
			return err_set(e, ERR_INVALID, /* which is not said again: a password may stand in it */
					"a service's URL is scheme, host, port and path only: no user, no query, no blanks");
	len = scheme + strcspn(host, "/");
	for (size_t i = 0; i < len; i++)
		out[i] = (char)tolower((unsigned char)out[i]);
	len = strlen(out);
	while (len > scheme && out[len - 1] == '/')
		out[--len] = '\0';
	return 0;
}

static int read_file(const char *path, struct buf *b, struct err *e)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = 1;

	if (fd < 0 && errno == ENOENT)
		return 0;
	if (fd < 0)
		return err_set_errno(e, "%s", path);
	while (n > 0) {
		uint8_t *p = buf_reserve(b, 4096);

		n = p != NULL ? read(fd, p, 4096) : -1;
		if (n > 0)
			buf_commit(b, (size_t)n);
	}
	close(fd);
	if (b->failed)
		return err_set(e, ERR_LIMIT, "%s is over %zu KiB; it is not ours", path, FILE_MAX_BYTES / 1024);
	return n < 0 ? err_set_errno(e, "%s", path) : 0;
}

static int parse(struct saved *s, const struct json *root, const char *path, struct err *e)
{
	const struct json *keys = json_get(root, "keys");
	const char *current = json_get_text(root, "current");

	if (json_type(root) != JSON_OBJECT || (keys != NULL && json_type(keys) != JSON_OBJECT))
		return err_set(e, ERR_INVALID, "%s is not what login wrote; remove it and log in again", path);
	if (current != NULL && !text_copy(s->current, sizeof s->current, current))
		return err_set(e, ERR_INVALID, "%s: \"current\" is too long", path);
	for (size_t i = 0; keys != NULL && i < json_len(keys) && s->count < SAVED_LOGINS_MAX; i++) {
		const struct json *key = json_at(keys, i);

		if (json_type(key) != JSON_STRING || !text_copy(s->logins[s->count].url, SAVED_URL_MAX, json_key(keys, i)) ||
				!text_copy(s->logins[s->count].key, SAVED_KEY_MAX, json_as_text(key)))
			return err_set(e, ERR_INVALID, "%s: a key is malformed; remove the file and log in again", path);
		s->count++;
	}
	return 0;
}

int saved_load(struct saved *s, struct err *e)
{
	char path[PATH_BYTES];
	struct buf b = BUF_INIT(FILE_MAX_BYTES);
	struct json *root = NULL;
	int rc = -1;

	memset(s, 0, sizeof *s);
	if (saved_path(path, sizeof path, e) != 0)
		return -1;
	if (read_file(path, &b, e) != 0)
		goto out;
	if (b.len == 0)
		rc = 0;
	else if (json_parse((const char *)b.data, b.len, &root, e) != 0)
		(void)err_wrap(e, "%s", path);
	else
		rc = parse(s, root, path, e);
out:
	json_free(root);
	buf_free(&b);
	return rc;
}

static int make_directories(char *path, struct err *e)
{
	for (char *p = strchr(path + 1, '/'); p != NULL; p = strchr(p + 1, '/')) {
		*p = '\0';
		if (mkdir(path, 0700) != 0 && errno != EEXIST)
			return err_set_errno(e, "make directory %s", path);
		*p = '/';
	}
	return 0;
}

static int write_file(const char *path, const struct buf *b, struct err *e)
{
	char tmp[PATH_BYTES];
	int fd;

	if (!text_fmt(tmp, sizeof tmp, "%s.%ld", path, (long)getpid()))
		return err_set(e, ERR_INVALID, "the path of the configuration is too long");
	fd = open(tmp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0)
		return err_set_errno(e, "write %s", tmp);
	if (write(fd, b->data, b->len) != (ssize_t)b->len || fsync(fd) != 0) {
		(void)err_set_errno(e, "write %s", tmp);
		close(fd);
		(void)unlink(tmp);
		return -1;
	}
	close(fd);
	if (rename(tmp, path) != 0) {
		(void)err_set_errno(e, "write %s", path);
		(void)unlink(tmp);
		return -1;
	}
	return 0;
}

int saved_store(const struct saved *s, struct err *e)
{
	char path[PATH_BYTES];
	struct buf b = BUF_INIT(FILE_MAX_BYTES);
	struct jw w;
	int rc = -1;

	jw_init(&w, &b);
	jw_object(&w);
	if (s->current[0] != '\0')
		jw_kstr(&w, "current", s->current);
	jw_kobject(&w, "keys");
	for (size_t i = 0; i < s->count; i++)
		jw_kstr(&w, s->logins[i].url, s->logins[i].key);
	jw_close(&w);
	jw_close(&w);
	if (!jw_end(&w) || !buf_add_char(&b, '\n'))
		(void)err_set(e, ERR_LIMIT, "the saved logins do not fit");
	else if (saved_path(path, sizeof path, e) == 0 && make_directories(path, e) == 0)
		rc = write_file(path, &b, e);
	buf_free(&b);
	return rc;
}

const char *saved_key(const struct saved *s, const char *url)
{
	for (size_t i = 0; i < s->count; i++)
		if (strcmp(s->logins[i].url, url) == 0)
			return s->logins[i].key;
	return NULL;
}

bool saved_remove(struct saved *s, const char *url)
{
	for (size_t i = 0; i < s->count; i++) {
		if (strcmp(s->logins[i].url, url) != 0)
			continue;
		s->logins[i] = s->logins[--s->count];
		if (strcmp(s->current, url) == 0)
			s->current[0] = '\0';
		return true;
	}
	return false;
}

int saved_set(struct saved *s, const char *url, const char *key, struct err *e)
{
	(void)saved_remove(s, url);
	if (s->count == SAVED_LOGINS_MAX)
		return err_set(e, ERR_LIMIT, "%d logins are saved; log out of one first", SAVED_LOGINS_MAX);
	if (!text_copy(s->logins[s->count].url, SAVED_URL_MAX, url) || !text_copy(s->logins[s->count].key, SAVED_KEY_MAX, key) ||
			!text_copy(s->current, sizeof s->current, url))
		return err_set(e, ERR_LIMIT, "the key or the URL is too long");
	s->count++;
	return 0;
}
