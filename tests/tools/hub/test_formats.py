"""From and to Hugging Face formats: what transformers computes is what we compute, there and back.

One module, because importing transformers takes seconds; a process that only collects these tests does without. Every
parameter is random, norms and biases too: what is put into the wrong place shows.
"""

import dataclasses
import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import safetensors.torch
import torch
import torch.nn.functional as F
from program import run
from torch import Tensor

from paceline.base.errors import RunError, UserError
from paceline.checkpoint import load, writers
from paceline.cli import sample
from paceline.cli import train as train_command
from paceline.config import Config, from_toml, to_toml
from paceline.data import tokenizer as tok
from paceline.data.config import DataConfig, Quiet
from paceline.model.config import ModelConfig
from paceline.model.generate import generate
from paceline.model.gpt import GPT, build
from paceline.record import folder as run_folder
from paceline.tools.hub.exporting import export_run
from paceline.tools.hub.importing import import_model
from paceline.tools.hub.tensors import from_theirs, gpt2_layout, nanogpt_layout, to_theirs
from paceline.tools.hub.writing import new_folder
from paceline.train.data import open_data
from paceline.train.initial import check_data, load_initial, require_same_shape, require_same_tokenizer
from paceline.world.group import from_rank_0


@pytest.fixture(scope="module", autouse=True)
def _import_transformers() -> None:
    global transformers
    import transformers


TEXT = "def paceline(rank):\n    return rank + 1  # <|endoftext|> naïve 数字 \U0001f6b4\n"
VOCAB = 300
PROMPT = [5, 17, 250, 3, 99, 42, 7, 7]
# Of logits up to 1.4 to 2.8. Measured: at most 9e-7, and 2e-6 for GPT-2's own size.
CLOSE = 1e-5


@pytest.fixture(scope="module")
def tokenizer() -> tok.Tokenizer:
    found = tok.Tokenizer(tok.train([Path(__file__).read_text()], VOCAB))
    assert found.vocab_size == VOCAB
    return found


def shuffled(parameters: Any, scale: float = 0.3) -> None:
    """Gives each parameter random values, the same ones every time."""
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)


THEIRS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB, n_positions=24, n_embd=32, n_layer=2, n_head=4)
    ),
    "gpt2 untied, own width, exact gelu, padded": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=320,
            n_positions=24,
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_inner=48,
            activation_function="gelu",
            layer_norm_epsilon=1e-3,
            tie_word_embeddings=False,
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(llama_config(num_key_value_heads=2)),
    "llama tied": lambda: transformers.LlamaForCausalLM(llama_config(tie_word_embeddings=True, rms_norm_eps=1e-3)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**llama_settings(num_key_value_heads=2, head_dim=8, tie_word_embeddings=True))
    ),
}


def llama_settings(**settings: Any) -> dict[str, Any]:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    rope = {"rope_type": "default", "rope_theta": 500.0}
    rest = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 24, "rope_parameters": rope}
    return {**sizes, **rest, **settings}


def llama_config(**settings: Any) -> Any:
    return transformers.LlamaConfig(**llama_settings(**settings))


def their_model(name: str) -> Any:
    model = THEIRS[name]().eval()
    shuffled(model.parameters())
    return model


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def their_logits(model: Any, ids: list[int] = PROMPT) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.tensor([ids])).logits
    return found


def our_model(folder: Path) -> GPT:
    """The newest weights of a run folder in the model that its config describes."""
    config = from_toml((folder / "config.toml").read_text(), "config.toml", Config())
    model = build(config.model, 0, "cpu")
    model.load_state_dict(load.read_weights(folder / "checkpoints", None)[0])
    return model.eval()


def our_logits(model: GPT, ids: list[int] = PROMPT) -> Tensor:
    with torch.no_grad():
        return model.logits(torch.tensor([ids]))


def make_run(folder: Path, model: ModelConfig, tokenizer: tok.Tokenizer | None = None) -> GPT:
    """A run folder with random weights, and its model."""
    ours = build(model, 0, "cpu").eval()
    shuffled(ours.parameters())
    found = run_folder.create(folder)
    found.config.write_text(to_toml(Config(model=model)))
    if tokenizer is not None:
        found.tokenizer.write_text(tokenizer.json)
    writers.save_complete(found.checkpoints, 7, dict(ours.named_parameters()), {}, {})
    return ours


@pytest.mark.parametrize("name", THEIRS)
def test_a_model_of_transformers_computes_the_same_here_and_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    theirs = their_model(name)
    import_model(str(saved(theirs, tmp_path / "theirs")), tmp_path / "run")
    assert (our_logits(our_model(tmp_path / "run")) - their_logits(theirs)).abs().max() < CLOSE
    assert their_logits(theirs).abs().max() > 1.0

    export_run(tmp_path / "run", tmp_path / "back", None, "float32")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert type(back) is type(theirs)
    assert torch.equal(their_logits(back), their_logits(theirs))
    for kept in ("activation_function", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "layer_norm_epsilon"):
        assert getattr(back.config, kept, None) == getattr(theirs.config, kept, None), kept
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert len({path.stat().st_mode for path in (tmp_path / "back").iterdir()}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "run", "theirs"]


SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 24, "vocab_size": VOCAB}
OURS = {
    "gpt2": ModelConfig(arch="gpt2", **SMALL),
    "gpt2 with biases, tanh": ModelConfig(arch="gpt2", bias=True, gelu="tanh", **SMALL),
    "gpt2 untied, own width": ModelConfig(arch="gpt2", head="untied", n_hidden=48, dropout=0.1, **SMALL),
    "llama": ModelConfig(**SMALL),
    "llama tied, grouped": ModelConfig(n_kv_head=1, head="tied", rope_theta=300.0, norm_eps=1e-3, **SMALL),
    "llama qk-norm, grouped, padded": ModelConfig(qk_norm=True, n_kv_head=2, **{**SMALL, "vocab_size": 384}),
}


@pytest.mark.parametrize("name", OURS)
def test_transformers_computes_writes_and_cuts_text_like_the_run_that_was_exported(
    name: str, tmp_path: Path, tokenizer: tok.Tokenizer
) -> None:
    ours = make_run(tmp_path / "run", OURS[name], tokenizer)
    export_run(tmp_path / "run", tmp_path / "theirs", None, "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    assert theirs.dtype == torch.float32
    assert (our_logits(ours) - their_logits(theirs)).abs().max() < CLOSE

    cutter = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert cutter.encode(TEXT, add_special_tokens=False, split_special_tokens=True) == tokenizer.encode(TEXT)
    assert cutter.eos_token_id == tokenizer.end_of_text
    prompt = tokenizer.prompt("def pace")
    written = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    expected = list(generate(ours, prompt, 12, temperature=0, stop=tokenizer.end_of_text))
    assert written == expected
    assert cutter.decode(written, skip_special_tokens=True) == tokenizer.decode(expected)

    export_run(tmp_path / "run", tmp_path / "half", 7, "bfloat16")
    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert half.dtype == torch.bfloat16
    for parameter, rounded in zip(theirs.parameters(), half.parameters(), strict=True):
        assert torch.equal(parameter.bfloat16(), rounded)


@pytest.mark.parametrize("kind", ["bytes", "characters", "none"])
def test_other_tokenizers_go_with_the_export_and_none_is_said(kind: str, tmp_path: Path) -> None:
    alphabet = dict(enumerate("abcdefgh \n"))
    made = {"bytes": tok.bytes_tokenizer, "characters": lambda: tok.character_tokenizer(alphabet), "none": lambda: None}
    tokenizer = made[kind]()
    make_run(tmp_path / "run", OURS["llama"], tokenizer)
    said = export_run(tmp_path / "run", tmp_path / "theirs", None, "float32")
    if tokenizer is None:
        assert "no tokenizer" in said[-1]
        assert not [path for path in (tmp_path / "theirs").iterdir() if "token" in path.name]
        return
    cutter = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    text = "a bad cafe" if kind == "bytes" else "a bad cab\nfeed"
    assert cutter.encode(text) == tokenizer.encode(text)
    assert cutter.decode(cutter.encode(text)) == text


def test_shards_half_precision_and_a_bare_tied_model_are_read(tmp_path: Path) -> None:
    theirs = their_model("gpt2").to(torch.bfloat16)
    saved(theirs, tmp_path / "shards", max_shard_size="30KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) == 3
    import_model(str(tmp_path / "shards"), tmp_path / "run")
    expected = their_logits(theirs.float())
    assert (our_logits(our_model(tmp_path / "run")) - expected).abs().max() < CLOSE

    # As OpenAI's repository has it: names without `transformer.`, and the causal masks among the weights.
    saved(theirs, tmp_path / "bare")
    weights = safetensors.torch.load_file(tmp_path / "bare" / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 24, 24, dtype=torch.uint8).tril() for layer in range(2)}
    head = {"lm_head.weight": bare["wte.weight"].clone()}
    safetensors.torch.save_file({**bare, **masks, **head}, tmp_path / "bare" / "model.safetensors")
    import_model(str(tmp_path / "bare"), tmp_path / "again")
    assert (our_logits(our_model(tmp_path / "again")) - expected).abs().max() < CLOSE


def test_rotary_positions_are_read_as_transformers_4_wrote_them(tmp_path: Path, pristine: dict[str, Path]) -> None:
    folder = shutil.copytree(pristine["llama"], tmp_path / "theirs")
    edit(folder, rope_parameters=None, rope_scaling=None, rope_theta=30.0)
    import_model(str(folder), tmp_path / "run")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert (our_logits(our_model(tmp_path / "run")) - their_logits(theirs)).abs().max() < CLOSE
    assert (their_logits(theirs) - their_logits(their_model("llama"))).abs().max() > 1e-2


def test_transformers_4_is_told_to_be_too_old(
    tmp_path: Path, pristine: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config has rope_theta and rope_scaling instead; an AttributeError was shown."""
    settings = {name: value for name, value in llama_config().to_dict().items() if name != "rope_parameters"}
    monkeypatch.setattr(transformers.LlamaConfig, "from_dict", lambda _: SimpleNamespace(**settings))
    with pytest.raises(UserError, match=r"config\.json, and an older one is installed: pip install 'transformers>=5'"):
        import_model(str(pristine["llama"]), tmp_path / "run")


def test_a_tokenizer_of_the_time_before_tokenizer_json_is_made_from_its_two_files(tmp_path: Path) -> None:
    theirs = saved(their_model("gpt2 untied, own width, exact gelu, padded"), tmp_path / "theirs")
    learnt = transformers.GPT2Tokenizer()
    learnt = learnt.train_new_from_iterator([Path(__file__).read_text()], 310, show_progress=False)
    model = json.loads(learnt.backend_tokenizer.to_str())["model"]
    (theirs / "vocab.json").write_text(json.dumps(model["vocab"]))
    (theirs / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    import_model(str(theirs), tmp_path / "run")
    ours = tok.Tokenizer.load(tmp_path / "run" / "tokenizer.json")
    assert ours.document_token == "<|endoftext|>"
    text = TEXT.replace("<|endoftext|>", "it's 1234  ")
    assert ours.encode(text) == learnt.encode(text)
    assert ours.decode(ours.encode(text)) == text

    (theirs / "vocab.json").write_text(json.dumps({**model["vocab"], "beyond": 400}))
    said = import_model(str(theirs), tmp_path / "without")
    assert "ids reach 400" in said[-1]
    assert not (tmp_path / "without" / "tokenizer.json").exists()


def nanogpt_weights(bias: bool) -> dict[str, Tensor]:
    """A state dict as nanoGPT's model has it, with the masks of old torch versions."""
    width, shapes = 32, {"wte.weight": (VOCAB, 32), "wpe.weight": (24, 32), "ln_f.weight": (32,), "ln_f.bias": (32,)}
    for layer in range(2):
        for name, outs, ins in (
            ("attn.c_attn", 3 * width, width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", 4 * width, width),
            ("mlp.c_proj", width, 4 * width),
        ):
            shapes |= {f"h.{layer}.{name}.weight": (outs, ins), f"h.{layer}.{name}.bias": (outs,)}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{layer}.{name}.weight": (width,), f"h.{layer}.{name}.bias": (width,)}
    generator = torch.Generator().manual_seed(2)
    weights = {
        f"transformer.{name}": torch.randn(shape, generator=generator) * 0.3
        for name, shape in shapes.items()
        if bias or not name.endswith("bias")
    }
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 24, 24).tril()
    return weights


def nanogpt_logits(weights: dict[str, Tensor], ids: list[int], num_heads: int = 4) -> Tensor:
    """The same model computed step by step from its paper: pre-norm, exact GELU, [out, in] matrices."""
    found = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    x = found["wte.weight"][ids] + found["wpe.weight"][: len(ids)]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ found[f"{name}.weight"].T + found.get(f"{name}.bias", torch.zeros(1))

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], found[f"{name}.weight"], found.get(f"{name}.bias"), 1e-5)

    for layer in range(2):
        qkv = linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn").split(32, -1)
        q, k, v = (part.view(len(ids), num_heads, -1).transpose(0, 1) for part in qkv)
        scores = (q @ k.transpose(1, 2) / (32 // num_heads) ** 0.5).masked_fill(
            torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1), -torch.inf
        )
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(ids), 32)
        x = x + linear(mixed, f"h.{layer}.attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")), f"h.{layer}.mlp.c_proj")
    return norm(x, "ln_f") @ found["wte.weight"].T


def nanogpt_checkpoint(path: Path, bias: bool, prefix: str = "", **changes: Any) -> dict[str, Tensor]:
    weights = nanogpt_weights(bias)
    saved = {prefix + name: tensor for name, tensor in weights.items()}
    arguments = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "bias": bias, "vocab_size": VOCAB}
    content = {"model": saved, "optimizer": {"state": {}}, "model_args": {**arguments, "dropout": 0.1}, "iter_num": 9}
    torch.save({**content, "best_val_loss": torch.tensor(1.5), "config": {"dataset": "x"}, **changes}, path)
    return weights


@pytest.mark.parametrize(
    ("bias", "prefix"),
    [
        (True, ""),
        (False, "_orig_mod."),
        (False, "module."),
        (False, "module._orig_mod."),
        (False, "_orig_mod.module."),
    ],
)
def test_a_checkpoint_of_nanogpt_computes_the_same_here(bias: bool, prefix: str, tmp_path: Path) -> None:
    """Also one that was saved from a model inside DDP, compiled, or both."""
    weights = nanogpt_checkpoint(tmp_path / "ckpt.pt", bias, prefix)
    said = import_model(str(tmp_path / "ckpt.pt"), tmp_path / "run")
    assert "came without a tokenizer" in said[-1]
    expected = nanogpt_logits(weights, PROMPT)
    assert (our_logits(our_model(tmp_path / "run"))[0] - expected).abs().max() < CLOSE
    assert expected.abs().max() > 1.0
    # Exported, transformers agrees: the missing biases are zeros there.
    export_run(tmp_path / "run", tmp_path / "theirs", None, "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    assert (their_logits(theirs)[0] - expected).abs().max() < CLOSE


def test_a_checkpoint_of_nanogpt_with_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    nanogpt_checkpoint(tmp_path / "ckpt.pt", True)
    content = torch.load(tmp_path / "ckpt.pt")
    content["model"]["module.transformer.wte.weight"] = torch.zeros(VOCAB, 32)
    torch.save(content, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match="has tensors twice"):
        import_model(str(tmp_path / "ckpt.pt"), tmp_path / "run")


class Payload:
    """A pickle that makes a folder when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol", "ignore:Environment variable TORCH_FORCE")
def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker, folder = tmp_path / "marker", saved(their_model("gpt2"), tmp_path / "theirs")
    nanogpt_checkpoint(tmp_path / "ckpt.pt", True, config=Payload(marker))
    (tmp_path / "raw.pt").write_bytes(pickle.dumps({"model": Payload(marker), "model_args": {}}))
    for source, said in (
        ("ckpt.pt", r"nothing in it was run \(it names posix\.mkdir\)"),
        ("raw.pt", "was run; paceline"),
    ):
        with pytest.raises(UserError, match=said):
            import_model(str(tmp_path / source), tmp_path / "run")
    (folder / "model.safetensors").write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read as safetensors"):
        import_model(str(folder), tmp_path / "run")
    (folder / "model.safetensors").unlink()
    torch.save({"wte.weight": Payload(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"only pytorch_model\.bin, which can run code when read"):
        import_model(str(folder), tmp_path / "run")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(UserError, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set"):
        import_model(str(tmp_path / "ckpt.pt"), tmp_path / "run")
    assert not marker.exists()
    assert not (tmp_path / "run").exists()
    torch.load(tmp_path / "ckpt.pt")  # as that setting has it: the payload is a live one
    assert marker.exists()


def edit(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    change(weights)
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})


def make_index(folder: Path, **weight_map: str) -> None:
    os.rename(folder / "model.safetensors", folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


WTE, C_ATTN = "transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
ROPE = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 8.0}
REFUSED: list[tuple[str, Callable[[Path], Any], str]] = [
    ("llama", lambda f: edit(f, model_type="mistral"), "model_type is 'mistral'; paceline imports gpt2, llama, qwen3"),
    ("llama", lambda f: edit(f, model_type=[]), r"model_type is \[\]; paceline imports"),
    ("llama", lambda f: edit(f, rope_parameters=ROPE), "rope_parameters is .*dynamic"),
    ("llama", lambda f: edit(f, rope_parameters=None, rope_scaling={"type": "linear"}), "rope_type'='linear'"),
    ("llama", lambda f: edit(f, rope_parameters={"full_attention": PLAIN}), "rope_parameters differs by layer"),
    ("llama", lambda f: edit(f, rope_parameters={"partial_rotary_factor": 0.5}), "is {'partial_rotary_factor': 0.5"),
    ("llama", lambda f: edit(f, attention_bias=True), "attention_bias is True.*must be False"),
    ("llama", lambda f: edit(f, mlp_bias=True), "mlp_bias is True"),
    ("llama", lambda f: edit(f, hidden_act="gelu"), "hidden_act is 'gelu'"),
    ("llama", lambda f: edit(f, head_dim=16), "head_dim is 16"),
    ("llama", lambda f: edit(f, hidden_size="32"), "'hidden_size' expected int, got str"),
    ("llama", lambda f: edit(f, max_position_embeddings=0), "max_position_embeddings is 0; it must be above 0"),
    ("llama", lambda f: edit(f, num_key_value_heads=3), "config.json: model.n-kv-head is 3"),
    ("llama", lambda f: edit(f, num_hidden_layers=1), r"has, and .* has not, model\.layers\.1\.input_layernorm"),
    ("llama", lambda f: edit(f, num_hidden_layers=3), r"lacks model\.layers\.2\..* and 4 more; nothing was imported"),
    ("llama", lambda f: edit(f, num_hidden_layers=10**9), "too few for the 1000000000 layers of its config"),
    ("llama", lambda f: edit(f, vocab_size=301), r"embed_tokens\.weight has the shape \[300, 32\].* \[301, 32\]"),
    ("llama", lambda f: edit(f, tie_word_embeddings=True), "lm_head.weight is not model.embed_tokens.weight"),
    ("llama", lambda f: edit(f, quantization_config={"bits": 4}), "quantization_config is"),
    ("llama", lambda f: (f / "config.json").write_text("{"), "config.json cannot be read as JSON"),
    ("llama", lambda f: (f / "config.json").unlink(), "has no config.json"),
    ("llama", lambda f: (f / "model.safetensors").unlink(), "has no weights; paceline reads model.safetensors"),
    ("llama", lambda f: os.truncate(f / "model.safetensors", 9000), "cannot be read as safetensors"),
    ("llama", lambda f: make_index(f, a="../other.safetensors"), "weight_map does not say"),
    ("llama", lambda f: make_index(f, a="other.safetensors"), "other.safetensors lacks a, which"),
    ("llama", lambda f: make_index(f, a="not.safetensors"), "not.safetensors cannot be read.*no such file"),
    ("qwen3", lambda f: edit(f, use_sliding_window=True), "use_sliding_window is True"),
    ("qwen3", lambda f: edit(f, layer_types=["full_attention", "sliding_attention"]), "layer_types is"),
    ("qwen3", lambda f: edit(f, layer_types=3), "config.json: .*'layer_types'"),
    ("gpt2", lambda f: edit(f, activation_function="relu"), "activation_function is 'relu'.*gelu_new.* or 'gelu'"),
    ("gpt2", lambda f: edit(f, tie_word_embeddings="false"), "'tie_word_embeddings' expected bool"),
    ("gpt2", lambda f: edit_tensors(f, lambda w: w.update({"score.weight": w[WTE].clone()})), "score.weight"),
    ("gpt2", lambda f: edit_tensors(f, lambda w: w.update({"wte.weight": w[WTE].clone()})), "has tensors twice"),
    ("gpt2", lambda f: edit_tensors(f, lambda w: w.pop(C_ATTN)), r"lacks h\.0\.attn\.c_attn\.weight"),
    ("gpt2", lambda f: edit_tensors(f, lambda w: w.update({C_ATTN: w[C_ATTN].T.contiguous()})), "has the shape"),
    ("gpt2", lambda f: edit_tensors(f, lambda w: w.update({WTE: w[WTE].to(torch.int8)})), "is of int8"),
]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pristine")
    return {name: saved(their_model(name), root / name) for name in ("gpt2", "llama", "qwen3")}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[2][:40])
def test_what_would_not_be_the_same_model_is_refused_by_name_and_leaves_nothing(
    case: tuple[str, Callable[[Path], Any], str], tmp_path: Path, pristine: dict[str, Path]
) -> None:
    name, change, message = case
    folder = shutil.copytree(pristine[name], tmp_path / "theirs")
    change(folder)
    with pytest.raises(UserError, match=message):
        import_model(str(folder), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


# Each gives other logits in transformers, beside whatever else the config says, and every tensor fits.
OTHER_LOGITS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_parameters is .*linear"),
    ("llama", {"is_causal": False}, "is_causal is False"),
    ("qwen3", {"is_causal": False}, "is_causal is False"),
    ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters is .*yarn"),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0, "layer_types": None},
        "use_sliding_window is True",
    ),
    ("gpt2", {"is_causal": False}, "is_causal is False"),
    ("gpt2", {"num_hidden_layers": 1}, "has, and the model that its config describes has not, h.1.attn"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
]
# And these are no other model, or the other one that transformers makes of them, too.
SAME_LOGITS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_parameters": {}, "rope_scaling": {}, "rope_theta": 30.0}),
    ("llama", {"rope_scaling": {"rope_type": "default"}}),
    ("llama", {"rope_scaling": {**PLAIN, "rope_theta": 7.0}}),
    ("llama", {"rope_parameters": {"type": "default"}, "rope_theta": 30.0}),
    ("llama", {"head_dim": None, "sliding_window": 3, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.0}),
    ("qwen3", {"sliding_window": 3, "max_window_layers": 0}),
    ("gpt2", {"n_inner": None, "reorder_and_upcast_attn": True, "rope_parameters": PLAIN, "num_attention_heads": 2}),
]


@pytest.mark.parametrize("case", OTHER_LOGITS, ids=lambda case: f"{case[0]} {next(iter(case[1]))}")
def test_a_setting_under_which_transformers_computes_something_else_is_refused(
    case: tuple[str, dict[str, Any], str], tmp_path: Path, pristine: dict[str, Path]
) -> None:
    name, settings, message = case
    folder = shutil.copytree(pristine[name], tmp_path / "theirs")
    edit(folder, **settings)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert (their_logits(theirs) - their_logits(their_model(name))).abs().max() > 100 * CLOSE
    with pytest.raises(UserError, match=message):
        import_model(str(folder), tmp_path / "run")


@pytest.mark.parametrize("case", SAME_LOGITS, ids=lambda case: f"{case[0]} {next(iter(case[1]))}")
def test_a_setting_is_read_as_transformers_reads_it(
    case: tuple[str, dict[str, Any]], tmp_path: Path, pristine: dict[str, Path]
) -> None:
    name, settings = case
    folder = shutil.copytree(pristine[name], tmp_path / "theirs")
    edit(folder, **settings)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    import_model(str(folder), tmp_path / "run")
    assert (our_logits(our_model(tmp_path / "run")) - their_logits(theirs)).abs().max() < CLOSE


def test_places_are_refused_before_anything_is_read(tmp_path: Path, pristine: dict[str, Path]) -> None:
    (tmp_path / "full").mkdir()
    with pytest.raises(UserError, match="full, which exists; name a folder that does not exist yet"):
        import_model(str(pristine["gpt2"]), tmp_path / "full")
    with pytest.raises(UserError, match=r"there is no .*nowhere: give a folder"):
        import_model(str(tmp_path / "nowhere"), tmp_path / "run")
    make_run(tmp_path / "made", OURS["llama"])
    with pytest.raises(UserError, match="is a run folder already: `paceline train --init-from"):
        import_model(str(tmp_path / "made"), tmp_path / "run")
    with pytest.raises(UserError, match="full, which exists"):
        export_run(tmp_path / "made", tmp_path / "full", None, "float32")
    with pytest.raises(UserError, match=r"holds no config\.toml, so it is not a run folder"):
        export_run(pristine["gpt2"], tmp_path / "theirs", None, "float32")
    with pytest.raises(UserError, match=r"has no checkpoint of step 3; it has \[7\]"):
        export_run(tmp_path / "made", tmp_path / "theirs", 3, "float32")
    for number, (model, message) in enumerate(
        [
            (ModelConfig(arch="gpt2", qk_norm=True, **SMALL), "model.qk-norm is true in a model of the gpt2 family"),
            (ModelConfig(arch="gpt2", n_kv_head=2, **SMALL), "model.n-kv-head is 2 in a model of the gpt2 family"),
            (ModelConfig(embed_mix=2, **SMALL), "model.embed-mix is 2, and no model of transformers has it"),
        ]
    ):
        make_run(tmp_path / f"odd{number}", model)
        with pytest.raises(UserError, match=message):
            export_run(tmp_path / f"odd{number}", tmp_path / "theirs", None, "float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "made", "odd0", "odd1", "odd2"]


def test_a_disk_that_takes_no_more_leaves_nothing_behind(tmp_path: Path, pristine: dict[str, Path]) -> None:
    make_run(tmp_path / "made", OURS["gpt2"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 10, before[1]))  # of any file that this process writes
    try:
        with pytest.raises(UserError, match=r"cannot write .*run: "):
            import_model(str(pristine["gpt2"]), tmp_path / "run")
        with pytest.raises(UserError, match=r"cannot write .*theirs: "):
            export_run(tmp_path / "made", tmp_path / "theirs", None, "float32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    """The second one removed what the first had written, and the first published what the second had not finished."""
    with new_folder(tmp_path / "out") as folder:
        folder.mkdir()
        (folder / "weights").touch()
        with pytest.raises(UserError, match="out is being written by another process"), new_folder(tmp_path / "out"):
            pass
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["out", "out/weights"]


def test_the_order_of_a_file_does_not_decide_which_third_is_which() -> None:
    ours = {name: tensor.detach() for name, tensor in build(OURS["gpt2"], 1, "cpu").named_parameters()}
    for layout in (gpt2_layout, nanogpt_layout):
        theirs = to_theirs(dict(sorted(ours.items(), reverse=True)), layout)
        back = from_theirs(OURS["gpt2"], layout, theirs, "there")
        assert all(torch.equal(back[name], tensor) for name, tensor in ours.items())


def prepared(folder: Path, tokenizer: Path | str) -> Path:
    """A token data set of a little text."""
    text = folder.with_suffix(".txt")
    text.write_text(TEXT * 200)
    run("data", "prepare", str(text), "--out", str(folder), "--tokenizer", str(tokenizer)).require()
    return folder


def test_fine_tuning_refuses_another_model_and_another_tokenizer(tmp_path: Path, tokenizer: tok.Tokenizer) -> None:
    make_run(tmp_path / "base", OURS["llama"], tokenizer)
    other = prepared(tmp_path / "other", "bytes")
    flags = ["--init-from", str(tmp_path / "base"), "--data.path", str(other), "--train.steps", "2"]
    (tmp_path / "file.toml").write_text("[model]\nn_head = 8\n")
    foreign = tok.bytes_tokenizer()
    make_run(tmp_path / "foreign", OURS["llama"], foreign)
    (tmp_path / "text.txt").write_text(TEXT)
    cases = [
        ([*flags, "--model.n-layer", "4"], "model.n-layer is given as 4, and the model of --init-from .* has 2"),
        ([*flags, "--model.n-kv-head", "2"], "model.n-kv-head is given as 2.* has 0"),
        ([*flags, "--model.head", "tied"], "model.head is given as tied.* has auto"),
        ([*flags, "--model.bias"], "model.bias is given as True.* has False"),
        ([*flags, "--config", str(tmp_path / "file.toml")], "model.n-head is given as 8.* has 4"),
        ([*flags, "--data.seq-len", "64"], "data.seq-len is 64, longer than the model's positions"),
        ([*flags, "--init-from", str(tmp_path)], "holds no config.toml, so it is not a run folder"),
        (flags, "made with another tokenizer .*data prepare TEXT --out DIR --tokenizer .*base/tokenizer.json"),
        (
            ["--init-from", str(tmp_path / "foreign"), "--data.path", str(tmp_path / "text.txt"), "--train.steps", "2"],
            "is text, and would be tokenized differently .*data prepare .*text.txt --out DIR",
        ),
    ]
    for arguments, message in cases:
        with pytest.raises(UserError, match=message):
            train_command.main(arguments)
    said_again = dataclasses.replace(
        OURS["llama"], n_kv_head=4, head="untied", n_hidden=128, vocab_size=0, n_positions=0, dropout=0.2
    )
    assert require_same_shape(tmp_path / "base", said_again) == dataclasses.replace(OURS["llama"], dropout=0.2)
    with pytest.raises(UserError, match=r"paceline import .* --out DIR"):
        train_command.main([*flags, "--init-from", str(other.with_suffix(".txt"))])
    require_same_tokenizer(tmp_path / "base", tokenizer.json, "web")
    rewritten = json.dumps({**json.loads(tokenizer.json), "post_processor": None}, indent=None)
    assert rewritten != tokenizer.json
    require_same_tokenizer(tmp_path / "base", rewritten, "web")
    require_same_tokenizer(tmp_path / "base", None, "web")


def test_the_tokenizer_is_compared_before_the_size_of_its_vocabulary(
    tmp_path: Path, tokenizer: tok.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger vocabulary got "use --model.vocab-size 0", which --init-from refuses (mutation: open the data first).
    Text gets a tokenizer of its own, which is known once it is trained."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    make_run(tmp_path / "base", OURS["llama"], tokenizer)
    (tmp_path / "text.txt").write_text(TEXT)
    prepared_data = DataConfig(path=str(prepared(tmp_path / "other", "bytes")))
    says = "made with another tokenizer .*data prepare .* --out DIR --tokenizer"
    with pytest.raises(UserError, match=says):
        check_data(tmp_path / "base", prepared_data, 100)
    config = Config().replace("data", path=str(tmp_path / "text.txt"), tokenizer_vocab=300)
    config = config.replace("model", vocab_size=100).replace("train", init_from=str(tmp_path / "base"))
    with pytest.raises(UserError, match=says):
        open_data(config, Quiet())


def everyone_loads(world: Any, good: Path, cut: Path, misfit: Path) -> tuple[dict[str, Tensor], list[str], list[str]]:
    model = build(ModelConfig(**SMALL), seed=100 + world.rank, device="cpu")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    errors = []
    others = tok.bytes_tokenizer().json
    for attempt in (
        lambda: load_initial(model, cut, world.group, world.device),
        lambda: load_initial(model, misfit, world.group, world.device),
        lambda: from_rank_0(world.group, lambda: require_same_tokenizer(good, others, "web")),
    ):
        try:
            attempt()
        except (UserError, RunError) as error:
            errors.append(f"{type(error).__name__} {error.reach} {error}")
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    share_integers, meetings = world.group.share_integers, list[list[int]]()
    world.group.share_integers = lambda numbers: (meetings.append(numbers), share_integers(numbers))[1]
    load._ROUND_S = 0.0  # while rank 0 reads, they meet after each part of a file
    problems = load_initial(model, good if world.is_main else Path("/nowhere"), world.group, world.device)
    assert len(meetings) > 2, "the others would wait for all of it, and at most parallel.timeout-s"
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, errors, problems


@pytest.mark.parametrize("n_layer", [1, 3])
def test_weights_of_another_model_than_the_edited_config_are_refused(
    n_layer: int, tmp_path: Path, tokenizer: tok.Tokenizer
) -> None:
    """Finds an export with layers of zeros, or without the last ones."""
    make_run(tmp_path / "run", OURS["gpt2"], tokenizer)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("n_layer = 2", f"n_layer = {n_layer}"))
    says = (
        r"run: its checkpoint (lacks|has, and the model has not,) layers\.[12]\..*its config.toml is of another model"
    )
    with pytest.raises(UserError, match=says):
        export_run(tmp_path / "run", tmp_path / "theirs", None, "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with pytest.raises(UserError, match=says):
        sample.main([str(tmp_path / "run")])


def test_every_rank_begins_with_the_weights_that_rank_0_read(tmp_path: Path, tokenizer: tok.Tokenizer) -> None:
    expected = dict(make_run(tmp_path / "good", OURS["llama"], tokenizer).named_parameters())
    make_run(tmp_path / "cut", OURS["llama"])
    largest = max((tmp_path / "cut" / "checkpoints").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1] + b"\x55")
    make_run(tmp_path / "misfit", OURS["llama tied, grouped"])
    found = ranks.run_ranks(everyone_loads, 2, *(tmp_path / name for name in ("good", "cut", "misfit")))
    for weights, errors, problems in found:
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
        assert errors[0].startswith("RunError world no checkpoint")
        assert errors[1].startswith("UserError world")
        assert "its config.toml is of another model" in errors[1]
        assert errors[2].startswith("UserError world the data (web) was made with another tokenizer")
        assert problems == []


@pytest.mark.long
def test_imported_from_the_hub_fine_tuned_two_steps_exported_and_loaded_again(
    tmp_path: Path, tokenizer: tok.Tokenizer
) -> None:
    """By the commands that people type; the hub's cache is filled as its client fills it, and there is no network."""
    theirs = their_model("gpt2")
    repository = tmp_path / "hub" / "models--org--small"
    snapshot = saved(theirs, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot / "tokenizer.json").write_text(tokenizer.json)
    env = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    absent = run("import", "org/absent", "--out", "base", env=env, cwd=tmp_path).require(2)
    assert "there is no folder org/absent here, and org/absent could not be read from the hub" in absent.err
    run("import", "org/small", "--out", "base", env=env, cwd=tmp_path).require()
    prepared(tmp_path / "data", tmp_path / "base" / "tokenizer.json")

    # The preset is of the llama family: only what it says beside the model counts.
    flags = ("--preset", "tiny", "--data.path", "data", "--data.seq-len", "24", "--train.steps", "2")
    rate = ("--optim.lr", "1e-3", "--optim.warmup-steps", "0")
    run("train", "--init-from", "base", *flags, *rate, "--out", "tuned", cwd=tmp_path).require()
    run("export", "tuned", "--out", "theirs", cwd=tmp_path).require()

    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    assert (our_logits(our_model(tmp_path / "tuned")) - their_logits(tuned)).abs().max() < CLOSE
    assert (their_logits(tuned) - their_logits(theirs)).abs().max() > 1e-3
    assert tuned.generate(torch.tensor([PROMPT]), max_new_tokens=4, do_sample=False).shape == (1, len(PROMPT) + 4)
    cutter = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert cutter.encode("return rank", add_special_tokens=False) == tokenizer.encode("return rank")
    # It began with the imported weights: two steps of AdamW move an element by hardly more than two learning rates.
    before = theirs.state_dict()
    moved = {name: (tensor - before[name]).abs().max().item() for name, tensor in tuned.state_dict().items()}
    assert 1e-4 < max(moved.values()) < 3e-3
