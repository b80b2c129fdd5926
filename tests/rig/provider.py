"""A model provider in a process that no fault touches: it plays the turns of a prompt (client.turns), waits before an answer while a test
holds it, and keeps its own tally of what it was asked and what it said, against which a run's meter is checked. It is a script, no model."""
import collections
import http.server
import json
import re
import threading

INPUT_PRICE, OUTPUT_PRICE = 50_000, 400_000  # micros for a million tokens

Call = collections.namedtuple("Call", "call attempt input output whole")


class Provider:
    """address: where it listens; hosts in networks of their own reach it at one that all of them know."""

    def __init__(self, address="127.0.0.1"):
        self.gate = threading.Event()               # a turn with "gate": true is answered when it is open
        self.closing = threading.Event()            # a turn with "late": N is answered after N seconds
        self.calls = collections.defaultdict(list)  # run id -> [Call]
        self._holds = {}                            # run id -> (reached, released)
        self._lock = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_POST(self):
                outer.answer(self)

        self.server = http.server.ThreadingHTTPServer((address, 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://{address}:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.1,), daemon=True).start()

    def serve_to(self, control):
        """Makes it the provider of a control plane, with a model that costs something."""
        control.operator("PUT", "/providers/tally", json={"base_url": self.url, "api_key": "no-secret-at-all", "any_address": True})
        control.operator("PUT", "/models/tally/auto", json={"default": True})
        control.operator("PUT", "/prices/tally/auto", json={"input_micros_per_million": INPUT_PRICE, "output_micros_per_million": OUTPUT_PRICE})
        control.set_prices(compute_micros_per_million_ms=200_000)

    def close(self):
        self.gate.set()
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

    # --- holding an answer back ------------------------------------------------------------------------------------------------------

    def hold(self, run_id):
        """The answer that follows the run's last command waits until release(); returns the event that says that it does."""
        with self._lock:
            self._holds[run_id] = (threading.Event(), threading.Event())
            return self._holds[run_id][0]

    def release(self, run_id):
        with self._lock:
            hold = self._holds.pop(run_id, None)
        if hold:
            hold[1].set()

    def _wait(self, run_id):
        with self._lock:
            hold = self._holds.get(run_id)
        if hold:
            hold[0].set()
            hold[1].wait(120)

    # --- answers ---------------------------------------------------------------------------------------------------------------------

    def answer(self, request):
        body = request.rfile.read(int(request.headers["Content-Length"]))
        run_id, call, attempt = request.headers["X-Request-Id"].rsplit("-", 2)
        messages = json.loads(body)["messages"]
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        script = json.loads(re.search(r"```turns\n(.*?)\n```", messages[last]["content"], re.S).group(1))
        turn = script[sum(m["role"] == "assistant" for m in messages[last:])]
        if "text" in turn:
            self._wait(run_id)
        if turn.get("gate"):
            self.gate.wait(120)
        self.closing.wait(turn.get("late", 0))
        tokens = (-(-len(body) // 4), 20)
        whole = False
        try:
            self._send(request, turn, tokens)
            whole = True
        except OSError:
            request.close_connection = True
        with self._lock:
            self.calls[run_id].append(Call(int(call), int(attempt), *tokens, whole))

    @staticmethod
    def _send(request, turn, tokens):
        delta = {"role": "assistant", "content": turn.get("text")}
        if "tool_calls" in turn:
            delta["tool_calls"] = [{"index": i, "id": f"call_{i}", "type": "function", "function": {"name": c["name"], "arguments": json.dumps(c["arguments"])}}
                                   for i, c in enumerate(turn["tool_calls"])]
        pieces = [
            {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls" if "tool_calls" in turn else "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}},
        ]
        text = "".join(f"data: {json.dumps(dict(piece, id='x', object='chat.completion.chunk'))}\n\n" for piece in pieces) + "data: [DONE]\n\n"
        request.send_response(200)
        request.send_header("Content-Type", "text/event-stream")
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text.encode())
        request.wfile.flush()

    # --- the tally -------------------------------------------------------------------------------------------------------------------

    def tally(self, run_id):
        with self._lock:
            return list(self.calls[run_id])


def price(calls):
    """What these calls cost, each rounded up as a call is."""
    return sum(-(-(c.input * INPUT_PRICE + c.output * OUTPUT_PRICE) // 1_000_000) for c in calls)
