"""Converts a `config.json` of transformers to a ModelConfig, and back.

Our two families compute exactly what three transformers architectures do: GPT2LMHeadModel, LlamaForCausalLM and
Qwen3ForCausalLM (llama with qk_norm). Settings with another result are refused by name and value.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from paceline.base.errors import UserError
from paceline.model.config import ModelConfig

Dtype = Literal["float32", "bfloat16"]

# Setting -> the values with which transformers computes the same as we do; the first is its default.
_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "llama": {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "pretraining_tp": (1,),
    },
    "qwen3": {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "use_sliding_window": (False,)},
}
# For every architecture: their shared code reads these keys, though their config classes do not list them.
_FIXED_IN_ALL: dict[str, tuple[Any, ...]] = {"quantization_config": (None,), "is_causal": (True,)}
_GELUS: dict[str, Literal["exact", "tanh"]] = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}
_ROPE_THETA = 10000.0
_QWEN3_HEAD_DIM = 128  # transformers' default


def read_config(found: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns the model of a config.json, without dropout; `where` names the file in errors. Raises UserError, naming
    setting and value, for an architecture or a setting that we cannot compute."""
    reader = _Settings(found, where)
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in _FIXED:
        raise UserError(f"{where}: model_type is {kind!r}; paceline imports {', '.join(_FIXED)}")
    for name, accepted in {**_FIXED[kind], **_FIXED_IN_ALL}.items():
        reader.require(name, accepted)
    model = _read_gpt2(reader) if kind == "gpt2" else _read_llama(reader, kind)
    try:
        model.check()
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return model


class _Settings:
    """A config.json whose values are checked when read. null means missing, as in transformers."""

    def __init__(self, found: Mapping[str, Any], where: str) -> None:
        self.found, self.where = found, where

    def require(self, name: str, accepted: tuple[Any, ...]) -> None:
        value = self.found.get(name)
        if value is not None and value not in accepted:
            shown = " or ".join(repr(one) for one in accepted)
            raise UserError(f"{self.where}: {name} is {value!r}, which paceline does not compute; it must be {shown}")

    def number(self, name: str, default: int | None = None, *, alias: str = "") -> int:
        """alias: transformers' other name of the setting, used if the first is missing."""
        value, other = self.found.get(name), self.found.get(alias)
        if value is not None and other is not None and value != other:
            raise UserError(f"{self.where}: {name} is {value!r} and {alias} is {other!r}; remove the wrong one")
        value = next((one for one in (value, other) if one is not None), default)
        if type(value) is not int or value < 1:
            raise UserError(f"{self.where}: {name} is {value!r}; it must be a whole number above 0")
        return value

    def real(self, name: str, default: float) -> float:
        value = self.found.get(name)
        value = default if value is None else value
        if type(value) not in (int, float) or not math.isfinite(value):
            raise UserError(f"{self.where}: {name} is {value!r}; it must be a number")
        return float(value)

    def head(self, default: bool) -> Literal["tied", "untied"]:
        self.require("tie_word_embeddings", (True, False))
        value = self.found.get("tie_word_embeddings")
        return "tied" if (default if value is None else value) else "untied"


def _read_gpt2(reader: _Settings) -> ModelConfig:
    reader.require("activation_function", tuple(_GELUS))
    width = reader.number("n_embd", alias="hidden_size")
    return ModelConfig(
        arch="gpt2",
        n_layer=reader.number("n_layer", alias="num_hidden_layers"),
        n_head=reader.number("n_head", alias="num_attention_heads"),
        n_embd=width,
        n_positions=reader.number("n_positions", 1024, alias="max_position_embeddings"),
        vocab_size=reader.number("vocab_size"),
        n_hidden=reader.number("n_inner", 4 * width),
        bias=True,
        gelu=_GELUS[reader.found.get("activation_function") or "gelu_new"],
        head=reader.head(default=True),
        norm_eps=reader.real("layer_norm_epsilon", 1e-5),
    )


def _read_llama(reader: _Settings, kind: str) -> ModelConfig:
    width, num_heads = reader.number("hidden_size"), reader.number("num_attention_heads")
    head_dim = reader.number("head_dim", _QWEN3_HEAD_DIM if kind == "qwen3" else max(1, width // num_heads))
    if head_dim * num_heads != width:
        raise UserError(
            f"{reader.where}: head_dim is {head_dim}; paceline's heads are hidden_size / num_attention_heads = "
            f"{width}/{num_heads} wide, so this model cannot be imported"
        )
    layer_types = reader.found.get("layer_types") or []
    if not isinstance(layer_types, list) or any(each != "full_attention" for each in layer_types):
        raise UserError(f"{reader.where}: layer_types is {layer_types!r}; paceline has full_attention only")
    return ModelConfig(
        arch="llama",
        n_layer=reader.number("num_hidden_layers"),
        n_head=num_heads,
        n_kv_head=reader.number("num_key_value_heads", num_heads),
        n_embd=width,
        n_positions=reader.number("max_position_embeddings"),
        vocab_size=reader.number("vocab_size"),
        n_hidden=reader.number("intermediate_size"),
        qk_norm=kind == "qwen3",
        head=reader.head(default=False),
        rope_theta=_rope_theta(reader),
        norm_eps=reader.real("rms_norm_eps", 1e-6),
    )


def _rope_theta(reader: _Settings) -> float:
    """Reads rope_parameters (transformers 5), rope_scaling and rope_theta (4): plain rotary positions only. If several
    are given they must agree, as their precedence depends on the version of transformers."""
    reader.require("partial_rotary_factor", (1.0,))
    said = {"rope_theta": reader.real("rope_theta", _ROPE_THETA)} if reader.found.get("rope_theta") is not None else {}
    for name in ("rope_parameters", "rope_scaling"):
        rope = reader.found.get(name)
        if not rope:  # null, and {} without scaling
            continue
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise UserError(f"{reader.where}: {name} is {rope!r}; paceline has plain rotary positions (default) only")
        nested = _Settings(rope, f"{reader.where}: {name}")
        nested.require("partial_rotary_factor", (1.0,))
        if by_layer := [key for key, value in rope.items() if isinstance(value, dict)]:
            raise UserError(f"{nested.where} differs by layer ({', '.join(by_layer)}); paceline has one for all layers")
        said[f"{name}.rope_theta"] = nested.real("rope_theta", said.get("rope_theta", _ROPE_THETA))
    if len(set(said.values())) > 1:
        values = " and ".join(f"{name} is {value:g}" for name, value in said.items())
        raise UserError(f"{reader.where}: {values}; remove the wrong one")
    return next(iter(said.values()), _ROPE_THETA)


def write_config(model: ModelConfig, end_of_text: int | None, dtype: Dtype) -> dict[str, Any]:
    """Returns the config.json from which transformers builds `model`, whose zeros must be resolved. Raises UserError,
    naming the field, for a model that none of the three architectures computes."""
    if model.embed_mix:
        raise UserError(
            f"model.embed-mix is {model.embed_mix}, and no model of transformers has it: this run cannot be exported"
        )
    architecture, settings = _write_gpt2(model) if model.arch == "gpt2" else _write_llama(model)
    return {
        "architectures": [architecture],
        **settings,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": dtype,
    }


def _write_gpt2(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    for name, value, is_plain in (
        ("model.qk-norm", "true", not model.qk_norm),
        ("model.n-kv-head", model.n_kv_head, model.num_kv_heads == model.n_head),
    ):
        if not is_plain:
            raise UserError(
                f"{name} is {value} in a model of the gpt2 family, and GPT2LMHeadModel of transformers has nothing "
                "like it: this run cannot be exported. The llama family has both"
            )
    return "GPT2LMHeadModel", {
        "model_type": "gpt2",
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_embd": model.n_embd,
        "n_positions": model.n_positions,
        "n_inner": model.hidden,
        "activation_function": "gelu_new" if model.gelu == "tanh" else "gelu",
        "layer_norm_epsilon": model.norm_eps,
        "resid_pdrop": model.dropout,
        "embd_pdrop": model.dropout,
        "attn_pdrop": 0.0,
    }


def _write_llama(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    return "Qwen3ForCausalLM" if model.qk_norm else "LlamaForCausalLM", {
        "model_type": "qwen3" if model.qk_norm else "llama",
        "num_hidden_layers": model.n_layer,
        "num_attention_heads": model.n_head,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_size": model.n_embd,
        "intermediate_size": model.hidden,
        "max_position_embeddings": model.n_positions,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},  # transformers 5
        "attention_bias": False,
    }
