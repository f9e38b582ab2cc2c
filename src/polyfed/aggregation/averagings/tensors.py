"""Averages tensor by tensor: among the clients of a type, of all types, or of types that share a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from polyfed.aggregation.averaging import (
    Averages,
    Averaging,
    GlobalModel,
    Mean,
    ModelsByType,
    SharedMean,
    require_one_frozen,
)
from polyfed.aggregation.mean import WeightedMean, accumulator
from polyfed.core.errors import ConfigError
from polyfed.models.blocks import BLOCK_ROLES
from polyfed.models.slots import EXTRA, HEAD, Slot

Layers = Literal["attention", "mlp", "mlp_norm", "blocks", "encoder"]

_ROLES: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention",),
    "mlp": ("mlp",),
    "mlp_norm": ("mlp", "norm"),
    "blocks": BLOCK_ROLES,
}


class Contribution(NamedTuple):
    """A share of a type's update of one of its slots."""

    source: str
    slot: Slot
    coefficient: float


Rule = Mapping[tuple[str, Slot], tuple[Contribution, ...]]
"""Maps (type, slot) to the contributions to its global model; without any it stays as it is."""


class ByType(Averaging):
    """w <- sum_k n_k w_k / sum_k n_k over the clients of each type (McMahan et al. 2017, Algorithm 1).

    Types exchange nothing.
    """

    short_name: ClassVar[str] = "by_type"

    def new_means(self, models: ModelsByType, asked: Mapping[str, float]) -> Mapping[str, Mean]:
        if self.mean == "exact":
            return super().new_means(models, asked)
        running = {
            type_name: {name: value.clone() for name, value in model.weights.items()}
            for type_name, model in models.items()
        }
        shared = models, self.rule(models, asked), running, set[tuple[str, Slot]]()
        return {name: Interpolation(name, asked.get(name, 0.0), *shared) for name in models}

    def average(self, models: ModelsByType, means: Mapping[str, Any]) -> Averages:
        first = next(iter(means.values()))
        return first.result() if isinstance(first, Interpolation) else self.of_means(models, means)

    def of_means(self, models: ModelsByType, means: Mapping[str, WeightedMean]) -> Averages:
        """New global models from the weighted mean of each type."""
        averages = {}
        for type_name, model in models.items():
            mean = means[type_name].take() if means[type_name].total > 0 else model.weights
            averages[type_name] = {name: mean[name] for name in model.weights}
        return averages

    def rule(self, models: ModelsByType, sizes: Mapping[str, float]) -> Rule:
        """Contributions to each global model, slot by slot; here, those of its own type.

        Args:
            models: type -> its global model.
            sizes: type -> samples of its clients whose updates arrived; absent types are left out.
        """
        return {
            (type_name, slot): (Contribution(type_name, slot, 1.0),) if sizes.get(type_name, 0) > 0 else ()
            for type_name, model in models.items()
            for slot in model.keys
        }


class ByName(Averaging):
    """w <- sum_k n_k w_k / sum_k n_k over the clients whose models have a tensor of that name and shape.

    So clients of other classes, whose models are of other types, learn prompts and adapters together.
    """

    short_name: ClassVar[str] = "by_name"
    between_types = crosses_types = True

    @model_validator(mode="after")
    def _is_exact(self) -> Self:
        if self.mean != "exact":
            raise ValueError("mean: sequential goes through clients of one type; leave it at exact, or choose by_type")
        return self

    def new_means(self, models: ModelsByType, asked: Mapping[str, float]) -> Mapping[str, Mean]:
        return dict.fromkeys(models, SharedMean())

    def average(self, models: ModelsByType, means: Mapping[str, Any]) -> Averages:
        mean: SharedMean = next(iter(means.values()))
        return mean.averages(models)

    def require(self, models: ModelsByType) -> None:
        require_one_frozen(models)


class BySlot(ByType):
    """Types of clients average some layers with each other, the other layers among their own clients.

    ``layers: encoder`` averages encoders over all who have the modality (CreamFL, section 4.1). With clients of one
    type alone it is ``by_type``.
    """

    short_name: ClassVar[str] = "by_slot"
    between_types = True

    layers: Layers = Field(default="encoder", description="shared layers; mlp_norm: FedCola's code means it by blocks")
    range: Literal["modality", "all"] = Field(default="modality", description="with all of the modality, or all stacks")
    compensation: bool = Field(default=False, description="scale all other layers like the shared ones (FedCola)")
    factor: float = Field(default=1.0, gt=0, le=1e6, description="on samples of clients with several modalities")
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
        """True if types average a slot with each other."""
        if self.layers == "encoder":
            return slot.role not in (HEAD, EXTRA)
        return slot.role in _ROLES[self.layers]

    def of_means(self, models: ModelsByType, means: Mapping[str, WeightedMean]) -> Averages:
        """W <- W + Omega (mean - W), with Omega as ``rule`` (FedCola, section 3).

        Integer tensors (counters) are the rounded mean of the type's own.
        """
        rule = self.rule(models, {type_name: mean.total for type_name, mean in means.items()})
        known = {type_name: mean.take() for type_name, mean in means.items() if mean.total > 0}
        return {
            type_name: {
                name: _moved(models, known, rule[type_name, place.slot], type_name, name)
                for name, place in model.slots.items()
            }
            for type_name, model in models.items()
        }

    def rule(self, models: ModelsByType, sizes: Mapping[str, float]) -> Rule:
        """FedCola's Omega_attn, Omega_others and Omega_comp (section 4.3), and FedIoT's factor.

        Entry (i, j) has the samples of column j, as in Omega_comp; Omega_attn is printed with n_i.
        """
        weights = {
            type_name: float(sizes.get(type_name, 0)) * (self.factor if len(model.modalities) > 1 else 1.0)
            for type_name, model in models.items()
        }
        return {
            (type_name, slot): self._contributions(models, weights, type_name, slot)
            for type_name, model in models.items()
            for slot in model.keys
        }

    def _contributions(
        self, models: ModelsByType, weights: Mapping[str, float], type_name: str, slot: Slot
    ) -> tuple[Contribution, ...]:
        total = sum(weights[name] for name in self._basis(models, type_name, slot))
        return tuple(
            Contribution(name, source, weights[name] / len(slots) / total)
            for name, slots in self._stacks(models, type_name, slot).items()
            for source in slots
            if weights[name] > 0
        )

    def _basis(self, models: ModelsByType, type_name: str, slot: Slot) -> list[str]:
        """Types whose samples a share is taken of: where not all of them contribute, shares add up to less than 1."""
        basis = set(self._stacks(models, type_name, slot))
        several = len(models[type_name].modalities) > 1
        if self.compensation or (self.denominator == "model" and several and self.covers(slot)):
            basis = {type_name}.union(*(self._stacks(models, type_name, other) for other in models[type_name].keys))
        # in a fixed order: a set's would change the sum's last bits from process to process
        return [name for name in models if name in basis]

    def _stacks(self, models: ModelsByType, type_name: str, slot: Slot) -> dict[str, list[Slot]]:
        """Type -> its slots that contribute to a slot of ``type_name``; a type's several stacks share its weight."""
        if not self.covers(slot):
            return {type_name: [slot]}
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

    def require(self, models: ModelsByType) -> None:
        present = {slot for model in models.values() for slot in model.keys}
        if not any(map(self.covers, present)):
            raise ConfigError(
                f"algorithm.averaging.layers is '{self.layers}', but no client's model has such layers; roles there "
                f"are: {', '.join(sorted({slot.role for slot in present}))}; give clients encoders 'blocks', or set "
                "algorithm.averaging.layers=encoder"
            )
        for type_name, model in models.items():
            for slot in model.keys:
                for name, others in self._stacks(models, type_name, slot).items():
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
    factor: float = Field(default=100.0, gt=0, le=1e6, description="alpha, on samples of multimodal clients")


@torch.no_grad()
def _moved(
    models: ModelsByType,
    means: Mapping[str, Mapping[str, Tensor]],
    shares: tuple[Contribution, ...],
    type_name: str,
    name: str,
) -> Tensor:
    old, place = models[type_name].weights[name], models[type_name].slots[name]
    if not shares:  # the same object: server optimisers skip tensors that no client has moved
        return old
    if shares == (Contribution(type_name, place.slot, 1.0),) or not old.is_floating_point():
        return means[type_name][name] if type_name in means else old
    # shares need not add up to one, so that the old model is moved by differences and not replaced by a mean
    total = old.to(accumulator(old.dtype), copy=True)
    for share in shares:
        # the same tensor under the name that the other type has for it
        source = models[share.source].keys[share.slot][place.key]
        total.add_(means[share.source][source].to(total), alpha=share.coefficient)
        total.sub_(models[share.source].weights[source].to(total), alpha=share.coefficient)
    return total.to(old.dtype)


@dataclass(frozen=True)
class Interpolation:
    """W <- W + c (W_k - W) for one client after the other, as in the released code of FedCola and its relatives.

    This is not the weighted mean: early clients count less than late ones, a share of the old model stays, and the
    result depends on the order of the clients. For comparison with published numbers only.

    Attributes:
        type_name: type of the clients that are added.
        asked: samples of the clients of the type that are asked, of which a client's share is taken.
        models: global models as they were sent.
        rule: contributions of the types, by the samples of all clients that are asked.
        running: global models as the clients so far have moved them; shared by all types.
        moved: types and slots that a client has had a share in; shared by all types.
    """

    type_name: str
    asked: float
    models: ModelsByType
    rule: Rule
    running: Averages
    moved: set[tuple[str, Slot]]

    @torch.no_grad()
    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Move the running models towards a client's."""
        own = self.models[self.type_name].keys
        for (target, slot), shares in self.rule.items():
            for share in (share for share in shares if share.source == self.type_name):
                self.moved.add((target, slot))  # even by 0: a client came, so that momenta may follow
                share_of_client = share.coefficient * weight / self.asked
                for key, name in self.models[target].keys[slot].items():
                    value, towards = self.running[target][name], tensors[own[share.slot][key]]
                    if value.is_floating_point():
                        value.lerp_(towards.to(value), share_of_client)
                    else:  # counters have no lerp, and in fp32 would lose their last digits
                        value.copy_(value.double().lerp(towards.to(value.device).double(), share_of_client).round())

    def result(self) -> Averages:
        """All global models; unmoved tensors are the same objects as before."""
        return {
            type_name: {
                name: self.running[type_name][name] if (type_name, place.slot) in self.moved else model.weights[name]
                for name, place in model.slots.items()
            }
            for type_name, model in self.models.items()
        }


def require_equal(target: GlobalModel, slot: Slot, source: GlobalModel, other: Slot) -> None:
    """Check that a slot of one type has the same tensors as a slot of another, behind the same frozen values.

    Raises:
        ConfigError: naming clients and slots.
    """
    here = {key: tuple(target.weights[name].shape) for key, name in target.keys.get(slot, {}).items()}
    there = {key: tuple(source.weights[name].shape) for key, name in source.keys.get(other, {}).items()}
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
    return {name: digest for key in model.keys.get(slot, {}).values() for name, digest in model.slots[key].frozen}
