"""Averages in which types of clients share some layers with each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from polyfed.aggregation.averaging import Averaging
from polyfed.aggregation.mean import Contribution, GlobalModel, Rule, Update, exact_average, sequential_average
from polyfed.core.errors import ConfigError
from polyfed.models.slots import BLOCK_ROLES, EXTRA, HEAD, Slot
from polyfed.optim.servers import Models

Layers = Literal["attention", "mlp", "mlp_norm", "blocks", "encoder"]

_ROLES: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention",),
    "mlp": ("mlp",),
    "mlp_norm": ("mlp", "norm"),
    "blocks": BLOCK_ROLES,
}


class BySlot(Averaging):
    """Types of clients average some layers with each other, the other layers among their own clients.

    ``layers: encoder`` averages encoders over all who have the modality (CreamFL, section 4.1). With clients of one
    type alone it is ``by_type``.
    """

    short_name: ClassVar[str] = "by_slot"
    between_types = True

    layers: Layers = Field(
        default="encoder",
        description="what types average with each other; mlp_norm: what the name blocks matches in FedCola's code",
    )
    range: Literal["modality", "all"] = Field(
        default="modality", description="with whom: all who have the modality, or the stacks of all modalities"
    )
    compensation: bool = Field(
        default=False, description="scale the other layers as those that are averaged between types (FedCola)"
    )
    factor: float = Field(
        default=1.0, gt=0, le=1e6, description="on sample counts of clients with several modalities (FedIoT: 100)"
    )
    denominator: Literal["slot", "model"] = Field(
        default="slot",
        description="of a share: samples of the types that have the slot; model: of all that average any slot of the "
        "model with it, as FedCola's released code (compensation does so itself)",
    )

    @model_validator(mode="after")
    def _has_one_denominator(self) -> Self:
        if self.compensation and self.denominator == "model":
            raise ValueError("denominator 'model' has no effect with compensation; leave it at slot")
        return self

    def covers(self, slot: Slot) -> bool:
        """Whether types average a slot with each other."""
        if self.layers == "encoder":
            return slot.role not in (HEAD, EXTRA)
        return slot.role in _ROLES[self.layers]

    def average(
        self,
        weights: Models,
        models: Mapping[str, GlobalModel],
        updates: Iterable[Update],
        asked: Mapping[str, float],
    ) -> dict[str, dict[str, Tensor]]:
        if self.mean == "sequential":
            return sequential_average(weights, models, self.rule(models, asked), updates, asked)
        return exact_average(weights, models, lambda sizes: self.rule(models, sizes), updates)

    def rule(self, models: Mapping[str, GlobalModel], sizes: Mapping[str, float]) -> Rule:
        """What each global model takes from which type, slot by slot.

        FedCola's Omega_attn, Omega_others and Omega_comp (section 4.3), and FedIoT's factor.

        Args:
            models: type -> its global model.
            sizes: type -> samples of its clients whose updates arrived; a type that is not there was absent.
        """
        weights = {
            kind: float(sizes.get(kind, 0)) * (self.factor if len(model.modalities) > 1 else 1.0)
            for kind, model in models.items()
        }
        return {
            (kind, slot): self._contributions(models, weights, kind, slot)
            for kind, model in models.items()
            for slot in model.keys
        }

    def _contributions(
        self, models: Mapping[str, GlobalModel], weights: Mapping[str, float], kind: str, slot: Slot
    ) -> tuple[Contribution, ...]:
        total = sum(weights[name] for name in self._basis(models, kind, slot))
        return tuple(
            Contribution(name, source, weights[name] / len(slots) / total)
            for name, slots in self._stacks(models, kind, slot).items()
            for source in slots
            if weights[name] > 0
        )

    def _basis(self, models: Mapping[str, GlobalModel], kind: str, slot: Slot) -> list[str]:
        """Types whose samples a share is taken of: where not all of them contribute, shares add up to less than 1."""
        basis = set(self._stacks(models, kind, slot))
        several = len(models[kind].modalities) > 1
        if self.compensation or (self.denominator == "model" and several and self.covers(slot)):
            basis = {kind}.union(*(self._stacks(models, kind, other) for other in models[kind].keys))
        # in a fixed order: a set's would change the sum's last bits from process to process
        return [name for name in models if name in basis]

    def _stacks(self, models: Mapping[str, GlobalModel], kind: str, slot: Slot) -> dict[str, list[Slot]]:
        """Type -> its slots that contribute to a slot of ``kind``; a type's several stacks share its weight."""
        if not self.covers(slot):
            return {kind: [slot]}
        # a slot of another modality only with range all, whatever the keys are called
        slots_of = {
            name: [
                other
                for other in model.keys
                if other.role == slot.role and (self.range == "all" or other.modality == slot.modality)
            ]
            for name, model in models.items()
        }
        return {name: slots for name, slots in slots_of.items() if slots}

    def require(self, models: Mapping[str, GlobalModel]) -> None:
        present = {slot for model in models.values() for slot in model.keys}
        if not any(map(self.covers, present)):
            raise ConfigError(
                f"algorithm.averaging.layers is '{self.layers}', but no client's model has such layers; roles there "
                f"are: {', '.join(sorted({slot.role for slot in present}))}; give clients encoders 'blocks', or set "
                "algorithm.averaging.layers=encoder"
            )
        for kind, model in models.items():
            for slot in model.keys:
                for name, others in self._stacks(models, kind, slot).items():
                    for other in others:
                        require_equal(model, slot, models[name], other)


class CollaborativeAveraging(BySlot):
    """Collaborative aggregation with compensation (FedCola, Sun et al., ECCV 2024, section 4.3).

    All types that share a modality average its attention; their other layers are scaled to match.
    """

    short_name: ClassVar[str] = "fedcola"

    layers: Layers = Field(default="attention", description="what types average with each other (Omega_attn)")
    compensation: bool = Field(default=True, description="scale the other layers like attention (Omega_comp)")


class MultimodalAveraging(BySlot):
    """Multimodal federated averaging (Zhao et al., IoTDI 2022), of transformer blocks as FedCola's authors adapt it.

    Clients with several modalities count alpha (``factor``) times as much as others.
    """

    short_name: ClassVar[str] = "fediot"

    layers: Layers = Field(default="blocks", description="what types of clients average with each other")
    factor: float = Field(
        default=100.0, gt=0, le=1e6, description="alpha, on sample counts of clients with several modalities"
    )


def require_equal(target: GlobalModel, slot: Slot, source: GlobalModel, other: Slot) -> None:
    """Check that a slot of one type has the same tensors as a slot of another, behind the same frozen values.

    Raises:
        ConfigError: naming clients and slots.
    """
    here = {key: target.shapes[name] for key, name in target.keys.get(slot, {}).items()}
    there = {key: source.shapes[name] for key, name in source.keys.get(other, {}).items()}
    if here != there:
        # the first difference by name is enough to find the others
        key = sorted(set(here.items()) ^ set(there.items()))[0][0]
        sizes = ["missing" if shape is None else str(list(shape)) for shape in (here.get(key), there.get(key))]
        raise ConfigError(
            f"slot '{slot}' of clients {target.some_clients} cannot be averaged with slot '{other}' of "
            f"clients {source.some_clients}: '{key}' is {sizes[0]} and "
            f"{sizes[1]}; give them equal encoders, or set algorithm.averaging=by_type"
        )
    ours, theirs = _frozen(target, slot), _frozen(source, other)
    if unequal := [name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]]:
        raise ConfigError(
            f"slot '{slot}' of clients {target.some_clients} cannot be averaged with slot '{other}' of clients "
            f"{source.some_clients}: what is frozen in their '{unequal[0]}' encoders is not the same "
            f"({ours[unequal[0]]} and {theirs[unequal[0]]}); give them equal encoders, or set "
            "algorithm.averaging=by_type"
        )


def _frozen(model: GlobalModel, slot: Slot) -> dict[str, str]:
    """Modality -> digest of the frozen values that a slot works with."""
    return {name: digest for key in model.keys.get(slot, {}).values() for name, digest in model.places[key].frozen}
