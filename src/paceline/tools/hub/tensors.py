"""Names and layouts of parameters, foreign and ours.

Our names are Llama's without `model.`. GPT-2 has other names, and one matrix for queries, keys and values; OpenAI's
original and transformers store its linear layers as [in, out] ("Conv1D"), nanoGPT as [out, in] like all others.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.base.errors import UserError
from paceline.base.units import dtype_name, listed
from paceline.model.config import ModelConfig
from paceline.model.gpt import parameter_shapes

_GPT2_NAMES = {
    "embed_tokens": "wte",
    "embed_positions": "wpe",
    "norm": "ln_f",
    "lm_head": "lm_head",
    "input_layernorm": "ln_1",
    "self_attn.q_proj": "attn.c_attn",
    "self_attn.k_proj": "attn.c_attn",
    "self_attn.v_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_THIRDS = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
# Constants that some versions save with the weights: causal masks and rotary frequencies.
_CONSTANTS = re.compile(r".*\.attn\.(bias|masked_bias)|.*rotary_emb\.inv_freq")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Place:
    """The place of one of our parameters among foreign tensors."""

    name: str
    third: int | None = None  # index into a matrix of queries, keys and values
    is_transposed: bool = False


Layout = Callable[[str], Place]
"""Our parameter's name -> its place."""


def nanogpt_layout(name: str) -> Place:
    """Place of our parameter in a nanoGPT model, whose names are without `transformer.` here."""
    module, _, kind = name.rpartition(".")
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", module)
    inner = match[2] if match else module
    theirs = f"{_GPT2_NAMES[inner]}.{kind}"
    return Place(f"h.{match[1]}.{theirs}" if match else theirs, _THIRDS.get(inner.rpartition(".")[2]))


def gpt2_layout(name: str) -> Place:
    """Place of our parameter in transformers' GPT2LMHeadModel, whose names are without `transformer.` here."""
    place = nanogpt_layout(name)
    is_linear = name.endswith("_proj.weight")
    return Place(place.name, place.third, is_transposed=is_linear)


def llama_layout(name: str) -> Place:
    """Place of our parameter in LlamaForCausalLM and Qwen3ForCausalLM."""
    return Place(name if name.startswith("lm_head.") else f"model.{name}")


def from_theirs(model: ModelConfig, layout: Layout, theirs: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Returns our parameters by name, float32, each in its own memory, from a foreign model's tensors.

    Raises UserError, naming tensors, if one is missing, left over, of another shape or not floating-point, or if a tied
    output layer differs from the embedding.
    """
    weights = {name: tensor for name, tensor in theirs.items() if not _CONSTANTS.fullmatch(name)}
    if model.n_layer > len(weights):  # before there is a module for each
        raise UserError(f"{where} has {len(weights)} tensors, too few for the {model.n_layer} layers of its config")
    shapes = parameter_shapes(model)
    if model.tied:
        weights = _without_tied_head(weights, layout, where)
    places = {name: layout(name) for name in shapes}
    missing = {place.name for place in places.values()} - set(weights)
    left_over = set(weights) - {place.name for place in places.values()}
    for names, what in ((missing, "lacks"), (left_over, "has, and the model that its config describes has not,")):
        if names:
            raise UserError(f"{where} {what} {listed(sorted(names), 5)}; nothing was imported")
    return {name: _taken(weights[place.name], place, shapes[name], where) for name, place in places.items()}


def to_theirs(weights: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Returns a model's tensors by the layout's names, from our parameters. Some may share memory with ours."""
    parts: dict[str, list[tuple[Place, Tensor]]] = {}
    for name, tensor in weights.items():
        place = layout(name)
        parts.setdefault(place.name, []).append((place, tensor))
    theirs = {}
    for name, tensors in parts.items():
        thirds = [tensor for _, tensor in sorted(tensors, key=lambda part: part[0].third or 0)]
        whole = torch.cat(thirds) if len(thirds) > 1 else thirds[0]
        theirs[name] = whole.t() if tensors[0][0].is_transposed else whole
    return theirs


def _without_tied_head(weights: dict[str, Tensor], layout: Layout, where: str) -> dict[str, Tensor]:
    """Drops a tied output layer, which some files contain; it must equal the embedding."""
    embedding, head = layout("embed_tokens.weight").name, layout("lm_head.weight").name
    if head in weights and embedding in weights and not torch.equal(weights[head], weights[embedding]):
        raise UserError(
            f"{where}: {head} is not {embedding}, and the config says that they are tied; "
            'if they are not, set "tie_word_embeddings": false in config.json'
        )
    return {name: tensor for name, tensor in weights.items() if name != head}


def _taken(tensor: Tensor, place: Place, shape: torch.Size, where: str) -> Tensor:
    if tensor.dtype not in _FLOATS:
        kind = dtype_name(tensor.dtype)
        raise UserError(
            f"{where}: {place.name} is of {kind}; paceline imports floating-point weights, not quantized ones"
        )
    ours = tensor.t() if place.is_transposed and tensor.dim() == 2 else tensor
    if place.third is not None and ours.dim() and ours.shape[0] == 3 * shape[0]:
        ours = ours[place.third * shape[0] : (place.third + 1) * shape[0]]
    if ours.shape != shape:
        raise UserError(
            f"{where}: {place.name} has the shape {list(tensor.shape)}, which gives {list(ours.shape)} where "
            f"the config makes it {list(shape)}"
        )
    return ours.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
