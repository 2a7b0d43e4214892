"""The configuration as text and back; every mistake named; the last word that a person said counts."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.base.errors import UserError
from paceline.config import Config, flatten, from_toml, load_file, load_preset, preset_names, supersede, to_toml

SECTIONS = [item.name for item in dataclasses.fields(Config)]
FIELDS = [
    (section, name, hint)
    for section in SECTIONS
    for name, hint in typing.get_type_hints(type(getattr(Config(), section))).items()
]


def values_of(hint: Any, text: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    if hint == tuple[str, ...]:
        return st.lists(text, max_size=3).map(tuple)
    if choices := typing.get_args(hint):
        return st.sampled_from(choices)
    return {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        str: text,
    }[hint]


@st.composite
def configs(draw: st.DrawFn, text: st.SearchStrategy[str]) -> Config:
    config = Config()
    for section, name, hint in draw(st.lists(st.sampled_from(FIELDS), max_size=25)):
        config = config.replace(section, **{name: draw(values_of(hint, text))})
    return config


ordinary = st.text(st.characters(max_codepoint=0xFFFF, codec="utf-8", exclude_characters="\x7f"))


@given(configs(ordinary))
def test_what_is_written_as_toml_reads_as_the_same_config(config: Config) -> None:
    assert from_toml(to_toml(config), "here", Config()) == config


@given(configs(st.text(st.sampled_from(["a", "/", "🚲", "\x7f", "é", '"', "\\", "\n", "\0"]), min_size=1)))
def test_also_with_emoji_and_control_characters_in_a_path(config: Config) -> None:
    config = config.replace("data", path="🚲" + config.data.path)
    assert from_toml(to_toml(config), "here", Config()) == config


@pytest.mark.parametrize(("section", "name", "hint"), FIELDS, ids=lambda part: str(part))
def test_each_field_can_be_set_and_refuses_another_type(section: str, name: str, hint: Any) -> None:
    wrong = ["[1]", "{}", "1979-05-27"]
    choices = () if hint == tuple[str, ...] else typing.get_args(hint)
    wrong += {int: ["true", "1.5", '"x"'], float: ["true", '"x"'], bool: ["1", '"true"'], str: ["1", "true"]}.get(
        hint, ['"none of them"', "1", "true"]
    )
    for text in wrong:
        with pytest.raises(UserError, match=rf"here: {section}\.{name} is "):
            from_toml(f"[{section}]\n{name} = {text}", "here", Config())
    plain = {int: "3", float: "2", bool: "true", str: '"x"', tuple[str, ...]: '["x"]'}
    good = f'"{choices[-1]}"' if choices else plain[hint]
    found = getattr(getattr(from_toml(f"[{section}]\n{name.replace('_', '-')} = {good}", "h", Config()), section), name)
    assert found == (
        choices[-1] if choices else {int: 3, float: 2.0, bool: True, str: "x", tuple[str, ...]: ("x",)}[hint]
    )
    if hint is float:
        assert type(found) is float


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[modle]\nn_layer = 1", r"no section \[modle\] \(did you mean 'model'\?\)"),
        ("[model]\nn_layr = 1", r"model has no field 'n_layr' \(did you mean 'n_layer'\?\)"),
        ("[model]\nn-layr = 1", r"model has no field 'n-layr' \(did you mean 'n_layer'\?\)"),
        ("[train]\nzzzzzzz = 1", r"train has no field 'zzzzzzz'$"),
        ("[model]\narch = 'lama'", r"model.arch is 'lama' \(did you mean 'llama'\?\); it must be one of gpt2, llama"),
        ("model = 3", r"\[model\] must be a table"),
        ("[model", "is not TOML"),
        ("[[model]]\nn_layer = 1", r"\[model\] must be a table"),
    ],
)
def test_a_mistake_is_named_with_the_nearest_right_name(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as refusal:
        from_toml(text, "file.toml", Config())
    assert "file.toml" in str(refusal.value)
    assert refusal.value.exit_status == 2


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("absent", "binary", "."):
        with pytest.raises(UserError, match="cannot read --config"):
            load_file(tmp_path / name, Config())


# ---- presets ----


def test_the_presets_that_are_promised_are_there() -> None:
    assert {"demo", "gpt2-124m", "gpt2-124m-modern", "tiny"} <= set(preset_names())


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_loads_checks_and_survives_the_run_folder(name: str) -> None:
    config = load_preset(name, Config())
    config.check()
    assert from_toml(to_toml(config), "run", Config()) == config


def test_nanogpts_reproduction_has_its_figures() -> None:
    config = load_preset("gpt2-124m", Config())
    assert (config.model.n_layer, config.model.n_embd, config.data.seq_len) == (12, 768, 1024)
    assert (config.optim.lr, config.train.steps) == (6e-4, 600_000)
    assert config.train.global_batch_size * 1024 == pytest.approx(500_000, rel=0.02)


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no preset is named 'dmo' \(did you mean 'demo'\?\)"):
        load_preset("dmo", Config())


# ---- superseding ----


def test_a_horizon_that_is_given_takes_the_place_of_the_presets() -> None:
    demo = load_preset("demo", Config())
    assert demo.train.time_budget > 0
    changed = from_toml("[train]\nsteps = 7", "x", demo)
    assert (changed.train.steps, changed.train.time_budget) == (7, 0)
    assert (demo.train.max_epochs, changed.train.max_epochs) == (8, 0), "it limits a time"
    changed.check()
    above = from_toml('preset = "demo"\n[train]\nsteps = 7', "x", Config())
    assert (above.train.steps, above.train.time_budget) == (7, 0)
    changed = from_toml("[train]\nglobal_batch_tokens = 4096", "x", demo)
    assert (changed.train.global_batch_tokens, changed.train.global_batch_size) == (4096, 0)


@pytest.mark.parametrize("name", ["n_layer", "n-layer"])
def test_a_size_that_is_given_takes_the_place_of_one_that_is_chosen(name: str) -> None:
    changed = from_toml(f'preset = "demo"\n[model]\n{name} = 9', "x", Config())
    assert (changed.model.size, changed.model.n_layer) == ("given", 9)


def test_two_horizons_given_together_stay_and_are_refused() -> None:
    both = from_toml("[train]\nsteps = 7\ntokens = 100", "x", Config())
    assert (both.train.steps, both.train.tokens) == (7, 100)
    with pytest.raises(UserError, match=r"train\.steps and train\.tokens; give exactly one"):
        both.check()
    with pytest.raises(UserError, match="nothing"):
        Config().check()


def test_what_changes_no_horizon_supersedes_none() -> None:
    demo = load_preset("demo", Config())
    changed = demo.replace("optim", lr=1.0).replace("train", eval_every=3)
    assert supersede(demo, changed) == changed
    assert supersede(demo, demo) == demo


# ---- combinations ----


@pytest.mark.parametrize(
    ("section", "fields", "said"),
    [
        ("train", {"steps": -1}, r"train\.steps is -1"),
        ("train", {"global_batch_size": -4}, r"train\.global-batch-size is -4"),
        ("train", {"global_batch_size": 4, "device_batch_size": 8}, r"train\.device-batch-size is 8, larger"),
        ("train", {"global_batch_size": 4, "global_batch_tokens": 8}, "both given"),
        ("train", {"layered_micro_batches": 0}, r"train\.layered-micro-batches is 0"),
        ("train", {"time_budget": float("nan"), "steps": 0}, r"train\.time-budget is nan"),
        ("train", {"max_epochs": 4.0, "steps": 9}, r"train\.max-epochs is 4, which only limits a train\.time-budget"),
        ("model", {"n_positions": 64}, r"data\.seq-len is 256, longer than the model's positions"),
        ("model", {"n_head": 3}, r"model\.n-embd"),
        ("data", {"seq_len": 0}, r"data\.seq-len is 0"),
        ("parallel", {"port": 70000}, r"parallel\.port is 70000"),
        ("parallel", {"timeout_s": 0.0}, r"parallel\.timeout-s is 0"),
        ("parallel", {"timeout_s": 1e10}, r"parallel\.timeout-s is 1.*; it must be between 1 and 1e\+09 seconds"),
        ("parallel", {"step_timeout_s": float("inf")}, r"parallel\.step-timeout-s is inf; it must be between 1 and"),
        ("parallel", {"backend": "nccl", "device": "cpu"}, "nccl works on GPUs only"),
        ("checkpoint", {"keep": 1}, r"checkpoint\.keep is 1"),
        ("log", {"every": 0}, r"log\.every is 0"),
        ("optim", {"lr": -1.0}, r"optim\.lr is -1"),
    ],
)
def test_impossible_combinations_are_refused_naming_the_field(section: str, fields: dict[str, Any], said: str) -> None:
    good = Config().replace("train", steps=10)
    good.check()
    with pytest.raises(UserError, match=said):
        good.replace(section, **fields).check()


def test_shares_are_of_the_whole_batch() -> None:
    """Finds: shares that are less than the batch, whose other sequences no rank would compute."""
    config = Config().replace("train", steps=10, global_batch_size=4)
    config.replace("parallel", shares="3,1").check()
    for shares in ("2,1", "3,2"):
        with pytest.raises(UserError, match=f"shares {shares} sum to"):
            config.replace("parallel", shares=shares).check()


def test_flattened_names_are_what_a_person_types() -> None:
    flat = flatten(Config())
    assert {"train.steps", "optim.lr", "model.n-layer", "data.seq-len", "train.global-batch-size"} <= set(flat)
    assert len(flat) == len(FIELDS)
    assert not any("_" in name for name in flat)


def test_what_windows_and_generators_write_is_read_or_refused(tmp_path: Path) -> None:
    """A byte order mark, and numbers that no float or int takes, each without a traceback."""
    path = tmp_path / "c.toml"
    path.write_bytes("\ufeff[train]\nsteps = 7\n".encode())
    assert load_file(path, Config()).train.steps == 7
    for text, says in (
        (f"[optim]\nlr = 1{'0' * 400}", "optim.lr has more than 100 digits"),
        (f"[train]\ntokens = 1{'0' * 400}", "train.tokens has more than 100 digits"),
        (f"[train]\nseed = 0x{'f' * 5000}", "train.seed has more than 100 digits"),
        (f"[train]\ndtype = 0x{'f' * 5000}", "train.dtype has more than 100 digits"),
        (f"[data]\nmix = [0x{'f' * 5000}]", "data.mix has more than 100 digits"),
        (f"[optim]\nlr = 1{'0' * 5000}", "is not TOML"),
        ("[model]\nn-layer = 2\nn_layer = 3", "model has the field n_layer twice"),
    ):
        with pytest.raises(UserError, match=says):
            from_toml(text, "c.toml", Config())
