"""A checkpoint has no ranks in it: what any number of writers cut up, any slices of it can be read."""

import errno
import itertools
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Call, run_calls
from saving import ended, keep, save_by, shares

from paceline.base.errors import PacelineError, UserError
from paceline.base.ownership import Slice, cut
from paceline.checkpoint import load, publish, shards
from paceline.checkpoint.config import CheckpointConfig
from paceline.checkpoint.encode import decode, encode
from paceline.checkpoint.manifest import Kind, parts_of, read_manifest
from paceline.checkpoint.save import Saver
from paceline.checkpoint.steps import folder_name
from paceline.checkpoint.writers import find_writers
from paceline.world.group import LocalGroup, SideChannel
from paceline.world.runtime import World


def read(folder: Path, manifest: dict[str, Any], kind: Kind, like: Mapping[Slice, torch.Tensor]) -> Any:
    """What one process reads."""
    group = LocalGroup(torch.device("cpu"))
    return load.receive(group, folder, manifest, kind, {item: t.dtype for item, t in like.items()}, everyone_sees=True)


shape = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@given(st.lists(shape, min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_what_n_writers_wrote_m_readers_read(shapes: list[tuple[int, ...]], n: int, m: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"t{i}.weight": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}
    state = {f"{name}/momentum": torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
    parameters = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        outcomes = save_by(n, Path(folder), 3, tensors, state, {}, CheckpointConfig())
        assert [outcome.problem for outcome in outcomes] == [None] * n
        path, manifest, _ = load.find(Path(folder))
        for kind, wanted in (("weights", tensors), ("optimizer", state)):
            for part in shares(wanted, m):
                found = read(path, manifest, kind, part)
                assert list(found) == list(part)
                assert all(torch.equal(found[item], tensor) for item, tensor in part.items())
        whole, _ = load.read_weights(Path(folder))
        assert {name: tuple(tensor.shape) for name, tensor in whole.items()} == parameters
        assert all(torch.equal(whole[name], tensor) for name, tensor in tensors.items())


def test_what_does_not_fit_is_refused_and_named_never_cast(tmp_path: Path) -> None:
    save_by(2, tmp_path, 1, {"a": torch.zeros(3, 4), "b": torch.zeros(2).bfloat16()}, {}, {}, CheckpointConfig())
    folder, manifest, _ = load.find(tmp_path)
    wanted: tuple[tuple[Kind, Slice, str], ...] = (
        ("weights", Slice("a", 0, 13), r"a is \[3, 4\] in the checkpoint, which has no element 12"),
        ("weights", Slice("b", 0, 2), r"b is torch.bfloat16 in the checkpoint and torch.float32 here"),
        ("weights", Slice("c", 0, 2), "the checkpoint has no c"),
        ("optimizer", Slice("a/exp_avg", 0, 2), "the checkpoint has no a/exp_avg"),
    )
    for kind, item, said in wanted:
        with pytest.raises(ValueError, match=said):
            read(folder, manifest, kind, {item: torch.zeros(0)})
    assert read(folder, manifest, "weights", {Slice("b", 0, 2): torch.zeros(0).bfloat16()})


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([(0, 5), (6, 10)], "t: element 5 is stored nowhere"),
        ([(0, 5), (4, 10)], "t: element 4 is stored twice"),
        ([(0, 5), (5, 9)], "t: 9 of its 10 elements are stored"),
        ([(0, 10), (10, 11)], "t: 11 of its 10 elements are stored"),
        ([(0, 10), (0, 10)], "t: element 0 is stored twice"),
        ([], "t: 0 of its 10 elements are stored"),
    ],
)
def test_gaps_and_overlaps_are_named(pieces: list[tuple[int, int]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parts_of("t", (2, 5), [(start, stop, writer) for writer, (start, stop) in enumerate(pieces)])


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([{(0, 5): torch.float32}, {(6, 10): torch.float32}], "t: element 5 is stored nowhere"),
        ([{(0, 6): torch.float32}, {(5, 10): torch.float32}], "t: element 5 is stored twice"),
        ([{(0, 5): torch.float32}, {(5, 10): torch.float16}], "t is of float32 and of float16"),
        ([{}, {}], "t: no writer has an element of it"),
    ],
)
def test_parts_that_make_no_whole_make_no_checkpoint(tmp_path: Path, parts: list[Any], said: str) -> None:
    savers = [Saver(tmp_path, CheckpointConfig(), writer, 2, token="t") for writer in (0, 1)]
    for saver, part in zip(savers, parts, strict=True):
        mine = {Slice("t", *edges): torch.zeros(edges[1] - edges[0], dtype=dtype) for edges, dtype in part.items()}
        saver.begin(5, {"weights": mine}, {"t": (10,)}, {})
    for saver in savers:
        saver.finish()
    outcome = savers[0].take_outcome()
    assert outcome is not None
    assert outcome.problem is not None
    assert said in outcome.problem
    assert list(tmp_path.iterdir()) == []


def test_a_dict_comes_back_with_the_keys_that_it_had() -> None:
    state = {(0, 1): 5, (("a", 2), None): {3: [1]}, 0.5: "half", True: {"(tensor)": 1}, "c": {"(key, value)": []}}
    assert decode(*encode(state, "x")) == state


# ---- ranks ----

SHAPES = {"a.weight": (7, 9), "b.weight": (130,), "c.weight": (3,)}


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def state(step: int) -> dict[str, torch.Tensor]:
    return {f"{name}/exp_avg": -tensor for name, tensor in tensors(step).items()}


def matches(found: dict[Slice, torch.Tensor], whole: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(t, whole[item.name].view(-1)[item.start : item.stop]) for item, t in found.items())


def on_three_ranks(world: World, shared: str, full_disk: str, damaged: str) -> dict[str, Any]:
    """Ranks 0 and 1 see the folder; rank 2 sends its part, and receives. Then all see it."""
    channel = SideChannel()
    savers = {folder: make_saver(world, folder, channel) for folder in (shared, full_disk)}
    steps = (shared, 10), (shared, 20), (full_disk, 21), (shared, 30)
    seen: dict[str, Any] = {"problems": [save(world, savers[folder], step) for folder, step in steps]}
    for everyone_sees in (False, True):
        hidden = world.rank == 2 and not everyone_sees
        answer = load.agree(world.group, Path("/nonexistent" if hidden else shared), None, everyone_sees)
        seen |= {f"{name} {everyone_sees}": value for name, value in receive(world, answer, everyone_sees).items()}
        answer = load.agree(world.group, Path("/nonexistent" if hidden else damaged), None, everyone_sees)
        seen[f"damaged {everyone_sees}"] = answer[1]["step"], answer[2]
    for name, folder, wanted_step in (("step", damaged, 11), ("none", damaged, 20), ("empty", full_disk, None)):
        try:
            load.agree(world.group, Path(folder), wanted_step, everyone_sees=True)
        except PacelineError as error:
            seen[name] = type(error).__name__, str(error), error.reach
    return seen


def find_in_own(world: World, folder: str) -> list[int]:
    return find_writers(world.group, Path(folder) / f"{world.rank}")[0]


def send_what_is_gone(world: World, folder: str) -> list[dict[str, Any]]:
    """Rank 2 sends a file that vanished after it was written, then one that is there. Returns the records that came."""
    channel, records = SideChannel(), []
    for name in ("gone", "there"):
        received, file = Path(folder) / f"received-{name}", Path(folder) / name
        if world.rank == 2:
            facts = shards.write_checked(file, [b"x" * 100])
            if name == "gone":
                file.unlink()
            publish.send(channel, file.parent, {"files": {name: facts}})
        if world.rank == 0:
            received.mkdir()
            publish.receive(channel, 2, 2, received)
            records.append(json.loads((received / "writer-00002.json").read_bytes()))
    return records


def test_a_disk_that_cannot_rename_folders_is_named_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finds: training for hours, of which no checkpoint can get its name at the end. Some mounted buckets are so."""
    assert find_writers(LocalGroup(torch.device("cpu")), tmp_path)[0] == [0]
    rename = os.rename

    def only_files(old: Path, new: Path) -> None:
        if Path(old).is_dir():
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        rename(old, new)

    monkeypatch.setattr(os, "rename", only_files)
    with pytest.raises(UserError, match=r"cannot be renamed: Function not implemented\. .*another file system"):
        find_writers(LocalGroup(torch.device("cpu")), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] in ([], [".seen"])


def make_saver(world: World, folder: str, channel: SideChannel) -> Saver:
    return Saver(Path(folder), CheckpointConfig(), world.rank, 3, token="t", channel=channel, senders=[2])


def save(world: World, saver: Saver, step: int) -> str | None:
    """Returns this rank's problem. That of step 20 is spoilt: rank 2's tensors are not what their slices
    say."""
    mine = shares(tensors(step), 3)[world.rank]
    if step == 20 and world.rank == 2:
        mine = {item: tensor[:-1] for item, tensor in mine.items()}
    saver.begin(step, {"weights": mine, "optimizer": shares(state(step), 3)[world.rank]}, SHAPES, {"progress": step})
    outcome = ended(saver)
    world.group.barrier()
    return outcome.problem


def receive(world: World, answer: load.Whole, everyone_sees: bool) -> dict[str, Any]:
    """Whether this rank got what it wanted, and what all say to what one rank cannot use."""
    folder, manifest, problems = answer
    seen: dict[str, Any] = {"found": (manifest["step"], problems)}
    dtype = torch.float16 if world.rank == 1 else torch.float32
    kinds: tuple[tuple[Kind, dict[str, torch.Tensor]], ...] = ("weights", tensors(30)), ("optimizer", state(30))
    for kind, whole in kinds:
        wanted = [Slice(name, 0, tensor.numel()) for name, tensor in whole.items()]
        if kind == "optimizer":
            wanted = cut(wanted, 3)[2 - world.rank]
        found = load.receive(world.group, folder, manifest, kind, dict.fromkeys(wanted, torch.float32), everyone_sees)
        seen[kind] = list(found) == wanted and matches(found, whole)
    try:
        load.receive(world.group, folder, manifest, "weights", {Slice("b.weight", 0, 3): dtype}, everyone_sees)
    except ValueError as error:
        seen["refused"] = str(error)
    return seen


def test_ranks_save_and_load_together_also_where_one_does_not_see_the_folder(tmp_path: Path) -> None:
    """And a rank that cannot read the token does not see the folder. Finds: a rank that could not read what it had
    written sent nothing more, and rank 0 waited for half an hour, or died by the next save's bytes."""
    shared, full_disk, damaged = (tmp_path / name for name in ("shared", "full", "damaged"))
    full_disk.mkdir()
    aside = publish.unfinished_folder(full_disk, 21, "t-1")
    (aside / "weights-00002-of-00003.safetensors").mkdir(parents=True)  # where rank 2's part is to be
    keep(damaged, 10)
    (keep(damaged, 20) / "optimizer-00000-of-00001.safetensors").unlink()
    (tmp_path / "0").mkdir()
    for rank in "12":
        (tmp_path / rank / ".seen").mkdir(parents=True)  # reading it fails, as a file of another user does
    calls = {
        "found": Call(find_in_own, str(tmp_path)),
        "sent": Call(send_what_is_gone, str(tmp_path)),
        "saved": Call(on_three_ranks, str(shared), str(full_disk), str(damaged)),
    }
    answers = run_calls(calls, 3)
    assert answers["found"] == [[0]] * 3
    (gone, there), *_ = answers["sent"]
    assert gone == {"problem": "gone: other bytes have arrived than were sent"}
    assert there["files"]["there"]["bytes"] == 100
    ranks = answers["saved"]
    first, spoilt, in_the_way, last = ranks[0]["problems"]
    assert (first, last) == (None, None)
    assert spoilt.startswith("writer 2: ")
    assert "elements" in spoilt
    assert "weights-00002-of-00003.safetensors: File exists" in in_the_way
    assert [rank["problems"][0::3] for rank in ranks] == [[None, None]] * 3
    assert sorted(os.listdir(shared)) == ["index.jsonl", "latest", "step-00000010", "step-00000030"]
    assert os.listdir(full_disk) == []
    names = [
        f"{kind}-0000{i}-of-00003.safetensors" for kind, i in itertools.product(("optimizer", "weights"), range(3))
    ]
    manifest = read_manifest(shared / folder_name(30))
    assert list(manifest["files"]) == names
    for rank in ranks:
        for sees in (False, True):
            assert rank[f"weights {sees}"]
            assert rank[f"optimizer {sees}"]
            assert rank[f"found {sees}"] == (30, [])
            assert rank[f"refused {sees}"] == "b.weight is torch.float32 in the checkpoint and torch.float16 here"
            step, problems = rank[f"damaged {sees}"]
            assert (step, problems) == (10, ["step-00000020: no optimizer-00000-of-00001.safetensors"])
        assert rank["step"][0] == "UserError"
        assert "no checkpoint of step 11" in rank["step"][1]
        assert rank["none"][0] == "RunError"
        assert "step-00000020" in rank["none"][1]
        assert rank["empty"][0] == "NothingSaved"
        assert {rank[name][2] for name in ("step", "none", "empty")} == {"world"}
