"""HetLoRA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.averagings.low_rank import Factors, Padded, factor_names, leading
from polyfed.algorithms.algorithm import Client, Lifetime, Reply, Server, WeightAveraging, Weights, client_step
from polyfed.algorithms.fedavg import FedAvg
from polyfed.data.samples import Batch
from polyfed.models.model import CachedModel


class HetLoRA(FedAvg):
    """Low-rank adapters of unequal ranks (Cho et al., EMNLP 2024, section 3).

    Factors are filled up with zeros to the largest rank and averaged with weights n ||B A||; each client gets the first
    directions. Clients add lambda ||B_tail|| ||A_tail|| to their loss, the tail being the directions behind the first
    gamma r; where a round has made that smaller, the client gives its tail up for good (rank self-pruning).

    >>> HetLoRA(gamma=0.9).averaging.component_name()
    'padded'
    """

    takes_late_replies: ClassVar[bool] = False
    keeps: ClassVar[Mapping[str, Lifetime]] = {"rank": Lifetime.RUN}

    averaging: WeightAveraging = Padded()
    pruning: float = Field(
        default=0.01,
        ge=0,
        le=1e6,
        description="lambda, weight of the tail's norm: a higher one lets more directions fade; 0: nothing is pruned",
    )
    gamma: float = Field(default=0.99, gt=0, le=1, description="share of directions that stays; lower prunes faster")

    # ---- server half

    def setup(self, server: Server) -> None:
        """Start the global models: those of smaller ranks as the first directions of the largest."""
        super().setup(server)
        largest: dict[str, Factors] = {}
        for tensors in server.weights.values():
            for layer, own in factor_names(tensors).items():
                factors = Factors(tensors[own.a], tensors[own.b])
                largest[layer] = max(largest.get(layer, factors), factors, key=lambda one: one.rank)
        server.update_weights({name: tensors | _leading(tensors, largest) for name, tensors in server.weights.items()})

    # ---- client half

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train as many directions as the client has left, and give up those that fade."""
        ranks = {layer: len(weights[own.a]) for layer, own in factor_names(weights).items()}
        kept = client.state.get("rank", {})
        ranks |= {layer: int(kept[layer]) for layer in ranks if layer in kept}
        client.load_weights({**weights, **_cut(weights, ranks)})
        before = self.tail(client.model.exchanged(), ranks)

        def fading(model: CachedModel, batch: Batch) -> Tensor:
            return self.pruning * self.tail(model.model.exchanged(live=True), ranks)

        regulariser = fading if self.pruning else None
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps, regulariser=regulariser)
        if self.pruning and self.tail(client.model.exchanged(), ranks) < before:
            ranks = {layer: max(1, int(self.gamma * rank)) for layer, rank in ranks.items()}
        client.state["rank"] = {layer: torch.tensor(rank) for layer, rank in ranks.items()}
        trained = client.model.exchanged()
        return Reply(weights=Weights({**trained, **_cut(trained, ranks)}), num_examples=client.num_examples)

    def tail(self, tensors: Mapping[str, Tensor], ranks: Mapping[str, int]) -> Tensor:
        """The sum over layers of ||B_tail|| ||A_tail||."""
        norms = [torch.zeros(())]
        for layer, own in factor_names(tensors).items():
            first, rank = max(1, int(self.gamma * ranks[layer])), ranks[layer]
            a, b = tensors[own.a][first:rank], tensors[own.b][:, first:rank]
            if rank > first:
                norms.append(_norm(a) * _norm(b))
        return torch.stack([norm.to(norms[-1].device) for norm in norms]).sum()


def _norm(x: Tensor) -> Tensor:
    # B starts at zero, where a norm has no gradient
    return (x.square().sum() + 1e-12).sqrt()


def _leading(tensors: Mapping[str, Tensor], largest: Mapping[str, Factors]) -> dict[str, Tensor]:
    new = {}
    for layer, own in factor_names(tensors).items():
        new[own.a], new[own.b] = leading(largest[layer], len(tensors[own.a]))
    return new


def _cut(tensors: Mapping[str, Tensor], ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """Factors with zeros in all directions behind a rank."""
    new = {}
    for layer, own in factor_names(tensors).items():
        size = len(tensors[own.a])
        new[own.a], new[own.b] = leading(leading(Factors(tensors[own.a], tensors[own.b]), ranks[layer]), size)
    return new
