"""FedCola's averages."""

from __future__ import annotations

from pydantic import Field

from polyfed.aggregation.averagings.by_slot import BySlot
from polyfed.aggregation.collaboration import Layers, Range


class CollaborativeAveraging(BySlot):
    """Collaborative aggregation with compensation (FedCola, Sun et al., ECCV 2024, section 4.3).

    All types that share a modality average its attention; their other layers are scaled to match.
    """

    layers: Layers = Field(default="attention", description="what types average with each other (Omega_attn)")
    range: Range = Field(default="modality", description="with whom: own type, the modality (paper), all stacks")
    compensation: bool = Field(default=True, description="scale the other layers like attention (Omega_comp)")
