"""The caches: images that are decoded once, rows that are computed once, and digests of what columns hold."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from filelock import FileLock
from PIL import Image

from item_tables import column_of, encoded, noise, struct_of, unread
from misbehaving import raising
from polyfed.core.activity import heard_by
from polyfed.core.errors import DataError
from polyfed.data import cache as module
from polyfed.data.cache import Decoding, StoredRows, Undecoded, content_digest, decode, remembered
from polyfed.data.source import Column
from polyfed.data.sources.scenes import Scenes
from polyfed.data.sources.stored import Parquet
from polyfed.data.view import DataContext

HOW = Decoding(8)
FULL = OSError(errno.ENOSPC, "No space left on device")


def decoded(column: Column, size: int, folder: Path, *how: Any) -> np.ndarray:
    return module.decoded(column, Decoding(size, *how), folder)


def test_equals_one_image_at_a_time(tmp_path: Path) -> None:
    images = [noise(seed) for seed in range(5)]
    result = decoded(column_of([struct_of(image) for image in images]), 8, tmp_path)
    slow = [np.asarray(image.resize((8, 8), Image.Resampling.BICUBIC)).transpose(2, 0, 1) for image in images]
    assert result.shape == (5, 3, 8, 8)
    assert result.dtype == np.uint8
    np.testing.assert_array_equal(result, np.stack(slow))


def test_many_chunks_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ITEMS", 3)
    shades = [struct_of(Image.new("RGB", (4, 4), (k, k, k))) for k in range(10)]
    result = decoded(Column(pa.chunked_array([shades[:4], shades[4:]]), "f", "here"), 4, tmp_path)
    assert result[:, 0, 0, 0].tolist() == list(range(10))


def test_second_open_reads_nothing_and_cannot_be_written(tmp_path: Path) -> None:
    first = decoded(column_of([struct_of(noise(0))]), 8, tmp_path)
    second = decoded(unread(nested=False), 8, tmp_path)
    assert isinstance(second.base, np.memmap)
    np.testing.assert_array_equal(first, second)
    with pytest.raises(ValueError, match="read-only"):
        second[0] = 0


def test_every_setting_has_a_file_of_its_own(tmp_path: Path) -> None:
    picture = [struct_of(noise(0))]
    decoded(column_of(picture), 8, tmp_path)
    decoded(column_of(picture), 16, tmp_path)
    decoded(column_of(picture), 8, tmp_path, "crop")
    decoded(column_of(picture), 8, tmp_path, "squash", "bilinear")
    decoded(column_of([struct_of(noise(1))], "other"), 8, tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def test_crop_keeps_the_middle_square(tmp_path: Path) -> None:
    wide = np.zeros((8, 24, 3), dtype=np.uint8)
    wide[:, 8:16] = 200
    assert (decoded(column_of([struct_of(Image.fromarray(wide))]), 8, tmp_path, "crop") == 200).all()
    assert decoded(column_of([struct_of(Image.fromarray(wide))]), 8, tmp_path)[0, 0, 0, 0] < 50


def test_empty_column(tmp_path: Path) -> None:
    form = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    assert decoded(column_of(pa.array([], form), "e"), 8, tmp_path).shape == (0, 3, 8, 8)
    assert decoded(unread("e", nested=False), 8, tmp_path).shape == (0, 3, 8, 8)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("L", (4, 4), 70), [70, 70, 70]),
        (Image.new("1", (4, 4), 1), [255, 255, 255]),
        (Image.new("RGBA", (4, 4), (0, 0, 0, 0)), [255, 255, 255]),
        (Image.new("LA", (4, 4), (40, 255)), [40, 40, 40]),
        (Image.new("RGB", (4, 4), (9, 8, 7)).quantize(2), [9, 8, 7]),
        (Image.fromarray(np.full((4, 4), 200 * 256, dtype=np.uint16)), [200, 200, 200]),
    ],
    ids=["grey", "bits", "transparent", "grey-alpha", "palette", "16 bits"],
)
def test_every_mode_becomes_rgb(image: Image.Image, expected: list[int]) -> None:
    assert decode(encoded(image), 4, "squash", "bicubic")[:, 2, 2].tolist() == expected


def test_images_are_turned_upright() -> None:
    image = Image.new("RGB", (8, 8), "black")
    image.paste("white", (0, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    pixels = decode(encoded(image, exif=exif), 8, "squash", "bicubic")
    assert pixels[0, 0].max() == 0
    assert pixels[0, 7].min() == 255


@pytest.mark.parametrize("bad", [b"not an image", b"", encoded(noise(0), "PNG")[:-60], encoded(noise(0), "JPEG")[:300]])
def test_damaged_image_is_named(tmp_path: Path, bad: bytes) -> None:
    pictures = [struct_of(noise(0)), struct_of(noise(1)), {"bytes": bad, "path": "b.png"}]
    with pytest.raises(DataError, match=r"pets/train, column 'x', row 2 \(path 'b.png'\): not a readable") as caught:
        decoded(column_of(pictures), 8, tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "use",
    [
        lambda folder: decoded(column_of([struct_of(noise(0))]), 8, folder),
        lambda folder: len(StoredRows(folder / "a.npy", lambda: (3, 2), torch.zeros, "zeros")),
        lambda folder: remembered(folder / "a.json", lambda: [5]),
    ],
)
def test_unusable_folder_names_folder_and_setting(tmp_path: Path, use: Callable[[Path], object]) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(DataError, match=rf"cache folder '{file}/inside' .*data\.cache_dir or POLYFED_CACHE"):
        use(file / "inside")


def test_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np.lib.format, "write_array_header_1_0", raising(FULL))
    with pytest.raises(DataError, match="No space left on device"):
        decoded(column_of([struct_of(noise(0))]), 8, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_truncated_cache_is_made_again(tmp_path: Path) -> None:
    expected = np.array(decoded(column_of([struct_of(noise(0))]), 8, tmp_path))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-10])
    np.testing.assert_array_equal(decoded(column_of([struct_of(noise(0))]), 8, tmp_path), expected)


def test_only_old_temporary_files_are_removed(tmp_path: Path) -> None:
    decoded(column_of([struct_of(noise(0))]), 8, tmp_path)
    (file,) = tmp_path.iterdir()
    file.unlink()
    old, young = (tmp_path / f".{file.name}.{name}.tmp" for name in ("old", "young"))
    old.touch()
    young.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    decoded(column_of([struct_of(noise(0))]), 8, tmp_path)
    assert set(tmp_path.iterdir()) == {file, young}


def _die_in_the_middle(folder: str) -> None:
    def decode_or_die(data: bytes, *settings: Any) -> Any:
        if data == pictures[5]["bytes"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return decode(data, *settings)

    module.CHUNK_ITEMS, module.decode = 2, decode_or_die
    pictures = [struct_of(noise(seed)) for seed in range(8)]
    decoded(column_of(pictures), 16, Path(folder))


def test_killed_process_leaves_no_half_written_cache(tmp_path: Path) -> None:
    victim = multiprocessing.get_context("fork").Process(target=_die_in_the_middle, args=(str(tmp_path),))
    victim.start()
    victim.join(20)
    assert victim.exitcode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.suffix == ".tmp"
    os.utime(left, (time.time() - 7200,) * 2)
    assert len(decoded(column_of([struct_of(noise(seed)) for seed in range(8)]), 16, tmp_path)) == 8
    assert [file.suffix for file in tmp_path.iterdir()] == [".npy"]


def _decode_in_process(folder: str, barrier: Any, results: Any) -> None:
    pictures = column_of([struct_of(noise(seed)) for seed in range(60)])
    barrier.wait()
    results.put(int(decoded(pictures, 16, Path(folder)).astype(np.int64).sum()))


def test_racing_processes_both_succeed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    racers = [context.Process(target=_decode_in_process, args=(str(tmp_path), barrier, results)) for _ in range(2)]
    for racer in racers:
        racer.start()
    sums = [results.get(timeout=20) for _ in racers]
    for racer in racers:
        racer.join(20)
    alone = decoded(column_of([struct_of(noise(seed)) for seed in range(60)], "alone"), 16, tmp_path)
    assert sums == [int(alone.astype(np.int64).sum())] * 2
    assert not [file for file in tmp_path.iterdir() if file.suffix == ".tmp"]


def test_integers_are_remembered(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "a.json"
    assert remembered(path, lambda: [3, 4]) == [3, 4]
    assert remembered(path, lambda: [5]) == [3, 4]
    path.write_text("{")
    assert remembered(path, lambda: [5]) == [5]


def test_images_that_are_not_decoded_ahead_are_the_same_and_read_row_by_row() -> None:
    column, asked = column_of([struct_of(noise(seed)) for seed in range(5)]), list[list[int]]()

    def take(rows: np.ndarray) -> pa.ChunkedArray:
        asked.append(rows.tolist())
        return column.flat_values().take(pa.array(rows))

    unknown = Column(lambda: pytest.fail("all were read"), "f", "here", False, take=take, lengths=np.ones(5, np.int64))
    lazy = Undecoded(unknown, HOW)
    complete = Undecoded(column, HOW)
    for rows in ([3, 1, 3], [1, 4]):
        np.testing.assert_array_equal(lazy[np.array(rows)], complete[np.arange(5)][rows])
    assert asked == [[1, 3], [4]]


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
    assert rows_at(tmp_path / "a.npy", Counting(), count=0)(torch.arange(0)).shape == (0, 2)
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


def test_a_full_disk_is_reported_before_anything_is_computed(tmp_path: Path, monkeypatch, caplog) -> None:
    compute = Counting()
    monkeypatch.setattr(os, "posix_fallocate", raising(FULL), raising=False)
    rows = rows_at(tmp_path / "a.npy", compute)
    rows.prepare(torch.tensor([0]))
    assert not compute.calls
    assert "No space left" in caplog.text
    assert read(rows, 4, 1, 4) == doubled([4, 1, 4])
    assert compute.calls == [[1, 4]]


def test_waiting_for_the_lock_of_another_process_is_shown(tmp_path: Path) -> None:
    lines: list[str] = []
    listener = SimpleNamespace(handle=lambda event: lines.append(event.what))
    lock = FileLock(tmp_path / "a.lock")
    with lock, heard_by(listener), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(copy_context().run, rows_at(tmp_path / "a.npy", Counting()).prepare, torch.arange(2))
        while not lines and not waiting.done():
            time.sleep(0.001)
        assert lines[0] == f"waiting for another process, which holds the lock '{tmp_path / 'a.lock'}'"
        lock.release()
        waiting.result()


# ---- digests: equal for the same files anywhere, different for any other content


def png(seed: int) -> bytes:
    return encoded(noise(seed, 6, 6))


def written_column(folder: Path, name: str, **changed: Any) -> Column:
    """A column of three rows that are written into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = {
        "image": [{"bytes": png(seed), "path": f"{seed}.png"} for seed in range(3)],
        "captions": [["a dog", "an animal"], ["a cat"], ["a bird", "wings"]],
    } | changed
    pq.write_table(pa.table(columns), folder / "train.parquet")
    source = Parquet(path=str(folder), columns={"image": "image", "text": "captions"})
    return source.open("train", name="shared", data_dir=None).read(name)


def digest(column: Column, cache: Path, items: tuple[int, ...] = (0, 1, 2)) -> str:
    return content_digest(column, DataContext(cache), torch.tensor(items))


@pytest.mark.parametrize("name", ["image", "captions"])
def test_copies_elsewhere_have_the_same_digest(tmp_path: Path, name: str) -> None:
    here = digest(written_column(tmp_path / "here", name), tmp_path / "a")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    there = Parquet(path=str(tmp_path / "there"), columns={}).open("train", name="other", data_dir=None).read(name)
    assert digest(there, tmp_path / "b") == here
    assert len(here) == 32


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("image", {"image": [{"bytes": png(seed), "path": f"{seed - 9}.png"} for seed in (9, 10, 11)]}),
        ("captions", {"captions": [["a dog", "an animal"], ["a cat"], ["a bird", "wing"]]}),
        ("captions", {"captions": [["a dog"], ["an animal", "a cat"], ["a bird", "wings"]]}),
        ("captions", {"captions": [["a doga", "n animal"], ["a cat"], ["a bird", "wings"]]}),
    ],
)
def test_changed_content_changes_it(tmp_path: Path, name: str, changed: dict[str, Any]) -> None:
    before = digest(written_column(tmp_path / "a", name), tmp_path / "cache")
    assert digest(written_column(tmp_path / "b", name, **changed), tmp_path / "cache") != before


def test_items_and_their_order_count_and_others_do_not(tmp_path: Path) -> None:
    column = written_column(tmp_path / "a", "captions")
    assert len({digest(column, tmp_path / "cache", items) for items in ((0, 1, 2), (0, 2), (2, 0))}) == 3
    other = written_column(tmp_path / "b", "captions", captions=[["a dog", "an animal"], ["!"], ["a bird", "wings"]])
    assert digest(other, tmp_path / "cache", (0, 2)) == digest(column, tmp_path / "cache", (0, 2))


def test_an_image_counts_by_its_content_wherever_it_lies(tmp_path: Path) -> None:
    embedded = digest(written_column(tmp_path / "a", "image"), tmp_path / "cache")
    rows = [{"bytes": None, "path": f"files/{seed}.jpg"} for seed in range(3)]
    (tmp_path / "b" / "files").mkdir(parents=True)
    for seed in range(3):
        (tmp_path / "b" / "files" / f"{seed}.jpg").write_bytes(png(seed))
    assert digest(written_column(tmp_path / "b", "image", image=rows), tmp_path / "cache") == embedded
    rows[1]["path"] = "../outside.jpg"
    with pytest.raises(DataError, match="row 1: the path leaves the data set's folder"):
        digest(written_column(tmp_path / "c", "image", image=rows), tmp_path / "cache", (1,))


def test_it_is_computed_once(tmp_path: Path) -> None:
    column = written_column(tmp_path / "a", "image")
    first = digest(column, tmp_path / "cache")

    assert digest(unread(column.fingerprint), tmp_path / "cache") == first


def test_generated_columns_go_by_their_recipe(tmp_path: Path) -> None:
    def generated(**settings: Any) -> Column:
        source = Scenes(train=4, columns={"image": "image"}, **settings)
        return source.open("train", name="any", data_dir=None).modality("image")

    one, same, other = (digest(generated(seed=seed), tmp_path) for seed in (1, 1, 2))
    assert one == same != other
    assert list(tmp_path.iterdir()) == []
