"""Training losses and the optimiser against the forms that they replace, in the same run.

Limits: the pair loss at least 100 x faster than pair by pair through index lists; the inter-modal loss in a
tenth of the memory of dense logits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import harness
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.randomness import generator
from polyfed.losses.contrast import inter_modal
from polyfed.losses.soft_contrastive import SoftContrastive
from polyfed.optim.adamp import AdamP

PAIR_LIMIT, MEMORY_LIMIT = 100.0, 0.1


def unit(size: int, dim: int, *, learn: bool = False) -> Tensor:
    """Random unit vectors."""
    return F.normalize(torch.randn(size, dim, generator=generator(size, dim)), dim=1).requires_grad_(learn)


def pair_by_pair(u: Tensor, v: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """The soft contrastive loss over lists of pair indices: two gathers of b^2 x d in each direction."""
    total = torch.zeros(())
    for left, right in ((u, v), (v, u)):
        pairs = [(i, j) for i in range(len(left)) for j in range(len(right))]
        match = torch.tensor([1.0 if i == j else -1.0 for i, j in pairs])
        first, second = left[[i for i, _ in pairs]], right[[j for _, j in pairs]]
        score = shift - scale * ((first - second).square().sum(1) + 1e-6).sqrt()
        total = total + (torch.logaddexp(score, -score) - match * score).sum()
    return total


def forward_backward(loss: Callable[[], Tensor]) -> Callable[[], None]:
    """One training pass of a loss."""
    return lambda: loss().backward()


def bench_pair_loss(batch: int, dim: int, repeats: int) -> None:
    """Forward and backward of the pair loss."""
    u, v, module = unit(batch, dim, learn=True), unit(batch, dim, learn=True), SoftContrastive()
    works = {
        "ours": forward_backward(lambda: module(u, v)),
        "pairs": forward_backward(lambda: pair_by_pair(u, v, module.shift, module.scale)),
    }
    times = harness.interleaved(works, repeats)
    values = float(module(u, v).detach()), float(pair_by_pair(u, v, module.shift, module.scale).detach())
    ratio = times["pairs"].cpu / times["ours"].cpu
    harness.report(
        f"pair loss, batch {batch}, d {dim}: times as fast",
        ratio=ratio,
        against="pair by pair through index lists",
        limit=PAIR_LIMIT,
        better="larger",
        milliseconds=1e3 * times["ours"].cpu,
        rival_milliseconds=1e3 * times["pairs"].cpu,
        relative_difference=abs(values[0] - values[1]) / values[1],
        peak_extra_bytes=harness.peak_extra(works["ours"]),
    )


def bench_inter_modal(batch: int, dim: int, public: int, repeats: int) -> None:
    """Forward and backward of the inter-modal contrast: memory and time against dense logits."""
    u, anchors, positive = unit(batch, dim, learn=True), unit(public, dim), torch.arange(batch)
    works = {
        "chunked": forward_backward(lambda: inter_modal(u, anchors, positive, 0.5)),
        "dense": forward_backward(lambda: F.cross_entropy(u @ anchors.T / 0.5, positive)),
    }
    times = harness.interleaved(works, repeats)
    memory = {name: harness.peak_extra(work) for name, work in works.items()}
    harness.report(
        f"inter-modal contrast, batch {batch} of {public:,}, d {dim}: peak memory",
        ratio=memory["chunked"] / memory["dense"],
        against="dense logits",
        limit=MEMORY_LIMIT,
        peak_extra_bytes=memory["chunked"],
        rival_bytes=memory["dense"],
        time_ratio=times["chunked"].cpu / times["dense"].cpu,
    )


def bench_adamp(repeats: int) -> None:
    """One optimiser step on a small network's parameters."""
    shapes = [(64, 64, 3, 3)] * 8 + [(512, 512)] * 8 + [(512,)] * 16
    works = {}
    for name, kind in {"adamp": AdamP, "adamw": torch.optim.AdamW}.items():
        weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        works[name] = kind(weights, lr=1e-3, weight_decay=0.01).step
    times = harness.interleaved(works, repeats)
    harness.report(
        "AdamP's step",
        ratio=times["adamp"].cpu / times["adamw"].cpu,
        against="torch.optim.AdamW, CPU time",
        parameters=sum(torch.Size(shape).numel() for shape in shapes),
        milliseconds=1e3 * times["adamp"].cpu,
        peak_extra_bytes=harness.peak_extra(works["adamp"]),
    )


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    repeats = 5 if arguments.quick else 15
    for dim in (256, 512):
        bench_pair_loss(128, dim, repeats)
        bench_inter_modal(128, dim, 50_000, 3)
    bench_adamp(repeats)


if __name__ == "__main__":
    main()
