"""Methods whose clients train in ways that stacks must cope with, in a module that polyfed knows nothing of."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.algorithms.algorithm import Client, Reply, client_step
from polyfed.algorithms.local import LocalOnly
from polyfed.data.samples import Batch
from polyfed.models.model import CachedModel


class Halting(LocalOnly):
    """The client called c1 fails after its first step."""

    def _halt(self, client: Client) -> None:
        if client.name.startswith("c1"):
            raise ZeroDivisionError("halfway")

    @client_step()
    def fit(self, client: Client) -> Reply:
        client.fit(client.train, epochs=self.local_epochs, after_step=lambda: self._halt(client))
        return Reply()


class Mislabelled(LocalOnly):
    """One client has a class that does not exist, which its loss refuses."""

    @client_step()
    def fit(self, client: Client) -> Reply:
        label = 10_000 if client.name.startswith("c1") else 0
        client.fit(client.train, epochs=self.local_epochs, regulariser=_Labelled(client.train.items.new_tensor(label)))
        return Reply()


class _Labelled(nn.Module):
    label: Tensor

    def __init__(self, label: Tensor) -> None:
        super().__init__()
        self.register_buffer("label", label)

    def forward(self, model: CachedModel, batch: Batch) -> Tensor:
        embedding = model.embed("text", batch.inputs["text"])
        return F.cross_entropy(embedding, self.label.expand(len(batch)))


class Drawing(LocalOnly):
    """A regulariser that is a function, whose draws nobody else may share."""

    @client_step()
    def fit(self, client: Client) -> Reply:
        client.fit(client.train, epochs=self.local_epochs, regulariser=lambda model, batch: 0 * batch.index.sum())
        return Reply()


class Slow(LocalOnly):
    """The client called c1 takes five seconds of a clock of its own."""

    now: ClassVar[list[float]] = [0.0]

    @client_step()
    def fit(self, client: Client) -> Reply:
        if client.name.startswith("c1"):
            self.now[0] += 5.0
        client.fit(client.train, epochs=self.local_epochs)
        return Reply()
