"""The most memory that was in use since a moment."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

_SELF = Path("/proc/self")
_SLACK = 1 << 20  # what may be given back between the two readings


class PeakMemory:
    """Measures from its making on: what a GPU has allocated, else what is resident of this process (on Linux)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_told = True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self._is_told = _reset_peak()

    def read(self) -> int | None:
        """Bytes at the peak since then; None where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return _resident().get("VmHWM") if self._is_told else None


def _reset_peak() -> bool:
    """Whether the peak is now what is resident; some containers refuse to reset it, others do not heed it."""
    before = _resident().get("VmHWM")
    with contextlib.suppress(OSError):
        (_SELF / "clear_refs").write_text("5")  # the kernel's word for it
    after = _resident()
    return bool(after) and (after["VmHWM"] != before or after["VmHWM"] - after["VmRSS"] < _SLACK)


def _resident() -> dict[str, int]:
    """VmHWM and VmRSS in bytes; nothing where the system does not tell."""
    with contextlib.suppress(OSError):
        lines = re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB$", (_SELF / "status").read_text(), re.MULTILINE)
        return {name: int(size) * 1024 for name, size in lines}
    return {}
