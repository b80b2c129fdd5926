/* Text from JSON answers. Pure but for standard output. */
#include "show.h"

#include "common/text.h"
#include "term.h"
#include "timeline.h"

#define CELL_MAX ((size_t)256 * 1024)
#define TABLE_MAX ((size_t)4 * 1024 * 1024)

void show_field(const char *name, const char *text)
{
	struct buf b = BUF_INIT(CELL_MAX);

	if (text == NULL)
		return;
	term_cell(&b, text, strlen(text), 4096, false);
	printf("%-12s %.*s\n", name, (int)b.len, b.data != NULL ? (const char *)b.data : "");
	buf_free(&b);
}

void show_value(const struct json *v, const char *key, enum show_kind kind, struct buf *out)
{
	const struct json *m = json_get(v, key);
	char text[32];

	if (m == NULL || json_type(m) == JSON_NULL)
		return;
	if ((kind == SHOW_MONEY || kind == SHOW_COST) && json_type(m) == JSON_INT) {
		text_dollars(json_as_int(m), text);
		buf_add_str(out, kind == SHOW_COST && !json_get_bool(v, "cost_final", true) ? "≤ " : "");
		buf_add_str(out, text);
	} else if (kind == SHOW_COUNT && json_type(m) == JSON_INT) {
		timeline_number(json_as_int(m), text);
		buf_add_str(out, text);
	} else if (json_type(m) == JSON_BOOL) {
		buf_add_str(out, json_as_bool(m) ? "yes" : "no");
	} else if (kind == SHOW_TIME && json_type(m) == JSON_STRING && json_len(m) >= 19) {
		/* 2026-11-30T12:00:00.123Z -> 2026-11-30 12:00:00 */
		buf_printf(out, "%.10s %.8s", json_as_text(m), json_as_text(m) + 11);
	} else if (json_type(m) == JSON_STRING) { /* a table's line stays one line */
		for (const char *p = json_as_text(m); *p != '\0'; p++)
			buf_add(out, *p == '\n' || *p == '\t' ? " " : p, 1);
	} else if (json_type(m) == JSON_INT || json_type(m) == JSON_DECIMAL) {
		buf_add_str(out, json_as_text(m));
	} else {
		(void)json_canonical(m, out);
	}
}

static void show_as(const char *name, const struct json *v, const char *key, enum show_kind kind)
{
	struct buf b = BUF_INIT(CELL_MAX);

	show_value(v, key, kind, &b);
	if (b.len > 0)
		show_field(name, buf_cstr(&b));
	buf_free(&b);
}

void show_money(const char *name, const struct json *v, const char *key)
{
	show_as(name, v, key, SHOW_MONEY);
}

void show_count(const char *name, const struct json *v, const char *key)
{
	show_as(name, v, key, SHOW_COUNT);
}

static void title_line(const struct show_column *columns, size_t count, struct buf *b)
{
	bool colour = term_colour(stdout);

	buf_add_str(b, term_begin(TERM_DIM, colour));
	for (size_t c = 0; c < count; c++) {
		term_cell(b, columns[c].title, strlen(columns[c].title), columns[c].width, c + 1 < count);
		buf_add_str(b, c + 1 < count ? "  " : "");
	}
	buf_add_str(b, term_end(colour));
	buf_add_char(b, '\n');
}

void show_table(const struct json *data, const struct show_column *columns, size_t count, bool titles)
{
	size_t width = term_width(stdout);
	struct buf b = BUF_INIT(TABLE_MAX), cell = BUF_INIT(CELL_MAX);

	if (titles)
		title_line(columns, count, &b);
	for (size_t i = 0; data != NULL && json_type(data) == JSON_ARRAY && i < json_len(data); i++) {
		size_t used = 0;

		for (size_t c = 0; c < count; c++) {
			size_t w = columns[c].width;

			if (c + 1 == count)
				w = width > used + w ? width - used : w;
			buf_reset(&cell);
			show_value(json_at(data, i), columns[c].key, columns[c].kind, &cell);
			term_cell(&b, cell.len > 0 ? (const char *)cell.data : "", cell.len, w, c + 1 < count);
			buf_add_str(&b, c + 1 < count ? "  " : "");
			used += w + 2;
		}
		buf_add_char(&b, '\n');
	}
	(void)term_buf(stdout, &b);
	buf_free(&b);
	buf_free(&cell);
}
