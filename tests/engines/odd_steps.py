"""A method whose client steps misbehave, each in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from polyfed.algorithms.algorithm import Algorithm, Lifetime, Reply, client_query, client_step
from polyfed.federation.client import Client
from polyfed.federation.cohort import Cohort
from polyfed.federation.server import Server
from polyfed.wire.payload import Weights


class Odd(Algorithm):
    """Clients count their steps, for the run and within a round."""

    keeps: ClassVar[Mapping[str, Lifetime]] = {"count": Lifetime.RUN, "round": Lifetime.ROUND}

    def round(self, server: Server, cohort: Cohort) -> None:
        for _ in cohort.ask(self.count):
            pass

    @client_step(count=int, round=int)
    def count(self, client: Client, by: int = 1) -> Reply:
        return Reply(**{key: self._more(client, key, by) for key in ("count", "round")})

    @client_query(count=int)
    def peek(self, client: Client) -> Reply:
        return Reply(count=self._more(client, "count", 100))

    @client_step(count=int)
    def fail(self, client: Client) -> Reply:
        self._more(client, "count", 1000)
        raise ZeroDivisionError("halfway")

    @client_step(weights=Weights)
    def diverge(self, client: Client, weights: Weights) -> Reply:
        self._more(client, "count", 1000)
        return Reply(weights=Weights({name: value * float("nan") for name, value in weights.items()}))

    @client_step(weights=Weights)
    def exotic(self, client: Client) -> Reply:
        return Reply(weights=Weights({"w": torch.zeros(2, dtype=torch.complex64)}))

    def _more(self, client: Client, key: str, by: int) -> int:
        total = int(client.state.get(key, {"n": torch.tensor(0)})["n"]) + by
        client.state[key] = {"n": torch.tensor(total)}
        return total
