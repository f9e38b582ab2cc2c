"""Membership inference on all that crossed, on the final models, and on models that stay at their clients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.federation.membership import Member
from polyfed.lab.analysis.leakage.candidates import Candidates, candidates_of
from polyfed.lab.analysis.leakage.figures import NO_MODEL, AttackResult, Discrimination, Found, NoAttack
from polyfed.lab.analysis.leakage.membership import has_scores, head_of, sample_scores
from polyfed.lab.analysis.leakage.seen import SeenReply, shown_kind
from polyfed.lab.analysis.leakage.shadows import (
    Shadows,
    ShadowSite,
    ShadowTraining,
    flat_outputs,
    likelihood_ratio,
    outlyingness,
    pull,
)
from polyfed.lab.analysis.leakage.situation import Crossed, Situation
from polyfed.lab.analysis.simulated import TrainedModel
from polyfed.models.model import Model
from polyfed.privacy.settings import UPDATE
from polyfed.tasks.classification import Classification
from polyfed.wire.payload import Logits, Prototypes, Representations, TensorBundle, Weights

MEMBERSHIP = "membership"


def membership_findings(situation: Situation) -> Found:
    attacks, chosen = _Attacks(situation), situation.chosen()
    for crossed in situation.crossed():
        yield from attacks.on_bundle(crossed)
    for trained in situation.opened.globals():
        yield from attacks.on_final(trained)
    if not any(isinstance(bundle, Weights) for seen in chosen for bundle in seen.bundles.values()):
        for client in dict.fromkeys(seen.clients[0] for seen in chosen):
            if client in situation.opened.keepers:
                yield from attacks.on_kept(client)


@dataclass(frozen=True)
class _Target:
    """Whose training samples are asked for.

    Attributes:
        on: what is attacked, in words.
        member: whose task and training count; of several clients the first.
        clients: who trained; they share their shadows.
        candidates: asked for.
        head: of the task in the model.
        fresh: gives the model as it was before any training.
        crosses: whether what is attacked left its client.
    """

    on: str
    member: Member
    clients: tuple[str, ...]
    candidates: Candidates
    head: str
    fresh: Callable[[], Model]
    crosses: bool = True


@dataclass
class _Attacks:
    """All of them in a situation; shadows of a client serve several."""

    situation: Situation
    _shadows: dict[tuple[str, ...], Shadows] = field(default_factory=dict)

    def on_bundle(self, crossed: Crossed) -> Found:
        on, member, seen, name, bundle = crossed
        if reason := obstacle(self.situation, member, name, bundle):
            yield NoAttack(on, MEMBERSHIP, reason)
            return
        candidates = self.situation.candidates(seen.clients)
        if isinstance(candidates, str):
            yield NoAttack(on, MEMBERSHIP, candidates)
            return
        target = _Target(on, member, seen.clients, candidates, member.head, partial(self.situation.fresh, member))
        if isinstance(bundle, Prototypes):
            yield self._on_prototypes(target, seen, name, bundle)
        elif isinstance(bundle, Weights):
            yield from self._on_model(target, sent_model(self.situation, seen, bundle))
        elif isinstance(bundle, Representations | Logits):
            yield self._finding(
                target, "surrogate, loss", self._scores(target, sent_model(self.situation, seen, bundle))
            )

    def _on_prototypes(
        self, target: _Target, seen: SeenReply, name: str, bundle: Prototypes
    ) -> AttackResult | NoAttack:
        if not self.situation.plan.shadows:
            return NoAttack(target.on, MEMBERSHIP, "an attack on prototypes needs shadow models (--shadows)")
        sent = ShadowSite.like(self.situation.seen.site).sent(seen, target.member.id, name)
        shadows = self._shadows_of(target, sent)
        assert shadows.outputs is not None
        return self._finding(target, "shadows, pull", pull(flat_outputs(bundle), shadows.outputs, shadows.inside))

    def on_final(self, trained: TrainedModel) -> Found:
        opened, plan = self.situation.opened, self.situation.plan
        on, members = f"final model of {trained.name}", list(opened.judges(trained).values())
        if opened.is_server_untrained and trained.name == "server":
            yield NoAttack(on, MEMBERSHIP, "nothing in the method trains it")
            return
        if not members or not has_scores(trained.task):
            yield NoAttack(on, MEMBERSHIP, "no client has its task, modalities and classes, and test samples")
            return
        train, test = partial(opened.train, trained), partial(opened.test, trained)
        candidates = candidates_of(members, train, test, plan.samples, plan.seed)
        if isinstance(candidates, str):
            yield NoAttack(on, MEMBERSHIP, candidates)
            return
        clients = (trained.name, *(member.id for member in members))
        fresh = partial(self._fresh_final, trained, members[0])
        yield from self._on_model(_Target(on, members[0], clients, candidates, trained.head, fresh), trained.model)

    def _fresh_final(self, trained: TrainedModel, member: Member) -> Model:
        opened = self.situation.opened
        if trained.name == "server" and opened.experiment.server is not None:
            return opened.federation.server_model().to(opened.run.place)
        return self.situation.fresh(member)

    def on_kept(self, client: str) -> Found:
        member = self.situation.member(client)
        on, candidates = f"model of {client} (stays there)", self.situation.candidates((client,))
        if isinstance(candidates, str) or not has_scores(member.settings.task):
            yield NoAttack(on, MEMBERSHIP, candidates if isinstance(candidates, str) else "no score of a single sample")
            return
        fresh = partial(self.situation.fresh, member)
        target = _Target(on, member, (client,), candidates, member.head, fresh, crosses=False)
        yield from self._on_model(target, self.situation.opened.kept(client).model)

    # ---- how

    def _scores(self, target: _Target, model: Model) -> Tensor:
        return sample_scores(model, target.member.settings.task, head_of(model, target.head), target.candidates.samples)

    def _on_model(self, target: _Target, model: Model) -> Found:
        scores = self._scores(target, model)
        yield self._finding(target, "loss threshold", scores)
        if self.situation.plan.shadows:
            shadows = self._shadows_of(target)
            for name, attack in (("LiRA online", likelihood_ratio), ("LiRA offline", outlyingness)):
                yield self._finding(target, name, attack(scores, shadows.scores, shadows.inside))

    def _shadows_of(self, target: _Target, sent: Callable[..., Tensor] | None = None) -> Shadows:
        if target.clients not in self._shadows:
            plan, experiment = self.situation.plan, self.situation.opened.experiment
            training = ShadowTraining(experiment, self.situation.seen.number, plan.shadows, plan.seed)
            made = training.shadows(target.fresh, target.member, target.head, target.candidates, sent)
            self._shadows[target.clients] = made
        return self._shadows[target.clients]

    def _finding(self, target: _Target, attack: str, scores: Tensor) -> AttackResult:
        member, values = target.candidates.is_member, scores.double().cpu()
        told = Discrimination.of(values[member].numpy(), values[~member].numpy(), self.situation.plan.seed)
        privacy = self.situation.privacy
        # noise on a reply does not touch what stays
        in_training = privacy is not None and privacy.samples is not None
        is_protected = self.situation.is_protected if target.crosses else in_training
        return told.result(target.on, attack, is_protected=is_protected, crosses=target.crosses)


def obstacle(situation: Situation, member: Member, name: str, bundle: TensorBundle) -> str:
    """Why what crossed cannot be attacked by scores of samples; empty if it can."""
    task = member.settings.task
    if not has_scores(task):
        return f"no score of a single sample is known for the task '{task.component_name()}'"
    if isinstance(bundle, Weights):
        return _lacking(situation, member, name, bundle)
    if isinstance(bundle, Representations) and isinstance(task, Classification):
        return "the classifier does not cross, and representations alone do not say how well a sample is known"
    if isinstance(bundle, Representations | Logits):
        exchanges = isinstance(getattr(situation.opened.experiment.algorithm, "public", None), PublicExchange)
        return "" if exchanges else "the method does not say of which public samples rows are"
    return "" if isinstance(bundle, Prototypes) else f"no attack on {shown_kind(name, bundle)} is known to us"


def _lacking(situation: Situation, member: Member, name: str, weights: Weights) -> str:
    """What keeps weights from being the client's model; empty if nothing does."""
    if name != UPDATE:
        return NO_MODEL
    missing = sorted(situation.fresh(member).exchanged().keys() - weights.keys())
    return f"'{missing[0]}' and so the whole model does not cross" if missing else ""


def sent_model(situation: Situation, seen: SeenReply, bundle: Weights | Representations | Logits) -> Model:
    """The model that crossed, or a surrogate of the one whose outputs did."""
    member = situation.member(seen.clients[0])
    if isinstance(bundle, Weights):
        model = situation.fresh(member)
        model.load(bundle)
        return model
    return ShadowSite.like(situation.seen.site).surrogate(seen, member.id, bundle, situation.plan.passes)
