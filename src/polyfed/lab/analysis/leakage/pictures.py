"""Pictures of a client from the gradient of a small batch (Geiping et al., NeurIPS 2020).

The attacker knows the weights, all of the batch but its pictures, and the sum of gradients that crosses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyfed.core.randomness import generator
from polyfed.data.samples import Batch, Samples
from polyfed.federation.membership import Member
from polyfed.lab.analysis.leakage.figures import NO_MODEL, AttackResult, Found, NoAttack
from polyfed.lab.analysis.leakage.membership import head_of
from polyfed.lab.analysis.leakage.seen import SeenReply
from polyfed.lab.analysis.leakage.situation import Situation
from polyfed.models.model import Model
from polyfed.privacy.settings import UPDATE
from polyfed.tasks import evaluating
from polyfed.tasks.pairing import PairTask
from polyfed.wire.payload import Weights

_PICTURES = "pictures"
Gradient = Sequence[Tensor]
Pictures = Float[Tensor, "b 3 h w"]

_RATE, _SMOOTHNESS = 0.05, 1e-4
_DROPS = (3 / 8, 5 / 8, 7 / 8)  # of all steps, after which the rate is a tenth


@dataclass(frozen=True)
class Protection:
    """What happens to a gradient before it crosses.

    Attributes:
        clip: largest norm, None: any.
        noise: standard deviation in every entry, over ``clip``.
        by_sample: whether each sample's gradient is clipped, or the sum.
    """

    clip: float | None = None
    noise: float = 0.0
    by_sample: bool = False

    def crossing(self, of_samples: Sequence[Gradient], draws: torch.Generator) -> Gradient:
        shortened = [_clipped(own, self.clip) for own in of_samples] if self.by_sample else list(of_samples)
        total = [torch.stack(parts).sum(0) for parts in zip(*shortened, strict=True)]
        total = total if self.by_sample else list(_clipped(total, self.clip))
        deviation = self.noise * (self.clip or 0.0)
        return [part + deviation * torch.randn(part.shape, generator=draws).to(part) for part in total]


def _clipped(gradient: Gradient, clip: float | None) -> Gradient:
    norm = math.sqrt(sum(float(part.square().sum()) for part in gradient))
    return gradient if clip is None or norm <= clip else [part * (clip / norm) for part in gradient]


def total_variation(pictures: Pictures) -> Float[Tensor, ""]:
    down = (pictures[:, :, 1:] - pictures[:, :, :-1]).abs().mean()
    across = (pictures[..., 1:] - pictures[..., :-1]).abs().mean()
    return down + across


def cosine_distance(first: Gradient, second: Gradient) -> Float[Tensor, ""]:
    """1 - cosine of two gradients, mean over tensors that the second is not 0 in.

    Of each tensor by itself: as one vector, the few large entries of last layers would hide all others.
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if bool(b.any())]
    cosines = [(a * b).sum() / (a.square().sum() * b.square().sum()).clamp_min(1e-30).sqrt() for a, b in pairs]
    return 1 - torch.stack(cosines).mean()


def inverted(
    gradient: Gradient,
    own: Callable[[Pictures], Gradient],
    start: Pictures,
    limits: tuple[float, float],
    steps: int,
) -> Pictures:
    """Pictures whose gradient has the direction of the one that crossed.

    Adam on the sign of the gradient of cosine distance + total variation, within the limits of pixels.

    Args:
        gradient: that crossed.
        own: gives the gradient of pictures, with a graph.
        start: the first guess.
        limits: of pixels.
        steps: of Adam.
    """
    pictures = start.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([pictures], lr=_RATE)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [round(part * steps) for part in _DROPS], 0.1)
    for _ in range(steps):
        loss = cosine_distance(own(pictures), gradient) + _SMOOTHNESS * total_variation(pictures)
        (slope,) = torch.autograd.grad(loss, pictures)
        pictures.grad = slope.sign()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            pictures.clamp_(*limits)
    return pictures.detach()


def psnr(pictures: Pictures, truth: Pictures, span: float) -> list[float]:
    """Peak signal-to-noise ratio of each true picture and the nearest reconstructed one, in dB; higher is nearer."""
    errors = (truth[:, None] - pictures[None]).square().mean((2, 3, 4)).min(1).values
    return [10 * math.log10(span**2 / max(float(error), 1e-12)) for error in errors]


# ---- the attack


def picture_findings(situation: Situation) -> Found:
    """Pictures from gradients of small batches, by the weights that clients received."""
    for on, member, seen, name, bundle in situation.crossed():
        modality = _picture_modality(situation.opened.federation.train(member))
        start: Mapping[str, Tensor] = seen.received.bundles.get(name, {})
        model = situation.fresh(member)
        if not isinstance(bundle, Weights):
            yield NoAttack(on, _PICTURES, "no gradient crosses, nor weights from which one follows")
        elif name != UPDATE:
            yield NoAttack(on, _PICTURES, NO_MODEL)
        elif modality is None:
            yield NoAttack(on, _PICTURES, "the client has no pictures")
        elif not model.exchanged().keys() <= start.keys():
            yield NoAttack(on, _PICTURES, "the server does not know all weights that the gradient is of")
        else:
            model.load(start)
            yield from _pictures(situation, on, seen, model, modality)


def _pictures(situation: Situation, on: str, seen: SeenReply, model: Model, modality: str) -> Found:
    member, plan = situation.member(seen.clients[0]), situation.plan
    for size in plan.batches:
        if isinstance(member.settings.task, PairTask) and size * len(seen.clients) < 2:
            yield NoAttack(f"{on}, batch 1", _PICTURES, "one pair has nothing to be compared with: its gradient is 0")
            continue
        reached, guesses, noises = list[float](), list[float](), list[float]()
        for trial in range(plan.trials):
            draws = generator(plan.seed, _PICTURES, seen.clients[0], size, trial)
            got = _reconstructed(situation, seen, model, modality, size, draws)
            for values, more in zip((reached, guesses, noises), got, strict=True):
                values += more
        says = _picture_verdict(fmean(reached) - fmean(guesses), situation.is_protected)
        figures = {
            "psnr": fmean(reached),
            "lowest": min(reached),
            "highest": max(reached),
            "guess": fmean(guesses),
            "noise": fmean(noises),
            "batch": size,
            "pictures": len(reached),
        }
        yield AttackResult(f"{on}, batch {size}", "inverted gradient", True, figures, says)


def _reconstructed(
    situation: Situation, seen: SeenReply, model: Model, modality: str, size: int, draws: torch.Generator
) -> tuple[list[float], list[float], list[float]]:
    """PSNR of each true picture to the nearest of the reconstructions, of guesses, and of noise.

    Guesses are the mean of test pictures, and as many of these as there are reconstructions.
    """
    member, federation = situation.member(seen.clients[0]), situation.opened.federation
    samples = [federation.train(situation.member(client)).having(modality) for client in seen.clients]
    # in double precision: gradients of different pictures may differ in the last bits of single precision
    model = model.double()
    batches = [_exact(own.batch(torch.randperm(len(own), generator=draws)[:size]).to(model.device)) for own in samples]
    weights = model.trained()
    victim = _Victim(model, member, modality, list(weights.values()))
    truth = torch.cat([batch.inputs[modality] for batch in batches])
    others = (federation.test(member) or samples[0]).having(modality)
    known = others.batch(torch.arange(min(len(others), 100))).inputs[modality].to(model.device).double()
    limits = (float(known.min()), float(known.max()))
    gradient = victim.crossing(batches, _protection(situation, member), draws)
    mean, span = known.mean(0, keepdim=True), limits[1] - limits[0]
    start = (mean + 0.05 * span * torch.randn(truth.shape, generator=draws).to(model.device)).clamp(*limits)

    def own(pictures: Tensor) -> Gradient:
        parts = torch.split(pictures, [len(batch) for batch in batches])
        pairs = zip(batches, parts, strict=True)
        shown = [replace(batch, inputs={**batch.inputs, modality: part}) for batch, part in pairs]
        return victim.gradient(shown, graph=True)

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
    return batch.each(lambda column: column[cut])


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
