"""Received messages before they are read: frames, and limits beyond which a message is refused.

A process that only passes frames on needs no torch, so this module imports none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field

from polyfed.core.errors import PayloadError
from polyfed.core.settings import Settings
from polyfed.core.untrusted import TEXT_BYTES


class Limits(Settings):
    """Bounds of one message, checked by its receiver."""

    message_bytes: int = Field(default=1 << 32, ge=1, description="largest message, bytes of tensors")
    text_bytes: int = Field(default=TEXT_BYTES, ge=1024, description="largest JSON and headers of tensors, bytes")
    tensors: int = Field(default=100_000, ge=1, description="most tensors in a message")
    row_norm: float = Field(default=1e4, gt=0, allow_inf_nan=False, description="largest L2 norm of a representation")
    tensor_norm: float = Field(default=1e6, gt=0, allow_inf_nan=False, description="largest L2 norm of other tensors")


class ReplySize(NamedTuple):
    """Largest reply to a request, known from the request; ``Limits`` hold as well.

    Attributes:
        tensors: most tensors.
        bytes: most bytes of all tensors.
    """

    tensors: int
    bytes: int

    def require(self, sizes: Sequence[int]) -> None:
        """Raise PayloadError unless tensors of these sizes, in bytes, may be a reply."""
        if len(sizes) > self.tensors or sum(sizes) > self.bytes:
            raise PayloadError(
                f"reply of {len(sizes):,} tensors, {sum(sizes):,} bytes: what was asked for has {self.tensors:,}, "
                f"{self.bytes:,} bytes at most"
            )


@dataclass(frozen=True)
class Frame:
    """One bundle as it crosses: JSON, and the bytes of its tensors in the order of the JSON."""

    header: str
    buffers: Sequence[memoryview]
