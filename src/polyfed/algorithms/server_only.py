"""Server-only training: the public set and no clients."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from polyfed.algorithms.algorithm import Algorithm, Cohort, FederationPlan, Server


class ServerOnly(Algorithm):
    """The server trains on the public set alone; the lower bound for what clients bring the server."""

    asks_clients: ClassVar[bool] = False
    needs_public: ClassVar[bool] = True
    needs_server: ClassVar[bool] = True

    server_epochs: int = Field(default=1, ge=0, description="passes over the public set a round; 0: it only evaluates")

    @property
    def server_passes(self) -> int:
        """``server_epochs``."""
        return self.server_epochs

    @property
    def epochs_a_round(self) -> int:
        return max(1, self.server_epochs)

    def require(self, plan: FederationPlan) -> None:
        """See ``Algorithm``; a server that only evaluates needs no public set."""
        if self.server_epochs or plan.server is None:
            super().require(plan)

    def round(self, server: Server, cohort: Cohort) -> None:
        """Train on the public pairs; nobody is asked."""
        if self.server_epochs:
            server.fit(server.public_set, epochs=self.server_epochs)
