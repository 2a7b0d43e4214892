"""The versions of torch that were tested, and the names in it that may go."""

import ast
import re
from pathlib import Path

import pytest
import torch

import paceline
from paceline.base.errors import UserError
from paceline.world import torch_version
from paceline.world.config import ParallelConfig
from paceline.world.env import Environment
from paceline.world.runtime import open_world

ROOT = Path(__file__).parents[2]
SRC = Path(paceline.__file__).parent
# Private names with a fallback or an error beside them, in these files.
WITH_FALLBACK = {
    "model/cpu.py": {"ops.mkldnn._linear_pointwise"},
    "model/float8.py": {"_scaled_mm"},  # asked for in world/device.py
    "model/layers.py": {"ops.aten._flash_attention_forward"},
    "world/process_group.py": {
        "distributed.distributed_c10d._get_default_store",
        "distributed.group.WORLD._get_backend",
    },
}


def test_there_are_constraints_for_each_torch_that_was_tested() -> None:
    """Finds a version in one list only: of the package, constraints*.txt, pyproject.toml and the pages."""
    files = {path.name: path.read_text() for path in ROOT.glob("constraints*.txt")}
    pins = {name: re.findall(r"^torch==(\d+\.\d+)\.\d+$", text, re.M) for name, text in files.items()}
    [default] = pins.pop("constraints.txt")
    others = [minor for minor in torch_version.TESTED if minor != default]
    assert pins == {f"constraints-torch-{minor}.txt": [minor] for minor in others}
    assert default in torch_version.TESTED
    assert f'"torch>={torch_version.TESTED[0]}"' in (ROOT / "pyproject.toml").read_text()
    for page in ("CONTRIBUTING.md", "docs/guide/install.md"):
        assert f"torch {torch_version.tested_text()}" in (ROOT / page).read_text(), page


@pytest.mark.parametrize("name", ["_fused_adamw_", "_guards.TracingContext.try_get"])
def test_a_torch_without_what_we_use_is_refused_before_the_first_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: nothing is looked at, and the first step ends in torch's own words."""
    monkeypatch.delattr(f"torch.{name}")
    with pytest.raises(UserError) as refused, open_world(ParallelConfig(), Environment()):
        pass
    assert name.rpartition(".")[2] in str(refused.value)
    assert f"install torch {torch_version.tested_text()}" in str(refused.value)


def test_a_module_without_what_we_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = torch.nn.Module.__init__

    def without(module: torch.nn.Module) -> None:
        begin(module)
        del module._forward_pre_hooks

    monkeypatch.setattr(torch.nn.Module, "__init__", without)
    with pytest.raises(UserError, match="_forward_pre_hooks"):
        torch_version.check_private_names()


def test_each_private_name_of_torch_is_looked_at_or_has_a_fallback() -> None:
    """Finds a new one that nothing guards. FSDP's are in one file, which looks at each (tests/sync/test_sharded.py)."""
    found: dict[str, set[str]] = {}
    for path in SRC.rglob("*.py"):
        for name in private_names(ast.parse(path.read_text())):
            if name not in torch_version._PRIVATE_NAMES:
                found.setdefault(str(path.relative_to(SRC)), set()).add(name)
    assert found == WITH_FALLBACK


def private_names(tree: ast.AST) -> set[str]:
    """Dotted names, without `torch.`, that have a part which begins with one underscore; to the last part."""
    roots = {"torch": "", "dist": "distributed."}
    names = set()
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            parts: list[str] = []
            place: ast.expr = node
            while isinstance(place, ast.Attribute):
                parts.insert(0, place.attr)
                place = place.value
            if isinstance(place, ast.Name) and place.id in roots and any(re.match(r"_[^_]", part) for part in parts):
                names.add(roots[place.id] + ".".join(parts))
    return names


def test_private_names_are_found() -> None:
    tree = ast.parse(
        "torch._a(x); dist.b._c.d; y = torch.e.f; torch.__version__; z._g; torch.h()._i; torch.nn._j._k(1)"
    )
    assert private_names(tree) == {"_a", "distributed.b._c.d", "nn._j._k"}
