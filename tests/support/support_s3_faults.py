"""A proxy that damages the traffic between the library and a server of S3, as a seed or a plan says.

Faults: `refuse` (503, the server sees nothing), `forget` (the server does it, the answer is 500), `hang_up` (the server does
it, the connection ends without an answer), `cut` (half of the answer comes), `twice` (the server gets it twice, the second
answer comes), `slow`, `conflict` (409 ConditionalRequestConflict, the server sees nothing).
"""

import collections
import contextlib
import random
import socket
import threading
import time

FAULTS = ("refuse", "forget", "hang_up", "cut", "twice", "slow")


def answer(status, code):
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>made by the test</Message></Error>".encode()
    return b"HTTP/1.1 %s\r\nContent-Type: application/xml\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (
        status.encode(), len(body), body)


class FaultProxy:
    """plan: faults of the first requests, None for none; `share`: of those after it, drawn by `seed`."""

    def __init__(self, endpoint, share=0.0, seed=1, plan=(), only=None):
        self.upstream = endpoint.removeprefix("http://").split(":")
        self.share, self.seed, self.plan, self.only = share, seed, list(plan), only
        self.counts, self.requests = collections.Counter(), []
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.endpoint = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def close(self):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def choose(self, line):
        with self.lock:
            self.requests.append(line)
            if self.only and not self.only(line):
                return None
            if self.plan:
                fault = self.plan.pop(0)
            else:
                draw = random.Random(f"{self.seed}/{len(self.requests)}")
                fault = draw.choice(FAULTS) if draw.random() < self.share else None
            self.counts[fault] += 1
            return fault

    def forward(self, head, body):
        with socket.create_connection(self.upstream) as server:
            server.sendall(head + body)
            pieces = []
            while piece := server.recv(1 << 16):
                pieces.append(piece)
            return b"".join(pieces)

    def serve(self, client):
        with client, contextlib.suppress(OSError):
            data = b""
            while b"\r\n\r\n" not in data:
                piece = client.recv(1 << 16)
                if not piece:
                    return
                data += piece
            head, body = data.split(b"\r\n\r\n", 1)
            lines = head.split(b"\r\n")
            fields = {n.strip().lower(): v.strip() for n, v in (line.split(b":", 1) for line in lines[1:])}
            if b"expect" in fields:
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            while len(body) < int(fields.get(b"content-length", 0)):
                body += client.recv(1 << 16)
            kept = [line for line in lines if not line.lower().startswith((b"expect:", b"connection:"))]
            self.respond(client, b"\r\n".join([*kept, b"Connection: close", b"", b""]), body)

    def respond(self, client, head, body):
        fault = self.choose(head.split(b"\r\n")[0].decode())
        if fault == "refuse":
            client.sendall(answer("503 Slow Down", "SlowDown"))
            return
        if fault == "conflict":
            client.sendall(answer("409 Conflict", "ConditionalRequestConflict"))
            return
        if fault == "flip" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault == "slow":
            time.sleep(0.1)
        came = self.forward(head, body)
        if fault == "twice":
            came = self.forward(head, body)
        if fault == "forget":
            came = answer("500 Internal Server Error", "InternalError")
        if fault == "hang_up":
            return
        if fault == "cut":
            start = came.find(b"\r\n\r\n") + 4
            came = came[:start + (len(came) - start) // 2] if len(came) > start else came[:start // 2]
        client.sendall(came)
