"""What the small HTTP servers have in common with which hosts hear each other."""

import http
from http.server import BaseHTTPRequestHandler


class QuietHandler(BaseHTTPRequestHandler):
    """Logs nothing, and takes an asker that is gone for the end of its request."""

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
