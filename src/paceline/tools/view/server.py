"""The live page's server: its addresses, and who may read them.

Other web pages in the same browser can send requests to a server on this machine, and so can its other users. So the
first address has a token; it becomes a cookie that no script can read and no other site can send. A request that
another site caused is refused, and one for a name that is not this server's (DNS rebinding). Nothing in a request
becomes a path.
"""

import contextlib
import hmac
import http
import ipaddress
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

from paceline.base.errors import UserError
from paceline.base.serving import QuietHandler, Server
from paceline.tools.view.follow import Views
from paceline.tools.view.report import FILES, asset

_EVERY_S = 1.0  # between two looks at the files
_ALIVE_EVERY_S = 10.0  # without news: a message by which each side notices that the other one is gone
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_View = dict[str, Any]


class News:
    """The views of the runs, for any number of readers."""

    def __init__(self, runs: Views):
        self._runs = runs
        self._views: dict[int, _View] = {}
        self._version = 0
        self._changed = threading.Condition()

    def follow(self) -> None:
        while True:
            if new := {index: view.as_json() for index, view in self._runs.update()}:
                with self._changed:
                    self._views |= new
                    self._version += 1
                    self._changed.notify_all()
            time.sleep(_EVERY_S)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yields what is known, then the fields that change; after a while without a change, a message without any."""
        sent: dict[int, _View] = {}
        version = -1
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._version != version, _ALIVE_EVERY_S)  # noqa: B023
                views, version = dict(self._views), self._version
            changes = {index: _changes(sent.get(index, {}), view) for index, view in views.items()}
            yield {
                "now": time.time(),
                "path": str(self._runs.path),
                "runs": {index: changed for index, changed in changes.items() if changed},
            }
            sent = views


def _changes(before: _View, now: _View) -> _View:
    return {name: value for name, value in now.items() if name not in before or before[name] != value}


class PageServer(Server):
    """`url` is what to open: the address with the token."""

    def __init__(self, views: Views, host: str, port: int):
        """Raises UserError if it cannot listen there."""
        try:
            super().__init__((host, port), _Handler)
        except socket.gaierror as error:
            raise UserError(f"--host is {host}: {error.strerror}; name an address of this machine") from None
        self.news, self.host, self.token = News(views), host, secrets.token_urlsafe(24)
        # The name is random: a browser sends a cookie to all ports of a host, such as tunnels to several servers.
        self.cookie = f"paceline-{secrets.token_hex(4)}={self.token}"
        self.files = {f"/{name}": (kind, asset(name).encode()) for name, kind in FILES.items()}
        self.files["/"] = self.files.pop("/page.html")
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/?token={self.token}"

    def serve(self) -> None:
        threading.Thread(target=self.news.follow, daemon=True).start()
        with self:
            self.serve_forever(0.1)


class _Handler(QuietHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "paceline", ""
    timeout = 30.0

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if refusal := self._refusal():
            self._answer(*refusal)
        elif _equal(parse_qs(query).get("token", [""])[0], self.server.token):
            self.send_response(http.HTTPStatus.SEE_OTHER)
            self.send_header("Set-Cookie", f"{self.server.cookie}; HttpOnly; SameSite=Strict; Path=/")
            self._end("text/plain", {"Location": "/", "Content-Length": "0"})
        elif not any(_equal(each.strip(), self.server.cookie) for each in self.headers.get("Cookie", "").split(";")):
            self._answer(http.HTTPStatus.UNAUTHORIZED, "open the address that `paceline watch` printed")
        elif path == "/events":
            self._stream()
        elif path in self.server.files:
            kind, body = self.server.files[path]
            self.send_response(http.HTTPStatus.OK)
            self._end(kind, {"Content-Length": str(len(body))}, body)
        else:
            self._answer(http.HTTPStatus.NOT_FOUND, "there is no such page")

    def _refusal(self) -> tuple[int, str] | None:
        if not _is_name_of(self.headers.get("Host", ""), self.server.host):
            return http.HTTPStatus.MISDIRECTED_REQUEST, "this server has another name"
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return http.HTTPStatus.FORBIDDEN, "another site asked; paste the address into the browser instead"
        return None

    def _answer(self, status: int, sentence: str) -> None:
        body = f"{sentence}\n".encode()
        self.send_response(status)
        self._end("text/plain", {"Content-Length": str(len(body))}, body)

    def _end(self, kind: str, headers: dict[str, str], body: bytes = b"") -> None:
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        """Sends server-sent events (html.spec.whatwg.org, section 9.2) until the reader is gone."""
        self.send_response(http.HTTPStatus.OK)
        self._end("text/event-stream", {"Connection": "close"}, b"retry: 1000\n\n")
        for message in self.server.news.messages():
            body = json.dumps(message, separators=(",", ":"), allow_nan=False)
            self.wfile.write(f"data: {body}\n\n".encode())


def _is_name_of(header: str, host: str) -> bool:
    """Whether a Host header names this server: by an address, by localhost, or as --host does. Other names may be made
    to lead here by whoever owns them. Any port: a tunnel may begin at another one."""
    name = ""
    with contextlib.suppress(ValueError):
        name = urlsplit(f"//{header}").hostname or ""
        ipaddress.ip_address(name)
        return True
    return name in ("localhost", host.lower())


def _equal(text: str, expected: str) -> bool:
    return hmac.compare_digest(text.encode(errors="replace"), expected.encode())
