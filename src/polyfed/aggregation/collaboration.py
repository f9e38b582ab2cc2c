"""Collaboration between global models by named slots: the rule as data, and its coefficients (FedCola, section 4.3).

Every type of client (image-only, text-only, paired, ...) has a global model of its own. Within a type updates are
averaged by sample count; between types a rule says, slot by slot, which types' updates a global model takes, and with
which coefficient: W <- W + sum of coefficient x update. Plain averaging, FedIoT, and FedCola with or without
compensation differ in the rule alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from polyfed.core.errors import ConfigError
from polyfed.models.slots import BLOCK_ROLES, EXTRA, HEAD, Slot, TensorPlaces

Layers = Literal["none", "attention", "mlp", "blocks", "encoder"]
Range = Literal["own", "modality", "all"]

_ROLES: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "attention": ("attention",),
    "mlp": ("mlp",),
    "blocks": BLOCK_ROLES,
}
_RELEASED: Mapping[str, tuple[str, ...]] = {**_ROLES, "mlp": (), "blocks": ("mlp", "norm")}


@dataclass(frozen=True)
class Scope:
    """Which slots collaborate, and how far.

    Attributes:
        layers: roles that collaborate; ``encoder`` is all of a modality's encoder.
        range: with whom: ``own`` type only, all types that have the ``modality``, or ``all`` stacks of all modalities.
        compensation: scale everything else by the coefficient that a type's own attention gets.
        factor: on the sample counts of types with several modalities (FedIoT: 100).
        denominator: without compensation, a slot's shares add up to one (``slot``), or are divided by the sample count
            of every type that collaborates with any slot of the model (``model``, as FedCola's released code does).
        names: ``role``, or ``released``: FedCola's code matches names such that ``blocks`` leaves attention out and
            ``mlp`` matches nothing.
    """

    layers: Layers = "none"
    range: Range = "own"
    compensation: bool = False
    factor: float = 1.0
    denominator: Literal["slot", "model"] = "slot"
    names: Literal["role", "released"] = "role"

    def covers(self, slot: Slot) -> bool:
        if self.range == "own":
            return False
        if self.layers == "encoder":
            return slot.role not in (HEAD, EXTRA)
        return slot.role in (_ROLES if self.names == "role" else _RELEASED)[self.layers]


@dataclass(frozen=True)
class Holder:
    """What aggregation knows of a type's global model.

    Attributes:
        modalities: that the type's clients have.
        places: of its tensors.
        shapes: of its tensors.
        clients: ids of the type's clients, for messages.
    """

    modalities: tuple[str, ...]
    places: TensorPlaces
    shapes: Mapping[str, tuple[int, ...]]
    clients: tuple[str, ...] = ()
    keys: Mapping[Slot, Mapping[str, str]] = field(init=False)
    """Slot -> key -> name of the tensor."""

    def __post_init__(self) -> None:
        keys: dict[Slot, dict[str, str]] = {}
        for name, place in self.places.items():
            keys.setdefault(place.slot, {})[place.key] = name
        object.__setattr__(self, "keys", keys)


@dataclass(frozen=True)
class Contribution:
    """A share of a type's update of one of its slots."""

    source: str
    slot: Slot
    coefficient: float


Rule = Mapping[tuple[str, Slot], tuple[Contribution, ...]]
"""(type, slot) -> what its global model takes; nothing means that it stays as it is."""


def collaborate(holders: Mapping[str, Holder], sizes: Mapping[str, float], scope: Scope) -> Rule:
    """The rule of a round (FedCola, Omega_attn, Omega_others and Omega_comp; FedIoT's factor).

    Args:
        holders: type -> its global model.
        sizes: type -> samples of its clients whose updates arrived; a type that is not there was absent.
        scope: who collaborates.
    """
    weights = {
        name: float(sizes.get(name, 0)) * (scope.factor if len(holder.modalities) > 1 else 1.0)
        for name, holder in holders.items()
    }
    return {
        (target, slot): _contributions(holders, weights, target, slot, scope)
        for target, holder in holders.items()
        for slot in holder.keys
    }


def _contributions(
    holders: Mapping[str, Holder], weights: Mapping[str, float], target: str, slot: Slot, scope: Scope
) -> tuple[Contribution, ...]:
    partners = stacks(holders, target, slot, scope)
    total = sum(weights[name] for name in _basis(holders, target, slot, scope))
    return tuple(
        Contribution(name, source, weights[name] / len(slots) / total)
        for name, slots in partners.items()
        for source in slots
        if weights[name] > 0
    )


def _basis(holders: Mapping[str, Holder], target: str, slot: Slot, scope: Scope) -> list[str]:
    """Types whose samples a share is taken of: where not all of them contribute, shares add up to less than 1."""
    basis = set(stacks(holders, target, slot, scope))
    several = len(holders[target].modalities) > 1
    if scope.compensation or (scope.denominator == "model" and several and scope.covers(slot)):
        basis = {target}.union(*(stacks(holders, target, other, scope) for other in holders[target].keys))
    # in a fixed order: a set's would change the sum's last bits from process to process
    return [name for name in holders if name in basis]


def stacks(holders: Mapping[str, Holder], target: str, slot: Slot, scope: Scope) -> dict[str, list[Slot]]:
    """Type -> its slots that contribute to a slot of ``target``; a type's several stacks share its weight."""
    if not scope.covers(slot):
        return {target: [slot]}
    # a slot of another modality only with range all, whatever the keys are called
    slots_of = {
        name: [
            other
            for other in holder.keys
            if other.role == slot.role and (scope.range == "all" or other.modality == slot.modality)
        ]
        for name, holder in holders.items()
    }
    return {name: slots for name, slots in slots_of.items() if slots}


def require_exchangeable(holders: Mapping[str, Holder], scope: Scope) -> None:
    """Check that all slots that are to collaborate have the same tensors.

    Args:
        holders: type -> its global model.
        scope: who collaborates.

    Raises:
        ConfigError: naming the clients and slots that cannot be averaged; or nobody has a slot of that kind.
    """
    _require_slots(holders, scope)
    owners = ((target, holder, slot) for target, holder in holders.items() for slot in holder.keys)
    for target, holder, slot in owners:
        for name, slots in stacks(holders, target, slot, scope).items():
            for other in slots:
                require_equal(holder, slot, holders[name], other)


def _require_slots(holders: Mapping[str, Holder], scope: Scope) -> None:
    if scope.range == "own" or scope.layers == "none":
        return
    present = {slot for holder in holders.values() for slot in holder.keys}
    released_no_op = scope.names == "released" and scope.layers == "mlp"  # matches nothing, as in FedCola's code
    if not released_no_op and not any(map(scope.covers, present)):
        raise ConfigError(
            f"algorithm.averaging.layers is '{scope.layers}', but no client's model has such layers; roles there are: "
            f"{', '.join(sorted({slot.role for slot in present}))}; give clients encoders 'blocks', or set "
            "algorithm.averaging.layers=encoder"
        )


def require_equal(target: Holder, slot: Slot, source: Holder, other: Slot) -> None:
    """Check that a slot of one type has the same tensors as a slot of another.

    Raises:
        ConfigError: naming clients and slots.
    """
    here = {key: target.shapes[name] for key, name in target.keys.get(slot, {}).items()}
    there = {key: source.shapes[name] for key, name in source.keys.get(other, {}).items()}
    if here != there:
        # the first difference by name is enough to find the rest
        key = sorted(set(here.items()) ^ set(there.items()))[0][0]
        sizes = ["missing" if shape is None else str(list(shape)) for shape in (here.get(key), there.get(key))]
        raise ConfigError(
            f"slot '{slot}' of clients {_some(target.clients)} cannot be averaged with slot '{other}' of "
            f"clients {_some(source.clients)}: '{key}' is {sizes[0]} and "
            f"{sizes[1]}; give them equal encoders, or set algorithm.averaging.range=own"
        )


def _some(clients: tuple[str, ...]) -> str:
    return ", ".join(clients[:3]) + (f" and {len(clients) - 3} more" if len(clients) > 3 else "")
