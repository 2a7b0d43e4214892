"""Who may read the live page, and what its stream says."""

import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from program import Program
from simulated_run import Simulated

from paceline.base.errors import UserError
from paceline.cli import watch
from paceline.tools.view.follow import Views
from paceline.tools.view.server import PageServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    server = PageServer(Views(tmp_path / "runs"), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(*server.server_address, timeout=20)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def status(server: PageServer, path: str, method: str = "GET", **headers: str) -> int:
    with ask(server, path, method, **headers) as answer:
        answer.read()
        return answer.status


def test_the_token_becomes_a_cookie_that_only_this_page_sends(server: PageServer) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", server.url)
    with ask(server, server.url.partition(str(server.server_address[1]))[2]) as answer:
        assert answer.status == 303
        assert answer.headers["Location"] == "/"  # the address with the token is not the page's
        name_and_value, *attributes = answer.headers["Set-Cookie"].split("; ")
    assert set(attributes) == {"HttpOnly", "SameSite=Strict", "Path=/"}
    for path in ("/", "/page.css", "/uPlot.js", "/charts.js", "/page.js"):
        assert status(server, path, Cookie=f"other={{}}; {name_and_value}") == 200
        for cookie in ("", name_and_value[:-1], name_and_value + "x", f"x{name_and_value}", "é"):
            assert status(server, path, Cookie=cookie.encode().decode("latin-1")) == 401
    assert status(server, "/events") == 401
    assert status(server, "/?token=") == status(server, "/?token=x") == status(server, "/?token=%C3%A9") == 401


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:9000", 200),  # a tunnel that begins at another port
        ("[::1]:9000", 200),
        ("10.1.2.3", 200),  # an address cannot be made to lead elsewhere
        ("evil.example:{port}", 421),
        ("localhost.evil.example", 421),
        ("", 421),
        ("[::1", 421),
    ],
)
def test_another_name_is_misdirected(server: PageServer, host: str, expected: int) -> None:
    given = host.format(port=server.server_address[1])
    assert status(server, "/", Host=given, Cookie=server.cookie) == expected


def test_other_sites_and_other_methods_are_refused(server: PageServer, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "secret.txt").write_text("secret")
    for site, expected in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        assert status(server, "/", Cookie=server.cookie, **{"Sec-Fetch-Site": site}) == expected
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert status(server, "/", method, Cookie=server.cookie) == 501
    outside = ("/../pyproject.toml", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/secret.txt", "/runs/secret.txt")
    for path in (*outside, f"{tmp_path}/runs/secret.txt", "/events/", "/page.html", "x://["):
        assert status(server, path, Cookie=server.cookie) == 404


def test_the_page_may_load_nothing_but_its_own_files(server: PageServer) -> None:
    with ask(server, "/", Cookie=server.cookie) as answer:
        page, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["form-action"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    scripts = [(f' src="{name}"', "") for name in ("uPlot.js", "charts.js", "page.js")]
    assert re.findall(r"<script(.*?)>(.*?)</script>", page, re.DOTALL) == scripts
    assert not re.search(r"<style|\sstyle=|\son\w+=|https?:", page)
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_the_stream_says_all_at_first_and_then_what_changes(server: PageServer, tmp_path: Path) -> None:
    with ask(server, "/events", Cookie=server.cookie) as answer:

        def message() -> dict[str, Any]:
            while not (line := answer.readline()).startswith(b"data: "):
                assert line
            found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            return found

        assert message()["runs"] == {}  # there is no run yet
        made = Simulated(tmp_path / "runs" / "one")
        while not (found := message()["runs"]):
            pass
        assert found["0"]["said"] == "running"
        made.steps(3)
        while "step" not in (found := message()["runs"]["0"]):
            pass
        assert found["step"] == "3 of 500"
        assert found["curves"]["steps"]["step"] == [1, 2, 3]
        assert found.keys().isdisjoint({"name", "said", "events", "resumed"})
    with ask(server, "/events", Cookie=server.cookie) as again:
        lines = [again.readline() for _ in range(3)]
    assert json.loads(lines[-1].removeprefix(b"data: "))["runs"]["0"]["name"] == "one"


def test_only_this_machine_reaches_it(tmp_path: Path) -> None:
    with Program("watch", str(tmp_path), "--page", "--port", "0") as program:
        program.wait_for(lambda: "Ctrl-C" in program._said())
        port = int(re.findall(r"127\.0\.0\.1:(\d+)/", program._said())[0])
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):  # whoever listens on all addresses listens on this one, too
            socket.create_connection(("127.0.0.2", port))


def test_a_port_that_is_taken_is_named(server: PageServer, tmp_path: Path) -> None:
    port = server.server_address[1]
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: .*; choose another port, or end what"):
        PageServer(Views(tmp_path), "127.0.0.1", port)


def test_a_second_page_takes_a_free_port_unless_one_was_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match="choose another port"):
            watch._page_server(Views(tmp_path), "127.0.0.1", port)
        monkeypatch.setattr(watch, "_PORT", port)  # the default
        with watch._page_server(Views(tmp_path), "127.0.0.1", port) as server:
            assert server.server_address[1] != port
