"""Baselines: clients alone, the server alone, and all data at one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field

from polyfed.algorithms.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Cohort,
    FederationPlan,
    Lifetime,
    LocalEpochs,
    LocalSteps,
    Reply,
    Server,
    Weights,
    client_step,
    each,
)
from polyfed.core.errors import ConfigError
from polyfed.federation.types import client_types


class LocalOnly(Algorithm):
    """Every client of the cohort trains on its own data only; the lower bound for what federation brings a client."""

    short_name: ClassVar[str] = "local"
    takes_late_replies: ClassVar[bool] = True
    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN, "optimizer": Lifetime.RUN}

    local_epochs: LocalEpochs = 5
    local_steps: LocalSteps = None
    idle_rounds: int = Field(default=0, ge=0, description="first rounds without training, as in a warm-up")

    def round(self, server: Server, cohort: Cohort) -> None:
        if server.clock.round > self.idle_rounds:
            for _ in cohort.ask(self.fit):
                pass

    @client_step()
    def fit(self, client: Client) -> Reply:
        client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        return Reply()


class ServerOnly(Algorithm):
    """The server trains on the public set alone; the lower bound for what clients bring the server."""

    short_name: ClassVar[str] = "server_only"
    asks_clients: ClassVar[bool] = False
    needs_public: ClassVar[bool] = True
    needs_server: ClassVar[bool] = True

    server_epochs: int = Field(default=1, ge=0, description="passes over P per round; 0: it only evaluates")

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
        """Train on the public pairs; no client is asked."""
        if self.server_epochs:
            server.fit(server.public_set, epochs=self.server_epochs)


_BUDGET = ("steps", "epochs", "samples")  # cost of training: optimiser steps, passes over the data, samples seen


class Centralised(Algorithm):
    """All data of a type of clients at one place; the upper bound for what federation reaches.

    Every group has one client, which holds all of the group's data. Its model and optimiser last for the run: T rounds
    of E epochs are one training of T x E epochs, cut into pieces at which the server takes over the model to evaluate
    it. Initial weights are those that FedAvg starts from.

    A ceiling means little without its budget: ``steps.<type>``, ``epochs.<type>`` and ``samples.<type>``, since the
    start of the run, are recorded every round.

    >>> Centralised(local_epochs=1).keeps["optimizer"].value
    'run'
    """

    short_name: ClassVar[str] = "centralised"
    sends_parts: ClassVar[bool] = True
    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN, "optimizer": Lifetime.RUN}

    has_global_models: ClassVar[bool] = True

    local_epochs: LocalEpochs = 5
    local_steps: LocalSteps = None

    # ---- server half

    def require(self, plan: FederationPlan) -> None:
        """See ``Algorithm``; the data of no type are spread over several clients."""
        super().require(plan)
        groups = Counter(client.group for client in plan.clients)
        spread = [f"{name} ({n} clients): set clients.{name}.count=1" for name, n in groups.items() if n > 1]
        for name, client_type in client_types(plan.clients).items():
            own = dict.fromkeys(client.group for client in client_type.clients)
            if len(own) > 1:
                spread.append(f"{name}: leave one of {', '.join(own)}, with all of the source (a second source: also)")
        if spread:
            raise ConfigError(f"centralised training needs all data of a type at one client, but {'; '.join(spread)}")

    def setup(self, server: Server) -> None:
        server.share_weights()

    def round(self, server: Server, cohort: Cohort) -> None:
        """Ask all clients to train on, and take over their models; new clients receive initial weights."""

        def initial(client: ClientInfo) -> Weights:
            return Weights({}) if server.type_of(client) in budget else server.weights_for(client)

        budget, new = server.state.setdefault("budget", {}), {}
        for reply in cohort.ask(self.fit, like={"weights": each(server.weights_for)}, weights=each(initial)):
            new[reply.type] = dict(reply.weights)  # the one client of its type is its mean
            spent = torch.tensor([getattr(reply, what) for what in _BUDGET], dtype=torch.float64)
            budget[reply.type] = budget.get(reply.type, torch.zeros_like(spent)) + spent
        server.update_weights(new)
        names = [name for name in server.types if name in budget]  # a checkpoint has an order of its own
        server.record(**{f"{what}.{name}": float(budget[name][k]) for name in names for k, what in enumerate(_BUDGET)})

    # ---- client half

    @client_step(weights=Weights, num_examples=int, steps=int, epochs=float, samples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        """Train on from where the client is; from ``weights`` if there are any."""
        if weights:
            client.load_weights(weights)
        steps = client.fit(client.train, epochs=self.local_epochs, steps=self.local_steps)
        return Reply(
            weights=client.weights,
            num_examples=client.num_examples,
            steps=steps,
            epochs=steps / max(client.steps_an_epoch, 1),
            samples=_seen(client, steps),
        )


def _seen(client: Client, steps: int) -> int:
    """Samples of a number of batches; the last of a pass may be smaller, and one of a single sample is left out."""
    size = client.training.batch_size
    passes, remainder = divmod(steps, max(client.steps_an_epoch, 1))
    in_a_pass = client.num_examples - (client.num_examples % size == 1)
    return passes * in_a_pass + remainder * size
