"""The network between a host and its controlds: plain TCP pumps that a test can cut, either by resetting every connection and refusing new
ones, or in silence: connections stay up and nothing passes, as behind a dead router. What TCP had not delivered comes when it is mended.
Or stuck: the connections that are there never say a word again, new ones are fine. Or slow: all that passes is late."""
import socket
import struct
import threading

import wait

RESET, SILENT, STUCK = "reset", "silent", "stuck"


class Proxy:
    """Listens on a port of its own and passes everything on to `target` (host:port), `late` seconds later, each way."""

    def __init__(self, target, address="127.0.0.1", late=0.0):
        host, port = target.rsplit(":", 1)
        self.target = (host, int(port))
        self.here, self.late, self.passed = address, late, 0
        self.mode = None
        self.pairs = set()
        self.lock = threading.Lock()
        self.flowing = threading.Event()
        self.flowing.set()
        self.stuck = []
        self.listener = self._listen(0)
        self.address = f"{address}:{self.listener.getsockname()[1]}"

    def _listen(self, port):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.here, port))
        listener.listen(64)
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def _accept(self, listener):
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near):
        try:
            far = socket.create_connection(self.target, 10)
        except OSError:
            self._reset(near)
            return
        with self.lock:
            self.pairs.add((near, far))
        pumps = [threading.Thread(target=self._pump, args=(*pair, self.flowing), daemon=True) for pair in ((near, far), (far, near))]
        for pump in pumps:
            pump.start()
        for pump in pumps:
            pump.join()
        with self.lock:
            self.pairs.discard((near, far))
        near.close()
        far.close()

    def _pump(self, source, sink, flowing):
        try:
            while data := source.recv(65536):
                flowing.wait()
                if self.late:
                    wait.fault_lasts(self.late)
                self.passed += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            self._reset(source, sink)

    @staticmethod
    def _reset(*sockets):
        for s in sockets:
            try:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def cut(self, mode):
        self.mode = mode
        if mode == SILENT:
            self.flowing.clear()
            return
        if mode == STUCK:
            self.stuck.append(self.flowing)
            self.flowing.clear()
            self.flowing = threading.Event()
            self.flowing.set()
            return
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        with self.lock:
            pairs = list(self.pairs)
        for pair in pairs:
            self._reset(*pair)
        wait.until(lambda: not self.pairs, 10, "every connection to be cut")

    def mend(self):
        if self.mode == RESET:
            self.listener = self._listen(int(self.address.rsplit(":", 1)[1]))
        self.mode = None
        self.flowing.set()

    def close(self):
        for flowing in (self.flowing, *self.stuck):
            flowing.set()
        for s in [self.listener, *(s for pair in list(self.pairs) for s in pair)]:
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.listener.close()
