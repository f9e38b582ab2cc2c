from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from polyfed.core.errors import RunError
from polyfed.runs.records import read_arrays


def write(folder, number, values, clients):
    folder.mkdir(parents=True, exist_ok=True)
    metadata = None if clients is None else {"clients": json.dumps(clients)}
    save_file({"values": values}, folder / f"round-{number:04d}.safetensors", metadata)


def test_arrays_are_read_by_name_and_round(tmp_path):
    values = torch.rand(2, 3)
    write(tmp_path / "weights.image", 10, values, ["a", "b"])
    write(tmp_path / "weights.image", 2, values[:1], ["b"])
    write(tmp_path / "weights.text", 2, values, ["a", "b"])
    found = read_arrays(tmp_path)
    assert {name: list(rounds) for name, rounds in found.items()} == {
        "weights.image": [2, 10],
        "weights.text": [2],
    }
    assert found["weights.image"][10].clients == ("a", "b")
    assert found["weights.image"][10].values == pytest.approx(values.numpy())


def test_damaged_arrays_are_named(tmp_path):
    folder = tmp_path / "w"
    write(folder, 1, torch.rand(2, 3), None)
    with pytest.raises(RunError, match=r"w/round-0001.safetensors is damaged"):
        read_arrays(tmp_path)
    write(folder, 1, torch.rand(2, 3), ["a"])
    with pytest.raises(RunError, match=r"shape \(2, 3\) for 1 clients"):
        read_arrays(tmp_path)
    (folder / "round-0001.safetensors").write_bytes(b"short")
    with pytest.raises(RunError, match="damaged"):
        read_arrays(tmp_path)
