"""Data sets on the hub, played by a server on this machine that speaks as much of its protocol as is asked for."""

import gzip
import hashlib
import io
import json
import random
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.base.errors import UserError
from paceline.data import documents as documents_module
from paceline.data import hub
from paceline.data.cache import ensure_datasets, inspect_data
from paceline.data.config import DataConfig, Quiet, Recipe
from paceline.data.documents import Skipped, read, whole
from paceline.data.find import find
from paceline.data.parts import cut
from paceline.data.sources import SourceFile, Sources
from paceline.data.split import split_text

constants = pytest.importorskip("huggingface_hub.constants")

Files = dict[str, bytes]


class Hub(ThreadingHTTPServer):
    """Repositories by (ORG/NAME, revision); `answers` is the size of each range that was fetched."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[tuple[str, str], Files] = {}
        self.gated: set[str] = set()
        self.answers: list[int] = []


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            if self._files(match[1], match[2]) is not None:
                self._answer_json({"id": match[1], "sha": "0" * 40, "siblings": [], "tags": []})
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/(main|refs/convert/parquet)(?:/(.+))?", path):
            files = self._files(match[1], match[2])
            if files is not None:
                wanted = f"{match[3]}/" if match[3] else ""
                self._answer_json([entry(n, c) for n, c in files.items() if n.startswith(wanted)])
        elif match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/(main|refs/convert/parquet)/(.+)", path):
            files = self._files(match[1], match[2])
            if match[1] in self.server.gated:  # such a repository can be listed, and not read
                self._refuse(403, "GatedRepo")
            elif files is not None:
                self._answer_range(files[match[3]])
        else:
            self.send_error(500, path)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        path = unquote(urlsplit(self.path).path)
        match = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/paths-info/(.+)", path)
        assert match, path
        files = self._files(match[1], match[2]) or {}
        wanted = json.loads(body)["paths"] if body.startswith("{") else [unquote(body.split("=")[-1])]
        self._answer_json([entry(name, files[name]) for name in wanted if name in files])

    def _files(self, repository: str, revision: str | None) -> Files | None:
        found = self.server.repositories.get((repository, revision or "main"))
        if found is None:
            known = any(repository == name for name, _ in self.server.repositories)
            self._refuse(404, "RevisionNotFound" if known else "RepoNotFound")
        return found

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": f"{code} it is"})

    def _answer_json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _answer_range(self, content: bytes) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["range"])
        assert match, "a whole file was asked for"
        part = content[int(match[1]) : int(match[2]) + 1]
        self.server.answers.append(len(part))
        self._send(206, part, {"Content-Range": f"bytes {match[1]}-{match[2]}/{len(content)}"})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


def entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def be_at(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """What the library makes of HF_ENDPOINT when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + template[template.index("/{repo_id}") :])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    be_at(monkeypatch, f"http://127.0.0.1:{made.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_RANGE_BYTES", 1 << 16)
    monkeypatch.setattr(documents_module, "_READ_BYTES", 1 << 14)
    monkeypatch.setattr(documents_module, "_CELL_BYTES", 1 << 17)
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


class Said(Quiet):
    text = ""

    def say(self, text: str) -> None:
        self.text += f"{text}\n"


def parquet(found: list[str]) -> bytes:
    content = io.BytesIO()
    small = {"row_group_size": 1000, "data_page_size": 1 << 14, "write_batch_size": 16, "use_dictionary": False}
    pq.write_table(pa.table({"text": found, "url": found}), content, **small)
    return content.getvalue()


def documents(sources: Sources, part_bytes: int = 0) -> list[str]:
    parts = cut(sources.files, Recipe(), part_bytes)
    return ["".join(document.slices) for part in parts for of in part for document in read(of, Recipe(), [])]


def long_texts(seed: int, count: int = 500) -> list[str]:
    return [random.Random(seed + i).randbytes(400).hex() for i in range(count)]


def test_a_repository_is_read_in_ranges(server: Hub) -> None:
    first, second = long_texts(1), long_texts(1000)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in second).encode()
    server.repositories["some/text", "main"] = {
        "data/b.parquet": parquet(first),
        "data/c.jsonl.gz": gzip.compress(lines),
        "a/plain.txt": b"plain\r\ntext",
        "README.md": b"what it is",
        ".gitattributes": b"x",
        "empty.jsonl": b"",
    }
    sources = find(["hub:some/text"])
    assert [(f.name, f.format, f.compression) for f in sources.files] == [
        ("some/text/a/plain.txt", "text", ""),
        ("some/text/data/b.parquet", "parquet", ""),
        ("some/text/data/c.jsonl.gz", "jsonl", "gzip"),
    ]
    assert sources.name == "some-text"
    stored = [len(server.repositories["some/text", "main"][f.name.removeprefix("some/text/")]) for f in sources.files]
    assert [f.num_bytes for f in sources.files] == stored
    assert documents(sources) == ["plain\ntext", *first, *second]
    assert max(server.answers) <= 2 * hub._RANGE_BYTES
    assert sum(server.answers) < 2 * sum(stored)
    stamps = [f.stamp for f in sources.files]
    server.repositories["some/text", "main"]["data/b.parquet"] = parquet(first[:7])
    again = find(["hub:some/text"])
    assert [f.stamp == stamp for f, stamp in zip(again.files, stamps, strict=True)] == [True, False, True]


def test_parts_are_read_by_themselves(server: Hub) -> None:
    found = long_texts(1, 800)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in found).encode()
    server.repositories["some/text", "main"] = {"a.parquet": parquet(found), "b.jsonl": lines}
    for pattern in ("hub:some/text:*.parquet", "hf://datasets/some/text/b.*"):
        sources = find([pattern])
        assert documents(sources) == documents(sources, 100_000) == found


def test_a_plain_text_is_split_without_fetching_it(server: Hub) -> None:
    server.repositories["some/text", "main"] = {"a.txt": b"a line\n" * 100_000}
    files = split_text(find(["hub:some/text"]).files)
    assert [file.split for file in files] == ["train", "validation"]
    assert sum(server.answers) <= 2 * hub._RANGE_BYTES
    assert "".join(documents(Sources("x", files))) == "a line\n" * 100_000


def test_what_the_hub_made_parquet_of(server: Hub) -> None:
    server.repositories["some/text", "main"] = {"data.tar": b"something else"}
    with pytest.raises(UserError, match="holds no text files, JSONL or Parquet"):
        find(["hub:some/text"])
    server.repositories["some/text", "refs/convert/parquet"] = {"default/train/0000.parquet": parquet(["one", "two"])}
    sources = find(["hub:some/text"])
    assert documents(sources) == ["one", "two"]
    assert sources.files[0].name == "some/text/default/train/0000.parquet"


def test_what_is_wrong_is_said(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repositories["some/text", "main"] = {"a.jsonl": b'{"text": "a"}'}
    for spec, says in [
        ("hub:some/nothing", "some/nothing is not on the hub, or is private"),
        ("hub:some/text:*.parquet", "holds no text files, JSONL or Parquet"),
        ("hub:text", "write hub:ORG/NAME"),
    ]:
        with pytest.raises(UserError) as error:
            find([spec])
        assert says in str(error.value)
    sources = find(["hub:some/text"])
    server.gated.add("some/text")
    with pytest.raises(UserError, match=r"a\.jsonl on the hub is gated"):
        documents(sources)
    be_at(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"could not be read from the hub.*try again"):
        find(["hub:some/text"])


def test_tokens_that_are_here_need_no_hub(server: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Finds: a restart in an outage of the hub ended the run, though its tokens lay in the cache (mutations: any
    failure counts as an outage; the folder of another vocabulary is taken)."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    server.repositories["some/text", "main"] = {"a.txt": "\n".join(long_texts(1)).encode()}
    config, said = DataConfig(path="hub:some/text", tokenizer_vocab=300), Said()
    made = ensure_datasets(config, said, 1)
    assert "taken as it is" not in said.text
    endpoint = constants.ENDPOINT
    be_at(monkeypatch, "http://127.0.0.1:9")
    inspect_data(config, 0)
    assert ensure_datasets(config, said, 1) == made
    assert "could not be read from the hub" in said.text
    assert f"{made[0]}, which was prepared before, is taken as it is" in said.text
    for other in (replace(config, tokenizer_vocab=310), replace(config, path="hub:some/more")):
        with pytest.raises(UserError, match="could not be read from the hub"):
            ensure_datasets(other, said, 1)
    be_at(monkeypatch, endpoint)
    del server.repositories["some/text", "main"]
    for refused in (partial(inspect_data, config, 0), partial(ensure_datasets, config, said, 1)):
        with pytest.raises(UserError, match="is not on the hub"):
            refused()


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install huggingface_hub"):
        find(["hub:some/text"])


@pytest.mark.parametrize("name", ["hub:org/name:*.txt", "hf://datasets/org/name"])
def test_what_is_on_the_hub_has_the_same_name_in_any_folder(name: str) -> None:
    """Finds: a run that cannot be resumed without --data.path, because its config has /folder/hub:org/name."""
    assert DataConfig(path=name).absolute().path == name
    assert DataConfig(mix=(f"{name}=2",)).absolute().mix == (f"{name}=2",)


class Lost(io.BytesIO):
    """The hub's file when the network fails."""

    def readinto(self, *_: Any) -> int:
        raise ConnectionError("the network is gone")

    read = readinto  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.parquet", b"<html>" * 9), ("a.parquet", parquet(["one"])[:-9]), ("a.jsonl.gz", gzip.compress(b"{}" * 9)[:-9])],
)
def test_a_damaged_file_is_skipped_and_a_failing_network_is_not(
    monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    """Of thousands of files on the hub one that is damaged stopped a preparation for good."""
    kind, _, compression = name.removeprefix("a.").partition(".")
    file = SourceFile(name, f"hf://datasets/some/text/{name}", kind, "gzip" if compression else "", len(content), "x")
    recipe, skipped = Recipe(on_error="skip"), list[Skipped]()
    monkeypatch.setattr(hub, "open_file", lambda _: io.BytesIO(content))
    assert list(read(whole(file), recipe, skipped)) == []
    assert [each.source for each in skipped] == [file.path]
    with pytest.raises(UserError):
        list(read(whole(file), Recipe(), skipped))
    monkeypatch.setattr(hub, "open_file", lambda _: Lost(content))
    with pytest.raises(UserError, match="could not be read from the hub") as error:
        list(read(whole(file), recipe, skipped))
    assert error.value.is_of_system
    assert len(skipped) == 1


def test_a_file_that_became_shorter_is_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    file = SourceFile("a.jsonl", "hf://datasets/some/text/a.jsonl", "jsonl", "", 100, "x")
    monkeypatch.setattr(hub, "open_file", lambda _: io.BytesIO(b'{"text": "a"}\n'))
    with pytest.raises(UserError, match="became shorter"):
        list(read(whole(file), Recipe(on_error="skip"), []))
