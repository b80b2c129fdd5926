/*
 * What reaches the terminal. Everything foreign goes through here escaped; colour and transient lines only where the stream is a
 * terminal and NO_COLOR is unset. Standard output holds answers, standard error notes and complaints.
 */
#ifndef CLI_TERM_H
#define CLI_TERM_H

#include "common/buf.h"
#include "common/error.h"

#include <stdbool.h>
#include <stdio.h>

enum term_style { TERM_PLAIN, TERM_BOLD, TERM_DIM, TERM_GREEN, TERM_RED, TERM_YELLOW, TERM_CYAN };

bool term_is_terminal(FILE *f);
/* Whoever read standard output has left (| head): no reason to complain. */
bool term_reader_gone(void);
bool term_colour(FILE *f);
/* Columns of the terminal; COLUMNS or 120 where there is none. */
size_t term_width(FILE *f);

/* Escape sequence that begins the style, or "" when colour is false; term_end(colour) ends it. */
const char *term_begin(enum term_style s, bool colour);
const char *term_end(bool colour);

/* A line on standard output. Foreign text in it is escaped, line ends as well. */
void term_say(const char *fmt, ...) EPH_PRINTF(1, 2);
/* A note on standard error: one line. */
void term_note(const char *fmt, ...) EPH_PRINTF(1, 2);
/* "ephemeral: ..." on standard error. Foreign text in it is escaped. */
void term_complain(const char *fmt, ...) EPH_PRINTF(1, 2);
/* Foreign text, escaped, newlines kept; ends with a newline. */
void term_text(FILE *f, const char *s, size_t n);
/* A whole buffer that was made safe already. False when it could not be written. */
bool term_buf(FILE *f, const struct buf *b);
/* Pads s with blanks to `width` columns; longer text is cut and ends in "…". s is escaped. */
void term_cell(struct buf *b, const char *s, size_t n, size_t width, bool pad);

#endif
