"""Local training: clients on their own, nothing exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from polyfed.algorithms.algorithm import (
    Algorithm,
    Client,
    Cohort,
    Lifetime,
    LocalEpochs,
    LocalSteps,
    Reply,
    Server,
    client_step,
)


class LocalOnly(Algorithm):
    """Every client of the cohort trains on its own data only; the lower bound for what federation brings a client."""

    takes_late_replies: ClassVar[bool] = True
    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN, "optimizer": Lifetime.RUN}

    local_epochs: LocalEpochs = 5
    local_steps: LocalSteps = None
    idle_rounds: int = Field(
        default=0, ge=0, description="first rounds in which nobody trains, as in those of a method that warms up"
    )

    def round(self, server: Server, cohort: Cohort) -> None:
        if server.clock.round > self.idle_rounds:
            for _ in cohort.ask(self.fit):
                pass

    @client_step()
    def fit(self, client: Client) -> Reply:
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        return Reply()
