/* JSON text: what is taken has a canonical form that is taken again and is its own canonical form, and valid UTF-8. */
#include "fuzz.h"

#include "json.h"
#include "text.h"

/* Every accessor on every value. */
static void walk(const struct json *v, int depth)
{
	must(v && depth <= JSON_DEPTH_MAX);
	must(json_type_name(json_type(v)));
	if (json_as_text(v))
		must(text_utf8_clean(json_as_text(v), json_len(v)) && strlen(json_as_text(v)) >= json_len(v));
	(void)json_as_int(v);
	(void)json_as_bool(v);
	if (json_type(v) != JSON_ARRAY && json_type(v) != JSON_OBJECT)
		return;
	for (size_t i = 0; i < json_len(v); i++) {
		if (json_type(v) == JSON_OBJECT)
			must(json_get(v, json_key(v, i)) == json_at(v, i)); /* keys are unique */
		walk(json_at(v, i), depth + 1);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	struct buf first = BUF_INIT(8 << 20), second = BUF_INIT(8 << 20), whole = BUF_INIT(8 << 20);
	struct json *v, *w;
	struct jw writer;
	struct err e = { .code = ERR_NONE };

	if (json_parse((const char *)data, n, &v, &e) != 0) {
		must(e.code != ERR_NONE && strlen(e.text) > 0 && text_utf8_valid(e.text, strlen(e.text)));
		return 0;
	}
	walk(v, 0);
	must(json_canonical(v, &first));
	must(text_utf8_clean((const char *)first.data, first.len));
	must(json_parse((const char *)first.data, first.len, &w, &e) == 0);
	must(json_canonical(w, &second));
	must(first.len == second.len && memcmp(first.data, second.data, first.len) == 0);
	json_free(w);
	jw_init(&writer, &whole);
	jw_json(&writer, v);
	must(jw_end(&writer));
	must(json_parse((const char *)whole.data, whole.len, &w, &e) == 0);
	json_free(w);
	json_free(v);
	buf_free(&first);
	buf_free(&second);
	buf_free(&whole);
	return 0;
}
