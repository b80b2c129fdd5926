"""The link between a host and its control plane, where somebody else answers in the control plane's place."""
import socket
import threading

import control as control_rig
import node as node_rig
import wait


class Forwarder:
    """Takes connections at one address and passes their bytes to another; counts them."""

    def __init__(self, address, to):
        self.to, self.count = to, 0
        self.listener = socket.create_server(address)
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            self.count += 1
            far = socket.create_connection(self.to)
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self.copy, args=(a, b), daemon=True).start()

    @staticmethod
    def copy(a, b):
        try:
            while data := a.recv(65536):
                b.sendall(data)
            b.shutdown(socket.SHUT_WR)
        except OSError:
            a.close()
            b.close()

    def close(self):
        self.listener.close()


def link_address(control):
    host, _, port = control.addresses["link"].rpartition("//")[2].rpartition(":")
    return host, int(port)


def test_another_control_plane_at_the_same_address(cluster, bin_dir, image):
    """A whole control plane, with an authority of its own, where the host's used to be: the host tries, and says not a word to it."""
    with control_rig.Control(cluster, bin_dir) as other:
        control = control_rig.Control(cluster, bin_dir)
        node = node_rig.Node(control, bin_dir, image)
        try:
            node.start()
            address = link_address(control)
            control.stop()
            before = len(node.log.read_text(errors="replace"))
            forwarder = Forwarder(address, link_address(other))

            def said():
                return "state=up" in node.log.read_text(errors="replace")[before:]

            wait.until(lambda: forwarder.count >= 3 or said(), 60, "the host to try")
            assert not said(), "the host takes any control plane for its own"
            assert other.operator("GET", "/nodes?limit=10")["data"] == []
            forwarder.close()
        finally:
            node.close()
            control.close()
