"""A round of every method on an accelerator, which is pretended: it computes as the CPU does, and raises as a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grids import mostly_slow
from polyfed.core.errors import ConfigError
from polyfed.federation.state import flatten
from pretended_device import DEVICE, OnDevice, pretended_device
from sessions import metrics, prepared
from small_federations import METHODS, Config, federation_for, participants

FAST = ("fedavg", "fedcola", "creamfl", "fedafd", "fedaid", "change_distillation")


def round_on(config: Config, folder: Path, device: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    """State of the server after a round with evaluation and checkpoint, and the round's metrics."""
    config["run"] |= {"device": device, "eval_every": 1}
    for participant in participants(config):  # Adam would turn rounding of gradients that are zero into steps
        participant["training"]["optimizer"] = {"kind": "sgd", "lr": 0.05}
    session = prepared(config, folder)
    session.loop().round(1)
    state = flatten(session.server.snapshot())
    assert not state or device == "cpu" or any(isinstance(value, OnDevice) for value in state.values())
    return {name: value.cpu() for name, value in state.items()}, metrics(session)


@pytest.mark.parametrize("method", mostly_slow(METHODS, *FAST))
def test_a_round_on_a_device_is_one_on_the_cpu(method: str, tmp_path: Path) -> None:
    with pretended_device() as device:
        state, measured = round_on(federation_for(method), tmp_path / "device", str(device))
    expected, known = round_on(federation_for(method), tmp_path / "cpu", "cpu")
    assert state.keys() == expected.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5, msg=name)
    assert measured == pytest.approx(known, rel=1e-3, abs=1e-5)
