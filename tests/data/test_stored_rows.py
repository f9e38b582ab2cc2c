import errno
import multiprocessing
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
from polyfed.data.cache import StoredRows


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


def rows_at(path: Path, compute: object, count: int = 10, group: int = 3) -> StoredRows:
    return StoredRows(path, lambda: (count, 2), compute, "numbers", group=group)


def read(rows: StoredRows, *numbers: int) -> list[list[float]]:
    return rows(torch.tensor(numbers, dtype=torch.int64)).tolist()


def doubled(rows: Sequence[int]) -> list[list[int]]:
    return [[row, 2 * row] for row in rows]


def test_only_rows_that_are_asked_for_are_computed_and_each_once(tmp_path: Path) -> None:
    compute = Counting()
    rows = rows_at(tmp_path / "sub" / "a.npy", compute)
    assert read(rows, 7, 1, 7) == doubled([7, 1, 7])
    assert compute.calls == [[1, 7]]
    rows.prepare(torch.tensor([7, 1]))
    assert len(compute.calls) == 1
    again = rows_at(tmp_path / "sub" / "a.npy", compute)
    assert len(again) == 10
    assert read(again, *range(10)) == doubled(range(10))
    assert compute.calls[1:] == [[0, 2, 3], [4, 5, 6], [8, 9]]
    assert read(rows, 3) == doubled([3])  # computed by the other


def test_the_last_row_gives_the_file_its_final_name_and_then_nothing_is_called(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    first, second = rows_at(path, Counting()), rows_at(path, Counting())
    first.prepare(torch.arange(5))
    assert not path.exists()
    assert read(second, *range(10)) == doubled(range(10))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.lock", "a.npy"]
    assert np.load(path).tolist() == doubled(range(10))
    assert read(first, *range(10)) == doubled(range(10))  # it still has the file under its first name
    untouched = StoredRows(path, lambda: pytest.fail("called"), lambda rows: pytest.fail("called"), "numbers")
    assert read(untouched, 9) == doubled([9])


def test_an_interrupted_computation_is_taken_up_again(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with pytest.raises(KeyboardInterrupt):
        read(rows_at(path, Counting(fail_at=7)), *range(10))
    compute = Counting()
    assert read(rows_at(path, compute), *range(10)) == doubled(range(10))
    assert compute.calls == [[6, 7, 8], [9]]


def fill(path: Path, rows: Sequence[int]) -> None:
    rows_at(path, lambda numbers: time.sleep(0.002) or Counting()(numbers), count=200).prepare(torch.tensor(rows))


def test_several_processes_and_a_killed_one_leave_each_row_once_and_none_wrong(tmp_path: Path) -> None:
    path, spawn = tmp_path / "a.npy", multiprocessing.get_context("fork")
    killed = spawn.Process(target=fill, args=(path, range(200)))
    killed.start()
    while not (path.with_suffix(".there").exists() and np.fromfile(path.with_suffix(".there"), np.uint8).any()):
        time.sleep(0.001)
    killed.kill()
    killed.join()
    others = [spawn.Process(target=fill, args=(path, range(start, 200, 2))) for start in (0, 1, 0)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert np.load(path).tolist() == doubled(range(200))


@pytest.mark.parametrize("damage", [".rows", ".there", "shorter"])
def test_damaged_progress_starts_anew(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.npy"
    rows_at(path, Counting()).prepare(torch.tensor([0]))
    if damage == "shorter":
        (tmp_path / "a.there").write_bytes(b"\1" * 9)
    else:
        (tmp_path / "a.npy").with_suffix(damage).write_text("{")
    compute = Counting()
    assert read(rows_at(path, compute), 0) == doubled([0])
    assert compute.calls == [[0]]


def test_no_rows_need_no_file(tmp_path: Path) -> None:
    rows = rows_at(tmp_path / "a.npy", Counting(), count=0)
    assert rows(torch.arange(0)).shape == (0, 2)
    assert not list(tmp_path.iterdir())


def test_values_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    rows = rows_at(tmp_path / "a.npy", lambda rows: torch.tensor([[1.0, 7e4 if row == 4 else 1.0] for row in rows]))
    rows.prepare(torch.tensor([3]))
    with pytest.raises(DataError, match="numbers: row 4 is not finite"):
        rows.prepare(torch.tensor([3, 4]))


def test_a_damaged_or_foreign_cache_file_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2), np.float32))
    with pytest.raises(DataError, match=r"are float32, not float16; delete the file"):
        len(rows_at(tmp_path / "a.npy", Counting()))
    (tmp_path / "b.npy").write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"b\.npy' are damaged"):
        len(rows_at(tmp_path / "b.npy", Counting()))


def test_a_full_disk_is_told_before_anything_is_computed(tmp_path: Path, monkeypatch, caplog) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    compute = Counting()
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    rows = rows_at(tmp_path / "a.npy", compute)
    rows.prepare(torch.tensor([0]))
    assert not compute.calls
    assert "No space left" in caplog.text
    assert read(rows, 4, 1, 4) == doubled([4, 1, 4])
    assert compute.calls == [[1, 4]]


def test_who_waits_for_another_processs_lock_says_for_which(tmp_path: Path) -> None:
    told: list[str] = []
    listener = SimpleNamespace(preparing=lambda what, done, total: told.append(what))
    lock = FileLock(tmp_path / "a.lock")
    with lock, heard_by(listener), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(copy_context().run, rows_at(tmp_path / "a.npy", Counting()).prepare, torch.arange(2))
        while not told and not waiting.done():
            time.sleep(0.001)
        assert told[0] == f"waiting for another process, which holds the lock '{tmp_path / 'a.lock'}'"
        lock.release()
        waiting.result()
