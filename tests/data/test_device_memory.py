"""Batches on a device. The CPU stands for it, so that all values can be compared; copies are counted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from polyfed import Experiment, run
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.data.cache import StoredRows
from polyfed.data.device_memory import DeviceMemory, memory_of
from polyfed.data.images import Augment, enlarged
from polyfed.data.samples import Batch, Samples
from polyfed.data.views.pixels import MaskRows, Masks, PixelRows
from polyfed.federation.settings import DataSettings

CPU, MANY = torch.device("cpu"), 1 << 20
CHANGES = Augment.model_validate({"rotate": 20, "crop": 0.4, "shift": 2, "flip": True, "erase": 0.5})


class Counting(DeviceMemory):
    """Counts copies of batches."""

    copies = 0

    def _copied(self, flat: list[Tensor]) -> Callable[[], Tensor]:
        self.copies += 1
        return super()._copied(flat)


def numbers(rows: Tensor, stream: torch.Generator | None = None) -> Tensor:
    """An input without a table, with an odd number of bytes per row."""
    return torch.stack([rows, rows + 1, rows + 2], 1).to(torch.uint8)


def stored_images() -> np.ndarray[Any, Any]:
    return torch.randint(0, 256, (11, 3, 8, 8), dtype=torch.uint8, generator=generator("stored")).numpy()


def samples(table: np.ndarray[Any, Any] | None = None, gaps: bool = True) -> Samples:
    images, rows = stored_images() if table is None else table, torch.arange(11)
    return Samples(
        inputs={"image": PixelRows(images, "half", CHANGES), "text": numbers},  # type: ignore[dict-item]
        rows={"image": rows.where(rows % 4 != 2, -1) if gaps else rows, "text": rows.flip(0), "mask": rows},
        items=rows // 2,
        targets={"label": rows.double(), "flag": rows > 3},
        ids=[str(item) for item in range(6)],
        classes={},
        lazy={"mask": MaskRows(images, "masks", Masks(of="image", size=8, augment=CHANGES))},
    )


def columns(batch: Batch) -> dict[str, Tensor]:
    nested = {
        f"{key} {name}": own for key in ("inputs", "targets", "present") for name, own in vars(batch)[key].items()
    }
    return nested | {name: vars(batch)[name] for name in ("index", "items", "matches")}


@pytest.mark.parametrize("most", [0, MANY])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("augmented", [False, True])
def test_batches_on_a_device_have_values_and_order_of_those_on_the_cpu(most: int, gaps: bool, augmented: bool) -> None:
    here, memory = samples(gaps=gaps), Counting(CPU, most)
    there = replace(here, memory=memory)
    passes = [list(one.batches(4, generator(3) if augmented else None)) for one in (here, there)]
    assert len(passes[0]) == memory.copies == 3, "one copy per batch"
    for expected, batch in zip(*map(lambda batches: map(columns, batches), passes), strict=True):
        assert batch.keys() == expected.keys()
        for name, column in batch.items():
            assert column.dtype == expected[name].dtype
            assert torch.equal(column, expected[name]), name
    assert all(batch.matches is batch.items for batch in passes[1]), "no column crosses twice"


def test_inputs_alone_are_loaded_in_order() -> None:
    here, memory = samples(), Counting(CPU, MANY)
    there, parts = replace(here, memory=memory), torch.split(here.rows["image"], 3)
    for expected, loaded in zip(here.loads("image", parts), there.loads("image", parts), strict=True):
        assert torch.equal(loaded, expected)
    assert memory.copies == 4
    assert torch.equal(there.load("text", parts[1]), here.load("text", parts[1]))


@pytest.mark.parametrize(("most", "held"), [(2 * 11 * 192, 2), (2 * 11 * 192 - 1, 1), (0, 0)])
def test_a_table_is_copied_once_if_it_fits_with_those_before_it(most: int, held: int) -> None:
    memory, index, seen = DeviceMemory(CPU, most), torch.arange(11), []
    tables = [stored_images(), stored_images()]
    clients = [replace(samples(table, gaps=False), memory=memory).subset(index) for table in tables for _ in range(2)]
    before = [client.batch(index).inputs["image"] for client in clients]
    for table in tables:
        table[:] = 0  # shows who reads it again
    for client, first in zip(clients, before, strict=True):
        seen.append(torch.equal(client.batch(index).inputs["image"], first))
    assert seen == [True] * 2 * held + [False] * 2 * (2 - held), "clients that share a table share its copy"


def test_views_of_one_file_share_its_copy(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", stored_images())
    memory, index = DeviceMemory(CPU, 11 * 192), torch.arange(11)
    for _ in range(2):
        table = np.asarray(np.load(tmp_path / "images.npy", mmap_mode="r"))
        replace(samples(table, gaps=False), memory=memory).batch(index)
    assert len(memory._tables) == 1


def test_stored_features_stay_on_the_device_once_all_are_computed(tmp_path: Path) -> None:
    computed = list[int]()

    def compute(rows: Any) -> Tensor:
        computed.extend(rows)
        return torch.tensor(rows)[:, None] * torch.ones(1, 2)

    features = StoredRows(tmp_path / "a.npy", lambda: (11, 2), compute, "numbers")
    memory = DeviceMemory(CPU, MANY)
    chosen = replace(samples(gaps=False), inputs={"image": features}, lazy={}, memory=memory)
    for held, index in ((0, torch.tensor([1, 2])), (0, torch.arange(11)), (1, torch.arange(11))):
        assert torch.equal(chosen.batch(index).inputs["image"][:, 0], index.float())
        assert len(memory._tables) == held
    assert sorted(computed) == list(range(11))


@pytest.mark.parametrize("fails", [False, True])
def test_one_batch_is_prepared_ahead_and_none_more(fails: bool) -> None:
    asked = list[list[int]]()

    def load(rows: Tensor, stream: torch.Generator | None = None) -> Tensor:
        asked.append(rows.tolist())
        if fails and len(asked) == 3:
            raise OSError("row 4 is damaged")
        return rows

    one = replace(samples(), inputs={"text": load}, lazy={}, memory=DeviceMemory(CPU))  # type: ignore[dict-item]
    batches = one.batches(2)
    assert next(batches).index.tolist() == [0, 1]
    assert asked == [[10, 9], [8, 7]]
    if fails:
        with pytest.raises(OSError, match="row 4"):
            next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert list(batches) == []
    assert len(asked) == 2 + fails


def test_on_cuda_pinned_bytes_cross_on_a_stream_of_their_own_for_which_the_device_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, empty = list[str](), torch.empty

    class Stream:
        def __init__(self, device: object) -> None: ...

        def record_event(self) -> str:
            calls.append("recorded")
            return "arrival"

        def wait_event(self, event: str) -> None:
            calls.append(f"waited for {event}")

    def allocated(size: int, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        calls.append(f"pinned: {pin_memory}")
        return empty(size, dtype=dtype)

    def moved(bytes_: Tensor, device: torch.device, *, non_blocking: bool) -> Tensor:
        calls.append(f"to {device}, non-blocking: {non_blocking}")
        return bytes_

    for name, stub in {"Stream": Stream, "current_stream": Stream, "stream": lambda own: nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(torch, "empty", allocated)
    monkeypatch.setattr(Tensor, "to", moved)
    monkeypatch.setattr(Tensor, "record_stream", lambda bytes_, stream: calls.append("kept"))
    memory, crossing = DeviceMemory(torch.device("cuda")), ["pinned: True", "to cuda, non-blocking: True", "recorded"]
    batches = memory.ahead({"index": torch.full((3,), number), "deep": {"flag": torch.ones(1)}} for number in range(2))
    assert next(batches)["index"].tolist() == [0, 0, 0]
    assert calls == [*crossing, *crossing, "waited for arrival", "kept"]
    assert next(batches)["index"].tolist() == [1, 1, 1]
    assert calls[8:] == ["waited for arrival", "kept"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_boxes_are_enlarged_as_one_by_one(dtype: torch.dtype) -> None:
    x = torch.from_numpy(stored_images())[:4].to(dtype)
    boxes = torch.tensor([[0, 0, 8, 8], [3, 1, 5, 7], [2, 5, 1, 3], [4, 0, 3, 2]])
    for image, box, (top, left, h, w) in zip(x, enlarged(x, boxes), boxes.tolist(), strict=True):
        expected = F.interpolate(image[None, :, top : top + h, left : left + w], (8, 8), mode="bilinear")[0]
        torch.testing.assert_close(box, expected, atol=1.0 if dtype is torch.uint8 else 1e-3, rtol=0)


def test_a_run_with_data_on_a_device_ends_in_the_same_weights(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tiny["clients"]["image"]["model"]["encoders"]["image"]
    image["view"] = {**image["view"], "augment": {"flip": True, "crop": 0.5}}
    memories = list[Counting]()

    def on_device(device: torch.device, most: int) -> DeviceMemory:
        memories.append(Counting(device, most))
        return memories[-1]

    def weights(name: str) -> dict[str, Tensor]:
        models = run(Experiment.load(tiny), tmp_path / name, quiet=True).folder / "models"
        files = sorted(models.rglob("*.safetensors"))
        return {f"{file.relative_to(models)} {key}": value for file in files for key, value in load_file(file).items()}

    expected = weights("cpu")
    monkeypatch.setattr("polyfed.runs.session.memory_of", on_device)
    result, (memory,) = weights("device"), memories
    assert memory.most == 1 << 30
    assert memory.copies > len(memory._tables) > 0
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_the_bound_is_a_number_of_bytes_for_devices_other_than_the_cpu() -> None:
    with pytest.raises(ConfigError, match=r"device_memory: Input should be greater than or equal to 0 \(got -1\)"):
        DataSettings(sources={}, device_memory=-1)
    assert memory_of(CPU, 5) is None
    other = memory_of(torch.device("meta"), DataSettings(sources={}, device_memory=5).device_memory)
    assert other is not None
    assert other.most == 5
