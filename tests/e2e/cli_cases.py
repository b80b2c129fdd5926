"""One normal use of every verb of `ephemeral`, for the transcripts. A verb that is not here fails test_cli_transcripts.py."""

# verb -> list of (words after it, standard input). {run}, {org}, {key}, {node} are made by the test; {ended} is a run that has ended.
CASES = {
    "run": [(["Say hello.", "--max-cost", "0.02", "--idempotency-key", "transcript"], b""), (["-", "--shell", "--metadata", "a=b"], b"from standard input")],
    "runs": [([], b""), (["--limit", "1", "--status", "succeeded"], b"")],
    "get": [(["{ended}"], b""), (["{failed}"], b"")],
    "wait": [(["{ended}"], b""), (["{failed}"], b"")],
    "cancel": [(["{run}"], b""), (["{ended}"], b"")],
    "events": [(["{ended}"], b""), (["{ended}", "--follow"], b"")],
    "replay": [(["{ended}", "--speed", "1000"], b""), (["{ended}", "--speed", "1000", "--verbose"], b"")],
    "models": [([], b"")],
    "login": [([], b"{key}\n")],
    "logout": [([], b"")],
    "status": [([], b"")],
    "admin org create": [(["acme", "--allow-emulated", "--default-model", "scripted/auto"], b"")],
    "admin org list": [([], b"")],
    "admin org set": [(["{org}", "--allow-emulated", "yes", "--max-running", "5", "--selector", "pool=blue"], b"")],
    "admin org credit": [(["{org}", "20", "--note", "invoice 7"], b"")],
    "admin key create": [(["{org}", "--role", "viewer", "--name", "ci"], b"")],
    "admin key list": [(["{org}"], b"")],
    "admin key revoke": [(["{org}", "{spare}"], b"")],
    "admin member add": [(["{org}", "Ada Lovelace", "--role", "admin"], b"")],
    "admin member list": [(["{org}"], b"")],
    "admin node token": [(["--uses", "2", "--expires-in", "600", "--label", "a=b"], b"")],
    "admin node list": [([], b"")],
    "admin node drain": [(["{node}"], b"")],
    "admin node undrain": [(["{node}"], b"")],
    "admin node revoke": [(["{node}"], b"")],
    "admin node remove": [(["{node}"], b"")],
    "admin image add": [(["{images}/0"], b""), (["{images}/1", "--note", "with jq"], b""), (["{images}/2"], b"")],
    "admin image list": [([], b"")],
    "admin image use": [(["{image0}"], b""), (["{image1}"], b"")],
    "admin image rollback": [([], b""), (["--label", "pool=blue"], b"")],
    "admin image remove": [(["{image2}"], b"")],
    "admin provider set": [(["example", "--base-url", "https://models.example/v1", "--api-key-file", "-"], b"model-key-canary\n")],
    "admin provider list": [([], b"")],
    "admin model set": [(["example/one", "--max-output-tokens", "1024"], b"")],
    "admin model list": [([], b"")],
    "admin price set": [(["example/one", "--input", "0.25", "--output", "2"], b""), (["--run-fee", "0", "--compute", "0.0002"], b"")],
    "help": [(["admin", "node"], b"")],
    "version": [([], b"")],
}
OFFLINE = {"help", "version", "logout"}  # nobody is asked
ID = "0" * 32
NOBODY = {"run": f"run_{ID}", "ended": f"run_{ID}", "failed": f"run_{ID}", "org": f"org_{ID}", "key": "eph_" + "A" * 43, "spare": f"key_{ID}",
          "node": f"node_{ID}", "images": "IMAGES", "image0": ID * 2, "image1": ID * 2, "image2": ID * 2}


def words(verb, case, names):
    """(arguments, standard input) of a case with the names filled in."""
    arguments, given = CASES[verb][case]
    return [*verb.split(), *(word.format(**names) for word in arguments)], given.decode().format(**names).encode()
