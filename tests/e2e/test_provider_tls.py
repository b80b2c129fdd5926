"""A provider over TLS: who is no provider by its certificate hears neither key nor prompt."""
import socket
import ssl
import threading

import pytest
from client import check_timeline


class Impostor:
    """Speaks TLS with a certificate that no authority of this machine vouches for; keeps what it is told."""

    def __init__(self, certificate, key):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.context, self.heard, self.tried = context, b"", 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                plain, _ = self.listener.accept()
            except OSError:
                return
            self.tried += 1
            try:
                with self.context.wrap_socket(plain, server_side=True) as talk:
                    self.heard += talk.recv(65536)
            except OSError:
                continue

    def close(self):
        self.listener.close()


@pytest.mark.guest
def test_a_certificate_that_nobody_vouches_for(make_stack):
    stack = make_stack(node={"max_vms": 1})
    control = stack.control
    tls = control.home / "tls"
    impostor = Impostor(tls / "server.pem", tls / "server.key")
    control.operator("PUT", "/providers/impostor", json={"base_url": f"https://127.0.0.1:{impostor.port}/v1", "api_key": "sk-canary", "any_address": True})
    control.operator("PUT", "/models/impostor/m", json={})
    control.operator("PUT", "/prices/impostor/m", json={"input_micros_per_million": 50_000, "output_micros_per_million": 400_000})
    client = stack.client()
    run = client.settled(client.create(prompt="prompt-canary", model="impostor/m")["id"], 120)
    impostor.close()
    assert impostor.tried > 0
    assert impostor.heard == b"", "any certificate is taken for a provider's"
    assert run["status"] == "failed" and run["error"]["code"] == "model_error", run["error"]
    assert "certificate" in run["error"]["message"], run["error"]
    assert run["cost"]["model_micros"] == 0
    check_timeline(run, client.events(run["id"]))
