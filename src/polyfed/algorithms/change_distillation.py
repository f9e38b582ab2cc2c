"""Change distillation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.ensemble import Ensembled
from polyfed.algorithms.algorithm import Client, Cohort, Lifetime, Reply, Representations, Server, client_step
from polyfed.algorithms.shared.digest import Digest, fit_in_closed_form, only_layer
from polyfed.algorithms.shared.distiller import Distiller, ServerTask, TaughtServer, compares_rows
from polyfed.algorithms.shared.public_exchange import PublicExchange, learnt, modality_of, of_part
from polyfed.algorithms.shared.teacher import Teacher
from polyfed.core.errors import ConfigError
from polyfed.federation.plan import FederationPlan
from polyfed.losses.distillation import Distillation
from polyfed.models.model import Model


class TowerDigest(Digest):
    """A digest per tower: ridge regression where one linear layer is all that it trains, or steps by gradient."""

    by: Literal["auto", "closed_form", "gradient"] = Field(
        default="auto",
        description="how clients fit the server's representations: ridge regression where one linear layer over fixed "
        "features is all that a tower trains (closed_form asks for that), or steps by gradient",
    )
    penalty: float = Field(
        default=0.01,
        ge=1e-6,
        description="penalty of the ridge regression, relative to the features' mean variance; without a penalty more "
        "features than samples have no solution",
    )
    epochs: int = Field(default=3, ge=1, description="by gradient: passes over the exchanged samples")
    loss: Distillation = Field(default="cosine", description="by gradient: distance to the targets")

    def fit(self, client: Client, public: PublicExchange, targets: Mapping[str, Tensor]) -> None:
        """Fit the client's encoders to the targets, output -> [n, d]."""
        by_gradient = []
        for modality in of_part(targets):
            layer = None if self.by == "gradient" else only_layer(client.model, modality)
            if layer is not None:
                client.model.eval()
                fit_in_closed_form(public, client, modality, layer, targets, self.penalty)
            else:
                by_gradient.append(modality)
        super().fit(client, public, {name: rows for name, rows in targets.items() if modality_of(name) in by_gradient})


class ChangeDistillation(TaughtServer):
    """Change distillation: FedAvg in function space (polyfed's own).

    A round: the server sends its representations S of P. A client *digests* them, that is, fits its encoders to S,
    represents P (before), trains on its own data, represents P again (after), and returns after - before. The server's
    targets are normalise(S + eta x mean change), learnt in one pass with its own task.

    The difference cancels what a client's architecture cannot express of S, and it is a direction in the server's own
    space, so that changes of different models can be averaged. It needs an encoder that starts from the same digest in
    both terms, as over frozen features. Models trained from scratch move too far from the digest for their changes to
    agree; there ``targets: absolute``, the mean of the representations *after*, is better.

    In the first ``warmup_rounds`` no client is asked: a server that has learnt nothing teaches its clients nothing.

    >>> method = ChangeDistillation(targets="absolute", warmup_rounds=0)
    >>> method.digest.by, method.task.order, method.distiller.weight
    ('auto', 'joint', 6.0)
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN}
    takes_late_replies: ClassVar[bool] = True

    local_epochs: int = Field(default=5, ge=1, description="E, local epochs per round")
    targets: Literal["change", "absolute"] = Field(
        default="change", description="what clients return: after - before, or after"
    )
    eta: float = Field(
        default=2.0,
        gt=0,
        description="change: distance of the server's targets from its representations, in mean changes",
    )
    warmup_rounds: int = Field(default=2, ge=0, description="first rounds, in which the server trains alone")
    digest: TowerDigest | None = Field(default=TowerDigest(), description="how clients take S in; null: not at all")
    public: PublicExchange = PublicExchange()
    teacher: Teacher = Teacher(renormalise=True)
    task: ServerTask | None = ServerTask(order="joint")
    distiller: Distiller | None = Distiller(weight=6.0)

    @model_validator(mode="after")
    def _targets_act(self) -> Self:
        moved, compared = self.targets == "change", compares_rows(self.distiller)
        if self.eta != 2.0 and (not moved or compared):
            raise ValueError(f"eta {self.eta} acts only with targets: change, and on their mean; leave it at 2.0")
        if moved and self.teacher.alignment is not None:
            raise ValueError("teacher.alignment has no effect with targets: change, which are in the server's space")
        if not self.teacher.renormalise and (moved or compared):
            raise ValueError("teacher.renormalise: false acts only with targets: absolute, and on their mean")
        return self

    @property
    def rounds_without_clients(self) -> int:
        return self.warmup_rounds

    def require(self, plan: FederationPlan) -> None:
        """Check the federation, see ``Algorithm``, and that clients are asked in some round."""
        super().require(plan)
        if self.warmup_rounds >= plan.rounds:
            raise ConfigError(
                f"algorithm.warmup_rounds is {self.warmup_rounds}, but run.rounds is {plan.rounds}: no client "
                "would ever be asked; lower the one, raise the other, or run the twin server-only"
            )

    # ---- server half

    def round(self, server: Server, cohort: Cohort) -> None:
        """Steps 1 to 6 of the method's page, or the server's task alone while it warms up."""
        targets = self.changed(server, cohort) if server.clock.round > self.warmup_rounds else self.warm_up(server)
        self.train_task(server)
        self.distil(server, targets)  # 6

    def changed(self, server: Server, cohort: Cohort) -> dict[str, Ensembled]:
        """Targets of the cohort's mean change, or of its mean representations after training."""
        moved = self.targets == "change"
        # a difference of two unit vectors has norm 2 at most
        exchange = self.exchange(server, largest=2.0 if moved else 1.0)
        own = exchange.outputs
        sent = self.public.to_wire(server, learnt(own), exchange.order)  # what is digested
        for reply in exchange.ask(cohort, self.fit, representations=sent):  # 1-4
            for name, rows in exchange.received(reply.representations).items():
                # a change is clipped by itself, before the server's own rows are added
                values = own[name] + rows if moved else rows
                weights = exchange.log_weights(reply, name, values)
                exchange.add_weighed(name, reply.sender.id, values, weights, reply.mixing)
        return exchange.targets(self.ahead if moved else None)  # 5

    def ahead(self, mean: Ensembled, own: Tensor) -> Ensembled:
        """normalise(S + eta (mean - S)), [n, d]: eta changes ahead of the server's representations S."""
        return mean._replace(values=F.normalize(torch.lerp(own, mean.values, self.eta), dim=1))

    # ---- client half

    def add_modules(self, model: Model) -> None:
        """Adds nothing; checks that all towers have a closed form if ``digest.by`` asks for it.

        Raises:
            ConfigError: A tower trains more than one linear layer.
        """
        towers = model.encoders if self.digest is not None and self.digest.by == "closed_form" else ()
        for modality in [name for name in towers if only_layer(model, name) is None]:
            raise ConfigError(
                f"algorithm.digest.by is closed_form, but the '{modality}' encoder of a client trains more than one "
                "linear layer; set algorithm.digest.by=auto, or give it a projection of frozen features"
            )

    @client_step(representations=Representations, num_examples=int)
    def fit(self, client: Client, representations: Representations) -> Reply:
        """Digest, represent, train, represent: returns the change, or the representations after."""
        received = self.public.from_wire(client, representations)
        targets = {name: received[name] for name in self.public.names_for(client.info, received)}
        if self.digest is not None:
            self.digest.fit(client, self.public, targets)  # 2
        before = self.public.outputs(client) if self.targets == "change" else {}  # 3: B
        client.fit(client.train, epochs=self.local_epochs)
        outputs = self.public.outputs(client)  # 3: A
        if before:
            outputs = {name: values - before[name] for name, values in outputs.items()}  # 4: A - B
        known = {name: rows for name, rows in outputs.items() if modality_of(name) in targets}
        own = self.public.to_wire(client, known, representations.order)
        return Reply(representations=own, num_examples=client.num_examples)
