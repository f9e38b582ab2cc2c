"""All statistics that weights over clients need, for 10 clients: one shared pass, passes apart, bare product.

Limits: the shared pass takes 1.5 x the time of the |P| x |P| x d products of all clients in the same tiles and 64 MB,
and half the time of the passes that the weightings make one by one, each with what it alone asks for. Both are
measured in the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import get_args

import harness
import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.statistics import Statistic, TileSize, row_statistics
from polyfed.core.randomness import generator

TIME_LIMIT = 1.5
APART_LIMIT = 0.5
MEMORY_LIMIT = 64.0
CLIENTS, DIM = 10, 256
SIZES = [10_000, 50_000]
WEIGHTINGS: dict[str, tuple[Statistic, ...]] = {
    "contrast": ("positive", "negatives_lse"),  # gca and sed
    "entropy": ("winner", "entropy"),
    "variance": ("variance",),
    "margin": ("positive", "best_negative"),
}
ALL: tuple[Statistic, ...] = get_args(Statistic)
ROWS = 2_000
"""Rows of each client that are timed, unless all are asked for: every row costs the same."""


def bare_product(rows: Tensor, anchors: Tensor) -> Callable[[], None]:
    """The products alone, tile by tile into one buffer that is never read."""
    blocks = TileSize.suited(rows.device)
    buffer = torch.empty(blocks.rows * blocks.columns, device=rows.device)

    def work() -> None:
        for part in rows.split(blocks.rows):
            for columns in anchors.split(blocks.columns):
                torch.mm(part, columns.T, out=buffer[: len(part) * len(columns)].view(len(part), len(columns)))

    return work


def apart(rows: Tensor, anchors: Tensor, own: Tensor, count: int) -> Callable[[], None]:
    """A pass for every client and weighting."""

    def work() -> None:
        for part, mine in zip(rows.split(count), own.split(count), strict=True):
            for wanted in WEIGHTINGS.values():
                row_statistics(part, anchors, wanted, own=mine)

    return work


def bench(size: int, device: str, repeats: int, rows_each: int) -> None:
    """Compare them at one size of the public set, on ``rows_each`` rows of each client."""
    draw = generator(0, size, DIM)
    anchors = F.normalize(torch.randn(size, DIM, generator=draw), dim=1).to(device)
    own = torch.arange(rows_each).repeat(CLIENTS)
    noise = torch.linspace(0.05, 1, CLIENTS).repeat_interleave(rows_each)[
        :, None
    ]  # of good clients and of useless ones
    noise = noise * torch.randn(len(own), DIM, generator=draw)
    rows = F.normalize(anchors[own.to(device)] + noise.to(device), dim=1)
    works: dict[str, harness.Work] = {
        "shared": lambda: row_statistics(rows, anchors, ALL, own=own),
        "products": bare_product(rows, anchors),
        "apart": apart(rows, anchors, own, rows_each),
    }
    singles = {name: single(rows, anchors, own, wanted) for name, wanted in WEIGHTINGS.items()}
    times = harness.interleaved(works | singles, repeats)
    clock = "wall" if rows.is_cuda else "cpu"
    seconds = {name: float(getattr(timing, clock)) for name, timing in times.items()}
    what = f"all statistics of {CLIENTS} clients, {size:,} samples, d {DIM}"
    harness.report(
        f"{what}: time",
        ratio=seconds["shared"] / seconds["products"],
        against=f"the bare products in the same tiles, {clock} time",
        limit=TIME_LIMIT,
        rows_each=rows_each,
        seconds=seconds["shared"],
        **{f"{name}_ratio": seconds[name] / seconds["products"] for name in WEIGHTINGS},
        device=rows.device.type,
        **harness.conditions(),
    )
    gain = seconds["shared"] / seconds["apart"]
    harness.report(f"{what}: shared", ratio=gain, against=f"a pass each, {clock} time", limit=APART_LIMIT)
    scratch = harness.peak_extra(works["shared"], rows.device) / 1e6
    harness.report(f"{what}: memory", ratio=scratch, unit="MB", against="nothing", limit=MEMORY_LIMIT)


def single(rows: Tensor, anchors: Tensor, own: Tensor, wanted: Sequence[Statistic]) -> harness.Work:
    """The pass of one weighting."""
    return lambda: row_statistics(rows, anchors, wanted, own=own)


def main() -> None:
    """Run all sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smallest public set only")
    parser.add_argument("--all-rows", action="store_true", help="every row of every client, once")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for size in SIZES[:1] if arguments.quick else SIZES:
        repeats, rows = (1, size) if arguments.all_rows else (3, ROWS)
        bench(size, arguments.device, repeats, rows)


if __name__ == "__main__":
    main()
