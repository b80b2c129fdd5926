/* The binary reader: the input is first a list of what to read, then the message. Also text in all its codecs. */
/* reads: common/wire.c common/text.c common/text_codec.c */
/* reached: 74 % of lines, 71 % of branches; the rest writes messages, wraps text, and is memory */
#include "fuzz.h"

#include "text.h"
#include "wire.h"

static void read_one(struct wire_reader *r, uint8_t what)
{
	char fixed[16], *s;
	uint8_t raw[8];
	const uint8_t *p;
	size_t n;

	switch (what % 10) {
	case 0: wire_u8(r); break;
	case 1: wire_u16(r); break;
	case 2: wire_u32(r); break;
	case 3: wire_u64(r); break;
	case 4: wire_bool(r); break;
	case 5: wire_raw(r, raw, what % 8); break;
	case 6:
		p = wire_bytes(r, what, &n);
		must(n <= what && (p || r->failed));
		break;
	case 7:
		s = wire_str(r, what);
		must(!s || (strlen(s) <= what && text_utf8_clean(s, strlen(s))));
		free(s);
		break;
	case 8:
		wire_str_fixed(r, fixed, sizeof(fixed));
		must(strlen(fixed) < sizeof(fixed));
		break;
	default: must(wire_count(r, what) <= what); break;
	}
}

static void codecs(const char *s, size_t n)
{
	struct buf safe = BUF_INIT(1 << 20), plain = BUF_INIT(1 << 20), again = BUF_INIT(1 << 20);
	uint8_t raw[64];
	char text[100];
	int64_t v;
	size_t len;
	struct err e;

	must(text_safe(&safe, s, n, false));
	must(text_utf8_clean((const char *)safe.data, safe.len));
	must(!memchr(safe.len ? (const char *)safe.data : "", '\n', safe.len) &&
			!memchr(safe.len ? (const char *)safe.data : "", 0x1b, safe.len));
	must(text_utf8_border(s, n) <= n && n - text_utf8_border(s, n) <= 3);
	if (text_unb64(s, n, &plain)) {
		must(text_b64(&again, plain.data, plain.len));
		must(again.len == n && (n == 0 || memcmp(again.data, s, n) == 0)); /* one text for each value */
	}
	if (text_unb64url(s, raw, sizeof(raw), &len)) {
		text_b64url(raw, len, text);
		must(strcmp(text, s) == 0);
	}
	if (text_micros(s, &v, &e) == 0)
		must(v >= 0);
	if (text_parse_time_ms(s, &v))
		text_time_ms(v, text);
	(void)!text_i64(s, -100, 100, &v, &e);
	buf_free(&safe);
	buf_free(&plain);
	buf_free(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	size_t fields = n > 0 ? data[0] % 16 : 0;
	struct wire_reader r;
	struct err e;
	char *s = strndup((const char *)data, n);

	must(s);
	codecs(s, strlen(s));
	free(s);
	if (n < 1 + fields)
		return 0;
	wire_read_init(&r, data + 1 + fields, n - 1 - fields);
	for (size_t i = 0; i < fields; i++)
		read_one(&r, data[1 + i]);
	if (wire_end(&r, "fuzz", &e) == 0)
		must(!r.failed && r.left == 0);
	return 0;
}
