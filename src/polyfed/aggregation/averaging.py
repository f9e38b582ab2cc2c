"""How trained weights become new global models, folded in as they come: a setting of methods that average weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, SerializeAsAny
from torch import Tensor

from polyfed.aggregation.collaboration import Contribution, Holder, Layers, Range, Rule, Scope, collaborate
from polyfed.aggregation.mean import WeightedMean, accumulator
from polyfed.core.effects import SEVERAL, SEVERAL_TYPES, SINGLE, Not, Only, Where
from polyfed.core.settings import Settings
from polyfed.models.slots import Slot
from polyfed.optim.servers import Models, Replace, ServerOptimizer, State

Update = tuple[str, Mapping[str, Tensor], float]
"""A client's type, the weights that it has trained, and on how many samples."""


class Averaging(Settings):
    """Averages what clients have trained: each type of clients (one architecture, task and classes) has a global model.

    Subclasses say in ``scope`` what types average with each other.
    """

    home: ClassVar[str] = "polyfed.aggregation.averaging"

    mean: Literal["exact", "sequential"] = Field(
        default="exact", description="weighted mean, or one client after the other into the running model, as released"
    )
    server_optimizer: SerializeAsAny[ServerOptimizer] = Field(
        default=Replace(),
        description="how the global models follow the averages: replace, momentum, adam, yogi, adagrad",
    )

    @property
    def scope(self) -> Scope:
        """Which slots types average with each other, and how; none unless a subclass says so."""
        return Scope()

    @property
    def mixes_types(self) -> bool:
        return self.scope.layers != "none" and self.scope.range != "own"

    def average(
        self,
        weights: Models,
        holders: Mapping[str, Holder],
        updates: Iterable[Update],
        asked: Mapping[str, float],
        state: State,
    ) -> dict[str, dict[str, Tensor]]:
        """The new global models, after the server optimiser's step; they may share memory with the old ones.

        Args:
            weights: type -> its global model at the start of the round.
            holders: type -> what its global model consists of.
            updates: one by one; none is kept.
            asked: type -> samples of the clients that are asked.
            state: of the server optimiser, whose momenta last in it.
        """
        if self.mean == "exact":
            averages = exact_average(weights, holders, self.scope, updates)
        else:
            averages = sequential_average(weights, holders, self.scope, updates, asked)
        return self.server_optimizer.step(weights, averages, state)


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


def exact_average(
    weights: Models, holders: Mapping[str, Holder], scope: Scope, updates: Iterable[Update]
) -> dict[str, dict[str, Tensor]]:
    """Means of each type, then W <- W + sum of coefficient x (mean - W) as the rule says (FedCola, Eq. 3).

    The order of the clients of a type does not matter (up to rounding). Memory: the global models and one mean of
    each, whatever the number of clients. Integer tensors (counters) are the rounded mean of the type's own.
    """
    means, sizes = _means(weights, updates)
    # shares between types need sizes, which are known only now
    rule = collaborate(holders, sizes, scope)
    return {
        kind: {
            name: _moved(weights, means, holders, rule[kind, place.slot], kind, name)
            for name, place in holder.places.items()
        }
        for kind, holder in holders.items()
    }


def _means(kinds: Iterable[str], updates: Iterable[Update]) -> tuple[Models, dict[str, float]]:
    """Mean of each type that has samples, and samples of each type."""
    running = {kind: WeightedMean() for kind in kinds}
    sizes = dict.fromkeys(running, 0.0)
    # never under no_grad: clients may train while their updates are iterated
    for kind, tensors, samples in updates:
        running[kind].add(tensors, samples)
        sizes[kind] += samples
        del tensors  # before the next come
    return {kind: mean.take() for kind, mean in running.items() if sizes[kind] > 0}, sizes


@torch.no_grad()
def _moved(
    weights: Models,
    means: Models,
    holders: Mapping[str, Holder],
    shares: tuple[Contribution, ...],
    kind: str,
    name: str,
) -> Tensor:
    old, place = weights[kind][name], holders[kind].places[name]
    if not shares:  # the very tensor: server optimisers leave alone what nobody has moved
        return old
    if shares == (Contribution(kind, place.slot, 1.0),) or not old.is_floating_point():
        return means[kind][name] if kind in means else old
    # shares need not add up to one, so that the old model is moved by differences and not replaced by a mean
    total = old.to(accumulator(old.dtype), copy=True)
    for share in shares:
        # the same tensor under the name that the other type has for it
        source = holders[share.source].keys[share.slot][place.key]
        total.add_(means[share.source][source].to(total), alpha=share.coefficient)
        total.sub_(weights[share.source][source].to(total), alpha=share.coefficient)
    return total.to(old.dtype)


def sequential_average(
    weights: Models,
    holders: Mapping[str, Holder],
    scope: Scope,
    updates: Iterable[Update],
    asked: Mapping[str, float],
) -> dict[str, dict[str, Tensor]]:
    """W <- W + c (W_k - W) for one client after the other, as the released code of FedCola and its relatives does.

    This is not the weighted mean: early clients count less than late ones, a share of the old model stays, and the
    result depends on the order of the clients. For comparison with published numbers only. Shares are of the samples
    of all clients that are ``asked``, by type.
    """
    rule = collaborate(holders, asked, scope)
    running = {kind: {name: value.clone() for name, value in model.items()} for kind, model in weights.items()}
    moved: set[tuple[str, Slot]] = set()
    for update in updates:
        moved |= interpolate(running, holders, rule, asked, update)
        del update  # before the next comes
    return {
        kind: {
            name: (running if (kind, place.slot) in moved else weights)[kind][name]
            for name, place in holder.places.items()
        }
        for kind, holder in holders.items()
    }


def interpolate(
    running: Models, holders: Mapping[str, Holder], rule: Rule, asked: Mapping[str, float], update: Update
) -> set[tuple[str, Slot]]:
    """Move the running models towards one client's, in place; the types and slots that it has a share in."""
    kind, tensors, samples = update
    moved = set()
    for (target, slot), shares in rule.items():
        for share in (share for share in shares if share.source == kind):
            moved.add((target, slot))  # even by 0: a client came, so that momenta may follow
            share_of_client = share.coefficient * samples / asked[kind]
            for key, name in holders[target].keys[slot].items():
                _move(running[target][name], tensors[holders[kind].keys[share.slot][key]], share_of_client)
    return moved


@torch.no_grad()
def _move(running: Tensor, towards: Tensor, share: float) -> None:
    if running.is_floating_point():
        running.lerp_(towards.to(running), share)
    else:
        # counters have no lerp, and in fp32 would lose their last digits
        running.copy_(running.double().lerp(towards.to(running.device).double(), share).round())
