"""Bodies of every call that takes one, field by field: wrong types, null, the limits and one beyond, names that are none. And what no JSON
body may hold, on each of those calls. The calls come from the route table: one without a row here fails."""
import hashlib
import json

import pytest
import requests
from api_rig import client, control, filled, paper, problem, routes  # noqa: F401

BODIES = [r for r in routes() if r.content not in ("NONE", "BYTES")]    # bytes: test_images.py
BIG = (2**63, -2**63 - 1, 10**30)


class Int:
    """A whole number from low to high."""

    def __init__(self, low, high, good=None, zero=False):
        self.low, self.high, self.good, self.zero = low, high, low if good is None else good, zero

    def bad(self):
        yield from ((v, [f"{self.low}", f"{self.high}"]) for v in
                    (self.low - 1, self.high + 1, -1 if self.low >= 0 else self.low - 2, *BIG, 1.5, "1", True, [], {}))
        # As written, since Python would change them.
        yield from ((Raw(text), ["whole number", f"{self.low}", f"{self.high}"]) for text in ("1e3", "1.0", "1E400", "9" * 200, "0.0", "-0.0"))
        if self.low > 0:
            yield Raw("-0"), [f"{self.low}"]

    def fine(self):
        return [self.low, self.high]


class Text:
    """A string of low to high bytes (unit: or characters), made of `of`; `odd` are values that are refused for what they say."""

    def __init__(self, low, high, of="x", odd=(), prefix="", characters=False, edges=True):
        self.low, self.high, self.of, self.odd, self.prefix, self.characters, self.edges = low, high, of, odd, prefix, characters, edges

    def make(self, n):
        return self.prefix + self.of * (n - len(self.prefix))

    def bad(self):
        yield from ((v, ["string"]) for v in (7, 1.5, True, [], ["x"], {}))
        yield self.make(self.high + 1), [f"{self.high}"]
        if self.low > 0:
            yield "", []
        yield from ((v, []) for v in self.odd)

    def fine(self):
        return ([self.make(self.low)] if self.low else []) + [self.make(self.high)] if self.edges else []


class Flag:
    def bad(self):
        yield from ((v, ["true or false"]) for v in (0, 1, "true", "", [], {}))

    def fine(self):
        return [True, False]


class Words:
    def __init__(self, *words):
        self.words = words

    def bad(self):
        yield from ((v, []) for v in (7, True, [], {}, "nonsense", self.words[0].upper(), self.words[0] + " ", ""))

    def fine(self):
        return list(self.words)


class Odd:
    """Values that are refused, with words; and those that are taken."""

    def __init__(self, bad, fine=()):
        self.wrong, self.taken = bad, fine

    def bad(self):
        yield from self.wrong

    def fine(self):
        return list(self.taken)


class Raw:
    """Characters of JSON that stand in the body as they are."""

    def __init__(self, text):
        self.text = text


def written(body):
    """JSON of a body in which Raw stands for itself."""
    raws = []

    def keep(value):
        raws.append(value.text)
        return f"\0{len(raws) - 1}\0"
    text = json.dumps(body, default=keep)
    for i, raw in enumerate(raws):
        text = text.replace(f'"\\u0000{i}\\u0000"', raw)
    return text.encode()


ROLE = Words("viewer", "member", "admin")
MICROS = 10**15
RATE = Int(0, 10**12)
TOKENS = Int(1, 10**7)
FUTURE = Odd([(v, []) for v in (7, True, [], {}, "", "tomorrow", "2001-01-01T00:00:00Z", "2030-02-30T00:00:00Z", "2030-01-01", "2030-01-01T00:00:00", "2030-01-01T00:00:00+02:00",
                                "9" * 65)], ["2999-12-31T23:59:59Z", "2999-12-31T23:59:59.999Z"])
ORG = {"name": Text(1, 128), "disabled": Flag(), "allow_emulated": Flag(), "unlimited": Flag(), "default_model": Text(0, 128, edges=False),
       "default_max_cost_micros": Int(0, 100_000_000), "max_queued_runs": Int(0, 10**6), "max_running_runs": Int(0, 10**6)}
KEY = {"name": Text(0, 128), "role": ROLE, "expires_at": FUTURE, "member_id": Odd([(v, []) for v in (7, [], "x", "mem_", "mem_" + "0" * 31, "MEM_" + "0" * 32,
                                                                                                  "mem_" + "g" * 32, "mem_" + "0" * 32)])}
MEMBER = {"name": Text(1, 128, of="é", characters=True, odd=(" ", "\n\t")), "role": ROLE,
          "email": Text(0, 254, prefix="a@", odd=("nobody", "@", "a@", "@b", "a@b@c", "a b@c", "a@b\n"), edges=False)}
NONE = {}
LABELS = ("a b=c", 'a"=b', "a=\\b", "a=ü", "a=\x7f", "a", "=b", "a=b,", "a=b,,c=d")
LABEL = {"label": Text(0, 256, prefix="a=", odd=(*LABELS, "a=b,c=d"))}
HASH = Odd([(v, []) for v in (7, True, [], {}, "", "0" * 63, "0" * 65, "g" * 64, "A" * 64)])
IMAGE = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("kernel", "initramfs", "rootfs")}
IMAGE |= {"image": hashlib.sha256("".join(f"{name} {value}\n" for name, value in IMAGE.items()).encode()).hexdigest(), **{f"{name}_bytes": 7 for name in IMAGE}}

# (call) -> (required fields as a good body has them, fields)
TABLE = {
    "runs_create": ({"prompt": "x"}, {
        "prompt": Text(1, 131072, odd=(" ", "\n\t ")), "shell": Flag(), "timeout_seconds": Int(1, 3600), "max_cost_micros": Int(1, 100_000_000),
        "max_model_calls": Int(1, 1000), "size": Words("small", "standard", "large"), "model": Text(3, 128, prefix="a/", odd=("x", "/x", "x/"), edges=False),
        "idempotency_key": Text(1, 255, odd=("a b", "ü", "a\nb", '""'), edges=False),
        "metadata": Odd([(7, ["object"]), ([], ["object"]), ({"a": 1}, ["string"]), ({"a": None}, ["string"]), ({"": "x"}, ["1 to 64"]), ({"k" * 65: "x"}, ["64"]),
                         ({"k": "€" * 513}, ["513", "512"]), ({f"k{i}": "" for i in range(17)}, ["17", "16"])],
                        [{"k" * 64: "€" * 512}, {f"k{i}": "" for i in range(16)}, {}]),
        "files": Odd([(7, ["array"]), ({}, ["array"]), ([7], ["object"]), ([{"path": "a"}], ["exactly one"]), ([{"content": "a"}], ["missing"]),
                      ([{"path": "a", "content": "b", "content_base64": "Yg=="}], ["exactly one"]), ([{"path": "a", "content": 7}], ["string"]),
                      ([{"path": "a", "content_base64": "Yg"}], ["base64"]), ([{"path": "a", "content_base64": "Y g="}], ["base64"]),
                      ([{"path": "a", "content": "b", "mode": 7}], ["not a member"]), ([{"path": "a", "content": ""}, {"path": "a", "content": ""}], ["twice"]),
                      ([{"path": "a", "content": ""}, {"path": "a/b", "content": ""}], ["directory"]),
                      ([{"path": f"{i}", "content": ""} for i in range(33)], ["33", "32"]),
                      *[([{"path": p, "content": ""}], ["relative path"]) for p in ("", "/a", "..", "a/../b", "./a", "a//b", "a/", "x" * 4097, "a\nb")],
                      ([{"path": 7, "content": ""}], ["string"]), ([{"path": "a", "content": "x" * (8 * 1024 * 1024 + 1)}], [str(8 * 1024 * 1024)])],
                     [[], [{"path": f"{i}", "content": ""} for i in range(32)]])}),
    "runs_cancel": (None, NONE),
    "keys_create": ({"role": "viewer"}, KEY),
    "members_create": ({"name": "x", "role": "viewer"}, MEMBER),
    "members_update": ({}, {**MEMBER, "name": Text(1, 128, of="é", characters=True, odd=(" ",))}),
    "operator_org_create": ({"name": "x"}, ORG),
    "operator_org_update": ({}, {**ORG, "selector": Text(0, 256, prefix="a=", odd=LABELS, edges=False)}),
    "operator_credit": ({"amount_micros": 1}, {"amount_micros": Int(-MICROS, MICROS, good=1, zero=True), "note": Text(0, 500)}),
    "operator_key_create": ({"role": "viewer"}, KEY),
    "operator_member_create": ({"name": "x", "role": "viewer"}, MEMBER),
    "operator_provider_put": ({"base_url": "https://x/v1"}, {
        "base_url": Text(1, 512, prefix="https://x/", odd=("http://x/v1", "ftp://x", "https://", "https:///x", "x", "https://u@x", "https://x?k", "https://x#f",
                                                           "https://x/", "https://x\ny", "https://ü"), edges=False), "api_key": Text(0, 512), "any_address": Flag()}),
    "operator_model_put": (None, {
        "upstream": Text(1, 128), "limit_param": Words("max_tokens", "max_completion_tokens"), "max_output_tokens": TOKENS, "min_output_tokens": TOKENS,
        "tokens_per_byte_milli": Int(1, 10**6), "overhead_tokens": Int(0, 10**7), "call_timeout_ms": Int(1000, 3_600_000), "default": Odd(Flag().bad(), [False])}),
    "operator_price_put": ({"input_micros_per_million": 1, "output_micros_per_million": 1}, {
        "input_micros_per_million": RATE, "output_micros_per_million": RATE, "cached_input_micros_per_million": RATE,
        "model_percent_hundredths": Int(0, 100_000)}),
    "operator_price_common_put": ({}, {"run_fee_micros": Int(0, MICROS), "compute_micros_per_million_ms": RATE, "web_request_micros_per_million": RATE,
                                       "web_search_micros_per_million": RATE}),
    "operator_token_create": (None, {"uses": Int(1, 1000), "expires_in_seconds": Int(1, 366 * 86400),
                                     "labels": Text(0, 512, prefix="a=", odd=LABELS), "isolation": Words("kvm", "emulated")}),
    "operator_node_drain": (None, NONE),
    "operator_node_undrain": (None, NONE),
    "operator_node_revoke": (None, NONE),
    "operator_image_begin": (IMAGE, {name: HASH if isinstance(value, str) else Int(1, 8 << 30) for name, value in IMAGE.items()}
                             | {"note": Text(0, 200), "kernel_version": Text(0, 64)}),
    "operator_image_complete": (None, NONE),
    "operator_image_use": (None, LABEL),
    "operator_image_rollback": (None, LABEL),
}
REQUIRED = {"runs_create": ["prompt"], "keys_create": ["role"], "members_create": ["name", "role"], "operator_org_create": ["name"],
            "operator_credit": ["amount_micros"], "operator_key_create": ["role"], "operator_member_create": ["name", "role"],
            "operator_provider_put": ["base_url"], "operator_image_begin": list(IMAGE), "operator_price_put": ["input_micros_per_million", "output_micros_per_million"]}
# Fields where null is not "leave it out".
NULL_IS_WRONG = {"runs_create": {"prompt", "shell", "timeout_seconds", "max_cost_micros", "max_model_calls", "size", "model", "idempotency_key", "metadata",
                                 "files"}}


def test_every_call_with_a_body_is_here():
    assert {r.handler for r in BODIES} == set(TABLE)


class Place:
    """Things for a body to be sent to, of an organization of its own."""

    def __init__(self, control):
        self.control = control
        self.admin = control.new_client("admin")
        self.member = self.admin.call("POST", "/v1/members", 201, json={"name": "Ada", "role": "viewer"}).json()["id"]
        control.operator("PUT", "/providers/play", json={"base_url": "https://x/v1"})
        control.operator("PUT", "/models/play/thing", json={})
        self.session = requests.Session()

    def send(self, route, data, content_type="application/json", **headers):
        """Ids exist where the call does not change what others need."""
        operator = route.listener == "OPERATOR"
        ids = {"id": {"members": self.member, "orgs": self.admin.org}.get(route.pattern.split("/")[3 if operator else 2]), "provider": "play", "model": "thing",
               "name": "play"}
        headers = {"Authorization": f"Bearer {self.control.operator_key if operator else self.admin.key}", **headers}
        if content_type:
            headers["Content-Type"] = content_type
        return self.session.request(route.method, (self.control.operator_url if operator else self.control.url) + filled(route.pattern, **ids), data=data,
                                    headers=headers, timeout=60)


@pytest.fixture(scope="module")
def place(control, paper):
    return Place(control)


def is_fine(answer, name):
    """Taken, or refused for what only the database knows (an id that does not exist, a cap too low): never for this field's form."""
    if answer.status_code < 300 or answer.status_code in (402, 404, 409):
        return True
    return answer.status_code == 400 and any(word in answer.text for word in ("needs at least", "GET /v1/", "above the role")) and name in answer.text


@pytest.mark.parametrize("route", BODIES, ids=lambda r: r.handler)
def test_fields(place, route):
    """Each field's wrong values: 400, the field named by its pointer, the limit in the text. Its limits themselves are taken."""
    good, fields = TABLE[route.handler]
    for name, field in fields.items():
        for value, words in field.bad():
            answer = place.send(route, written({**(good or {}), name: value}))
            found = problem(answer, 400, "invalid-request")
            shown = (value.text if isinstance(value, Raw) else repr(value))[:80]
            assert len(found["errors"]) == 1, (name, shown, found["errors"])
            error = found["errors"][0]
            assert error["pointer"].split("/")[1] == name, (name, shown, error)
            assert all(word in error["detail"] for word in words), (name, shown, error, words)
            assert len(answer.content) < 4096, "the answer repeats what was sent"
        for value in field.fine():
            answer = place.send(route, written({**(good or {}), name: value}))
            assert is_fine(answer, name), (name, repr(value)[:80], answer.text[:500])
            if answer.status_code == 201 and route.handler == "runs_create":
                place.admin.cancel(answer.json()["id"])


@pytest.mark.parametrize("route", BODIES, ids=lambda r: r.handler)
def test_null_missing_and_unknown(place, route):
    good, fields = TABLE[route.handler]
    for name in fields:
        answer = place.send(route, written({**(good or {}), name: None}))
        if name in NULL_IS_WRONG.get(route.handler, ()) or name in REQUIRED.get(route.handler, ()):
            problem(answer, 400, "invalid-request", f"#/{name}")
        else:
            assert is_fine(answer, name), (name, answer.text)
    for name in REQUIRED.get(route.handler, ()):
        found = problem(place.send(route, written({k: v for k, v in good.items() if k != name})), 400, "invalid-request", f"#/{name}")
        assert "missing" in found["errors"][0]["detail"]
    # A name that is none, each kind of it, and all faults at once.
    for odd, pointer in (("nonsense", "#/nonsense"), ("", "#/"), ("a/b~c", "#/a~1b~0c"), ("Prompt", "#/Prompt"), ("\u202e\u00e9", None), ("x" * 5000, None)):
        found = problem(place.send(route, written({**(good or {}), odd: 1})), 400, "invalid-request")
        assert len(found["errors"]) == 1 and (pointer is None or found["errors"][0]["pointer"] == pointer), found
        assert "fields are" in found["errors"][0]["detail"] or "field" in found["errors"][0]["detail"]
    many = {f"n{i}": i for i in range(200)}
    found = problem(place.send(route, written({**(good or {}), **many})), 400, "invalid-request")
    assert len(found["errors"]) <= 65 and "200" in found["detail"], found["detail"]


DEEP = 65
BROKEN = {
    "empty object in an array": (b"[{}]", "object"),
    "an array": (b"[]", "object"),
    "a string": (b'"x"', "object"),
    "a number": (b"7", "object"),
    "null": (b"null", "object"),
    "nothing but blanks": (b" \r\n\t ", ""),
    "trailing bytes": (b"{} x", ""),
    "two values": (b"{}{}", ""),
    "cut": (b'{"a":', ""),
    "cut in a string": (b'{"a":"b', ""),
    "a comma too many": (b'{"a":1,}', ""),
    "comment": (b"{/* */}", ""),
    "single quotes": (b"{'a':1}", ""),
    "bare name": (b"{a:1}", ""),
    "NaN": (b'{"a":NaN}', ""),
    "plus": (b'{"a":+1}', ""),
    "leading zero": (b'{"a":01}', ""),
    "hex": (b'{"a":0x1}', ""),
    "BOM": (b"\xef\xbb\xbf{}", ""),
    "UTF-16": ("{}".encode("utf-16"), "UTF-8"),
    "NUL byte": (b'{"a":"b\0c"}', "NUL"),
    "NUL after": (b"{}\0", "NUL"),
    "NUL escape": (b'{"a":"\\u0000"}', "u0000"),
    "NUL escape in a name": (b'{"a\\u0000b":1}', "u0000"),
    "control character": (b'{"a":"\x01"}', ""),
    "line break in a string": (b'{"a":"b\nc"}', ""),
    "high surrogate": (b'{"a":"\\ud800"}', "surrogate"),
    "low surrogate": (b'{"a":"\\udc00"}', "surrogate"),
    "surrogates the wrong way": (b'{"a":"\\udc00\\ud800"}', "surrogate"),
    "surrogate in UTF-8": (b'{"a":"\xed\xa0\x80"}', "UTF-8"),
    "overlong slash": (b'{"a":"\xc0\xaf"}', "UTF-8"),
    "overlong NUL": (b'{"a":"\xc0\x80"}', "UTF-8"),
    "overlong of three": (b'{"a":"\xe0\x80\xaf"}', "UTF-8"),
    "overlong of four": (b'{"a":"\xf0\x80\x80\xaf"}', "UTF-8"),
    "above U+10FFFF": (b'{"a":"\xf4\x90\x80\x80"}', "UTF-8"),
    "five bytes": (b'{"a":"\xf8\x88\x80\x80\x80"}', "UTF-8"),
    "lone continuation": (b'{"a":"\x80"}', "UTF-8"),
    "cut character": (b'{"a":"\xe2\x82"}', "UTF-8"),
    "cut at the end": (b'{"a":"x"}\xe2', "UTF-8"),
    "latin-1": ('{"a":"ü"}'.encode("latin-1"), "UTF-8"),
    "a name twice": (b'{"a":1,"a":1}', "twice"),
    "a name twice, escaped": (b'{"a":1,"\\u0061":1}', "twice"),
    "a name twice, deep": (b'{"x":[{"y":{"a":1,"b":2,"a":3}}]}', "twice"),
    "a name twice among many": (b"{" + b",".join(b'"k%d":1' % i for i in range(40)) + b',"k7":1}', "twice"),
    "nested 65 arrays": (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "64"),
    "nested 65 objects": (b'{"a":' * DEEP + b"1" + b"}" * DEEP, "64"),
    "nested for ever": (b"[" * 60000, "64"),
    "a long number": (b'{"a":' + b"1" * 257 + b"}", "256"),
    "bad escape": (b'{"a":"\\x41"}', ""),
    "bad hex": (b'{"a":"\\u12g4"}', ""),
}


@pytest.mark.parametrize("route", BODIES, ids=lambda r: r.handler)
def test_what_is_no_json(place, route):
    """400 at the whole body, in words; the next request is fine, on the same connection."""
    for name, (data, word) in BROKEN.items():
        found = problem(place.send(route, data), 400, "invalid-request", "#")
        assert word in found["errors"][0]["detail"], (name, found)
    if TABLE[route.handler][0] is not None:
        problem(place.send(route, b""), 400, "invalid-request")
    # Depth 64 is not too deep; it is a field that is none.
    found = problem(place.send(route, b'{"a":' + b"[" * 63 + b"]" * 63 + b"}"), 400, "invalid-request")
    assert any(e["pointer"] == "#/a" for e in found["errors"])
    assert place.admin.get("/v1/me")["role"] == "admin"


TYPES = {
    "none": (None, 415), "text/plain": ("text/plain", 415), "form": ("application/x-www-form-urlencoded", 415), "json-ish": ("application/jsonx", 415),
    "application/json5": ("application/json5", 415), "suffix": ("application/problem+json", 415), "list": ("application/json, text/plain", 415),
    "empty": ("", 415), "utf-16": ("application/json; charset=utf-16", 415), "latin-1": ("application/json;charset=iso-8859-1", 415),
    "utf-8x": ("application/json; charset=utf-8x", 415), "quoted latin": ('application/json; charset="latin1"', 415),
    "half quoted": ('application/json; charset="utf-8', 415), "second charset": ("application/json; a=b; charset=utf-7", 415),
    "blank charset": ("application/json; charset =utf-8", 415), "no value": ("application/json; charset", 415),
    "plain": ("application/json", 0), "upper": ("Application/JSON", 0), "charset": ("application/json; charset=utf-8", 0),
    "upper charset": ("application/json;CHARSET=UTF-8", 0), "quoted": ('application/json; charset="UTF-8"', 0), "other parameter": ("application/json; a=b", 0),
    "semicolon": ("application/json;", 0), "blank": ("application/json ", 0),
}


@pytest.mark.parametrize("route", BODIES, ids=lambda r: r.handler)
def test_content_types(place, route):
    for name, (value, status) in TYPES.items():
        answer = place.send(route, b'{"nonsense":1}', value)
        if status:
            found = problem(answer, status, "unsupported-media-type")
            assert "application/json" in found["detail"], name
        else:
            problem(answer, 400, "invalid-request")
    for coding in ("gzip", "br", "identity, gzip", "x"):
        assert "uncompressed" in problem(place.send(route, b"{}", **{"Content-Encoding": coding}), 415, "unsupported-media-type")["detail"]
    problem(place.send(route, b'{"nonsense":1}', **{"Content-Encoding": "identity"}), 400, "invalid-request")


@pytest.mark.parametrize("route", BODIES, ids=lambda r: r.handler)
def test_body_limits(place, route):
    """At the limit it is read, one more is 413 with the limit in the text."""
    limit = 12 * 1024 * 1024 if route.handler == "runs_create" else 64 * 1024
    frame = len(b'{"nonsense":""}')
    problem(place.send(route, b'{"nonsense":"' + b"x" * (limit - frame) + b'"}'), 400, "invalid-request")
    found = problem(place.send(route, b'{"nonsense":"' + b"x" * (limit - frame + 1) + b'"}'), 413, "too-large")
    assert str(limit) in found["detail"]


@pytest.mark.parametrize("route", [r for r in routes() if r.content == "NONE" and r.need != "NONE"], ids=lambda r: r.handler)
def test_calls_without_a_body_take_none(place, route):
    answer = place.send(route, b"{}")
    assert "no body" in problem(answer, 400, "invalid-request")["detail"]


@pytest.mark.parametrize("route", [r for r in routes() if r.need != "NONE"], ids=lambda r: r.handler)
def test_queries(place, route):
    """What a call does not know is named, with what it knows; each once; UTF-8; numbers within their bounds."""
    def ask(query):
        operator = route.listener == "OPERATOR"
        base = place.control.operator_url if operator else place.control.url
        ids = {"id": place.admin.org} if "/orgs/{id}/" in route.pattern else {}
        return requests.request(route.method, f"{base}{filled(route.pattern, **ids)}?{query}", timeout=30,
                                headers={"Authorization": f"Bearer {place.control.operator_key if operator else place.admin.key}"})

    found = problem(ask("nonsense=1"), 400, "invalid-request", "nonsense")
    known = [q for q in route.query.split() if not q.endswith("*")]
    assert all(name in found["errors"][0]["detail"] for name in known)
    problem(ask("nonsense=1&more=2"), 400, "invalid-request", "nonsense", "more")
    for name in known:
        assert "2 times" in problem(ask(f"{name}=1&{name}=1"), 400, "invalid-request")["errors"][0]["detail"]
    for broken in ("%ff", "%c0%af", "%ed%a0%80", "%00"):
        for query in (f"{broken}=1", *(f"{name}={broken}" for name in known)):
            assert "query" in problem(ask(query), 400, "invalid-request")["detail"]
    for name in {"limit", "timeout_seconds"} & set(known):
        for bad in ("0", "-1", "1.0", "1e1", "x", "", "%201", "0x1", "99999999999999999999", "1000000"):
            found = problem(ask(f"{name}={bad}"), 400, "invalid-request", name)
            assert "from 1 to" in found["errors"][0]["detail"]
