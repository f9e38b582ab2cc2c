"""Aggregation of global models in a stream: clients' weights come one by one and are not kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from polyfed.aggregation.collaboration import Contribution, Holder, Rule, Scope, collaborate
from polyfed.aggregation.mean import WeightedMean, accumulator
from polyfed.models.slots import Slot, TensorPlace
from polyfed.optim.servers import Models


class WeightExchange(Protocol):
    """One round's way from clients' weights to new global models."""

    def add(self, kind: str, tensors: Mapping[str, Tensor], samples: float) -> None:
        """Fold in the weights that a client of a type has trained on so many samples; they are not kept."""
        ...

    def result(self) -> dict[str, dict[str, Tensor]]:
        """The new global models; ends the exchange."""
        ...


class ExactExchange:
    """Means of each type, then W <- W + sum of coefficient x (mean - W) as the rule says (FedCola, Eq. 3).

    The order of the clients of a type does not matter (up to rounding). Memory: the global models and one mean of
    each, whatever the number of clients. Integer tensors (counters) are the rounded mean of the type's own.
    """

    def __init__(self, weights: Models, holders: Mapping[str, Holder], scope: Scope) -> None:
        self._weights, self._holders, self._scope = weights, holders, scope
        self._means = {kind: WeightedMean() for kind in weights}
        self._sizes = dict.fromkeys(weights, 0.0)

    def add(self, kind: str, tensors: Mapping[str, Tensor], samples: float) -> None:
        """See ``WeightExchange``."""
        self._means[kind].add(tensors, samples)
        # shares between types need sizes, which are known only at the end
        self._sizes[kind] += samples

    @torch.no_grad()
    def result(self) -> dict[str, dict[str, Tensor]]:
        """See ``WeightExchange``."""
        rule = collaborate(self._holders, self._sizes, self._scope)
        means = {kind: mean.take() for kind, mean in self._means.items() if self._sizes[kind] > 0}
        return {
            kind: {name: self._new(rule, means, kind, name, place) for name, place in holder.places.items()}
            for kind, holder in self._holders.items()
        }

    def _new(self, rule: Rule, means: Models, kind: str, name: str, place: TensorPlace) -> Tensor:
        old, shares = self._weights[kind][name], rule[kind, place.slot]
        if not shares:  # the very tensor: server optimisers leave alone what nobody has moved
            return old
        if shares == (Contribution(kind, place.slot, 1.0),) or not old.is_floating_point():
            return means[kind][name] if kind in means else old
        # shares need not add up to one, so that the old model is moved by differences and not replaced by a mean
        total = old.to(accumulator(old.dtype), copy=True)
        for share in shares:
            # the same tensor under the name that the other type has for it
            source = self._holders[share.source].keys[share.slot][place.key]
            total.add_(means[share.source][source].to(total), alpha=share.coefficient)
            total.sub_(self._weights[share.source][source].to(total), alpha=share.coefficient)
        return total.to(old.dtype)


class SequentialExchange:
    """W <- W + c (W_k - W) for one client after the other, as the released code of FedCola and its relatives does.

    This is not the weighted mean: early clients count less than late ones, a share of the old model stays, and the
    result depends on the order of the clients. For comparison with published numbers only.

    Args:
        weights: the global models at the start of the round.
        holders: type -> its global model.
        scope: who collaborates.
        sizes: type -> samples of all clients that are asked.
    """

    def __init__(
        self, weights: Models, holders: Mapping[str, Holder], scope: Scope, sizes: Mapping[str, float]
    ) -> None:
        self._weights, self._holders, self._sizes = weights, holders, sizes
        self._moved: set[tuple[str, Slot]] = set()
        self._rule = collaborate(holders, sizes, scope)
        self._running = {
            kind: {name: value.clone() for name, value in model.items()} for kind, model in weights.items()
        }

    @torch.no_grad()
    def add(self, kind: str, tensors: Mapping[str, Tensor], samples: float) -> None:
        """See ``WeightExchange``."""
        for (target, slot), shares in self._rule.items():
            for share in (share for share in shares if share.source == kind):
                self._moved.add((target, slot))  # even by 0: a client came, so that momenta may follow
                share_of_client = share.coefficient * samples / self._sizes[kind]
                for key, name in self._holders[target].keys[slot].items():
                    source = tensors[self._holders[kind].keys[share.slot][key]]
                    self._move(self._running[target][name], source, share_of_client)

    @staticmethod
    def _move(running: Tensor, towards: Tensor, share: float) -> None:
        if running.is_floating_point():
            running.lerp_(towards.to(running), share)
        else:
            # counters have no lerp, and in fp32 would lose their last digits
            running.copy_(running.double().lerp(towards.to(running.device).double(), share).round())

    def result(self) -> dict[str, dict[str, Tensor]]:
        """See ``WeightExchange``."""
        return {
            kind: {
                name: self._running[kind][name] if (kind, place.slot) in self._moved else self._weights[kind][name]
                for name, place in holder.places.items()
            }
            for kind, holder in self._holders.items()
        }
