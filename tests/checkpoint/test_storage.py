"""A run at an address: complete checkpoints only, one writer, and a server that is gone costs nothing. By file://,
whose operations are those of a bucket (test_storage_s3.py has a server)."""

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from saving import OPTIMIZER, WEIGHTS, keep, read
from whole_runs import events, saved, status_of, tiny

from paceline.base.errors import EXIT_RESUMABLE, RunError, UserError
from paceline.checkpoint.bring import bring
from paceline.checkpoint.bucket import IDENTITY, Bucket, identity
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.retention import set_aside
from paceline.checkpoint.steps import MANIFEST, folder_name, list_steps
from paceline.checkpoint.storage import OwnedByOther, Storage
from paceline.cli import train as train_command
from paceline.cli.flags import parse
from paceline.cli.resume import ResumeArguments, _brought
from paceline.cli.train import TrainArguments

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cli"))
from in_process import here
from program import run


class At:
    """A run folder and an address; their steps."""

    def __init__(self, base: Path):
        self.run, self.there = base / "run", base / "bucket/run"
        self.url = self.there.as_uri()
        self.run.mkdir(parents=True)
        (self.run / "config.toml").write_text("[train]\n")

    def save(self, *steps: int, num_kept: int = 2) -> None:
        for step in steps:
            keep(self.run / "checkpoints", step, num_kept)
            (self.run / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')

    @property
    def steps(self) -> list[int]:
        """The complete ones there."""
        return [step for step in Bucket(self.url).steps() if Bucket(self.url).manifest(step)]

    @contextlib.contextmanager
    def sending(self, retry_s: float = 30.0, resume_step: int | None = None) -> Iterator[Storage]:
        sender = Storage(self.url, self.run, CheckpointConfig(to=self.url, retry_s=retry_s))
        sender.begin(brings=False, progress=lambda: None, resume_step=resume_step)
        yield sender
        self.end(sender)

    def end(self, sender: Storage) -> None:
        while sender.is_ending_within(0.01):
            pass
        sender.release()
        sender._threads[0].join()

    def send(self, retry_s: float = 30.0, resume_step: int | None = None) -> list[str]:
        """Sends what there is, and returns what is said."""
        with self.sending(retry_s, resume_step) as sender:
            pass
        return [sentence for sentence, _ in sender.take_news() if sentence]


@pytest.fixture
def at(tmp_path: Path) -> Iterator[At]:
    quick = {"_BEAT_S": 0.05, "_SILENT_BEATS": 20, "_RETRY_S": 0.01}
    with patch.multiple("paceline.checkpoint.storage", **quick):
        yield At(tmp_path)


def test_a_manifest_comes_last_and_retention_is_that_of_the_run_folder(at: At) -> None:
    """Mutation: a manifest is sent before the files that it lists."""
    order: list[str] = []
    write, send = Bucket.write, Bucket.send
    with (
        patch.object(Bucket, "write", lambda *args, **kw: order.append(args[1]) or write(*args, **kw)),
        patch.object(Bucket, "send", lambda *args: order.append(args[2]) or send(*args)),
    ):
        at.save(1, 2)
        at.there.mkdir(parents=True)
        (at.there / "owner.json").touch()  # of a process that was killed as it wrote it
        assert at.send() == []
    manifest = order.index(f"checkpoints/{folder_name(2)}/{MANIFEST}")
    first = order.index(f"checkpoints/{folder_name(2)}/{WEIGHTS}")
    assert first < order.index("metrics.jsonl") < manifest
    assert sum(folder_name(2) in name for name in order[:manifest]) == 2  # weights and optimizer
    at.save(3, 4, num_kept=2)
    at.send()
    assert at.steps == list_steps(at.run / "checkpoints") == [3, 4]
    assert json.loads((at.there / "metrics.jsonl").read_text()) == {"step": 4}
    target = at.run.parent / "other"
    bring(at.url, target)  # the newest only: what is older there stays until newer ones are there
    assert list_steps(target / "checkpoints") == [4]
    at.run = target
    at.save(5)
    at.send()
    assert at.steps == [4, 5]


def test_what_is_brought_is_verified(at: At) -> None:
    """Mutation: the bytes that come are not compared with the manifest."""
    at.save(1, 2)
    at.send()
    path = at.there / "checkpoints" / folder_name(2) / WEIGHTS
    path.write_bytes(bytes([*path.read_bytes()[:-1], path.read_bytes()[-1] ^ 1]))
    target = at.run.parent / "other"
    assert "sha256 differs" in bring(at.url, target)[0]
    assert list_steps(target / "checkpoints") == [1]
    assert read(target / "checkpoints" / folder_name(1)) == read(at.run / "checkpoints" / folder_name(1))
    assert not list((target / "checkpoints").glob(".*"))
    at.run = target  # step 2 is set aside there, and this run continues from 1
    with at.sending() as sender:
        sender.supersede()
    assert at.steps == [1]
    assert (at.there / "checkpoints" / f"superseded-{folder_name(2)}" / MANIFEST).exists()
    (at.there / "checkpoints" / folder_name(1) / MANIFEST).write_bytes(b"{")
    with pytest.raises(RunError, match="unreadable"):
        bring(at.url, at.run.parent / "third")
    with pytest.raises(UserError, match=r"holds no checkpoint of step 7; it has \[1\]"):
        bring(at.url, at.run.parent / "third", step=7)
    with pytest.raises(UserError, match="holds no checkpoint: give the address"):
        bring(f"{at.url}/no", at.run.parent / "third")


def test_a_folder_from_which_the_run_moved_away_gets_what_it_lacks(at: At) -> None:
    """And keeps what it has. Finds: a refusal, "Directory not empty", where one to bring was here already."""
    at.save(2, 4)
    (at.run / "checkpoints/best").write_text(f"{folder_name(2)}\n")
    at.send()
    first, at.run = at.run, at.run.parent / "other"
    bring(at.url, at.run)
    at.save(6)
    at.send()
    manifest = at.there / "checkpoints" / folder_name(6) / MANIFEST
    manifest.rename(aside := at.there / MANIFEST)
    assert "was not sent completely" in bring(at.url, first)[0]
    assert list_steps(first / "checkpoints") == [2, 4]
    aside.rename(manifest)
    for damaged in (False, True):
        if damaged:
            (first / "checkpoints" / folder_name(6) / WEIGHTS).write_bytes(b"half")
        assert bring(at.url, first) == []
        assert list_steps(first / "checkpoints") == [2, 4, 6]
        read(first / "checkpoints" / folder_name(6))


def test_an_earlier_step_is_gone_on_with_where_the_run_was_first(at: At) -> None:
    """Finds: a refusal for ever, because the later steps of another machine were not set aside at the address. They
    are there until the run continues: a resume that is refused after it has begun to send changes nothing."""
    at.save(2, 4)
    at.send()
    first, at.run = at.run, at.run.parent / "other"
    bring(at.url, at.run)
    at.save(6)
    at.send()
    assert bring(at.url, first, step=4) == []
    assert json.loads((first / "metrics.jsonl").read_text()) == {"step": 4}, "it has its own rows"
    at.run = first
    at.send(resume_step=4)
    assert at.steps == [2, 4, 6]
    with at.sending(resume_step=4) as sender:
        sender.supersede()
    assert at.steps == [2, 4]
    assert (at.there / "checkpoints" / f"superseded-{folder_name(6)}" / MANIFEST).exists()


def test_what_was_brought_for_a_named_step_and_not_restored_supersedes_nothing(at: At) -> None:
    """Finds: `resume RUN` after a refused `resume ADDRESS --step N` went back to step N and set all later steps aside,
    also those that another machine had saved since."""
    at.save(2, 4, 6)
    at.send()
    at.run = at.run.parent / "other"
    bring(at.url, at.run, step=4)
    at.send(resume_step=4)  # refused, or killed, before it has restored
    with pytest.raises(OwnedByOther, match=r"has a checkpoint of step 6, and .* none after step 4"):
        at.send()
    with patch.object(Storage, "_send_all"), at.sending(resume_step=4) as sender:
        sender.supersede()  # killed as soon as it has restored
    kept = (at.run / IDENTITY).read_bytes()
    manifest = at.there / "checkpoints" / folder_name(6) / MANIFEST
    before = manifest.read_bytes()
    manifest.write_bytes(before + b" ")  # another machine's step 6
    for step in (4, None):
        with pytest.raises(OwnedByOther, match="has a checkpoint of step 6"):
            at.send(resume_step=step)
    manifest.write_bytes(before)
    for content in (kept, json.dumps({**json.loads(kept), "later": [6]}).encode()):  # before, there were only steps
        (at.run / IDENTITY).write_bytes(content)
        with at.sending() as sender:
            sender.supersede()
        assert at.steps == [4]
        (at.there / "checkpoints" / f"superseded-{folder_name(6)}").rename(manifest.parent)


def test_the_best_one_comes_also_after_an_interrupt(at: At) -> None:
    at.save(2, 4)
    (at.run / "checkpoints/best").write_text(f"{folder_name(2)}\n")
    at.send()
    target, fetch, fetched = at.run.parent / "other", Bucket.fetch, []

    def interrupt(bucket: Bucket, name: str, *rest: Any) -> str | None:
        fetched.append(name)
        if folder_name(2) in name:
            raise KeyboardInterrupt
        return fetch(bucket, name, *rest)

    with patch.object(Bucket, "fetch", interrupt), pytest.raises(KeyboardInterrupt):
        bring(at.url, target)
    assert list_steps(target / "checkpoints") == [4]
    bring(at.url, target)
    assert list_steps(target / "checkpoints") == [2, 4]
    assert (target / "checkpoints/best").read_text() == f"{folder_name(2)}\n"


def test_a_restart_does_not_ask_for_the_step_that_an_attempt_before_went_on_from(
    at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finds: restarts that are refused, since retention has removed that step."""
    at.save(100, 110)
    at.send()
    monkeypatch.chdir(at.run.parent)
    arguments = [at.url, "--step", "100"]
    _brought(arguments)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    at.run = at.run.parent / "runs/run"
    _brought(arguments)
    assert list_steps(at.run / "checkpoints") == [100], "nothing was restored yet"
    with at.sending(resume_step=100) as sender:
        sender.supersede()
    at.save(120, 130)
    at.send()
    assert at.steps == list_steps(at.run / "checkpoints") == [120, 130]
    assert _brought(arguments) == ["runs/run", "--checkpoint.to", at.url, "--step", "100"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(UserError, match="holds no checkpoint of step 100"):
        _brought(arguments)


def test_an_address_is_the_same_with_a_slash_at_its_end(at: At) -> None:
    """Finds: a run that was brought is refused there as another run."""
    at.save(2)
    at.send()
    plain, at.url, at.run = at.url, f"{at.url}/", at.run.parent / "other"
    bring(at.url, at.run)
    assert at.send() == []
    (at.run / IDENTITY).write_text(json.dumps(identity(at.run) | {"to": at.url}))  # as former versions wrote it
    at.url = plain
    assert at.send() == []


def test_resume_auto_brings_the_run_also_after_an_interrupt(at: At) -> None:
    """Finds: a command that is refused for ever, since the records came and no checkpoint."""
    at.save(2)
    at.send()
    target, fetch = at.run.parent / "other", Bucket.fetch
    again = TrainArguments(out=str(target), settings=tiny(checkpoint__to=at.url))

    def interrupt(bucket: Bucket, name: str, *rest: Any) -> str | None:
        if name.endswith(WEIGHTS):
            raise KeyboardInterrupt
        return fetch(bucket, name, *rest)

    with patch.object(Bucket, "fetch", interrupt), pytest.raises(KeyboardInterrupt):
        train_command._bring(again)
    assert (target / "config.toml").exists()
    train_command._bring(again)
    assert list_steps(target / "checkpoints") == [2]


def test_step_0_is_a_step(at: At) -> None:
    at.save(0, 2)
    at.send()
    target = at.run.parent / "other"
    bring(at.url, target)
    bring(at.url, target, step=0)
    assert list_steps(target / "checkpoints") == [0, 2]


def test_the_best_one_of_a_folder_stays_where_the_address_has_an_older_one(at: At) -> None:
    at.save(2, 4)
    (at.run / "checkpoints/best").write_text(f"{folder_name(2)}\n")
    at.send()
    (at.run / "checkpoints/best").write_text(f"{folder_name(4)}\n")  # and killed before that was sent
    bring(at.url, at.run)
    assert (at.run / "checkpoints/best").read_text() == f"{folder_name(4)}\n"


def test_a_folder_of_another_run_is_not_overwritten_by_one_without_an_owner(at: At) -> None:
    at.save(2)
    at.send()
    (at.there / "owner.json").unlink()
    other = at.run.parent / "other"
    other.mkdir()
    (other / "config.toml").write_bytes(b"[another]\n")
    with pytest.raises(UserError, match="is not the run of"):
        bring(at.url, other)
    assert [path.name for path in other.iterdir()] == ["config.toml"]
    assert (other / "config.toml").read_bytes() == b"[another]\n"
    for _ in range(2):
        assert bring(at.url, at.run.parent / "third") == []
        assert list_steps(at.run.parent / "third/checkpoints") == [2]


def test_a_resume_sends_where_the_user_says(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds: a fork that went into the address from which it came."""
    at.save(2)
    at.send()
    monkeypatch.chdir(at.run.parent)
    arguments = _brought([at.url, "--checkpoint.to", f"{at.url}-fork"])
    parsed = parse(ResumeArguments, ResumeArguments(folder=""), arguments, "resume")
    assert (parsed.folder, parsed.settings.checkpoint.to) == ("runs/run", f"{at.url}-fork")
    assert _brought([at.url]) == ["runs/run", "--checkpoint.to", at.url]


def test_a_file_of_a_folder_is_never_seen_in_part(at: At) -> None:
    """Rows of steps before a complete checkpoint were lost where a process was killed as it sent them again."""
    bucket, rows = Bucket(at.url), at.run / "metrics.jsonl"
    rows.write_text("1\n")
    bucket.send(rows, "metrics.jsonl", lambda: None)
    rows.write_text("1\n2\n")
    with pytest.raises(KeyboardInterrupt):
        bucket.send(rows, "metrics.jsonl", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    assert bucket.read("metrics.jsonl") == b"1\n"


def test_one_process_writes_and_another_that_takes_over_ends_it(at: At) -> None:
    """Mutation: who has lost the address still completes checkpoints there."""
    at.save(1)
    with at.sending() as sender:
        while not at.steps:
            sender._ended.wait(0.01)
        with (
            pytest.raises(OwnedByOther, match=r"is being written by another process \(host .*, pid \d+\)"),
            at.sending(),
        ):
            pass
        taken = {**Bucket(at.url).owner(), "token": "another", "host": "b"}
        Bucket(at.url).write("owner.json", json.dumps(taken).encode())
        at.save(2)
        sender.saved(2)
    assert at.steps == [1]
    assert [sentence for sentence, _ in sender.take_news() if sentence] == [
        f"checkpoints are not sent to {at.url}: another process (host b, pid {taken['pid']}) writes there now; nothing "
        "more is sent"
    ]
    assert Bucket(at.url).owner() == taken
    at.send()  # it is silent by now
    assert at.steps == [1, 2]


def test_a_process_of_another_machine_with_this_ones_name_is_not_taken_for_gone(at: At) -> None:
    at.save(1)
    at.send()
    bucket = Bucket(at.url)
    elsewhere = {**bucket.owner(), "is_over": False, "pid": 1 << 30, "place": "another boot", "token": "another"}
    bucket.write("owner.json", json.dumps(elsewhere).encode())
    beat = json.dumps({**elsewhere, "beat": 99}).encode()
    alive = threading.Timer(0.3, bucket.write, ("owner.json", beat))
    alive.start()
    with pytest.raises(OwnedByOther, match="is being written by another process"), at.sending():
        pass
    alive.join()


def test_what_was_set_aside_there_stays_when_a_later_one_of_its_step_is_removed(at: At) -> None:
    """Finds: a checkpoint that retention removes renamed over the one that a resume had set aside."""
    at.save(2, 4)
    at.send()
    set_aside(at.run / "checkpoints", 2)  # as by `resume --step 2`
    at.send()
    kept = at.there / "checkpoints" / f"superseded-{folder_name(4)}"
    before = (kept / MANIFEST).read_bytes()
    keep(at.run / "checkpoints", 4, 2, note="another one of this step")
    at.send()
    at.save(6, 8, num_kept=2)
    at.send()
    assert at.steps == [6, 8]
    assert (kept / MANIFEST).read_bytes() == before
    assert [path.name for path in kept.parent.glob("superseded-*")] == [kept.name]  # the later one is removed
    (at.there / "checkpoints" / folder_name(4)).mkdir()
    (at.there / "checkpoints" / folder_name(4) / WEIGHTS).write_bytes(b"sent in part, and removed here since")
    weights = (kept / WEIGHTS).read_bytes()
    at.send()
    assert (kept / WEIGHTS).read_bytes() == weights
    assert not (at.there / "checkpoints" / folder_name(4)).exists()
    set_aside(at.run / "checkpoints", 6)
    at.save(8)
    set_aside(at.run / "checkpoints", 6)
    at.send()
    assert at.steps == [6]


def test_another_run_or_an_older_copy_does_not_write_there(at: At, tmp_path: Path) -> None:
    at.save(1, 2)
    at.send()
    copy = At(tmp_path / "copy")
    copy.url = at.url
    with pytest.raises(OwnedByOther, match="holds another run, up to step 2: continue that by `paceline resume file:"):
        copy.send()
    (copy.run / IDENTITY).write_bytes((at.run / IDENTITY).read_bytes())
    copy.save(1)
    with pytest.raises(OwnedByOther, match=r"has a checkpoint of step 2, and .* none after step 1"):
        copy.send()
    set_aside(at.run / "checkpoints", 1)  # as by `resume --step 1`
    at.send()
    assert at.steps == [1]


def test_a_server_that_is_gone_is_said_once_and_gets_all_later(at: At) -> None:
    """Mutation: what could not be sent is not tried again."""
    at.save(1)
    with at.sending() as sender:
        while not at.steps:
            sender._ended.wait(0.01)
        gone = threading.Event()

        def refuse(*args: Any) -> None:
            gone.set()
            raise ConnectionError("no route to the server")

        with patch.object(Bucket, "send", refuse):
            for step in (2, 3):
                at.save(step, num_kept=3)
                gone.clear()
                sender.saved(step)
                assert gone.wait(10)
        at.save(4, num_kept=3)
        sender.saved(4)
    assert at.steps == [2, 3, 4]
    (at.run / "checkpoints" / folder_name(3) / WEIGHTS).unlink()  # damaged: it is not sent, and stops nothing
    Bucket(at.url).remove(f"checkpoints/{folder_name(3)}")
    assert at.send() == []
    assert at.steps == [2, 4]
    said = [facts["kind"] for _, facts in sender.take_news()]
    assert said == ["checkpoint sent", "checkpoints not sent", *["checkpoint sent"] * 3, "checkpoints sent again"]


def test_at_the_end_a_server_that_is_gone_is_given_up(at: At) -> None:
    at.save(1)
    with patch.object(Bucket, "send", side_effect=ConnectionError("no route")):
        assert f"{at.url} lacks the end of this run, which {at.run} has" in at.send(retry_s=0.1)
    send = Bucket.send

    def refuse_one(bucket: Bucket, file: Path, *rest: Any) -> None:
        if file.name == OPTIMIZER:
            raise PermissionError("a limit of sizes")
        send(bucket, file, *rest)

    with patch.object(Bucket, "send", refuse_one):  # the weights come again in each try
        assert f"{at.url} lacks the end of this run, which {at.run} has" in at.send(retry_s=0.1)
    assert at.steps == []
    with patch.object(Bucket, "read", side_effect=ConnectionError("no route")):
        at.send(retry_s=0.1)  # it begins all the same: it has sent there before
        (at.run / IDENTITY).unlink()
        with pytest.raises(UserError, match="cannot be used: no route"):
            at.send()


@pytest.mark.long
def test_a_run_goes_on_from_its_address_on_another_machine(tmp_path: Path) -> None:
    """Its losses are those of a run that was never stopped. Mutation: rows of the steps before are not sent."""
    url = (tmp_path / "bucket/x").as_uri()
    config = tiny(checkpoint__to=url, checkpoint__every=2, train__eval_every=-1)
    assert status_of(tmp_path / "a", config.replace("train", stop_at_step=3)) == EXIT_RESUMABLE
    assert saved(tmp_path / "a") == saved(tmp_path / "bucket/x") == [2, 3]
    assert [event["step"] for event in events(tmp_path / "a", "checkpoint sent")] in ([2, 3], [3])
    with pytest.raises(UserError, match="holds another run, up to step 3"):
        status_of(tmp_path / "b", config)
    here("resume", url, cwd=tmp_path).require(0)
    assert status_of(tmp_path / "whole", tiny(train__eval_every=-1)) == 0
    runs = (tmp_path / "runs/x", tmp_path / "whole")
    ends = [events(run, "end")[-1] for run in runs]
    assert ends[0]["digest"] == ends[1]["digest"]
    losses = [[json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()] for run in runs]
    assert losses[0] == losses[1]
    assert (tmp_path / "bucket/x/metrics.jsonl").read_bytes() == (tmp_path / "runs/x/metrics.jsonl").read_bytes()
    assert json.loads((tmp_path / "bucket/x/owner.json").read_text())["is_over"]
    ended = here("resume", url, "--train.steps", "9", cwd=tmp_path / "bucket").require(0)
    assert f"bringing the run at {url} to runs/x" in ended.out
    before = saved(tmp_path / "bucket/x")
    assert before[-1] == 9
    (tmp_path / "third").mkdir()
    resumed = ("resume", url, "--step", str(before[0]))
    assert "comes before" in run(*resumed, "--train.tokens", "384", cwd=tmp_path / "third").require(2).err
    assert "continue by `paceline resume file://" in run("resume", "runs/x", cwd=tmp_path / "third").require(2).err
    assert saved(tmp_path / "bucket/x") == before, "a resume that is refused changes nothing"
    here(*resumed, "--train.steps", str(before[0]), cwd=tmp_path / "third").require(0)
    assert saved(tmp_path / "bucket/x") == before[:1]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://b/run", "s3://b/run needs a package: pip install s3fs"),
        ("/mnt/x", "checkpoint.to is '/mnt/x'; it is s3://BUCKET/RUN, gs://BUCKET/RUN or file:///FOLDER/RUN"),
        ("s3://", "checkpoint.to is 's3://'; it is s3://BUCKET/RUN"),
        ("s3://b/run[1]", "is 's3://b/run[1]': '*', '?' and '[' would name other runs there, too; leave them out"),
        ("gs://b/*", "is 'gs://b/*': '*', '?' and '[' would name other runs there, too; leave them out"),
    ],
)
def test_what_cannot_be_an_address_is_refused(url: str, said: str, tmp_path: Path) -> None:
    with patch.dict(sys.modules, {"s3fs": None}):
        assert said in here("train", "--preset", "tiny", "--checkpoint.to", url, cwd=tmp_path).require(2).err
    assert not list(tmp_path.iterdir())


def test_a_command_from_a_bucket_is_shown_and_not_executed(tmp_path: Path) -> None:
    """Mutation: `resume --run` executes what somebody put into a bucket."""
    at = At(tmp_path)
    (at.run / "config.toml").write_text('[run]\ncommand = "python -c 1"\n')
    at.save(1)
    at.send()
    ended = run("resume", at.url, "--run", cwd=tmp_path).require(2)  # a process: the mistake replaces it
    assert "came from a bucket, so its command may not be yours" in ended.err
    assert "python -c 1" in here("resume", at.url, cwd=tmp_path).require(0).out
