"""Methods whose clients misbehave, in a module that polyfed knows nothing of."""

from __future__ import annotations

import time

from polyfed.algorithms.algorithm import Algorithm, Reply, client_step
from polyfed.federation.client import Client
from polyfed.federation.cohort import Cohort
from polyfed.federation.server import Server


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
