"""A round of every method on an accelerator, which is pretended: it computes as the CPU does, and raises as a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from grids import mostly_slow
from polyfed.federation.state import flatten
from pretended_device import DEVICE, OnDevice, pretended_device
from sessions import prepared
from small_federations import METHODS, Config, federation_for, participants

FAST = ("fedavg", "fedcola", "creamfl", "fedafd", "fedaid", "change_distillation")


def round_on(config: Config, folder: Path, device: str) -> tuple[dict[str, Tensor], dict[tuple[str, str], float]]:
    """State of the server after a round with evaluation and checkpoint, and all metrics."""
    config["run"] |= {"device": device, "eval_every": 1}
    for participant in participants(config):  # Adam would turn rounding of gradients that are zero into steps
        participant["training"]["optimizer"] = {"kind": "sgd", "lr": 0.05}
    session = prepared(config, folder)
    session.loop().round(1)
    state = flatten(session.server.snapshot())
    assert not state or device == "cpu" or any(isinstance(value, OnDevice) for value in state.values())
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    measured = [(line["participant"], *metric) for line in lines for metric in line.get("metrics", {}).items()]
    assert measured
    return {name: value.cpu() for name, value in state.items()}, {(who, name): value for who, name, value in measured}


def products(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Changes of the layers that factors A and B describe."""
    return {name: state[name.replace("lora_A", "lora_B")] @ value for name, value in state.items() if "lora_A" in name}


REFUSED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "tensors of two devices": lambda there, here: there + here,
    "a tensor on the CPU that is written": lambda there, here: here.add_(there),
    "a number on the CPU that is written": lambda there, here: here.sum().add_(there.sum()),
    "numbers of two devices in one tensor": lambda there, here: torch.stack([there.sum(), here.sum()]),
    "a product of two devices": lambda there, here: there @ here,
    "an index into the CPU": lambda there, here: here[there.long()],
    "rows of two devices": lambda there, here: there.index_select(0, here.long()),
    "a mask of the CPU": lambda there, here: there.masked_fill(here > 0, 0.0),
    "a loss over targets on the CPU": lambda there, here: cross_entropy(there[None], here[:1].long()),
    "a generator of the CPU": lambda there, here: there.normal_(generator=torch.Generator()),
    "a draw by a generator of the CPU": lambda there, here: torch.rand(2, device=DEVICE, generator=torch.Generator()),
    "numpy": lambda there, here: there.numpy(),
    "numpy's own way": lambda there, here: np.asarray(there),
}
ALLOWED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a number of the CPU": lambda there, here: there * here.sum(),
    "an index of the CPU": lambda there, here: there[here.long()],
    "a number of the CPU that fills": lambda there, here: there.masked_fill(there > 0, here.sum()),
    "a copy to the CPU": lambda there, here: here.copy_(there).to(DEVICE),
    "a copy from the CPU": lambda there, here: there.copy_(here),
    "tensors made there": lambda there, here: torch.arange(3, device=DEVICE) + torch.tensor([1, 2, 3], device=DEVICE),
}


@pytest.mark.parametrize("operation", REFUSED)
def test_the_device_refuses_what_a_gpu_refuses(operation: str) -> None:
    with pretended_device(), pytest.raises(RuntimeError, match=r"device|cpu|numpy"):
        REFUSED[operation](torch.ones(3).to(DEVICE), torch.ones(3))


@pytest.mark.parametrize("operation", ALLOWED)
def test_the_device_allows_what_a_gpu_allows(operation: str) -> None:
    with pretended_device():
        assert ALLOWED[operation](torch.ones(3).to(DEVICE), torch.ones(3)).device == DEVICE


@pytest.mark.parametrize("method", mostly_slow(METHODS, *FAST))
def test_a_round_on_a_device_is_one_on_the_cpu(method: str, tmp_path: Path) -> None:
    with pretended_device() as device:
        state, measured = round_on(federation_for(method), tmp_path / "device", str(device))
    expected, known = round_on(federation_for(method), tmp_path / "cpu", "cpu")
    if method == "flexlora":  # its factors are singular vectors, of which only the products are determined
        state, expected = products(state), products(expected)
    torch.testing.assert_close(state, expected, rtol=1e-3, atol=1e-5)
    assert measured == pytest.approx(known, rel=1e-3, abs=1e-5)
