import errno
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock

from polyfed.core.activity import heard_by
from polyfed.core.errors import DataError
from polyfed.data.cache import CacheFullError
from polyfed.data.stored_rows import StoredRows


class Counting:
    """Computes row i as [i, 2 i], and notes what it was asked."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list[list[int]] = []
        self.fail_at = fail_at

    def __call__(self, rows: Sequence[int]) -> torch.Tensor:
        self.calls.append(list(rows))
        if self.fail_at is not None and max(rows) >= self.fail_at:
            raise KeyboardInterrupt
        return torch.tensor(rows).unsqueeze(1) * torch.tensor([[1.0, 2.0]])


def rows_at(path: Path, compute: object, count: int = 10, block: int = 3) -> StoredRows:
    return StoredRows(path, lambda: (count, 2), compute, block, "numbers")


def doubled(rows: Sequence[int]) -> list[list[int]]:
    return [[row, 2 * row] for row in rows]


def test_only_blocks_of_what_is_asked_for_are_computed_and_each_once(tmp_path: Path) -> None:
    compute = Counting()
    rows = rows_at(tmp_path / "sub" / "a.npy", compute)
    assert rows(np.array([7, 1, 7])).tolist() == doubled([7, 1, 7])
    assert compute.calls == [[0, 1, 2, 6, 7, 8]]
    rows.require(np.array([8, 0]))
    assert len(compute.calls) == 1
    again = rows_at(tmp_path / "sub" / "a.npy", compute)
    assert len(again) == 10
    assert again(np.arange(10)).tolist() == doubled(range(10))
    assert compute.calls[1:] == [[3, 4, 5, 9]]
    assert rows(np.arange(10)).dtype == np.float16


def test_the_last_row_gives_the_file_its_final_name_and_then_nothing_is_called(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    first, second = rows_at(path, Counting()), rows_at(path, Counting())
    first.require(np.arange(5))
    assert not path.exists()
    assert second(np.arange(10)).tolist() == doubled(range(10))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.lock", "a.npy"]
    assert np.load(path).tolist() == doubled(range(10))
    assert first(np.arange(10)).tolist() == doubled(range(10))  # it still has the file under its first name
    untouched = StoredRows(path, lambda: pytest.fail("called"), lambda rows: pytest.fail("called"), 3, "numbers")
    assert untouched(np.array([9])).tolist() == doubled([9])


def test_an_interrupted_computation_is_taken_up_again(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with pytest.raises(KeyboardInterrupt):
        rows_at(path, Counting(fail_at=600), count=700, block=128).require(np.arange(700))
    compute = Counting()
    assert rows_at(path, compute, count=700, block=128)(np.arange(700)).tolist() == doubled(range(700))
    assert compute.calls == [list(range(512, 700))]


@pytest.mark.parametrize("damage", [".rows", ".there", "shorter"])
def test_damaged_progress_starts_anew(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.npy"
    rows_at(path, Counting()).require(np.array([0]))
    if damage == "shorter":
        (tmp_path / "a.there").write_bytes(b"\1" * 9)
    else:
        (tmp_path / "a.npy").with_suffix(damage).write_text("{")
    compute = Counting()
    assert rows_at(path, compute)(np.array([0])).tolist() == doubled([0])
    assert compute.calls == [[0, 1, 2]]


def test_no_rows_need_no_file(tmp_path: Path) -> None:
    rows = rows_at(tmp_path / "a.npy", Counting(), count=0)
    assert rows(np.arange(0)).shape == (0, 2)
    assert not list(tmp_path.iterdir())


def test_values_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    rows = rows_at(tmp_path / "a.npy", lambda rows: torch.tensor([[1.0, 7e4 if row == 4 else 1.0] for row in rows]))
    rows.require(np.array([0]))
    with pytest.raises(DataError, match="numbers: row 4 is not finite"):
        rows.require(np.array([3]))


def test_a_damaged_or_foreign_cache_file_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))
    with pytest.raises(DataError, match=r"are float32, not float16; delete the file"):
        len(rows_at(tmp_path / "a.npy", Counting()))
    (tmp_path / "b.npy").write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"b\.npy' are damaged"):
        len(rows_at(tmp_path / "b.npy", Counting()))


def test_a_full_disk_is_told_before_anything_is_computed(tmp_path: Path, monkeypatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    compute = Counting()
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(CacheFullError, match="No space left"):
        rows_at(tmp_path / "a.npy", compute).require(np.array([0]))
    assert not compute.calls


def test_who_waits_for_another_processs_lock_says_for_which(tmp_path: Path) -> None:
    told: list[str] = []
    listener = SimpleNamespace(preparing=lambda what, done, total: told.append(what))
    lock = FileLock(tmp_path / "a.lock")
    with lock, heard_by(listener), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(copy_context().run, rows_at(tmp_path / "a.npy", Counting()).require, np.arange(2))
        while not told and not waiting.done():
            time.sleep(0.001)
        assert told[0] == f"waiting for another process, which holds the lock '{tmp_path / 'a.lock'}'"
        lock.release()
        waiting.result()
