"""Methods whose clients misbehave, in a module that polyfed knows nothing of."""

from __future__ import annotations

import math
import time
from bdb import BdbQuit
from itertools import count

import torch
from torch import Tensor

from polyfed.algorithms.algorithm import Algorithm, Reply, client_step
from polyfed.algorithms.fedavg import FedAvg
from polyfed.data.samples import Batch
from polyfed.federation.client import Client
from polyfed.federation.cohort import Cohort
from polyfed.federation.server import Server
from polyfed.federation.trainer import Regulariser
from polyfed.models.model import CachedModel
from polyfed.wire.payload import Weights


class Failing(Algorithm):
    """The client called image divides by zero."""

    def round(self, server: Server, cohort: Cohort) -> None:
        for _ in cohort.ask(self.fit):
            pass

    @client_step(n=int)
    def fit(self, client: Client) -> Reply:
        return Reply(n=1 / 0 if client.name == "image" else 1)


class Sleeping(Failing):
    """The client called image sleeps in one round."""

    seconds: float
    round_number: int

    @client_step(n=int)
    def fit(self, client: Client) -> Reply:
        if client.name == "image" and client.clock.round == self.round_number:
            time.sleep(self.seconds)
        return Reply(n=1)


class Mistaken(FedAvg):
    """Trains as its author wrote by mistake, at one client or at all."""

    how: str
    client: str = "image"

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        if client.name != self.client:
            return super().fit(client, weights)
        client.load_weights(weights)
        client.fit(client.train, epochs=1, steps=4, regulariser=self.regulariser(client))
        sent = dict(client.weights)
        first = min(sent)
        if self.how == "shape":
            sent[first] = torch.cat([sent[first], sent[first]])
        if self.how == "debugger":
            raise BdbQuit
        count_name = "num_example" if self.how == "name" else "num_examples"
        reply = Reply(weights=Weights(sent), **{count_name: client.num_examples})
        return None if self.how == "return" else reply  # type: ignore[return-value]

    def regulariser(self, client: Client) -> Regulariser:
        steps = count(1)

        def penalty(model: CachedModel, batch: Batch) -> Tensor:
            weight = next(iter(client.model.parameters())).sum()
            return weight * (math.nan if self.how == "nan" and next(steps) == 3 else 0.0)

        return penalty
