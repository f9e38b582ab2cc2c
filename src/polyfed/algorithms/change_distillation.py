"""Change distillation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.ensemble import Ensembled
from polyfed.algorithms.algorithm import Client, Cohort, Lifetime, Reply, Representations, Server, client_step
from polyfed.algorithms.shared.digest import fit_by_gradient, fit_in_closed_form, only_layer
from polyfed.algorithms.shared.ensemble_distillation import MOVES, OF_MEANS, EnsembleDistillation
from polyfed.algorithms.shared.public_exchange import DISTILS
from polyfed.core.effects import Condition, Not, Only
from polyfed.core.errors import ConfigError
from polyfed.federation.public_outputs import (
    GALLERY,
    OutputKind,
    PublicOutputs,
    RepresentationKind,
    modality_of,
    of_part,
    part_of,
)
from polyfed.losses.distillation import Distillation
from polyfed.models.model import Model

_CHANGE, _ABSOLUTE = Only(targets="change"), Only(targets="absolute")
_BY_GRADIENT, _CLOSED = Only(digest={"auto", "gradient"}), Only(digest={"auto", "closed_form"})


class ChangeDistillation(EnsembleDistillation):
    """Change distillation: FedAvg in function space (polyfed's own).

    A round: the server sends its representations S of P. A client *digests* them, that is, fits its encoders to S,
    represents P (before), trains on its own data, represents P again (after), and returns after - before. The server's
    targets are normalise(S + eta x mean change), learnt in one pass with its own task.

    The difference cancels what a client's architecture cannot express of S, and it is a direction in the server's own
    space, so that changes of unlike models can be averaged. It needs an encoder that starts from the digest alike in
    both terms: over frozen features it is right. Models trained from scratch move too far from the digest for their
    changes to agree; there ``targets: absolute``, the mean of the representations *after*, is better.

    In the first ``warmup_rounds`` nobody is asked: a server that knows nothing teaches its clients nothing.
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {"model": Lifetime.RUN}

    only_if: ClassVar[Mapping[str, Condition]] = {
        "renormalise_target": DISTILS & OF_MEANS & _ABSOLUTE,
        "alignment": DISTILS & MOVES & _ABSOLUTE,  # changes are in the server's space already
        "public_augment": Only(kd_epochs=Not(0)) | Only(digest={"auto", "gradient"}, digest_epochs=Not(0)),
    }

    targets: Annotated[Literal["change", "absolute"], DISTILS] = Field(
        default="change", description="what clients return: after less before, or after"
    )
    eta: Annotated[float, DISTILS & OF_MEANS & _CHANGE] = Field(
        default=2.0, gt=0, description="how many mean changes the server's targets lie ahead of its representations"
    )
    warmup_rounds: int = Field(default=2, ge=0, description="first rounds, in which the server trains alone")
    digest: Literal["auto", "closed_form", "gradient"] = Field(
        default="auto",
        description="how clients fit the server's representations: ridge regression where one linear layer over fixed "
        "features is all that a tower trains (closed_form asks for that), or steps by gradient",
    )
    digest_penalty: Annotated[float, _CLOSED] = Field(
        default=0.01,
        ge=1e-6,
        description="of the ridge regression, relative to the features' mean variance; without one more features than "
        "samples have no solution",
    )
    digest_epochs: Annotated[int, _BY_GRADIENT] = Field(
        default=3, ge=0, description="passes over the exchanged samples of a digest by gradient"
    )
    digest_loss: Annotated[Distillation, _BY_GRADIENT & Only(digest_epochs=Not(0))] = Field(
        default="cosine", description="distance of a digest by gradient"
    )
    digest_batch_size: Annotated[int, _BY_GRADIENT & Only(digest_epochs=Not(0))] = Field(
        default=128, ge=2, description="public samples a step of a digest by gradient"
    )
    kd_joint: bool = Field(default=True, description="one pass with task and distillation loss together")
    kd_weight: float = Field(default=6.0, ge=0, description="factor of the distillation loss")
    renormalise_target: bool = Field(default=True, description="scale the mean of absolute targets to unit length")

    @property
    def output_kind(self) -> OutputKind:
        """Representations, or differences of two, whose norm is 2 at most."""
        return RepresentationKind(2.0 if self.targets == "change" else 1.0)

    # ---- server half

    def setup(self, server: Server) -> None:
        """Check also that distances suit representations, and that clients are ever asked.

        Raises:
            ConfigError: it is not so.
        """
        super().setup(server)
        if self.warmup_rounds >= server.clock.rounds:
            raise ConfigError(
                f"algorithm.warmup_rounds is {self.warmup_rounds}, but run.rounds is {server.clock.rounds}: nobody "
                "would ever be asked; lower the one, raise the other, or run the twin server-only"
            )
        if self.digest_loss == "kl":
            raise ConfigError(
                "algorithm.digest_loss is kl, which compares class scores, not representations; choose cosine"
            )

    @property
    def rounds_without_clients(self) -> int:
        return self.warmup_rounds

    def aggregate(self, server: Server, cohort: Cohort, server_outputs: PublicOutputs) -> dict[str, Ensembled]:
        """Ask the cohort, unless the server still warms up, and make targets of the mean change."""
        if server.clock.round <= self.warmup_rounds:
            return {}
        ensembles = self.ensembles(server, server_outputs)
        check = self.outputs_check(server, server_outputs, "representations")
        # the gallery is not digested: on it teacher and server are compared
        digested = {name: rows for name, rows in server_outputs.items() if part_of(name) != GALLERY}
        sent = self.to_wire(server, digested, server_outputs.order)
        for reply in cohort.ask(self.fit, check=check, representations=sent):
            for name, rows in ensembles.received(reply.representations).items():
                # a change is clipped by itself: what it is added to is the server's own
                values = server_outputs[name] + rows if self.targets == "change" else rows
                ensembles.add_weighed(name, reply.sender.id, values, ensembles.log_weights(reply, name, values))
        return ensembles.targets()

    def target(self, mean: Ensembled, own: Tensor) -> Ensembled:
        """normalise(S + eta (mean - S)), [n, d]: eta changes ahead of the server's representations S."""
        if self.targets == "absolute":
            return super().target(mean, own)
        return mean._replace(values=F.normalize(torch.lerp(own, mean.values, self.eta), dim=1))

    # ---- client half

    def add_modules(self, model: Model) -> None:
        """Nothing; but where digests are to be in closed form, all towers must have one.

        Raises:
            ConfigError: one has not.
        """
        towers = model.encoders if self.digest == "closed_form" else ()
        for modality in [name for name in towers if only_layer(model, name) is None]:
            raise ConfigError(
                f"algorithm.digest is closed_form, but the '{modality}' encoder of a client trains more than one "
                "linear layer; set algorithm.digest=auto, or give it a projection of frozen features"
            )

    @client_step(representations=Representations, num_examples=int)
    def fit(self, client: Client, representations: Representations) -> Reply:
        """Digest, represent, train, represent: replies with the change, or with the representations after."""
        mine = self.output_kind.channels(client.info, list(representations))
        goals = {name: rows for name, rows in self.from_wire(client, representations).items() if name in mine}
        self.take_in(client, goals)
        before = self.outputs_of(client) if self.targets == "change" else {}
        client.fit(client.train, epochs=self.local_epochs)
        outputs = self.outputs_of(client)
        if before:
            outputs = {name: values - before[name] for name, values in outputs.items()}
        known = {name: rows for name, rows in outputs.items() if modality_of(name) in goals}
        return Reply(
            representations=self.to_wire(client, known, representations.order), num_examples=client.num_examples
        )

    def take_in(self, client: Client, goals: Mapping[str, Tensor]) -> None:
        """The digest: fit the client's encoders to the goals, output -> [n, d]."""
        by_gradient = []
        for modality in of_part(goals):
            layer = None if self.digest == "gradient" else only_layer(client.model, modality)
            if layer is not None:
                client.model.eval()
                fit_in_closed_form(self, client, modality, layer, goals, self.digest_penalty)
            else:
                by_gradient.append(modality)
        others = {name: rows for name, rows in goals.items() if modality_of(name) in by_gradient}
        epochs = self.digest_epochs if others else 0
        fit_by_gradient(self, client, others, epochs, self.digest_batch_size, self.digest_loss)
