"""A `config.json` of the transformers library as a ModelConfig, and back.

Three architectures compute exactly what our two families do: GPT2LMHeadModel, LlamaForCausalLM, Qwen3ForCausalLM (the
llama family with qk_norm). A setting under which they would compute something else is refused by name and value.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from paceline.base.errors import UserError
from paceline.model.config import ModelConfig

Dtype = Literal["float32", "bfloat16"]

# Setting -> the values under which transformers computes what we do; the first is what a missing one means there.
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
_GELUS: dict[str, Literal["exact", "tanh"]] = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}
_QWEN3_HEAD_DIM = 128  # what transformers takes where a qwen3 config.json does not say


def read_config(found: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns the model that a config.json describes, without dropout; `where` names the file in refusals.

    Raises UserError, naming the setting and its value, for an architecture or a setting that we do not compute.
    """
    reader = _Settings(found, where)
    kind = found.get("model_type")
    if kind not in _FIXED:
        raise UserError(f"{where}: model_type is {kind!r}; paceline imports {', '.join(_FIXED)}")
    for name, accepted in {**_FIXED[kind], "quantization_config": (None,)}.items():
        reader.require(name, accepted)
    model = _read_gpt2(reader) if kind == "gpt2" else _read_llama(reader, kind)
    try:
        model.check()
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return model


class _Settings:
    """A config.json, its values checked as they are asked for. null is as good as missing, as in transformers."""

    def __init__(self, found: Mapping[str, Any], where: str) -> None:
        self.found, self.where = found, where

    def require(self, name: str, accepted: tuple[Any, ...]) -> None:
        value = self.found.get(name)
        if value is not None and value not in accepted:
            shown = " or ".join(repr(one) for one in accepted)
            raise UserError(f"{self.where}: {name} is {value!r}, which paceline does not compute; it must be {shown}")

    def number(self, name: str, default: int | None = None) -> int:
        value = self.found.get(name, default)
        value = default if value is None else value
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
        return "tied" if self.found.get("tie_word_embeddings", default) else "untied"


def _read_gpt2(reader: _Settings) -> ModelConfig:
    activation = reader.found.get("activation_function", "gelu_new")
    reader.require("activation_function", tuple(_GELUS))
    width = reader.number("n_embd")
    return ModelConfig(
        arch="gpt2",
        n_layer=reader.number("n_layer"),
        n_head=reader.number("n_head"),
        n_embd=width,
        n_positions=reader.number("n_positions", 1024),
        vocab_size=reader.number("vocab_size"),
        n_hidden=reader.number("n_inner", 4 * width),
        bias=True,
        gelu=_GELUS[activation],
        head=reader.head(default=True),
        norm_eps=reader.real("layer_norm_epsilon", 1e-5),
    )


def _read_llama(reader: _Settings, kind: str) -> ModelConfig:
    width, num_heads = reader.number("hidden_size"), reader.number("num_attention_heads")
    head_dim = reader.number("head_dim", _QWEN3_HEAD_DIM if kind == "qwen3" else max(1, width // num_heads))
    if head_dim * num_heads != width:
        raise UserError(
            f"{reader.where}: head_dim is {head_dim}; paceline's heads are hidden_size / num_attention_heads = "
            f"{width}/{num_heads} wide, so this model can not be imported"
        )
    layer_types = reader.found.get("layer_types") or []
    if set(layer_types) - {"full_attention"}:
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
    """From rope_parameters (transformers 5), or rope_theta beside rope_scaling (4). Plain rotary positions only."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = reader.found.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise UserError(f"{reader.where}: {name} is {rope!r}; paceline has plain rotary positions (default) only")
        nested = _Settings(rope, f"{reader.where}: {name}")
        nested.require("partial_rotary_factor", (1.0,))
        if "rope_theta" in rope:
            return nested.real("rope_theta", 0.0)
    reader.require("partial_rotary_factor", (1.0,))
    return reader.real("rope_theta", 10000.0)


def write_config(model: ModelConfig, end_of_text: int | None, dtype: Dtype) -> dict[str, Any]:
    """Returns the config.json with which transformers builds `model`, whose zeros are resolved.

    Raises UserError, naming the field, for a model that none of the three architectures computes.
    """
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
                "like it: this run can not be exported. The llama family has both"
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
