"""FedAFD: steps by hand, in which each loss trains its own part of a model alone; learning."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fedafd_sessions import CLIENTS, FAST, SEVERAL, SLOW, Values, asked, encoders_of, known_of, session_of
from torch import Tensor
from torch.nn import functional as F

from by_hand import as_left, play
from grids import mostly_slow
from polyfed.core.randomness import isolated
from polyfed.data.samples import Batch
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from sessions import prepared, woken
from small_federations import Config, bag, group, sgd, three_kinds, training, words

# ---- steps by hand


class ByHand:
    """A client's round 1 as plain loops; its model, which descends by gradients alone, is the result."""

    def __init__(self, session: Session, name: str) -> None:
        self.session, self.name = session, name
        self.settings = session.experiment.algorithm.adversarial
        self.epochs = session.experiment.algorithm.local_epochs
        self.member = session.federation.members[name]
        self.model = session.federation.client_model(self.member).train()
        self.streams, self.known = woken(session, name), known_of(session)
        self.teacher = copy.deepcopy(session.server.model).eval().requires_grad_(False)
        self.views = session.federation.train(self.member, session.experiment.server.model)

    def joint(self) -> None:
        for epoch in range(self.epochs):
            public = [b for k in range(3) for b in self.public(f"align-{epoch}-{k}")]
            for private, other in zip(self.private(epoch), public, strict=False):
                local = self.local(other)
                self.judge(local, other, 1.0)
                self.descend(self.task(private) + self.settings.weight * self.deceive(local, other), fusion=True)

    def alternate(self) -> None:
        for epoch in range(self.epochs):
            for other in self.public(f"align-{epoch}-0"):
                local = self.local(other)
                self.judge(local, other, self.settings.weight)
                self.descend(self.settings.weight * self.deceive(local, other), fusion=False)
            for private in self.private(epoch):
                self.descend(self.task(private), fusion=True)

    def private(self, epoch: int) -> list[Batch]:
        return list(self.streams.batches(self.streams.train, f"task-{epoch}"))

    def public(self, purpose: str) -> list[Batch]:
        return list(self.streams.public_batches(purpose, self.settings.batch_size))

    def local(self, batch: Batch) -> Values:
        return {name: self.model.represent(name, x) for name, x in batch.inputs.items()}

    def levels(self, local: Values) -> Iterator[tuple[Tensor, torch.nn.Module, Tensor]]:
        for modality, values in local.items():
            for other, real in self.known.items():
                variant = "own" if other == modality else "cross"
                yield values, self.model.extras[f"discriminator_{variant}_{modality}"], real

    def judge(self, local: Values, batch: Batch, factor: float) -> None:
        losses = []
        for fake, judge, real in self.levels(local):
            right = F.logsigmoid(judge(real[batch.index])).mean() + torch.log(1 - judge(fake.detach()).sigmoid()).mean()
            losses.append(-right)
        names = [key for key, _ in self.model.named_parameters() if "discriminator" in key]
        self._step(factor * torch.stack(losses).sum(), {key: SLOW for key in names})

    def deceive(self, local: Values, batch: Batch) -> Tensor:
        losses = []
        for fake, judge, real in self.levels(local):
            false = judge(fake)
            if self.settings.loss == "minimax":
                losses.append(F.logsigmoid(judge(real[batch.index])).mean() + torch.log(1 - false.sigmoid()).mean())
            else:
                losses.append(-torch.log(false.sigmoid()).mean())
        return torch.stack(losses).sum()

    def task(self, batch: Batch) -> Tensor:
        task, head = self.member.settings.task, self.model.heads[self.member.head]
        there = self.views.batch(batch.index)
        fused = {}
        for name, x in batch.inputs.items():
            own, other = (F.normalize(values) for values in (self.model.embed(name, x), self.guide(name, there)))
            fused[name] = self.model.extras["fusion"](own, other)
        if task.component_name() == "classification":
            return F.cross_entropy(head(next(iter(fused.values()))), batch.targets[task.target])
        loss: Tensor = head(*(F.normalize(fused[name]) for name in task.between), None)
        return loss

    def guide(self, name: str, there: Batch) -> Tensor:
        return self.teacher.embed(name, there.inputs[name])

    def descend(self, loss: Tensor, *, fusion: bool) -> None:
        rates = {key: 0.05 for key, _ in self.model.named_parameters() if not key.startswith("extras.")}
        if fusion:
            rate = SEVERAL if len(self.model.modalities) > 1 else FAST
            rates |= {key: rate for key, _ in self.model.named_parameters() if key.startswith("extras.fusion")}
        self._step(loss, rates)

    def _step(self, loss: Tensor, rates: dict[str, float]) -> None:
        named = dict(self.model.named_parameters())
        actual = torch.autograd.grad(loss, [named[key] for key in rates], allow_unused=True)
        with torch.no_grad():
            for (key, rate), gradient in zip(rates.items(), actual, strict=True):
                if gradient is not None:
                    named[key] -= rate * gradient


@pytest.mark.parametrize("name", mostly_slow(CLIENTS, "paired"))
@pytest.mark.parametrize(
    "options",
    [
        {"adversarial": {"update": "joint", "weight": 0.7}},
        {"adversarial": {"update": "alternate", "loss": "non_saturating", "weight": 0.7}},
        {"adversarial": {"update": "alternate", "weight": 0.3}},
    ],
    ids=["joint", "released", "alternate-minimax"],
)
def test_training_equals_plain_loops(tmp_path: Path, name: str, options: Config) -> None:
    epochs = 1 if name == "paired" else 2  # rounding grows fast there
    session = session_of(tmp_path, local_epochs=epochs, **options)
    before = {key: value.clone() for key, value in woken(session, name).model.state_dict().items()}
    hand = ByHand(session, name)
    with isolated(0, 1, name, "fit", 0):  # dropout draws as the step's does
        getattr(hand, options["adversarial"]["update"])()
    answer = asked(session, name, hand.known, encoders_of(session, *hand.streams.info.modalities))
    actual = woken(session, name, (2, 0), after=(1, 0)).model
    after = actual.state_dict()
    torch.testing.assert_close(after, hand.model.state_dict(), atol=5e-6, rtol=1e-5)
    moved = {"".join(key.split(".")[:2]) for key, value in before.items() if not torch.equal(value, after[key])}
    assert {f"encoders{modality}" for modality in hand.streams.info.modalities} <= moved
    assert "extrasfusion" in moved
    assert sum("discriminator" in key for key in moved) == 2 * len(hand.streams.info.modalities)
    unfused = actual.eval().represent
    for modality, sent in answer.fields["representations"].items():
        samples = hand.streams.public_set
        x = samples.inputs[modality](samples.rows[modality])
        torch.testing.assert_close(sent, unfused(modality, x).detach(), atol=1e-6, rtol=1e-5)


def test_released_clients_share_one_pair_of_discriminators(tmp_path: Path) -> None:
    session = session_of(tmp_path, adversarial={"shared": True})
    client, known, alignment = woken(session, "paired"), known_of(session), session.experiment.algorithm.adversarial
    local = alignment.local_representations(client, client.public_set.batch(torch.arange(10)), known)
    actual = [(modality, id(judge), id(real)) for modality, judge, real in alignment.levels(client, local, known)]
    own, cross = (id(client.model.extras[f"discriminator_{variant}_every"]) for variant in ("own", "cross"))
    image, text = (id(known[name]) for name in ("image", "text"))
    assert actual == [("image", own, image), ("image", cross, text), ("text", own, text), ("text", cross, image)]


def test_new_fusions_a_round_forget_their_optimiser(tmp_path: Path) -> None:
    session = session_of(tmp_path, fusion={"reset": True, "training": {"optimizer": {"kind": "adam"}}})
    play(session, 1, 2)
    state = as_left(session, "image").optimizers.states["fusion"]
    steps = {int(value) for key, value in state.items() if key.startswith("step:")}
    assert steps == {2}  # of one epoch of two batches, not of two


# ---- learning


@pytest.mark.slow
def test_fused_clients_learn_topics(tmp_path: Path) -> None:
    config = three_kinds(name="fedafd", local_epochs=4, adversarial={"batches_per_epoch": 2})
    del config["clients"]["image"], config["clients"]["paired"]
    config["clients"]["text"] = group(
        1, "texts", {"text": bag(words(24, 400))}, training("adam", 0.03, 32), target="topic", dim=8
    )
    config["data"]["sources"]["texts"] |= {"train": 400, "test": 100, "difficulty": 0.0}
    session = prepared(config, tmp_path)
    accuracies = []
    for number in range(1, 4):
        play(session, number, number)
        cohort = session.cohort(number, Ledger())
        accuracies.append(session.experiment.algorithm.evaluate_clients(session.server, cohort)["text"]["accuracy"])
    assert accuracies[-1] > 2 * 100 / 6


def test_the_alignment_brings_clients_to_the_server(tmp_path: Path) -> None:
    """Means of the public representations come closer than without alignment."""
    distances = {}
    for beta in (0.0, 2.0):
        adversarial = {"weight": beta, "training": sgd(0.5)} if beta else None
        session = session_of(tmp_path / str(beta), adversarial=adversarial, local_epochs=10)
        known = known_of(session)
        answer = asked(session, "image", known, encoders_of(session, "image"))
        distances[beta] = float((answer.fields["representations"]["image"].mean(0) - known["image"].mean(0)).norm())
    assert distances[2.0] < 0.7 * distances[0.0]
