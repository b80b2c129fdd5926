"""A strict reader of OpenMetrics 1.0 text, written from the specification: what a scraper may refuse is refused here. And a plain one for the
older format, whose checking is promtool's."""
import re
import subprocess

import requests

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"')
NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|Inf)|NaN")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "info": ("_info",), "histogram": ("_bucket", "_sum", "_count")}


class Family:
    def __init__(self, name):
        self.name, self.type, self.unit, self.help = name, None, None, None
        self.samples = {}  # (name, ((label, value), ...)) -> float


def need(condition, line, why):
    if not condition:
        raise ValueError(f"{why}: {line!r}")


def labels(text, line):
    found, at = [], 0
    while at < len(text):
        match = LABEL.match(text, at)
        need(match, line, "labels")
        found.append((match[1], re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], match[2])))
        at = match.end()
        need(at == len(text) or text[at] == ",", line, "labels are not parted by a comma")
        at += 1
        need(at != len(text), line, "a comma after the last label")
    names = [name for name, _ in found]
    need(len(set(names)) == len(names), line, "a label twice")
    return tuple(sorted(found))


def sample(family, line):
    match = re.fullmatch(rf"({NAME})(?:\{{(.*)\}})? (\S+)", line)
    need(match, line, "no sample")
    name, inner, value = match.groups()
    need(inner is None or inner, line, "empty braces")
    need(NUMBER.fullmatch(value), line, "no number")
    need(family and name in [family.name + s for s in SUFFIXES[family.type]], line, "not of the family that was begun")
    key = (name, labels(inner or "", line))
    need(key not in family.samples, line, "a sample twice")
    family.samples[key] = float(value)
    need(family.type not in ("counter", "histogram") or float(value) >= 0, line, "a count below zero")
    need(family.type != "info" or float(value) == 1, line, "an info is 1")


def check_histogram(family):
    series = {}
    for (name, of), value in family.samples.items():
        rest = tuple(pair for pair in of if pair[0] != "le")
        entry = series.setdefault(rest, {"buckets": []})
        if name.endswith("_bucket"):
            bound = dict(of)["le"]
            need(bound == "+Inf" or re.fullmatch(r"\d+\.\d+", bound), bound, "le is no canonical number")
            entry["buckets"].append((float(bound), value))
        else:
            entry[name[len(family.name):]] = value
    for rest, entry in series.items():
        buckets = entry["buckets"]
        need(buckets == sorted(buckets) and len({b for b, _ in buckets}) == len(buckets), rest, "buckets out of order")
        need([n for _, n in buckets] == sorted(n for _, n in buckets), rest, "buckets do not grow")
        need(buckets[-1][0] == float("inf") and buckets[-1][1] == entry["_count"] and "_sum" in entry, rest, "no whole histogram")


def parse(text):
    """{name: Family}; raises ValueError for whatever breaks the format."""
    need(text.endswith("\n# EOF\n"), text[-40:], "does not end with # EOF")
    families, family = {}, None
    for line in text[:-len("# EOF\n")].split("\n")[:-1]:
        if not line.startswith("#"):
            sample(family, line)
            continue
        match = re.fullmatch(rf"# (HELP|TYPE|UNIT) ({NAME}) (.*)", line)
        need(match, line, "no line of metadata")
        kind, name, rest = match.groups()
        if not family or family.name != name:
            need(name not in families, line, "a family begun twice")
            family = families[name] = Family(name)
        need(not family.samples, line, "metadata after samples")
        field = kind.lower()
        need(getattr(family, field) is None, line, "metadata twice")
        setattr(family, field, rest)
        need(kind != "TYPE" or rest in SUFFIXES, line, "unknown type")
        need(kind != "UNIT" or name.endswith("_" + rest), line, "the unit is not at the end of the name")
        need(kind != "HELP" or re.fullmatch(r'(?:[^"\\]|\\[\\"n])*', rest), line, "help is not escaped")
    names = [f.name + s for f in families.values() for s in SUFFIXES[f.type]]
    need(len(set(names)) == len(names), names, "two families share a sample's name")
    for family in families.values():
        need(family.type and family.help, family.name, "a family without type or help")
        if family.type == "histogram":
            check_histogram(family)
    return families


class Scrape:
    """One scrape of an address in both formats, read strictly. scrape[name] is a sample without labels, scrape.get(name, label=value) one with them."""

    def __init__(self, address):
        url = f"http://{address}/metrics"
        session = requests.Session()
        session.trust_env = False
        answer = session.get(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"}, timeout=10)
        assert answer.status_code == 200 and answer.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0"), answer.headers
        self.families = parse(answer.content.decode())
        self.samples = {key: value for f in self.families.values() for key, value in f.samples.items()}

    def __getitem__(self, name):
        return self.samples[name, ()]

    def get(self, name, **wanted):
        return self.samples[name, tuple(sorted(wanted.items()))]


def promtool(address):
    """What `promtool check metrics` says of the older format: "" when it has nothing to say."""
    session = requests.Session()
    session.trust_env = False
    answer = session.get(f"http://{address}/metrics", headers={"Accept": "text/plain;version=0.0.4"}, timeout=10)
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    done = subprocess.run(["promtool", "check", "metrics"], input=answer.content, capture_output=True, timeout=30, check=False)
    said = (done.stdout + done.stderr).decode()
    return said if done.returncode else said.strip()
