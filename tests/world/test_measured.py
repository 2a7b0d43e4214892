"""Facts of the processor that are kept between starts. Each test names the mistake that it finds."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.world import processor
from paceline.world.device import choose_dtype
from paceline.world.measured import Measured

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    return tmp_path / "measured"


def use_bfloat16_in_products() -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


@pytest.mark.parametrize(
    "change",
    [
        lambda: os.environ.update(ONEDNN_MAX_CPU_ISA="AVX2"),
        lambda: os.environ.update(DNNL_MAX_CPU_ISA="AVX2"),
        lambda: os.environ.update(MKL_CBWR="COMPATIBLE"),
        lambda: os.environ.update(ATEN_CPU_CAPABILITY="default"),
        use_bfloat16_in_products,
    ],
    ids=["oneDNN", "DNNL", "MKL", "ATen", "matmul precision"],
)
def test_a_kept_value_is_of_these_settings(change: Callable[[], None]) -> None:
    """Finds a key without the settings: the rounding of other kernels would be this process's."""
    before, precision = dict(os.environ), torch.backends.mkldnn.matmul.fp32_precision
    Measured("rounding").keep("a1b2c3")
    try:
        change()
        assert Measured("rounding").read() is None
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.backends.mkldnn.matmul.fp32_precision = precision
    assert Measured("rounding").read() == "a1b2c3"
    assert Measured("rounding", threads=2).read() is None


@pytest.mark.parametrize("damage", [b"", b"[]", b"{}", b"\xff", b'{"value": "b1b2c3", "sha256": 7}', "flipped"])
def test_a_damaged_value_is_measured_anew(folder: Path, damage: bytes | str) -> None:
    """Finds a file that is believed unchecked."""
    Measured("rounding").keep("a1b2c3")
    (file,) = folder.iterdir()
    content = file.read_bytes()
    file.write_bytes(damage if isinstance(damage, bytes) else content.replace(b"a1b2c3", b"b1b2c3"))
    assert Measured("rounding").read() is None
    digest = processor.rounding()
    assert Measured("rounding").read() == digest == processor._computed_rounding()


def test_a_write_that_is_interrupted_leaves_the_old_value(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds a file that is written in place: another rank would read a part of it."""
    Measured("peak").keep(1.0)
    with monkeypatch.context() as patch:

        def die(source: Path, target: Path) -> None:
            raise OSError(f"{source} is complete, {target} is not replaced")

        patch.setattr(os, "replace", die)
        Measured("peak").keep(2.0)
    assert Measured("peak").read() == 1.0
    Measured("peak").keep(2.0)
    assert Measured("peak").read() == 2.0


def test_a_folder_that_cannot_be_written_keeps_nothing(folder: Path) -> None:
    folder.write_text("a file")
    Measured("peak").keep(1.0)
    assert Measured("peak").read() is None
    assert processor.rounding() == processor._computed_rounding()


def test_a_kept_rounding_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = processor.rounding()
    monkeypatch.delattr(processor, "_computed_rounding")
    assert processor.rounding() == digest


class Processor:
    """Multiplies bfloat16 matrices in 1 ms and float32 ones in 3 ms of its own time. A busy one lets others run for as
    long as it computes."""

    def __init__(self, *, is_busy: bool = False):
        self.is_busy, self.computed_s, self.num_products = is_busy, 0.0, 0

    def multiply(self, a: torch.Tensor, _: torch.Tensor) -> None:
        self.computed_s += 1e-3 if a.dtype == torch.bfloat16 else 3e-3
        self.num_products += 1

    def clock(self) -> float:
        return self.computed_s * (2 if self.is_busy else 1)

    def choice(self, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.dtype, str]:
        """What a process that starts on this processor chooses."""
        monkeypatch.setattr(processor, "_mm", self.multiply)
        monkeypatch.setattr(processor, "_has_bfloat16_units", lambda: True)
        clocks = SimpleNamespace(perf_counter=self.clock, thread_time=lambda: self.computed_s)
        monkeypatch.setattr(processor, "time", clocks)
        processor.bfloat16_speedup.cache_clear()
        return choose_dtype("auto", CPU)


@pytest.fixture(autouse=True)
def _no_choice_is_left() -> Iterator[None]:
    yield
    processor.bfloat16_speedup.cache_clear()


def test_the_number_format_is_measured_once_and_its_reason_says_when(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds a start that measures again, and a reason that says nothing of the earlier start."""
    first, second = Processor(), Processor()
    assert first.choice(monkeypatch) == (torch.bfloat16, "measured, it is faster than float32 on this CPU")
    assert first.num_products == 30
    reason = "measured at an earlier start, it is faster than float32 on this CPU"
    assert second.choice(monkeypatch) == (torch.bfloat16, reason)
    assert second.num_products == 0


def test_what_was_measured_on_a_busy_machine_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds a value that is kept though others had half of the time: it would be wrong for ever."""
    busy, again = Processor(is_busy=True), Processor()
    busy.choice(monkeypatch)
    again.choice(monkeypatch)
    assert again.num_products == 30


def test_ranks_that_start_at_once_take_the_value_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds ranks of one host that choose differently, each by its own measurement."""
    slower = Processor()
    multiply = slower.multiply

    def beside_another_rank(a: torch.Tensor, b: torch.Tensor) -> None:
        multiply(a, b)
        Measured("bfloat16-speedup").keep(1.1)

    monkeypatch.setattr(slower, "multiply", beside_another_rank)
    assert slower.choice(monkeypatch) == (torch.float32, "measured, bfloat16 is no faster on this CPU")
