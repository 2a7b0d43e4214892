"""Rows read while another process writes them: each once, whatever happens to the file."""

import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.base.jsonl import Tail, rows
from paceline.record.folder import create


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30), cuts=st.lists(st.integers(0, 60), max_size=20))
def test_each_row_is_read_once_however_it_is_written(tmp_path: Path, lengths: list[int], cuts: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.unlink(missing_ok=True)
    written = [{"step": step, "text": "é" * length} for step, length in enumerate(lengths)]
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in written).encode()
    tail, found = Tail(path), []
    assert tail.read() == (False, [])  # there is no file yet
    for piece in [*cuts, len(data)]:
        with path.open("ab") as file:
            file.write(data[:piece])
        data = data[piece:]
        is_anew, rows = tail.read()
        assert not is_anew
        found += rows
    assert found == written


def test_a_file_that_loses_rows_begins_anew(tmp_path: Path) -> None:
    """As a run leaves it that resumes from an earlier checkpoint, and has gone past where it was before."""
    folder = create(tmp_path / "run")
    tail = Tail(folder.metrics)
    for step in range(1, 6):
        folder.append_metrics({"step": step, "step_ms": 10})
    assert [row["step"] for row in tail.read()[1]] == [1, 2, 3, 4, 5]
    folder.forget_after(5)
    folder.append_metrics({"step": 6, "step_ms": 10})
    assert tail.read() == (False, [{"step": 6, "step_ms": 10}])  # another file, which holds all that was read
    folder.forget_after(2)
    for step in range(3, 9):
        folder.append_metrics({"step": step, "step_ms": 11})
    is_anew, rows = tail.read()
    assert is_anew
    assert [row["step_ms"] for row in rows] == [10, 10, 11, 11, 11, 11, 11, 11]
    folder.metrics.unlink()
    assert tail.read() == (False, [])
    folder.metrics.write_text('no row\n{"step": 1}\n[2]\n{"step": 2')
    assert tail.read() == (True, [{"step": 1}])
    folder.close()


def test_a_last_line_without_its_end_is_no_row(tmp_path: Path) -> None:
    """It may be the beginning of a longer one: 12 of 125."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}')
    assert list(rows(path)) == [{"step": 1}, None]
