"""How deep a training step stands below a method's ``round``, traced in a tiny federation."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch


def frames_to_backward(content: dict[str, Any], method: str = "round") -> list[str]:
    """Functions of polyfed on the way from ``round`` to the deepest ``Tensor.backward`` below it, both ends included.

    Args:
        content: an experiment, which runs in this process with the engine that it names.
        method: name of the function where the way begins.
    """
    from polyfed import Experiment, run

    ways: list[list[str]] = []
    backward = torch.Tensor.backward

    def traced(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        ways.append(_way(sys._getframe(1), method))
        backward(tensor, *args, **options)

    with tempfile.TemporaryDirectory() as folder, patch.object(torch.Tensor, "backward", traced):
        run(Experiment.load(content), Path(folder) / "run")
    return max(ways, key=len)


def _way(frame: FrameType | None, method: str) -> list[str]:
    names: list[str] = []
    while frame is not None:
        module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_qualname
        if module.startswith("polyfed."):
            names.append(f"{module}.{name}")
            if name.endswith(f".{method}"):
                return names[::-1]
        frame = frame.f_back
    return []
