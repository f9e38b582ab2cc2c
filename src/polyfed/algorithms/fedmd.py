"""FedMD."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from polyfed.aggregation.ensemble import Ensembled
from polyfed.algorithms.algorithm import (
    Client,
    Cohort,
    Lifetime,
    Logits,
    Reply,
    Representations,
    Server,
    client_step,
    each,
)
from polyfed.algorithms.shared.digest import fit_by_gradient
from polyfed.algorithms.shared.either_form import OF_FORM, EitherForm
from polyfed.algorithms.shared.ensemble_distillation import MOVES, OF_MEANS, EnsembleDistillation
from polyfed.algorithms.shared.ensembles import COMPARING, MEASURES
from polyfed.algorithms.shared.public_exchange import DISTILS
from polyfed.core.effects import Condition, Not, Only
from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.core.untrusted import read_json
from polyfed.data.samples import Samples
from polyfed.federation.participant import never
from polyfed.federation.public_outputs import PublicOutputs, of_part
from polyfed.losses.distillation import Distillation


class Convergence(Settings):
    """When a training has converged: its main metric, on the samples that it is trained on, does not rise any more."""

    patience: int = Field(ge=1, description="passes without a rise after which it ends")
    rise: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="what counts as one, in units of the metric (percent)"
    )

    def watch(self, client: Client, samples: Samples) -> Callable[[], bool]:
        best, waiting = -math.inf, 0

        def is_over() -> bool:
            nonlocal best, waiting
            value = client.evaluate(samples)[client.task.primary]
            best, waiting = (value, 0) if value > best + self.rise else (best, waiting + 1)
            return waiting >= self.patience

        return is_over


_DIGESTS = Only(digest_epochs=Not(0))  # clients learn from the others' outputs


class FedMD(EitherForm, EnsembleDistillation):
    """Heterogeneous federated learning by model distillation (FedMD, Li and Wang, 2019).

    Before its first round a client trains on the labelled public set, then on its own data, each until it converges
    (``first_*``; not at all by default). A round: clients send their
    outputs on public samples (the paper: 5,000 drawn anew), the server takes the mean, and clients *digest* it (fit the
    consensus) and *revisit* their own data.

    The paper exchanges class scores of one classification and has no server model. Here the server has one, which
    distils the same consensus, as CreamFL and FedAFD compare it; and with ``exchange: representations`` participants
    of any task agree on representations instead, by modality (a reconstruction: how those papers did it is not
    published).
    """

    keeps: ClassVar[Mapping[str, Lifetime]] = {
        "model": Lifetime.RUN,
        "optimizer": Lifetime.RUN,
        "begun": Lifetime.RUN,
    }

    only_if: ClassVar[Mapping[str, Condition]] = {
        "server_first": OF_FORM & Only(kd_joint=False, server_epochs=Not(0), aggregation=COMPARING),
        "aggregation": DISTILS | _DIGESTS,
        "judge_clients": OF_FORM & MEASURES,
        "renormalise_target": OF_FORM & (DISTILS & OF_MEANS | _DIGESTS),
        "alignment": OF_FORM & (DISTILS & MOVES | _DIGESTS),
        "public_augment": Only(kd_epochs=Not(0)) | _DIGESTS,
    }

    digest_epochs: int = Field(default=1, ge=0, description="passes over the exchanged samples that fit the consensus")
    digest_loss: Annotated[Distillation, _DIGESTS] = Field(
        default="l1", description="distance of the digest; the paper's: l1"
    )
    digest_batch_size: Annotated[int, _DIGESTS] = Field(
        default=128, ge=2, description="public samples a step of the digest"
    )
    first_public_epochs: int = Field(
        default=0,
        ge=0,
        description="scores: passes over the labelled public set before a client's first round, at most; the paper: "
        "until it converges, its code: 20",
    )
    first_public_until: Annotated[Convergence | None, Only(first_public_epochs=Not(0))] = Field(
        default=None, description="end these once they have converged; the code: {patience: 3, rise: 0.5}; None: all"
    )
    first_private_epochs: int = Field(
        default=0,
        ge=0,
        description="then passes over private data, at most; the paper: until it converges, its code: 25",
    )
    first_private_until: Annotated[Convergence | None, Only(first_private_epochs=Not(0))] = Field(
        default=None, description="end these once they have converged; the code: {patience: 10, rise: 0.1}; None: all"
    )

    @property
    def summed(self) -> Mapping[str, str | None]:
        return {"tell": "num_examples"} if self.sums_suffice else {}

    # ---- server half

    def setup(self, server: Server) -> None:
        """Check that everybody has what crosses.

        Raises:
            ConfigError: somebody cannot.
        """
        super().setup(server)
        if self.digest_loss == "kl" and self.exchange != "scores":
            raise ConfigError(
                "algorithm.digest_loss is kl, which compares class scores, not representations; choose l1"
            )
        if self.first_public_epochs and (
            self.exchange != "scores" or self.output_kind.labels(server, server.public_set) is None
        ):
            raise ConfigError(
                f"algorithm.first_public_epochs is {self.first_public_epochs}, but clients can only train on a "
                "labelled public set of their own classification: it needs exchange: scores and labels; set it to 0"
            )

    def aggregate(self, server: Server, cohort: Cohort, server_outputs: PublicOutputs) -> dict[str, Ensembled]:
        """Ask for clients' outputs, take the consensus, and have them digest it and revisit their own data."""
        ensembles = self.ensembles(server, server_outputs)
        replies = cohort.ask(
            self.tell,
            check=self.outputs_check(server, server_outputs, "knowledge"),
            order=server_outputs.order,
            channels=each(self.asked_outputs(server_outputs)),
        )
        for reply in replies:
            ensembles.add(reply, reply.knowledge)
        targets = ensembles.targets()
        # where everybody's weight is 0 a row is 0: clients take that for no consensus on the sample
        agreed = {name: target.values for name, target in of_part(targets).items() if bool(target.valid.any())}
        server.record(**{f"consensus.{name}": float(target.valid.float().mean()) for name, target in targets.items()})

        consensus = self.output_kind.bundle(agreed, server_outputs.order)
        for _ in cohort.ask(self.learn, consensus=each(self.outputs_for(consensus))):
            pass
        return targets

    # ---- client half

    @client_step(knowledge=Representations | Logits, num_examples=int)
    def tell(self, client: Client, order: str, channels: str) -> Reply:
        """The client's outputs on the exchanged samples, those that ``channels`` lists as JSON; a client that is new
        here trains first."""
        if "begun" not in client.state:
            if self.first_public_epochs:
                self._begin(client, client.public_set, self.first_public_epochs, self.first_public_until, "public")
            if self.first_private_epochs:
                self._begin(client, client.train, self.first_private_epochs, self.first_private_until, "private")
            client.state["begun"] = {"round": torch.tensor(client.clock.round)}
        return Reply(
            knowledge=self.client_outputs(client, order, read_json(channels)), num_examples=client.num_examples
        )

    def _begin(self, client: Client, samples: Samples, epochs: int, until: Convergence | None, what: str) -> None:
        is_over = never if until is None else until.watch(client, samples)
        client.fit(samples, epochs=epochs, once=True, purpose=f"first-{what}", until=is_over)

    @client_step()
    def learn(self, client: Client, consensus: Representations | Logits) -> Reply:
        """Digest, then revisit."""
        self.digest(client, consensus)
        client.fit(client.train, epochs=self.local_epochs)
        return Reply()

    def digest(self, client: Client, consensus: Mapping[str, Tensor]) -> None:
        """Fit the client's outputs on the exchanged samples to the consensus, where there is one."""
        # of the client's own outputs only: others are not sent to it
        agreed = {name: values.to(client.device) for name, values in consensus.items()}
        epochs = self.digest_epochs if agreed else 0
        fit_by_gradient(self, client, agreed, epochs, self.digest_batch_size, self.digest_loss)
