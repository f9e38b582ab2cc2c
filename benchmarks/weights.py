"""Statistics that weights over clients need, for 10 clients: one shared pass, single passes, bare product.

Limits: the shared pass takes 1.5 x the time of the |P| x |P| x d products of all clients in the same tiles and 64 MB,
and half the time of a pass for each weighting; the pass of contrastive scores (CreamFL, Eq. 4) alone takes 1.25 x the
time of the products. All are measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import harness
import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.statistics import Statistic, TileSize, row_statistics
from polyfed.core.randomness import generator

TIME_LIMIT, SCORES_LIMIT, SINGLE_LIMIT, MEMORY_LIMIT = 1.5, 1.25, 0.5, 64.0
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
"""Rows of each client that are timed, unless all are requested: every row costs the same."""


def bare_product(rows: Tensor, anchors: Tensor) -> Callable[[], None]:
    """The products alone, tile by tile into one buffer that is never read."""
    blocks = TileSize.suited(rows.device)
    buffer = torch.empty(blocks.rows * blocks.columns, device=rows.device)

    def work() -> None:
        for part in rows.split(blocks.rows):
            for columns in anchors.split(blocks.columns):
                torch.mm(part, columns.T, out=buffer[: len(part) * len(columns)].view(len(part), len(columns)))

    return work


def bench(size: int, device: str, repeats: int, rows_each: int) -> None:
    """Compare them at one size of the public set, on ``rows_each`` rows of each client."""
    draw = generator(0, size, DIM)
    anchors = F.normalize(torch.randn(size, DIM, generator=draw), dim=1).to(device)
    own = torch.arange(rows_each).repeat(CLIENTS)
    noise = torch.linspace(0.05, 1, CLIENTS).repeat_interleave(rows_each)[:, None]  # good clients to useless ones
    noise = noise * torch.randn(len(own), DIM, generator=draw)
    rows = F.normalize(anchors[own.to(device)] + noise.to(device), dim=1)

    def passes(wanted: Sequence[Statistic]) -> harness.Work:
        return lambda: row_statistics(rows, anchors, wanted, own=own)

    works = {name: passes(wanted) for name, wanted in (WEIGHTINGS | {"shared": ALL}).items()}
    clock = "wall" if rows.is_cuda else "cpu"
    times = harness.interleaved(works | {"products": bare_product(rows, anchors)}, repeats)
    seconds = {name: float(getattr(timing, clock)) for name, timing in times.items()}
    title = f"{CLIENTS} clients, {size:,} samples, d {DIM}"
    products, single = f"the bare products in the same tiles, {clock} time", sum(seconds[name] for name in WEIGHTINGS)
    for name, ratio, against, limit in (
        (f"all statistics of {title}: time", seconds["shared"] / seconds["products"], products, TIME_LIMIT),
        (f"GCA scores of {title}: time", seconds["contrast"] / seconds["products"], products, SCORES_LIMIT),
        (f"all statistics of {title}: shared", seconds["shared"] / single, f"a pass each, {clock} time", SINGLE_LIMIT),
    ):
        harness.report(name, ratio=ratio, against=against, limit=limit, rows_each=rows_each, device=rows.device.type)
    scratch = harness.peak_extra(works["shared"], rows.device) / 1e6
    harness.report(
        f"all statistics of {title}: memory", ratio=scratch, unit="MB", against="nothing", limit=MEMORY_LIMIT
    )


def main() -> None:
    """Run all sizes."""
    parser = harness.parser(__doc__)
    parser.add_argument("--all-rows", action="store_true", help="every row of every client, once")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = harness.parsed(parser)
    for size in SIZES[:1] if given.quick else SIZES:
        repeats, rows = (1, size) if given.all_rows else (3, ROWS)
        bench(size, given.device, repeats, rows)


if __name__ == "__main__":
    main()
