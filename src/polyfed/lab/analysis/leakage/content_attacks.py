"""What crossed, turned back into private data: words of texts, pictures, and which classes a client has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyfed.core.randomness import generator
from polyfed.data.samples import Batch, Samples
from polyfed.data.tokenization import Vocabulary
from polyfed.federation.membership import Member
from polyfed.federation.privacy import UPDATE
from polyfed.lab.analysis.leakage.classes import class_shares, evidence, told_apart
from polyfed.lab.analysis.leakage.figures import AttackResult, Discrimination, NoAttack, leak_verdict
from polyfed.lab.analysis.leakage.membership import head_of
from polyfed.lab.analysis.leakage.membership_attacks import NO_MODEL, Found, shown_kind
from polyfed.lab.analysis.leakage.pictures import Gradient, Protection, inverted, psnr
from polyfed.lab.analysis.leakage.seen import SeenReply
from polyfed.lab.analysis.leakage.situation import Situation
from polyfed.lab.analysis.leakage.words import (
    WordRecovery,
    moves,
    no_words,
    token_counts,
    vocabularies,
    word_recovery,
    word_table,
)
from polyfed.models.model import Model
from polyfed.tasks import evaluating
from polyfed.tasks.classification import Classification
from polyfed.tasks.pairing import PairTask
from polyfed.wire.payload import TensorBundle, Weights

WORDS, PICTURES, CLASSES = "words", "pictures", "classes"
WORD_COLUMNS = ("attacked", "by", "AUC", "precision", "recall", "guess: precision", "recall ", "words", "gave away")
PICTURE_COLUMNS = ("attacked", "by", "PSNR", "lowest", "highest", "guess", "noise", "pictures", "gave away")
CLASS_COLUMNS = ("attacked", "by", "AUC", "told at 1 %", "more than others", "less", "gave away")


# ---- words


def word_findings(situation: Situation) -> Found:
    for seen in situation.chosen():
        for name, bundle in seen.bundles.items():
            yield from _words(situation, seen, name, bundle)


def _words(situation: Situation, seen: SeenReply, name: str, bundle: TensorBundle) -> Found:
    on, member = f"{shown_kind(name, bundle)} of {seen.who}", situation.member(seen.clients[0])
    known = vocabularies(situation.opened.federation.train(member))
    if not isinstance(bundle, Weights):
        yield NoAttack(on, WORDS, "no rows of word embeddings cross")
    elif name != UPDATE:
        yield NoAttack(on, WORDS, NO_MODEL)
    elif not known:
        yield NoAttack(on, WORDS, "the client has no texts")
    else:
        for modality, vocabulary in known.items():
            yield _words_of(situation, on, seen, name, modality, vocabulary)


def _words_of(
    situation: Situation, on: str, seen: SeenReply, name: str, modality: str, vocabulary: Vocabulary
) -> AttackResult | NoAttack:
    sent: Mapping[str, Tensor] = seen.bundles[name]
    start: Mapping[str, Tensor] = seen.received.bundles.get(name, {})
    model = situation.fresh(situation.member(seen.clients[0]))
    table = word_table(model, modality, len(vocabulary.tokens), sent)
    if table is None or table not in start:
        return NoAttack(on, WORDS, f"word embeddings of '{modality}' do not cross, or nobody sent what they were")
    quality = _word_quality(situation, seen.clients, moves(start[table], sent[table]), modality, vocabulary)
    if not len(quality.held) or not len(quality.others):
        return NoAttack(on, WORDS, "the client's texts have all words of the vocabulary, or none")
    told = Discrimination.of(quality.held, quality.others, situation.plan.seed)
    figures = {key: value for key, value in vars(quality).items() if isinstance(value, int | float)}
    says = leak_verdict(told.auc, is_protected=situation.is_protected)
    shares = (quality.precision, quality.recall, quality.guessed_precision, quality.guessed_recall)
    words = f"{quality.private} of {quality.vocabulary}"
    cells = (on, "moved rows", str(told.auc), *(f"{share:.2f}" for share in shares), words, says)
    return AttackResult(on, "moved rows", True, {**told.to_json(), **figures}, cells, says)


def _word_quality(
    situation: Situation, clients: Sequence[str], moved: Tensor, modality: str, vocabulary: Vocabulary
) -> WordRecovery:
    """Against all words of these clients' texts; the guess goes by the first client's test texts."""
    federation, spared = situation.opened.federation, no_words(vocabulary)
    owners = [situation.member(client) for client in clients]
    private = set[int]().union(*(token_counts(federation.train(owner), modality) for owner in owners)) - spared
    test = federation.test(owners[0])
    common = [] if test is None else [entry for entry, _ in token_counts(test, modality).most_common()]
    order = list(dict.fromkeys([*common, *range(len(vocabulary.tokens))]))
    return word_recovery(moved, private, spared, order)


# ---- pictures


def picture_findings(situation: Situation) -> Found:
    """Pictures from gradients of small batches, by the weights that clients received."""
    for seen in situation.chosen():
        for name, bundle in seen.bundles.items():
            on, member = f"{shown_kind(name, bundle)} of {seen.who}", situation.member(seen.clients[0])
            samples = situation.opened.federation.train(member)
            modality = _picture_modality(samples)
            start: Mapping[str, Tensor] = seen.received.bundles.get(name, {})
            model = situation.fresh(member)
            if not isinstance(bundle, Weights):
                yield NoAttack(on, PICTURES, "no gradient crosses, nor weights from which one follows")
            elif name != UPDATE:
                yield NoAttack(on, PICTURES, NO_MODEL)
            elif modality is None:
                yield NoAttack(on, PICTURES, "the client has no pictures")
            elif not model.state_dict().keys() <= start.keys():
                yield NoAttack(on, PICTURES, "the server does not know all weights that the gradient is of")
            else:
                model.load_state_dict(dict(start))
                yield from _pictures(situation, on, seen, model, modality)


def _pictures(situation: Situation, on: str, seen: SeenReply, model: Model, modality: str) -> Found:
    member, plan = situation.member(seen.clients[0]), situation.plan
    for size in plan.batches:
        if isinstance(member.settings.task, PairTask) and size * len(seen.clients) < 2:
            yield NoAttack(f"{on}, batch 1", PICTURES, "one pair has nothing to be compared with, so its gradient is 0")
            continue
        reached, guesses, noises = list[float](), list[float](), list[float]()
        for trial in range(plan.trials):
            draws = generator(plan.seed, PICTURES, seen.clients[0], size, trial)
            got = _reconstructed(situation, seen, model, modality, size, draws)
            for values, more in zip((reached, guesses, noises), got, strict=True):
                values += more
        gain = fmean(reached) - fmean(guesses)
        says = _picture_verdict(gain, situation.is_protected)
        figures = {
            "psnr": fmean(reached),
            "lowest": min(reached),
            "highest": max(reached),
            "guess": fmean(guesses),
            "noise": fmean(noises),
            "batch": size,
            "pictures": len(reached),
        }
        shown = (fmean(reached), min(reached), max(reached), fmean(guesses), fmean(noises))
        cells = (
            f"{on}, batch {size}",
            "inverted gradient",
            *(f"{value:.1f}" for value in shown),
            str(len(reached)),
            says,
        )
        yield AttackResult(f"{on}, batch {size}", "inverted gradient", True, figures, cells, says)


def _reconstructed(
    situation: Situation, seen: SeenReply, model: Model, modality: str, size: int, draws: torch.Generator
) -> tuple[list[float], list[float], list[float]]:
    """PSNR of each true picture to the nearest of the reconstructions, of guesses, and of noise.

    Guesses are the mean of test pictures, and as many of these as there are reconstructions.
    """
    member, federation = situation.member(seen.clients[0]), situation.opened.federation
    samples = [federation.train(situation.member(client)) for client in seen.clients]
    # in double precision: gradients of different pictures may differ in the last bits of single precision
    model = model.double()
    batches = [_exact(own.batch(torch.randperm(len(own), generator=draws)[:size]).to(model.device)) for own in samples]
    weights = {name: value for name, value in model.named_parameters() if value.requires_grad}
    victim = _Victim(model, member, modality, list(weights.values()))
    truth = torch.cat([batch.inputs[modality] for batch in batches])
    others = federation.test(member) or samples[0]
    known = others.batch(torch.arange(min(len(others), 100))).inputs[modality].to(model.device).double()
    limits = (float(known.min()), float(known.max()))
    gradient = victim.crossing(batches, _protection(situation, member), draws)
    mean, span = known.mean(0, keepdim=True), limits[1] - limits[0]
    start = (mean + 0.05 * span * torch.randn(truth.shape, generator=draws).to(model.device)).clamp(*limits)

    def own(pictures: Tensor) -> Gradient:
        parts = torch.split(pictures, [len(batch) for batch in batches])
        return victim.gradient(
            [
                replace(batch, inputs={**batch.inputs, modality: part})
                for batch, part in zip(batches, parts, strict=True)
            ],
            graph=True,
        )

    # fused attention has no second derivative
    with evaluating(model, inference=False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        pictures = inverted(gradient, own, start, limits, situation.plan.steps)
    noise = limits[0] + span * torch.rand(truth.shape, generator=draws).to(model.device)
    guess = torch.cat([mean, known[: len(truth)]])
    return psnr(pictures, truth, span), psnr(guess, truth, span), psnr(noise, truth, span)


class _Victim:
    """Gives the gradients of a client's task."""

    def __init__(self, model: Model, member: Member, modality: str, weights: Sequence[Tensor]) -> None:
        self._model, self._task, self._weights = model, member.settings.task, weights
        self._head = head_of(model, member.head)

    def gradient(self, batches: Sequence[Batch], *, graph: bool) -> Gradient:
        loss = torch.stack([self._task.loss(self._model, self._head, batch) for batch in batches]).sum()
        parts = torch.autograd.grad(loss, self._weights, create_graph=graph, allow_unused=True)
        pairs = zip(parts, self._weights, strict=True)
        return [torch.zeros_like(weight) if part is None else part for part, weight in pairs]

    def crossing(self, batches: Sequence[Batch], protection: Protection, draws: torch.Generator) -> Gradient:
        parts = [_single(batch, place) for batch in batches for place in range(len(batch))]
        with evaluating(self._model, inference=False), torch.enable_grad():
            sums = [self.gradient([part], graph=False) for part in (parts if protection.by_sample else batches)]
        return protection.crossing([[value.detach() for value in own] for own in sums], draws)


def _exact(batch: Batch) -> Batch:
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in batch.inputs.items()}
    return replace(batch, inputs=inputs)


def _single(batch: Batch, place: int) -> Batch:
    cut = slice(place, place + 1)
    return Batch(
        inputs={name: value[cut] for name, value in batch.inputs.items()},
        targets={name: value[cut] for name, value in batch.targets.items()},
        index=batch.index[cut],
        items=batch.items[cut],
        matches=batch.matches[cut],
    )


def _protection(situation: Situation, member: Member) -> Protection:
    """Of one step of plain gradient descent at the client's learning rate."""
    privacy = situation.privacy
    if privacy is None:
        return Protection()
    if privacy.samples is not None:
        return Protection(privacy.samples.clip, privacy.samples.noise_multiplier, by_sample=True)
    reply = privacy.reply
    assert reply is not None
    assert reply.noise_multiplier is not None
    rate = member.settings.training.optimizer.lr
    return Protection(None if reply.weights is None else reply.weights / rate, reply.noise_multiplier)


def _picture_modality(samples: Samples) -> str | None:
    few = torch.arange(min(2, len(samples)))
    inputs = samples.batch(few).inputs
    return next((name for name, value in inputs.items() if value.dim() == 4 and value.shape[1] == 3), None)


def _picture_verdict(gain: float, is_protected: bool) -> str:
    if gain >= 1:
        return "much" if gain >= 6 else "some" if gain >= 3 else "little"
    return "nothing found" if is_protected else "attack too weak"


# ---- classes


def class_findings(situation: Situation) -> Iterator[AttackResult | NoAttack]:
    """Which classes a client has more of than others, from what all of a class space sent."""
    spaces: dict[tuple[str, str], list[tuple[SeenReply, TensorBundle, str]]] = defaultdict(list)
    for seen in situation.seen.replies:
        member = situation.member(seen.clients[0])
        for name, bundle in seen.bundles.items():
            spaces[shown_kind(name, bundle), member.head].append((seen, bundle, name))
    for (kind, head), sent in spaces.items():
        first = sent[0][0]
        task = situation.member(first.clients[0]).settings.task
        on = f"{kind} of {first.who if first.is_sum or len(sent) == 1 else f'{len(sent)} clients'}"
        if not isinstance(task, Classification):
            yield NoAttack(on, CLASSES, "their task has no classes")
        elif any(seen.is_sum for seen, _, _ in sent):
            yield NoAttack(on, CLASSES, "a sum says nothing of one client")
        elif len(sent) < 2:
            yield NoAttack(on, CLASSES, "one client has nobody to be told from")
        else:
            yield _classes(situation, on, task, head, sent)


def _classes(
    situation: Situation,
    on: str,
    task: Classification,
    head: str,
    sent: Sequence[tuple[SeenReply, TensorBundle, str]],
) -> AttackResult | NoAttack:
    signs, shares = list[Tensor](), list[Tensor]()
    for seen, bundle, name in sent:
        start: Mapping[str, Tensor] = seen.received.bundles.get(name, {})
        sign = evidence(bundle, start, head, task.target)
        if isinstance(sign, str):
            return NoAttack(on, CLASSES, sign)
        labels = situation.opened.federation.train(situation.member(seen.clients[0])).targets[task.target]
        signs.append(sign)
        shares.append(class_shares(labels, len(sign)))
    values, more = told_apart(torch.stack(signs), torch.stack(shares))
    if not bool(more.any()) or bool(more.all()):
        return NoAttack(on, CLASSES, "all clients have equal shares of all classes")
    told = Discrimination.of(values[more].numpy(), values[~more].numpy(), situation.plan.seed)
    says = leak_verdict(told.auc, is_protected=situation.is_protected)
    cells = (on, "evidence by class", str(told.auc), str(told.rate), str(told.members), str(told.others), says)
    return AttackResult(on, "evidence by class", True, told.to_json(), cells, says)
