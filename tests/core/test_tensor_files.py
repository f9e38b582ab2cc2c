"""Safetensors files in blocks: the library's bytes, without its copies."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from naive import Largest
from polyfed.core.files import link_atomically, write_atomically
from polyfed.core.tensor_files import tensor_blocks
from polyfed.federation.state import StateStore
from polyfed.runs.folder import Checkpoint, RunFolder
from polyfed.runs.saved import KeptModel, save_model

ODD: dict[str, Tensor] = {
    'a"\\\n\x01\x7fé😀': torch.arange(6.0).view(2, 3),
    "number": torch.tensor(3),
    "empty": torch.zeros(0, 3),
    "half": torch.ones(3, 5).half(),
    "brain": torch.ones(5).bfloat16(),
    "mask": torch.tensor([True, False, True]),
    "channels last": torch.arange(96.0).view(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "one value": torch.ones(1, dtype=torch.float64).expand(3),
    "of several blocks": torch.arange(1_200_000),
}


@pytest.mark.parametrize("tensors", [ODD, {}])
@pytest.mark.parametrize("metadata", [None, {}, {"clients": '["é", "b/c"]'}])
def test_the_bytes_are_the_library_s(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> None:
    plain = {name: value.contiguous().clone() for name, value in tensors.items()}
    expected = safetensors.torch.save(plain, metadata=dict(metadata) if metadata else None)
    assert b"".join(map(bytes, tensor_blocks(tensors, metadata))) == expected


def test_tensors_may_share_memory(tmp_path: Path) -> None:
    RunFolder(tmp_path).save_tensors("file", {"a": ODD["mask"], "b": ODD["mask"]})
    assert (RunFolder(tmp_path).tensors("file") or {}).keys() == {"a", "b"}


MODEL = {"embedding": torch.arange(2e6), **{f"layer{k}": torch.arange(5e4) for k in range(40)}}
BYTES = sum(value.nbytes for value in MODEL.values())
WRITERS: dict[str, tuple[Callable[[Path], object], float]] = {
    "checkpoint": (lambda folder: RunFolder(folder).save_checkpoint(Checkpoint(1, MODEL, {})), 0.1),
    "saved model": (
        lambda folder: save_model(RunFolder(folder), ["best", "last"], 1, KeptModel({}, MODEL, lambda: MODEL), None),
        0.1,
    ),
    "state of a client": (lambda folder: StateStore(folder).save("a", (1, 0), MODEL, None), 1.1),  # which it holds
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_makes_no_copy_of_a_model(tmp_path: Path, writer: str) -> None:
    """Bytes that torch allocates in all, and Python at its peak."""
    work, most = WRITERS[writer]
    with Largest():
        work(tmp_path)  # which imports
    tracemalloc.start()
    with Largest() as allocated:
        work(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (allocated.made + peak) / BYTES < most


def test_a_checkpoint_has_the_digest_of_its_file(tmp_path: Path) -> None:
    RunFolder(tmp_path).save_checkpoint(Checkpoint(3, ODD, {}))
    content = (tmp_path / "checkpoints" / "round-000003.safetensors").read_bytes()
    assert f'"sha256": "{hashlib.sha256(content).hexdigest()}"' in next(tmp_path.rglob("*.json")).read_text()


# ---- one file under several names


def linked(folder: Path) -> tuple[Path, Path]:
    first, second = folder / "first", folder / "new" / "second"
    write_atomically(first, b"content")
    link_atomically(first, second)
    return first, second


def test_weights_of_a_model_are_once_on_the_disk(tmp_path: Path) -> None:
    kept = KeptModel({}, {"frozen": torch.ones(2)}, lambda: {"weight": torch.zeros(2)})
    for number in (1, 2):
        save_model(RunFolder(tmp_path), ["best", "last"], number, kept, None)
        for name in ("model.safetensors", "frozen.safetensors"):
            assert (tmp_path / "best" / name).samefile(tmp_path / "last" / name)
    before = (tmp_path / "best" / "model.safetensors").read_bytes()
    save_model(RunFolder(tmp_path), ["last"], 3, KeptModel({}, {}, lambda: {"weight": torch.ones(2)}), None)
    assert (tmp_path / "best" / "model.safetensors").read_bytes() == before
    assert len([*tmp_path.rglob("*.safetensors")]) == 4
    assert not [*tmp_path.rglob("*.tmp")]


def test_a_link_over_the_same_file_leaves_nothing_behind(tmp_path: Path) -> None:
    first, second = linked(tmp_path)
    link_atomically(first, second)
    assert sorted(tmp_path.rglob("*")) == [first, second.parent, second]


def test_a_file_system_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refusing)
    first, second = linked(tmp_path)
    assert second.read_bytes() == b"content"
    assert not second.samefile(first)


def test_a_link_that_a_kill_left_behind_is_not_written_into(tmp_path: Path) -> None:
    """The next process may have the same number, and would empty the file that both names mean."""
    first, second = linked(tmp_path)
    (second.parent / f".second.{os.getpid()}.tmp").hardlink_to(first)
    write_atomically(second, b"new")
    assert (first.read_bytes(), second.read_bytes()) == (b"content", b"new")
