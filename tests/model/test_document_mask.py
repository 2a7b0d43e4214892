"""Attention inside documents: a packed row is its documents one by one, in loss and in every gradient."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from paceline.model import cpu, gpt, layers
from paceline.model.config import ModelConfig
from paceline.model.gpt import GPT, build

NUM_POSITIONS = 48
SHAPE = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": NUM_POSITIONS, "vocab_size": 50}
ROTARY = {
    "llama": ModelConfig(arch="llama", **SHAPE),
    "gqa": ModelConfig(arch="llama", n_kv_head=2, **SHAPE),
    "mqa-qk": ModelConfig(arch="llama", n_kv_head=1, qk_norm=True, **SHAPE),
    "mix": ModelConfig(arch="llama", embed_mix=2, **SHAPE),
}
DTYPES = {"float32": (torch.float32, 2e-5), "bfloat16": (torch.bfloat16, 3e-2)}
# Tokens of each document of each row: one alone, of a single token, of the whole row.
ROWS = [[7, 20, 1, 20], [NUM_POSITIONS], [1, 1, 46]]


@pytest.fixture(params=ROTARY)
def model(request: pytest.FixtureRequest) -> GPT:
    """With parameters well away from their first values, so that attention is far from uniform."""
    model = build(ROTARY[request.param], 3, "cpu")
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.2, generator=generator))
    return model


@pytest.fixture
def tokens_BT() -> torch.Tensor:
    return torch.randint(0, 50, (len(ROWS), NUM_POSITIONS), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def targets_BT() -> torch.Tensor:
    return torch.randint(0, 50, (len(ROWS), NUM_POSITIONS), generator=torch.Generator().manual_seed(2))


def documents_of(rows: list[list[int]]) -> torch.Tensor:
    """Numbers that are neither sorted nor from 0: only whether they are equal counts."""
    return torch.tensor([[9 - i for i, n in enumerate(row) for _ in range(n)] for row in rows], dtype=torch.int32)


def loss_and_gradients(model: GPT, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss and all gradients in one vector."""
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def one_by_one(model: GPT, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each document in a forward pass of its own."""
    loss = torch.zeros(())
    for row, tokens_T, targets_T in zip(ROWS, tokens_BT, targets_BT, strict=True):
        for t, u in zip(tokens_T.split(row), targets_T.split(row), strict=True):
            loss = loss + model(t[None], u[None])
    return loss_and_gradients(model, loss)


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def flash(q_BTHD: torch.Tensor, k_BTKD: torch.Tensor, v_BTKD: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """What the GPU's kernel for documents computes."""
    q_HND, k_KND, v_KND = (x.flatten(0, 1).transpose(0, 1) for x in (q_BTHD, k_BTKD, v_BTKD))
    parts = [
        F.scaled_dot_product_attention(*(x[:, a:b] for x in (q_HND, k_KND, v_KND)), is_causal=True, enable_gqa=True)
        for a, b in pairwise(bounds.tolist())
    ]
    return torch.cat(parts, 1).transpose(0, 1).reshape(q_BTHD.shape)


@pytest.fixture(params=["mask", "flash"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "flash" all is as on a GPU, but for the kernel."""
    if request.param == "flash":
        monkeypatch.setattr(gpt, "attends_by_document", lambda *_: True)
        monkeypatch.setattr(layers, "attend_by_document", flash)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize(("dtype", "checkpoint_blocks"), [("float32", False), ("bfloat16", True)])
def test_a_packed_row_is_its_documents_one_by_one(
    model: GPT, dtype: str, checkpoint_blocks: bool, tokens_BT: torch.Tensor, targets_BT: torch.Tensor
) -> None:
    expected_loss, expected = one_by_one(model, tokens_BT, targets_BT)  # in float32
    model.compute_dtype, tolerance = DTYPES[dtype]
    model.checkpoint_blocks = checkpoint_blocks
    packed = model(tokens_BT, targets_BT, None, documents_of(ROWS), split=(1, 2))
    loss, gradients = loss_and_gradients(model, packed)
    assert float(loss) == pytest.approx(float(expected_loss), rel=tolerance)
    assert distance(gradients, expected) < tolerance
    unmasked_loss, unmasked = loss_and_gradients(model, model(tokens_BT, targets_BT))
    assert float(unmasked_loss) != pytest.approx(float(expected_loss), rel=1e-3)
    assert distance(unmasked, expected) > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_document_a_row_is_no_mask(
    model: GPT, dtype: str, tokens_BT: torch.Tensor, targets_BT: torch.Tensor
) -> None:
    model.compute_dtype, tolerance = DTYPES[dtype]
    plain_loss, plain = loss_and_gradients(model, model(tokens_BT, targets_BT))
    whole = torch.zeros(tokens_BT.shape, dtype=torch.int32)
    loss, gradients = loss_and_gradients(model, model(tokens_BT, targets_BT, documents=whole))
    assert float(loss) == pytest.approx(float(plain_loss), rel=tolerance)
    assert distance(gradients, plain) < tolerance


def test_no_token_moves_another_document(model: GPT, tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> None:
    """Bit for bit: other tokens in the documents before leave a document's loss alone; in its own they do not."""
    documents_BT = documents_of([[10, 38]])
    row, other = tokens_BT[:1], tokens_BT[:1].clone()
    other[:, :10] = (other[:, :10] + 1) % 50
    with torch.no_grad():
        hidden, moved = (model._hidden([t], documents=[documents_BT])[0] for t in (row, other))
        plain, plain_moved = (model._hidden([t])[0] for t in (row, other))
    assert torch.equal(hidden[:, 10:], moved[:, 10:])
    assert not torch.equal(hidden[:, :10], moved[:, :10])
    assert (plain[:, 10:] - plain_moved[:, 10:]).abs().amax(-1).min() > 1e-4


@pytest.mark.parametrize("num_kv", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_in_several_chunks_is_the_definition(num_kv: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries in chunks of 5 of 17, and a softmax over the allowed keys written out here in float64."""
    monkeypatch.setattr(cpu, "_QUERIES_AT_ONCE", 5)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, heads, 17, 8, generator=generator) for heads in (4, num_kv, num_kv))
    documents = torch.randint(0, 3, (2, 17), generator=generator)
    kind, tolerance = DTYPES[dtype]
    mask_BTT = layers.document_mask(documents, kind)
    found = layers.attend(q.to(kind), k.to(kind), v.to(kind), mask_BTT)
    expected = torch.zeros(2, 4, 17, 8, dtype=torch.float64)
    for b in range(2):
        for h in range(4):
            for t in range(17):
                keys = [s for s in range(t + 1) if documents[b, s] == documents[b, t]]
                kv = h * num_kv // 4
                weights = (k[b, kv, keys].double() @ q[b, h, t].double() / math.sqrt(8)).softmax(0)
                expected[b, h, t] = weights @ v[b, kv, keys].double()
    assert found.dtype == kind
    assert torch.allclose(found.double(), expected, atol=tolerance, rtol=tolerance)


def test_learned_positions_go_on_counting(tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> None:
    """The gpt2 family's second document is what it is alone, at the positions that it has in the row."""
    model = build(ModelConfig(arch="gpt2", **SHAPE), 3, "cpu")
    with torch.no_grad():
        model.embed_positions.weight.mul_(20)
        packed = model(tokens_BT[:1], targets_BT[:1], documents=documents_of([[20, 28]]))
        first = model(tokens_BT[:1, :20], targets_BT[:1, :20])
        rest = [part[:1, 20:] for part in (tokens_BT, targets_BT)]
        from_zero = model(*rest)
        model.embed_positions.weight.copy_(model.embed_positions.weight.roll(-20, 0))
        moved = model(*rest)
    assert float(packed) == pytest.approx(float(first + moved), rel=1e-5)
    assert abs(float(moved - from_zero)) > 1e-2


@pytest.mark.long
def test_compiled_blocks_take_a_mask(tokens_BT: torch.Tensor, targets_BT: torch.Tensor) -> None:
    model, compiled = (build(ROTARY["gqa"], 3, "cpu") for _ in range(2))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for block in compiled.layers:
            block.compile(backend="aot_eager")  # the graphs; tests/train/test_switches.py asks what C++ makes of them
        for rows in (ROWS, [[12, 12, 24], [47, 1], [5, 43]]):
            expected = loss_and_gradients(model, model(tokens_BT, targets_BT, None, documents_of(rows)))
            found = loss_and_gradients(compiled, compiled(tokens_BT, targets_BT, None, documents_of(rows)))
            assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-5)
            assert distance(found[1], expected[1]) < 1e-4
    torch.compiler.reset()
