"""Shadow models: the client's own training on random halves of the candidates, to which the client's are compared.

Source: Carlini et al. (IEEE S&P 2022), "Membership inference attacks from first principles" (LiRA).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polyfed.aggregation.prototypes import ClassMeans, by_space
from polyfed.algorithms.algorithm import LocalTraining
from polyfed.algorithms.shared.digest import Digest
from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.core.randomness import generator, isolated
from polyfed.data.samples import Samples
from polyfed.engines.leaving import Performing
from polyfed.engines.site import Site
from polyfed.federation.membership import Member
from polyfed.federation.participant import Participant
from polyfed.federation.public_outputs import PublicOutputs
from polyfed.federation.server import loaded
from polyfed.federation.trainer import Clock
from polyfed.lab.analysis.leakage.candidates import Candidates
from polyfed.lab.analysis.leakage.membership import head_of, sample_scores
from polyfed.lab.analysis.leakage.seen import SeenReply, StagedSite
from polyfed.models.model import Model
from polyfed.runs.experiment import Experiment
from polyfed.wire.payload import Payload, Prototypes, TensorBundle
from polyfed.wire.schema import steps_of

_SURROGATE_BATCH = 32


@dataclass(frozen=True)
class Shadows:
    """What k shadow models say of n candidates.

    Attributes:
        inside: which candidates each was trained on: half of the models for each candidate.
        scores: how well each model knows each candidate.
        outputs: what the client's step sends with each model; None where nothing was asked.
    """

    inside: Bool[Tensor, "k n"]
    scores: Float[Tensor, "k n"]
    outputs: Float[Tensor, "k m"] | None


def halves(samples: Samples, number: int, seed: int) -> Bool[Tensor, "k n"]:
    """Random halves and what they leave, by item, so that each candidate is in as many as it is out of."""
    items, places = torch.unique(samples.items, return_inverse=True)
    rows = []
    for turn in range(number // 2):
        order = torch.randperm(len(items), generator=generator(seed, "halves", turn))
        chosen = torch.zeros(len(items), dtype=torch.bool)
        chosen[order[: len(items) // 2]] = True
        rows += [chosen[places], ~chosen[places]]
    return torch.stack(rows)


@dataclass(frozen=True)
class ShadowTraining:
    """How long shadows train: as long as the client did in the run, on its task alone.

    Attributes:
        experiment: of the run.
        rounds: in each of which a client trains.
        number: of shadow models; even.
        seed: of halves, batches and dropout.
    """

    experiment: Experiment
    rounds: int
    number: int
    seed: int

    def models(
        self, fresh: Callable[[], Model], member: Member, head: str, samples: Samples, inside: Bool[Tensor, "k n"]
    ) -> Iterator[Model]:
        initial = fresh()
        start = {name: value.clone() for name, value in initial.exchanged().items()}
        for place, chosen in enumerate(inside):
            initial.load(start)
            self._train(initial, member, head, samples.subset(chosen.nonzero().flatten()), place)
            yield initial.eval()

    def _train(self, model: Model, member: Member, head: str, samples: Samples, place: int) -> None:
        local = self.experiment.algorithm.local_training or LocalTraining()
        state: dict[str, dict[str, Tensor]] = {}
        for number in range(1, self.rounds + 1):
            participant = Participant(
                name=f"{member.id}-shadow-{place}",
                load_model=lambda weights: loaded(model, weights),
                clock=Clock(self.seed, number, self.rounds, self.experiment.algorithm.epochs_a_round),
                objective=member.settings.task,
                head_name=head,
                training=member.settings.training,
                precision=self.experiment.run.precision,
                optimizer_state=state,
            )
            with isolated(self.seed, "shadow", place, number):
                participant.fit(samples, epochs=local.epochs, steps=local.steps)
            # momentum goes on where the client's does
            state = participant.trainer_states() if "optimizer" in self.experiment.algorithm.keeps else {}

    def shadows(
        self,
        fresh: Callable[[], Model],
        member: Member,
        head: str,
        candidates: Candidates,
        sent: Callable[[Mapping[str, Tensor], Samples], Tensor] | None = None,
    ) -> Shadows:
        """What all shadows say.

        Args:
            fresh: gives the model with initial weights, on the device.
            member: whose training they copy.
            head: name of the task's head in the model.
            candidates: to train on, and to judge.
            sent: what the client would send with weights and samples; None: not asked.
        """
        inside = halves(candidates.samples, self.number, self.seed)
        scores, outputs = [], []
        for chosen, model in zip(inside, self.models(fresh, member, head, candidates.samples, inside), strict=True):
            scores.append(sample_scores(model, member.settings.task, head_of(model, head), candidates.samples))
            if sent is not None:
                weights = {name: value.detach().clone() for name, value in model.exchanged().items()}
                outputs.append(sent(weights, candidates.samples.subset(chosen.nonzero().flatten())))
        return Shadows(inside, torch.stack(scores), torch.stack(outputs) if outputs else None)


@dataclass
class ShadowSite(StagedSite):
    """A client's place as an attacker makes it up: the method's own step, with other weights and samples.

    Attributes:
        weights: of the client's model.
    """

    weights: Mapping[str, Tensor] | None = None

    @classmethod
    def like(cls, site: Site) -> ShadowSite:
        return cls.of(site, {}, None)

    def sent(self, seen: SeenReply, client: str, field: str) -> Callable[[Mapping[str, Tensor], Samples], Tensor]:
        """What the client would have sent in ``field`` to the request that was seen, as one vector."""
        request, member = replace(seen.request, client=client), self.federation.members[client]
        schema = steps_of(self.spec.algorithm)[request.step]
        # of a sum more was sent: what masks need
        received = Payload({name: value for name, value in seen.received.fields.items() if name in schema.receives})

        def outputs(weights: Mapping[str, Tensor], samples: Samples) -> Tensor:
            self.weights, self.samples = weights, {client: samples}
            return flat_outputs(self.perform(Performing(request, received, schema, member)).bundles[field])

        return outputs

    def surrogate(self, seen: SeenReply, client: str, rows: PublicOutputs, passes: int) -> Model:
        """The client's model trained from its initial weights to give the rows that crossed (Yang et al. 2022).

        Raises:
            TypeError: the method does not say of which public samples the rows are.
        """
        method, member = self.spec.algorithm, self.federation.members[client]
        public = getattr(method, "public", None)
        if not isinstance(public, PublicExchange):
            raise TypeError(f"'{method.component_name()}' exchanges no rows of public samples")
        self.weights, self.samples = None, {}
        with isolated(self.spec.seed, "surrogate", client):
            who = self.wake(member, (seen.request.round, seen.request.phase))
            digest = Digest(epochs=passes, loss="l2", batch_size=_SURROGATE_BATCH)
            digest.fit(who, public, public.from_wire(who, rows))
        return who.model.eval()

    def _kept(self, client_id: str, version: Any, after: Any) -> dict[str, dict[str, Tensor]]:
        kept = super()._kept(client_id, version, after)
        own = {key: value for key, value in kept.items() if key != "optimizer"}
        return own if self.weights is None else {**own, "model": dict(self.weights)}

    def _keep(self, client: Any, version: Any, after: Any, digest: bytes) -> None:
        """Nothing: it never happened."""


def flat_outputs(bundle: TensorBundle) -> Float[Tensor, " m"]:
    """All values as one vector; of prototypes a row for each class, zero where there is none."""
    if not isinstance(bundle, Prototypes):
        return torch.cat([value.double().flatten().cpu() for _, value in sorted(bundle.items())])
    parts = []
    for _, own in sorted(by_space(bundle, ClassMeans).items()):
        rows = torch.zeros(len(own.present), own.means.shape[1], dtype=torch.float64)
        rows[own.present.cpu()] = own.means.double().cpu()
        parts.append(rows.flatten())
    return torch.cat(parts)


# ---- what is made of them


def likelihood_ratio(
    target: Float[Tensor, " n"], shadows: Float[Tensor, "k n"], inside: Bool[Tensor, "k n"]
) -> Float[Tensor, " n"]:
    """LiRA online: log N(score; in) - log N(score; out), normal by candidate, with one spread for all of each kind."""
    sides = [_normal(shadows, chosen) for chosen in (inside, ~inside)]
    ratios = [-((target - mean) ** 2) / (2 * spread**2) - spread.log() for mean, spread in sides]
    return ratios[0] - ratios[1]


def outlyingness(
    target: Float[Tensor, " n"], shadows: Float[Tensor, "k n"], inside: Bool[Tensor, "k n"]
) -> Float[Tensor, " n"]:
    """LiRA offline: how many standard deviations a score is above those of models that never saw the candidate."""
    mean, spread = _normal(shadows, ~inside)
    return (target - mean) / spread


def pull(
    target: Float[Tensor, " m"], outputs: Float[Tensor, "k m"], inside: Bool[Tensor, "k n"]
) -> Float[Tensor, " n"]:
    """How far outputs lie in the direction in which training on each candidate moves them.

    The direction of a candidate is the mean output of shadows with it less that of those without; outputs are in
    standard deviations over shadows.
    """
    spread = outputs.std(0)
    used = spread > 1e-12 * spread.max()
    scaled = (outputs[:, used] - outputs[:, used].mean(0)) / spread[used]
    place = (target[used] - outputs[:, used].mean(0)) / spread[used]
    weights = inside.double() / inside.sum(0) - (~inside).double() / (~inside).sum(0)
    directions = weights.T @ scaled
    pulls: Tensor = directions @ place / directions.norm(dim=1).clamp_min(1e-12)
    return pulls


def _normal(shadows: Float[Tensor, "k n"], chosen: Bool[Tensor, "k n"]) -> tuple[Tensor, Tensor]:
    """Mean by candidate over the chosen models [n], and the spread about it over all [1]."""
    counts = chosen.sum(0)
    means = (shadows * chosen).sum(0) / counts
    squares = ((shadows - means) ** 2 * chosen).sum()
    # each candidate's mean takes one degree of freedom
    freedom = (counts - 1).sum().clamp_min(1)
    return means, (squares / freedom).sqrt().clamp_min(1e-6)
