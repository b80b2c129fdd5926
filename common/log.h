/*
 * Logs: one line an event, about an object: `run=... vm=... node=...` first, then key=value. Never a secret, a prompt, or guest
 * text that did not go through text_safe. Thread-safe (one write(2) a line). Text on stderr by default, JSON lines on request.
 *
 * Each place that logs has an allowance (log.c): a flood is cut to a few lines a second, and a line says how many more there were.
 */
#ifndef EPH_LOG_H
#define EPH_LOG_H

#include "error.h"

#include <stdbool.h>

enum log_level { LOG_LEVEL_DEBUG, LOG_LEVEL_INFO, LOG_LEVEL_WARN, LOG_LEVEL_ERROR };

/* `role` is the process' name in each line ("controld", "noded/keeper"); static storage. Call once before threads start. */
void log_init(const char *role, enum log_level min, bool json);
bool log_level_parse(const char *s, enum log_level *out);
bool log_enabled(enum log_level level);
/* One event. fmt is "event words key=value ..."; lines over 4 KiB are cut. */
void log_at(enum log_level level, const char *fmt, ...) EPH_PRINTF(2, 3);

#define log_debug(...)                                                                                                             \
	do {                                                                                                                       \
		if (log_enabled(LOG_LEVEL_DEBUG))                                                                                  \
			log_at(LOG_LEVEL_DEBUG, __VA_ARGS__);                                                                      \
	} while (0)
#define log_info(...) log_at(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_warn(...) log_at(LOG_LEVEL_WARN, __VA_ARGS__)
#define log_error(...) log_at(LOG_LEVEL_ERROR, __VA_ARGS__)

/* Self-checks in three strengths, on in production. */
#define check_abort(cond) ((cond) ? (void)0 : log_abort(#cond, __FILE__, __LINE__)) /* a broken invariant of our own */
#define check_warn(cond) ((cond) ? (void)0 : log_odd(#cond, __FILE__, __LINE__))    /* odd, worth a line */
void log_abort(const char *what, const char *file, int line) __attribute__((noreturn));
void log_odd(const char *what, const char *file, int line);

/* Opens what of the descriptors 0, 1, 2 is closed: else the next socket would be standard error and get the log's lines. Called
 * first in main(). Standard output becomes one that cannot be written, so that nobody takes silence for an answer. */
void log_descriptors(void);

#endif
