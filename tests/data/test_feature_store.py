import json

import numpy as np
import pytest
import torch

from polyfed.core.errors import DataError
from polyfed.data.cache import remembered, stored


class Counting:
    """Computes row i as [i, 2 i], and notes what it was asked."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list[tuple[int, int]] = []
        self.fail_at = fail_at

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        self.calls.append((start, stop))
        if self.fail_at is not None and stop > self.fail_at:
            raise KeyboardInterrupt
        return torch.arange(start, stop).unsqueeze(1) * torch.tensor([[1.0, 2.0]])


def test_rows_are_computed_once_in_chunks(tmp_path):
    compute = Counting()
    rows = stored(tmp_path / "sub" / "a.npy", lambda: (7, 2), compute, chunk=3)
    assert compute.calls == [(0, 3), (3, 6), (6, 7)]
    assert rows.dtype == np.float16
    assert rows.tolist() == [[i, 2 * i] for i in range(7)]
    again = stored(tmp_path / "sub" / "a.npy", lambda: (7, 2), Counting(fail_at=0), chunk=3)
    assert (again == rows).all()
    assert not again.flags.writeable


def test_an_interrupted_computation_is_taken_up_again(tmp_path):
    path = tmp_path / "a.npy"
    with pytest.raises(KeyboardInterrupt):
        stored(path, lambda: (10, 2), Counting(fail_at=7), chunk=3)
    assert not path.exists()
    compute = Counting()
    rows = stored(path, lambda: (10, 2), compute, chunk=3)
    assert compute.calls[0] == (6, 9)
    assert rows.tolist() == [[i, 2 * i] for i in range(10)]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.lock", "a.npy"]


@pytest.mark.parametrize("damage", ["done", "part", "shape"])
def test_damaged_progress_starts_anew(tmp_path, damage):
    path = tmp_path / "a.npy"
    with pytest.raises(KeyboardInterrupt):
        stored(path, lambda: (10, 2), Counting(fail_at=7), chunk=3)
    if damage == "shape":
        (tmp_path / "a.done").write_text(json.dumps({"rows": 6, "shape": [9, 2]}))
    else:
        (tmp_path / f"a.{damage}").write_text("{")
    compute = Counting()
    assert stored(path, lambda: (10, 2), compute, chunk=3)[9].tolist() == [9, 18]
    assert compute.calls[0] == (0, 3)


def test_no_rows_need_no_file(tmp_path):
    assert stored(tmp_path / "a.npy", lambda: (0, 2, 3), Counting()).shape == (0, 2, 3)
    assert not list(tmp_path.iterdir())


def test_values_that_float16_cannot_hold_are_refused(tmp_path):
    def compute(start: int, stop: int) -> torch.Tensor:
        values = torch.ones(stop - start, 2)
        values[1, 1] = 70_000
        return values

    with pytest.raises(DataError, match="features of row 1 are not finite"):
        stored(tmp_path / "a.npy", lambda: (3, 2), compute)
    assert not (tmp_path / "a.npy").exists()


def test_a_damaged_or_foreign_cache_file_is_named(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))
    with pytest.raises(DataError, match=r"are float32, not float16; delete the file"):
        stored(tmp_path / "a.npy", lambda: (3, 2), Counting())
    (tmp_path / "b.npy").write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"b\.npy' are damaged"):
        stored(tmp_path / "b.npy", lambda: (3, 2), Counting())


def test_an_unusable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be used .*POLYFED_CACHE"):
        stored(tmp_path / "file" / "a.npy", lambda: (3, 2), Counting())


def test_integers_are_remembered(tmp_path):
    path = tmp_path / "sub" / "a.json"
    assert remembered(path, lambda: [3, 4]) == [3, 4]
    assert remembered(path, lambda: [5]) == [3, 4]
    path.write_text("{")
    assert remembered(path, lambda: [5]) == [5]
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="POLYFED_CACHE"):
        remembered(tmp_path / "file" / "a.json", lambda: [5])
