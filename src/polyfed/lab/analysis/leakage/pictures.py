"""Pictures of a client from the gradient of a small batch (Geiping et al., NeurIPS 2020).

The attacker knows the weights, all of the batch but its pictures, and the sum of gradients that crosses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

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
