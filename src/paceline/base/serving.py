"""The request handler of the small HTTP servers: launchers, doctors and the live page."""

import http
from http.server import BaseHTTPRequestHandler


class QuietHandler(BaseHTTPRequestHandler):
    """Logs nothing. If the client has disconnected, the request ends without an error."""

    def begin(self, num_bytes: int) -> None:
        self.send_response(http.HTTPStatus.OK)
        self.send_header("Content-Length", str(num_bytes))
        self.end_headers()

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None: ...
