"""Frames of messages; apart from ``framing``, so that a process that only passes them on needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Frame:
    """One bundle as it crosses: JSON, and the bytes of its tensors in the order of the JSON."""

    header: str
    buffers: Sequence[memoryview]
