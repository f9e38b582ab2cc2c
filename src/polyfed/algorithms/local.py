"""Local training: clients on their own, nothing exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from polyfed.algorithms.algorithm import Algorithm, Client, Cohort, Lifetime, LocalTraining, Reply, Server, client_step
from polyfed.core.effects import Only


class LocalOnly(Algorithm):
    """Every client of the cohort trains on its own data only; the lower bound for what federation brings a client."""

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN, "optimizer": Lifetime.RUN}

    local_epochs: Annotated[int, Only(local_steps=None)] = Field(
        default=5, ge=1, description="E, passes over private data a round"
    )
    local_steps: int | None = Field(
        default=None, ge=1, description="so many batches a round instead of whole passes; None: local_epochs"
    )

    idle_rounds: int = Field(
        default=0, ge=0, description="first rounds in which nobody trains, as in those of a method that warms up"
    )

    @property
    def local_training(self) -> LocalTraining:
        """``local_epochs``, or ``local_steps`` if there are any."""
        return LocalTraining(self.local_epochs, self.local_steps)

    def round(self, server: Server, cohort: Cohort) -> None:
        if server.clock.round > self.idle_rounds:
            for _ in cohort.ask(self.fit):
                pass

    @client_step()
    def fit(self, client: Client) -> Reply:
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        return Reply()
