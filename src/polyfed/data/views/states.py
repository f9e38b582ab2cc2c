"""What the last layers of a frozen pretrained backbone work on, computed once and read from a cache from then on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from polyfed.data.views.features import Features


class States(Features):
    """States [l, f] of all positions before the last layers of a ``transformers`` network, for who trains these."""

    pool: Literal["tokens"] = Field(default="tokens", description="states are of all positions")
    positions: None = Field(default=None, description="states are not averaged")
    before_last: int = Field(ge=1, description="how many layers are still to come")

    @property
    def left(self) -> int:
        return self.before_last
