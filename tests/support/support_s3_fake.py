"""A server that says what a test wants, to requests of S3 and of services that give credentials. It keeps what it was asked."""

import contextlib
import email
import hashlib
import hmac
import socket
import ssl
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Fake:
    """answer(request) returns (status, headers, body). A request has `method`, `path`, `headers` and `body`."""

    def __init__(self, answer, certificate=None):
        self.requests, self.connections = [], 0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                fake.connections += 1

            def handle_any(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = types.SimpleNamespace(method=self.command, path=self.path, headers=self.headers, body=body)
                fake.requests.append(request)
                status, headers, body = answer(request)
                self.send_response_only(status)
                headers.setdefault("Date", self.date_time_string())
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def log_message(self, *_):
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_):
                pass  # a client that does not trust the certificate hangs up

        self.server = Quiet(("127.0.0.1", 0), Handler)
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)
        self.endpoint = f"{'https' if certificate else 'http'}://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def signer(request):
    """The access key that signed a request."""
    return request.headers["Authorization"].split("Credential=")[1].split("/")[0]


def signature_valid(request, secret):
    """Computes the signature of version 4 from what came, without the code under test."""
    fields = dict(part.strip().split("=", 1) for part in request.headers["Authorization"].split(" ", 1)[1].split(","))
    names, date = fields["SignedHeaders"].split(";"), request.headers["x-amz-date"]
    path, _, query = request.path.partition("?")
    canonical = "\n".join([request.method, path, query, *(f"{n}:{request.headers[n].strip()}" for n in names), "",
                           ";".join(names), request.headers["x-amz-content-sha256"]])
    scope = fields["Credential"].split("/")[1:]
    text = "\n".join(["AWS4-HMAC-SHA256", date, "/".join(scope), hashlib.sha256(canonical.encode()).hexdigest()])
    key = b"AWS4" + secret.encode()
    for part in [*scope, text]:
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    body = hashlib.sha256(request.body).hexdigest() == request.headers["x-amz-content-sha256"]
    return body and scope[0] == date[:8] and hmac.compare_digest(key.hex(), fields["Signature"])


def problem(status, code, more="", headers=None):
    return status, headers or {}, f"<Error><Code>{code}</Code><Message>from the test</Message>{more}</Error>".encode()


class RawFake:
    """answer(request) returns the bytes that are sent; then the connection ends. For answers that no sane server gives."""

    def __init__(self, answer):
        self.requests, self.answer = [], answer
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client):
        with client, client.makefile("rb") as lines, contextlib.suppress(OSError):
            method, path, _ = lines.readline().decode().split(" ", 2)
            headers = email.message_from_bytes(b"".join(iter(lines.readline, b"\r\n")))
            body = lines.read(int(headers.get("Content-Length", 0)))
            request = types.SimpleNamespace(method=method, path=path, headers=headers, body=body)
            self.requests.append(request)
            client.sendall(self.answer(request))
            client.shutdown(socket.SHUT_WR)
            client.recv(1)  # an end with unread data would be a reset

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


class Bucket:
    """The answers of a server that keeps objects in memory, for Fake. `damage(request, answer)` may replace an answer once it was carried out."""

    def __init__(self, damage=lambda request, answer: answer, conditions=True):
        self.objects, self.lock, self.damage, self.conditions = {}, threading.Lock(), damage, conditions

    def __call__(self, request):
        with self.lock:
            return self.damage(request, self.carry_out(request))

    def carry_out(self, request):
        if request.method == "PUT":
            if self.conditions and request.headers.get("If-None-Match") and request.path in self.objects:
                return problem(412, "PreconditionFailed")
            self.objects[request.path] = request
            return 200, {"ETag": '"tag"'}, b""
        if request.method == "DELETE":
            self.objects.pop(request.path, None)
            return 204, {}, b""
        there = self.objects.get(request.path)
        if not there:
            return problem(404, "NoSuchKey")
        return 200, {"x-amz-meta-ckptdelta-writer": there.headers["x-amz-meta-ckptdelta-writer"]}, there.body
