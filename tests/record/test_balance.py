"""Speeds of unequal ranks, and what equal shares would have cost, from rows of metrics."""

import pytest

from paceline.record.balance import speeds

# Rank 0 computes a sequence of 100 tokens in 10 ms, rank 1 in 30 ms; both update for 5 ms: 245 ms for 24 + 8 sequences.
ROW = {
    "rank_sequences": [24, 8],
    "rank_compute_ms": [240.0, 240.0],
    "rank_optim_ms": [5.0, 5.0],
    "rank_exposed_comm_ms": [5.0, 5.0],
    "step_ms": 250.0,
    "tokens_per_s": 3200 / 0.25,
}


def test_two_unequal_ranks() -> None:
    found = speeds([ROW, ROW])
    assert found is not None
    assert found.sequences == [24, 8]
    assert found.tokens_per_s == pytest.approx([2400 / 0.245, 800 / 0.245])
    assert found.idle_frac == pytest.approx([0.02, 0.02])
    assert found.sum_of_speeds_frac == pytest.approx(245 / 250)
    assert found.equal_step_ms == pytest.approx(16 * 30 + 5 + 5)  # rank 1's 16 sequences and update; the rest as it was


def test_other_world_sizes_and_rows_without_shares_do_not_count() -> None:
    alone = ROW | {name: values[:1] for name, values in ROW.items() if isinstance(values, list)}
    assert speeds([{"step": 1, "val_loss": 2.0}, alone, ROW]) == speeds([ROW])
    assert speeds([]) is None
    assert speeds([{"step_ms": 1.0, "tokens_per_s": 1.0}]) is None


def test_a_rank_that_computes_nothing_has_no_speed_to_predict_with() -> None:
    found = speeds([ROW | {"rank_sequences": [32, 0]}])
    assert found is not None
    assert found.tokens_per_s[1] == 0.0
    assert found.equal_step_ms is None
