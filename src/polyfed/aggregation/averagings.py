"""Averagings of trained weights: within types of clients, and of layers between types."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from polyfed.aggregation.averaging import Averaging
from polyfed.aggregation.collaboration import Layers, Range, Scope
from polyfed.core.effects import SEVERAL, SEVERAL_TYPES, SINGLE, Not, Only, Where


class ByType(Averaging):
    """w <- sum_k n_k w_k / sum_k n_k over the clients of each type (McMahan et al. 2017, Algorithm 1).

    Types exchange nothing.
    """

    short_name: ClassVar[str] = "by_type"


MIXES = Only(layers=Not("none"), range=Not("own")) & Where(SEVERAL_TYPES)
"""Types of clients average layers with each other."""


class BySlot(Averaging):
    """Types of clients average some layers with each other, the other layers among their own clients.

    ``layers: encoder, range: modality`` averages encoders over all who have the modality (CreamFL, section 4.1).
    """

    short_name: ClassVar[str] = "by_slot"

    layers: Annotated[Layers, Only(range=Not("own")) & Where(SEVERAL_TYPES)] = Field(
        default="none", description="what types of clients average with each other"
    )
    range: Annotated[Range, Only(layers=Not("none")) & Where(SEVERAL_TYPES)] = Field(
        default="own", description="with whom: own type, all who have the modality, or the stacks of all modalities"
    )
    compensation: Annotated[bool, MIXES] = Field(
        default=False, description="scale the other layers as those that are averaged between types (FedCola)"
    )
    factor: Annotated[float, MIXES & Where(SINGLE) & Where(SEVERAL)] = Field(
        default=1.0, gt=0, le=1e6, description="on sample counts of clients with several modalities (FedIoT: 100)"
    )
    denominator: Annotated[Literal["slot", "model"], MIXES & Only(compensation=False) & Where(SEVERAL)] = Field(
        default="slot", description="without compensation: shares add up to one; model: as FedCola's released code"
    )
    names: Annotated[Literal["role", "released"], MIXES & Only(layers={"blocks", "mlp"})] = Field(
        default="role", description="layers by role; released: as FedCola's code matches names (no attention in blocks)"
    )

    @property
    def scope(self) -> Scope:
        # plain data: aggregation functions do not see settings
        return Scope(self.layers, self.range, self.compensation, self.factor, self.denominator, self.names)


class CollaborativeAveraging(BySlot):
    """Collaborative aggregation with compensation (FedCola, Sun et al., ECCV 2024, section 4.3).

    All types that share a modality average its attention; their other layers are scaled to match.
    """

    short_name: ClassVar[str] = "fedcola"

    layers: Layers = Field(default="attention", description="what types average with each other (Omega_attn)")
    range: Range = Field(default="modality", description="with whom: own type, the modality (paper), all stacks")
    compensation: bool = Field(default=True, description="scale the other layers like attention (Omega_comp)")


class MultimodalAveraging(BySlot):
    """Multimodal federated averaging (Zhao et al., IoTDI 2022), of transformer blocks as FedCola's authors adapt it.

    Clients with several modalities count alpha (``factor``) times as much as others.
    """

    short_name: ClassVar[str] = "fediot"

    layers: Layers = Field(default="blocks", description="what types of clients average with each other")
    range: Range = Field(
        default="modality", description="with whom: own type, all who have the modality, or the stacks of all"
    )
    factor: float = Field(
        default=100.0, gt=0, le=1e6, description="alpha, on sample counts of clients with several modalities"
    )
