"""The small HTTP servers, of doctors, the live page and Prometheus, and how doctors ask each other."""

import http
import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from paceline.base.net import listen


class Server(ThreadingHTTPServer):
    """Listens at this address only, on `port`. Raises UserError if it cannot."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]):
        listener = listen(*address)
        self.port: int = listener.getsockname()[1]
        super().__init__((address[0], self.port), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener

    def begin(self) -> None:
        """Serves from a thread until `end`."""
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class QuietHandler(BaseHTTPRequestHandler):
    """Logs nothing. If the client has disconnected, the request ends without an error."""

    def begin(self, num_bytes: int, kind: str = "") -> None:
        self.send_response(http.HTTPStatus.OK)
        if kind:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(num_bytes))
        self.end_headers()

    def answer(self, body: bytes, kind: str = "") -> None:
        self.begin(len(body), kind)
        self.wfile.write(body)

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None: ...


def fetch(address: tuple[str, int], name: str, timeout_s: float) -> http.client.HTTPResponse:
    """Returns a server's answer, to read. Raises FileNotFoundError if it has no such thing, OSError, HTTPException."""
    connection = http.client.HTTPConnection(*address, timeout=timeout_s)
    connection.request("GET", f"/{name}")
    answer = connection.getresponse()
    if answer.status != http.HTTPStatus.OK:
        answer.close()
        raise FileNotFoundError(f"{address[0]}:{address[1]} has no {name}")
    return answer
