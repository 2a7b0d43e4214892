"""Converts a `config.json` of transformers to a ModelConfig, and back.

Our two families compute exactly what three transformers architectures do: GPT2LMHeadModel, LlamaForCausalLM and
Qwen3ForCausalLM (llama with qk_norm). transformers itself reads the file: its defaults, its other names of a setting,
and the formats of its former versions. Settings with another result are refused by name and value.
"""

from collections.abc import Mapping
from typing import Any, Literal

from paceline.base.errors import UserError
from paceline.model.config import ModelConfig

Dtype = Literal["float32", "bfloat16"]

# Setting -> the values with which transformers computes the same as we do.
_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
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


def read_config(document: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns the model of a config.json, without dropout; `where` names the file in errors. Raises UserError, naming
    setting and value, for an architecture or a setting that we cannot compute."""
    kind = document.get("model_type")
    if not isinstance(kind, str) or kind not in _FIXED:
        raise UserError(f"{where}: model_type is {kind!r}; paceline imports {', '.join(_FIXED)}")
    config = _read_by_transformers(kind, document, where)
    for name, accepted in {**_FIXED[kind], **_FIXED_IN_ALL}.items():
        value = getattr(config, name, accepted[0])
        if value not in accepted:
            shown = " or ".join(repr(one) for one in accepted)
            raise UserError(f"{where}: {name} is {value!r}, which paceline does not compute; it must be {shown}")
    if any(each != "full_attention" for each in getattr(config, "layer_types", None) or ()):
        raise UserError(f"{where}: layer_types is {config.layer_types!r}; paceline has full_attention only")
    width, num_heads = config.hidden_size, config.num_attention_heads
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
        if getattr(config, name) < 1:
            raise UserError(f"{where}: {name} is {getattr(config, name)}; it must be above 0")
    head_dim = getattr(config, "head_dim", width // num_heads)
    if head_dim * num_heads != width and kind != "gpt2":
        raise UserError(
            f"{where}: head_dim is {head_dim}; paceline's heads are hidden_size / num_attention_heads = "
            f"{width}/{num_heads} wide, so this model cannot be imported"
        )
    model = ModelConfig(
        n_layer=config.num_hidden_layers,
        n_head=num_heads,
        n_embd=width,
        n_positions=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        head="tied" if config.tie_word_embeddings else "untied",
        **(_of_gpt2(config) if kind == "gpt2" else _of_llama(config, where)),
    )
    try:
        model.check()
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return model


def _read_by_transformers(kind: str, document: Mapping[str, Any], where: str) -> Any:
    """Returns transformers' own config, which has checked the type of each value."""
    try:
        from transformers import CONFIG_MAPPING  # an optional extra, and slow to import
    except ImportError:
        raise UserError(f"transformers reads {where}: pip install 'transformers>=5'") from None
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(document))
    except Exception as error:  # its classes of errors have changed from version to version
        raise UserError(f"{where}: {' '.join(str(error).split())}") from None


def _of_gpt2(config: Any) -> dict[str, Any]:
    return {
        "arch": "gpt2",
        "n_hidden": 4 * config.n_embd if config.n_inner is None else config.n_inner,
        "bias": True,
        "gelu": "exact" if config.activation_function == "gelu" else "tanh",
        "norm_eps": config.layer_norm_epsilon,
    }


def _of_llama(config: Any, where: str) -> dict[str, Any]:
    if not hasattr(config, "rope_parameters"):
        raise UserError(f"transformers 5 reads {where}, and an older one is installed: pip install 'transformers>=5'")
    rope = config.rope_parameters
    if by_layer := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise UserError(
            f"{where}: rope_parameters differs by layer ({', '.join(by_layer)}); paceline has one for all layers"
        )
    if rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"{where}: rope_parameters is {rope!r}; paceline has plain rotary positions (default) only")
    return {
        "arch": "llama",
        "n_kv_head": config.num_key_value_heads,
        "n_hidden": config.intermediate_size,
        "qk_norm": config.model_type == "qwen3",
        "rope_theta": rope["rope_theta"],
        "norm_eps": config.rms_norm_eps,
    }


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
