/*
 * Plays the sample of the sample page: the same two pairs of commands, and an answer in the page's form that is filled from what
 * the commands printed, and from nothing else. What a command did not print, the answer does not say. Pure.
 *
 * A tool output is what a command printed, then a last line in brackets that says how it ended ("[exit code 0]").
 */
#include "plan.h"

#include "common/text.h"

#define SHOWN_MAX 200 /* bytes of a command's output in one line of the answer: keeps it below its 120 words */
#define WORDS_MAX 22

static const char sample_prompt[] = "This is a sandbox test. Do these steps with the shell and report the real output, never what "
				    "you expect. 1) Write a small script "
				    "that prints the first 15 prime numbers, run it and show the output. 2) Run `whoami` and "
				    "`pwd`. 3) Try to reach the internet with "
				    "`curl -sS -m 8 https://example.com` (and, if curl is missing, python3 with urllib) and report "
				    "the exact error. 4) Write a file "
				    "named /tmp/proof.txt and list it. Reply in Markdown, at most 120 words: one line per step "
				    "with the result, then one sentence "
				    "saying whether the network call succeeded.";

static const char *const commands[2][2] = {
	{
			"pwd; whoami",
			"command -v curl && curl -sS -m 8 https://example.com",
	},
	{
			"printf '%s\\n' '#!/usr/bin/env python3' 'primes = []' 'n = 2' 'while len(primes) < 15:' ' if all(n % p "
			"for p in primes):' "
			"'  primes.append(n)' ' n += 1' 'print(*primes)' > primes.py && python3 primes.py",
			"printf 'sandbox proof\\n' > /tmp/proof.txt && ls -l /tmp/proof.txt",
	},
};

enum { OUT_WHERE, OUT_CURL, OUT_PRIMES, OUT_PROOF, OUT_COUNT };

bool sample_is(const char *prompt)
{
	return strcmp(prompt, sample_prompt) == 0;
}

/* One tool output taken apart. Views into it. */
struct printed {
	const char *text; /* what the command printed */
	size_t len;
	const char *end; /* "exit code 0", without the brackets; "" when there is none */
	size_t end_len;
	bool ok; /* exit code 0 */
};

static struct printed take_apart(const struct chat *c, size_t i)
{
	struct printed p = { .text = "", .end = "" };
	const char *s, *last;

	if (i >= c->output_count)
		return p;
	s = c->outputs[i];
	p.text = s;
	p.len = strlen(s);
	last = strrchr(s, '\n');
	last = last ? last + 1 : s;
	if (last[0] == '[' && s[p.len - 1] == ']') {
		p.end = last + 1;
		p.end_len = strlen(last) - 2;
		p.len = (size_t)(last - s);
	}
	while (p.len > 0 && p.text[p.len - 1] == '\n')
		p.len--;
	p.ok = p.end_len == strlen("exit code 0") && memcmp(p.end, "exit code 0", p.end_len) == 0;
	return p;
}

/* Line n (from 0) of what was printed. False when it has none. */
static bool line_of(const struct printed *p, size_t n, const char **line, size_t *len)
{
	const char *s = p->text, *end = p->text + p->len;

	for (; s < end; n--) {
		const char *stop = memchr(s, '\n', (size_t)(end - s));

		if (!stop)
			stop = end;
		if (n == 0) {
			*line = s;
			*len = (size_t)(stop - s);
			return *len > 0;
		}
		s = stop + 1;
	}
	return false;
}

/* The first line that begins with `prefix` and is not empty. One pass: the text may be long and is a guest's. */
static bool line_with(const struct printed *p, const char *prefix, const char **line, size_t *len)
{
	const char *s = p->text, *end = p->text + p->len;
	size_t n = strlen(prefix);

	while (s < end) {
		const char *stop = memchr(s, '\n', (size_t)(end - s));

		if (!stop)
			stop = end;
		if (stop > s && (size_t)(stop - s) >= n && memcmp(s, prefix, n) == 0) {
			*line = s;
			*len = (size_t)(stop - s);
			return true;
		}
		s = stop + 1;
	}
	return false;
}

/* Cut so that the whole answer keeps to its words. */
static void show(struct buf *b, const char *s, size_t n)
{
	size_t words = 0, i = 0;

	if (n > SHOWN_MAX)
		n = text_utf8_border(s, SHOWN_MAX);
	for (; i < n; i++) {
		if (s[i] == ' ' && ++words == WORDS_MAX)
			break;
	}
	buf_add(b, s, i);
}

static void say_missing(struct buf *b, const struct printed *p)
{
	buf_add_str(b, "not in the output");
	if (p->end_len > 0 && p->end_len < 60)
		buf_printf(b, " (%.*s)", (int)p->end_len, p->end);
}

static void say_line(struct buf *b, const struct printed *p, const char *prefix)
{
	const char *line;
	size_t n;

	if (line_with(p, prefix, &line, &n))
		show(b, line, n);
	else
		say_missing(b, p);
}

static void say_where(struct buf *b, const struct printed *p)
{
	const char *line;
	size_t n;

	buf_add_str(b, "2. whoami: ");
	if (line_of(p, 1, &line, &n))
		show(b, line, n);
	else
		say_missing(b, p);
	buf_add_str(b, "; pwd: ");
	if (line_of(p, 0, &line, &n))
		show(b, line, n);
	else
		say_missing(b, p);
	buf_add_str(b, "\n");
}

/* curl's own exit status decides: the command printed a page or it printed an error. */
static void say_curl(struct buf *b, const struct printed *p)
{
	const char *line;
	size_t n;

	if (p->ok) {
		buf_add_str(b, "3. curl reached example.com: ");
		say_line(b, p, "<");
	} else if (line_with(p, "curl: (", &line, &n)) {
		buf_add_str(b, "3. curl error: ");
		show(b, line, n);
	} else {
		buf_add_str(b, "3. curl: no error line, ");
		say_missing(b, p);
	}
	buf_add_str(b, "\n");
}

static int report(const struct chat *c, struct plan *out, struct err *e)
{
	struct buf b = BUF_INIT(8192);
	struct printed primes = take_apart(c, OUT_PRIMES), where = take_apart(c, OUT_WHERE), curl = take_apart(c, OUT_CURL),
		       proof = take_apart(c, OUT_PROOF);

	buf_add_str(&b, primes.ok ? "1. Prime script output: " : "1. Prime script failed: ");
	say_line(&b, &primes, "");
	buf_add_str(&b, "\n");
	say_where(&b, &where);
	say_curl(&b, &curl);
	buf_add_str(&b, proof.ok ? "4. /tmp/proof.txt created; ls -l: " : "4. /tmp/proof.txt failed: ");
	say_line(&b, &proof, "");
	buf_add_str(&b, "\n");
	if (curl.ok)
		buf_add_str(&b, "The network call succeeded.");
	else if (curl.end_len > 0)
		buf_add_str(&b, "The network call did not succeed.");
	else
		buf_add_str(&b, "Whether the network call succeeded is not in the output.");
	if (b.failed || !buf_cstr(&b)) {
		buf_free(&b);
		return err_set(e, ERR_NOMEM, "no memory");
	}
	out->text = buf_steal(&b, NULL);
	return 0;
}

int plan_sample(const struct chat *c, struct plan *out, struct err *e)
{
	if (!c->shell) {
		out->text = strdup("This is a script, not a model. It plays the sample with the tool shell, which this run does "
				   "not have: "
				   "set shell to true.");
		return out->text ? 0 : err_set(e, ERR_NOMEM, "no memory");
	}
	if (c->turn >= 2)
		return report(c, out, e);
	for (size_t i = 0; i < 2; i++) {
		const char *command = commands[c->turn][i];

		if (plan_add_shell(out, c->turn, command, strlen(command), e) != 0)
			return -1;
	}
	return 0;
}
