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
from polyfed.lab.analysis.leakage.situation import Situation
from polyfed.lab.analysis.simulated import TrainedModel
from polyfed.models.model import Model
from polyfed.privacy.settings import UPDATE
from polyfed.tasks.classification import Classification
from polyfed.wire.payload import Logits, Prototypes, Representations, TensorBundle, Weights

MEMBERSHIP = "membership"
COLUMNS = ("attacked", "by", "AUC", "told at 1 %", "members", "others", "gave away")


@dataclass
class MembershipAttacks:
    """All of them in a situation; shadows of a client serve several."""

    situation: Situation
    _shadows: dict[tuple[str, ...], Shadows] = field(default_factory=dict)

    def findings(self) -> Found:
        chosen = self.situation.chosen()
        for on, member, seen, name, bundle in self.situation.crossed():
            yield from self._on_bundle(on, member, seen, name, bundle)
        for trained in self.situation.opened.globals():
            yield from self._on_final(trained)
        attacked = dict.fromkeys(seen.clients[0] for seen in chosen)
        if not any(isinstance(bundle, Weights) for seen in chosen for bundle in seen.bundles.values()):
            for client in attacked:
                if client in self.situation.opened.keepers:
                    yield from self._on_kept(client)

    # ---- what is attacked

    def _on_bundle(self, on: str, member: Member, seen: SeenReply, name: str, bundle: TensorBundle) -> Found:
        if reason := obstacle(self.situation, member, name, bundle):
            yield NoAttack(on, MEMBERSHIP, reason)
            return
        candidates = self.situation.candidates(seen.clients)
        if isinstance(candidates, str):
            yield NoAttack(on, MEMBERSHIP, candidates)
        elif isinstance(bundle, Weights):
            model = sent_model(self.situation, seen, bundle)
            yield from self._on_model(on, model, member, seen.clients, candidates)
        elif isinstance(bundle, Representations | Logits):
            model = sent_model(self.situation, seen, bundle)
            scores = sample_scores(model, member.settings.task, head_of(model, member.head), candidates.samples)
            yield self._finding(on, "surrogate, loss", scores, candidates, crosses=True)
        else:
            yield from self._on_prototypes(on, seen, name, bundle, candidates)

    def _on_prototypes(
        self, on: str, seen: SeenReply, name: str, bundle: TensorBundle, candidates: Candidates
    ) -> Found:
        member = self.situation.member(seen.clients[0])
        if not self.situation.plan.shadows:
            yield NoAttack(on, MEMBERSHIP, "an attack on prototypes needs shadow models (--shadows)")
            return
        sent = ShadowSite.like(self.situation.seen.site).sent(seen, member.id, name)
        shadows = self._shadows_of(seen.clients, partial(self.situation.fresh, member), member, candidates, sent)
        assert shadows.outputs is not None
        yield self._finding(
            on, "shadows, pull", pull(flat_outputs(bundle), shadows.outputs, shadows.inside), candidates, True
        )

    def _on_final(self, trained: TrainedModel) -> Found:
        opened, plan = self.situation.opened, self.situation.plan
        on = f"final model of {trained.name}"
        members = list(opened.judges(trained).values())
        if opened.is_server_untrained and trained.name == "server":
            yield NoAttack(on, MEMBERSHIP, "nothing in the method trains it")
        elif not members or not has_scores(trained.task):
            yield NoAttack(on, MEMBERSHIP, "no client has its task, modalities and classes, and test samples")
        else:
            test = {member.id: opened.test(trained, member) for member in members}
            candidates = candidates_of(
                members, partial(opened.train, trained), lambda member: test[member.id], plan.samples, plan.seed
            )
            if isinstance(candidates, str):
                yield NoAttack(on, MEMBERSHIP, candidates)
                return
            clients = (trained.name, *(member.id for member in members))
            fresh = partial(self._fresh_final, trained, members[0])
            yield from self._by_scores(
                on, trained.model, trained.head, members[0], clients, candidates, fresh, crosses=True
            )

    def _fresh_final(self, trained: TrainedModel, member: Member) -> Model:
        opened = self.situation.opened
        if trained.name == "server" and opened.experiment.server is not None:
            return opened.federation.server_model().to(opened.run.place)
        return self.situation.fresh(member)

    def _on_kept(self, client: str) -> Found:
        member = self.situation.member(client)
        on, candidates = f"model of {client} (stays there)", self.situation.candidates((client,))
        if isinstance(candidates, str) or not has_scores(member.settings.task):
            yield NoAttack(on, MEMBERSHIP, candidates if isinstance(candidates, str) else "no score of a single sample")
            return
        model = self.situation.opened.kept(client).model
        yield from self._on_model(on, model, member, (client,), candidates, crosses=False)

    # ---- how

    def _on_model(
        self,
        on: str,
        model: Model,
        member: Member,
        clients: tuple[str, ...],
        candidates: Candidates,
        *,
        crosses: bool = True,
    ) -> Found:
        fresh = partial(self.situation.fresh, member)
        yield from self._by_scores(on, model, member.head, member, clients, candidates, fresh, crosses=crosses)

    def _by_scores(
        self,
        on: str,
        model: Model,
        head: str,
        member: Member,
        clients: tuple[str, ...],
        candidates: Candidates,
        fresh: Callable[[], Model],
        *,
        crosses: bool,
    ) -> Found:
        scores = sample_scores(model, member.settings.task, head_of(model, head), candidates.samples)
        yield self._finding(on, "loss threshold", scores, candidates, crosses)
        if self.situation.plan.shadows:
            shadows = self._shadows_of(clients, fresh, member, candidates, head=head)
            for name, attack in (("LiRA online", likelihood_ratio), ("LiRA offline", outlyingness)):
                yield self._finding(on, name, attack(scores, shadows.scores, shadows.inside), candidates, crosses)

    def _shadows_of(
        self,
        clients: tuple[str, ...],
        fresh: Callable[[], Model],
        member: Member,
        candidates: Candidates,
        sent: Callable[..., Tensor] | None = None,
        head: str | None = None,
    ) -> Shadows:
        if clients not in self._shadows:
            plan, experiment = self.situation.plan, self.situation.opened.experiment
            training = ShadowTraining(experiment, self.situation.seen.number, plan.shadows, plan.seed)
            self._shadows[clients] = training.shadows(fresh, member, head or member.head, candidates, sent)
        return self._shadows[clients]

    def _finding(self, on: str, attack: str, scores: Tensor, candidates: Candidates, crosses: bool) -> AttackResult:
        member, values = candidates.is_member, scores.double().cpu()
        told = Discrimination.of(values[member].numpy(), values[~member].numpy(), self.situation.plan.seed)
        privacy = self.situation.privacy
        # noise on a reply does not touch what stays
        in_training = privacy is not None and privacy.samples is not None
        is_protected = self.situation.is_protected if crosses else in_training
        return told.result(on, attack, is_protected=is_protected, crosses=crosses)


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
