/*
 * What `ephemeral login` keeps: for each URL the API key that was checked against it, and which URL is used when none is named.
 * $XDG_CONFIG_HOME/ephemeral/config.json (else ~/.config), mode 0600: {"current":"URL","keys":{"URL":"eph_…"}}.
 */
#ifndef CLI_SAVED_H
#define CLI_SAVED_H

#include "common/error.h"

#include <stdbool.h>
#include <stddef.h>

#define SAVED_URL_MAX 512
#define SAVED_KEY_MAX 256
#define SAVED_LOGINS_MAX 64

struct saved {
	char current[SAVED_URL_MAX]; /* "" = none */
	struct {
		char url[SAVED_URL_MAX];
		char key[SAVED_KEY_MAX];
	} logins[SAVED_LOGINS_MAX];
	size_t count;
};

/* A missing file is an empty one. */
int saved_load(struct saved *s, struct err *e) EPH_MUST_CHECK;
int saved_store(const struct saved *s, struct err *e) EPH_MUST_CHECK;
const char *saved_key(const struct saved *s, const char *url); /* NULL when there is none for exactly this URL */
int saved_set(struct saved *s, const char *url, const char *key, struct err *e) EPH_MUST_CHECK; /* and makes it current */
bool saved_remove(struct saved *s, const char *url);
/* The file's path, for messages. */
int saved_path(char *out, size_t size, struct err *e) EPH_MUST_CHECK;

/* One spelling of a URL: scheme and host in lower case, no slash at the end, no user, query or fragment. */
int saved_url(const char *url, char out[SAVED_URL_MAX], struct err *e) EPH_MUST_CHECK;

#endif
