/* Hex and base64 in the spellings that text.h names. Strict both ways: one text for each value. Pure and thread-safe. */
#include "text.h"

#include <string.h>

static const char hex_digits[] = "0123456789abcdef";
static const char url_alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
static const char std_alphabet[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

void text_hex(const uint8_t *p, size_t n, char *out)
{
	for (size_t i = 0; i < n; i++) {
		out[2 * i] = hex_digits[p[i] >> 4];
		out[2 * i + 1] = hex_digits[p[i] & 15];
	}
	out[2 * n] = '\0';
}

static int hex_value(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	return -1;
}

bool text_unhex(const char *s, uint8_t *out, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		int high = hex_value(s[2 * i]);
		int low = high < 0 ? -1 : hex_value(s[2 * i + 1]);

		if (low < 0)
			return false;
		out[i] = (uint8_t)(high << 4 | low);
	}
	return s[2 * n] == '\0';
}

/* Up to three bytes as four digits; digits past the data are left to the caller (dropped or shown as '='). */
static void encode_group(const char *alphabet, const uint8_t *p, size_t n, char out[4])
{
	uint32_t v = (uint32_t)p[0] << 16 | (n > 1 ? (uint32_t)p[1] << 8 : 0) | (n > 2 ? p[2] : 0);

	for (int i = 0; i < 4; i++)
		out[i] = alphabet[v >> (18 - 6 * i) & 63];
}

void text_b64url(const uint8_t *p, size_t n, char *out)
{
	while (n > 0) {
		size_t take = n < 3 ? n : 3;
		char group[4];

		encode_group(url_alphabet, p, take, group);
		memcpy(out, group, take + 1);
		out += take + 1;
		p += take;
		n -= take;
	}
	*out = '\0';
}

bool text_b64(struct buf *b, const uint8_t *p, size_t n)
{
	while (n > 0) {
		size_t take = n < 3 ? n : 3;
		char group[4];

		encode_group(std_alphabet, p, take, group);
		if (take < 3)
			group[3] = '=';
		if (take < 2)
			group[2] = '=';
		if (!buf_add(b, group, 4))
			return false;
		p += take;
		n -= take;
	}
	return true;
}

/*
 * -1 when c is no digit. Without branches: digits come as good as at random, and a jump that was guessed wrong costs more than all
 * of this (8 MiB of files in a request are decoded on the loop).
 */
static int digit_value(const char *alphabet, char c)
{
	int upper = (c >= 'A') & (c <= 'Z'), lower = (c >= 'a') & (c <= 'z'), number = (c >= '0') & (c <= '9');

	return upper * (c - 'A' + 1) + lower * (c - 'a' + 27) + number * (c - '0' + 53) + (c == alphabet[62]) * 63 +
	       (c == alphabet[63]) * 64 - 1;
}

/* 2 to 4 digits into 1 to 3 bytes; bits beyond the data must be zero. Returns the bytes, 0 when malformed. */
static size_t decode_group(const char *alphabet, const char *s, size_t n, uint8_t out[3])
{
	uint32_t v = 0;

	if (n < 2)
		return 0;
	for (size_t i = 0; i < 4; i++) {
		int d = i < n ? digit_value(alphabet, s[i]) : 0;

		if (d < 0)
			return 0;
		v = v << 6 | (uint32_t)d;
	}
	if ((n == 2 && (v & 0xffff) != 0) || (n == 3 && (v & 0xff) != 0))
		return 0;
	out[0] = (uint8_t)(v >> 16);
	out[1] = (uint8_t)(v >> 8);
	out[2] = (uint8_t)v;
	return n - 1;
}

bool text_unb64url(const char *s, uint8_t *out, size_t max, size_t *n)
{
	size_t left = strlen(s);

	*n = 0;
	while (left > 0) {
		size_t take = left < 4 ? left : 4;
		uint8_t group[3];
		size_t got = decode_group(url_alphabet, s, take, group);

		if (got == 0 || got > max - *n)
			return false;
		memcpy(out + *n, group, got);
		*n += got;
		s += take;
		left -= take;
	}
	return true;
}

bool text_unb64(const char *s, size_t n, struct buf *b)
{
	size_t pad = n >= 4 && s[n - 1] == '=' ? s[n - 2] == '=' ? 2 : 1 : 0, size = n / 4 * 3 - pad;
	uint8_t *out;

	if (n % 4 != 0)
		return false;
	if (n == 0)
		return true;
	out = buf_reserve(b, size);
	if (!out)
		return false;
	for (; n > 0; s += 4, n -= 4) {
		uint8_t group[3];
		size_t got = decode_group(std_alphabet, s, n == 4 ? 4 - pad : 4, group);

		if (got == 0)
			return false;
		memcpy(out, group, got);
		out += got;
	}
	buf_commit(b, size);
	return true;
}
