"""FedTGP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from polyfed.aggregation.prototypes import ClassMeans, GlobalPrototypes, MeanWeighting, adaptive_margin, mean_prototypes
from polyfed.algorithms.algorithm import Server
from polyfed.algorithms.fedproto import FedProto
from polyfed.core.effects import require_default
from polyfed.core.randomness import isolated
from polyfed.losses.classification import distance_contrast

_STATE = "generator"


class FedTGP(FedProto):
    """Trainable global prototypes with an adaptive margin (Zhang et al., AAAI 2024).

    Clients do as in FedProto. The server does not average their prototypes: it trains a generator of global ones, a
    vector for each class and an MLP for all, by a contrast with the clients' over negative distances. The distance to
    a client's own class bears a margin, min(largest gap of a class, tau), so that global prototypes get as far apart
    as the clients' are at best. Only classes that somebody has sent so far compete and are broadcast.

    Plain SGD, as released, has no state: the generator is all that lasts.
    """

    takes_late_replies: ClassVar[bool] = False

    weighting: MeanWeighting = Field(
        default="uniform", description="of clients in the class means that gaps are measured between; as released"
    )
    server_epochs: int = Field(default=100, ge=1, description="S, passes over the clients' prototypes a round")
    server_lr: float = Field(default=0.01, gt=0, le=100, description="learning rate of the generator, plain SGD")
    server_batch_size: int = Field(default=10, ge=1, description="clients' prototypes a step of the generator")
    server_width: int | None = Field(default=None, ge=1, description="hidden width of the generator; None: d")
    margin_threshold: float = Field(default=100.0, ge=0, le=1e6, description="tau, the largest margin")

    @model_validator(mode="after")
    def _gaps_matter(self) -> Self:
        if not self.margin_threshold:
            require_default(self, "with margin_threshold: 0", "weighting")
        return self

    @property
    def summed(self) -> Mapping[str, str | None]:
        return {}

    def learn(
        self, server: Server, space: str, sent: Sequence[ClassMeans], old: GlobalPrototypes | None
    ) -> GlobalPrototypes:
        """Train the generator on what clients sent; the prototypes that it makes of the classes seen so far."""
        average = mean_prototypes(sent, self.weighting)
        seen = average.present if old is None else average.present | old.present
        generator = self.generator(server, space, *average.shape)
        features = torch.cat([one.means for one in sent])
        rows = seen.cumsum(0) - 1  # class -> row among the seen
        labels = torch.cat([rows[one.present] for one in sent])
        margin = float(adaptive_margin(average.means, self.margin_threshold))
        optimizer = torch.optim.SGD(generator.parameters(), lr=self.server_lr)
        for epoch in range(self.server_epochs):
            # on the CPU, so that all devices shuffle alike
            order = torch.randperm(len(features), generator=server.generator(f"prototypes-{space}-{epoch}"))
            for index in torch.split(order.to(features.device), self.server_batch_size):
                loss = distance_contrast(features[index], generator()[seen], labels[index], margin)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        tensors = {f"{space}.{name}": value for name, value in generator.state_dict().items()}
        server.state[_STATE] = dict(server.state.get(_STATE, {})) | tensors
        return GlobalPrototypes(generator().detach()[seen], seen)

    def generator(self, server: Server, space: str, classes: int, dim: int) -> PrototypeGenerator:
        """The generator of a class space as the last round left it, or new."""
        # drawn in every round and then overwritten: the draws depend on nothing that was kept
        with isolated(server.clock.seed, "init", f"prototypes-{space}"):
            generator = PrototypeGenerator(classes, dim, self.server_width or dim).to(server.device)
        kept = {
            name.removeprefix(f"{space}."): value
            for name, value in server.state.get(_STATE, {}).items()
            if name.startswith(f"{space}.")
        }
        if kept:
            generator.load_state_dict(kept)
        return generator


class PrototypeGenerator(nn.Module):
    """Global prototypes [classes, d]: a trainable vector for each class through an MLP that all classes share."""

    def __init__(self, classes: int, dim: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(classes, dim))
        self.layers = nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, dim))

    def forward(self) -> Float[Tensor, "classes d"]:
        made: Tensor = self.layers(self.vectors)
        return made
