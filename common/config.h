/*
 * Configuration: `key = value` lines, `#` comments. Every key of a program stands in one table with range, default, help; an
 * unknown key, a bad value or a duplicate is an error with file and line. The same table answers -t, `help config` and reload.
 */
#ifndef EPH_CONFIG_H
#define EPH_CONFIG_H

#include "buf.h"
#include "error.h"

#include <stdbool.h>
#include <stdint.h>

enum config_type { CONFIG_STRING, CONFIG_INT, CONFIG_BOOL, CONFIG_ENUM, CONFIG_LIST /* comma separated, malloc'd string */ };

struct config_key {
	const char *name;
	size_t offset;        /* of a char *, int64_t or bool (CONFIG_ENUM: int64_t index) in the program's config struct */
	const char *fallback; /* default as text; NULL = required unless `optional` */
	int64_t min, max;     /* CONFIG_INT; for strings max is the length bound (0 = 1024) */
	const char *choices;  /* CONFIG_ENUM: "a|b|c" */
	enum config_type type;
	bool reloadable;
	bool optional;    /* no default and may be absent (char * stays NULL) */
	bool secret;      /* never printed */
	const char *help; /* one line, with the unit */
};

/* Fills `config` (zeroed by the caller) from defaults, then the file (NULL = defaults only), then overrides "key=value". */
int config_load(const struct config_key *keys, size_t count, void *config, const char *path, const char *const *overrides,
		size_t override_count, struct err *e) EPH_MUST_CHECK;
void config_free(const struct config_key *keys, size_t count, void *config);
/* The table as text for `help config`. */
void config_help(const struct config_key *keys, size_t count, struct buf *out);
/* host:port, [v6]:port or :port (= all addresses). host holds 256. */
int config_addr(const char *s, char *host, size_t host_size, uint16_t *port, struct err *e) EPH_MUST_CHECK;

#endif
