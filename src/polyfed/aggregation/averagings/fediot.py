"""FedIoT's averages."""

from __future__ import annotations

from pydantic import Field

from polyfed.aggregation.averagings.by_slot import BySlot
from polyfed.aggregation.collaboration import Layers, Range


class MultimodalAveraging(BySlot):
    """Multimodal federated averaging (Zhao et al., IoTDI 2022), of transformer blocks as FedCola's authors adapt it.

    Clients with several modalities count alpha (``factor``) times as much as others.
    """

    layers: Layers = Field(default="blocks", description="what types of clients average with each other")
    range: Range = Field(
        default="modality", description="with whom: own type, all who have the modality, or the stacks of all"
    )
    factor: float = Field(
        default=100.0, gt=0, le=1e6, description="alpha, on sample counts of clients with several modalities"
    )
