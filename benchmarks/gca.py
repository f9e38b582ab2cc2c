"""Contrastive scores of CreamFL (Eq. 4) for one client: time over the bare matrix product, and memory.

Limits: 1.25 x the time of the |P| x |P| x d product in the same tiles, measured in the same run, and 64 MB.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import harness
import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.aggregation.statistics import TileSize
from polyfed.aggregation.weighting import GCA, Evidence
from polyfed.core.randomness import generator

TIME_LIMIT = 1.25
MEMORY_LIMIT = 64.0
SIZES, DIM = (5_000, 20_000, 50_000), 256
LARGE = TileSize(2048, 2048)


def bare_product(local: Tensor, other: Tensor, blocks: TileSize) -> Callable[[], None]:
    """The product alone, tile by tile into one buffer that is never read."""
    buffer = torch.empty(blocks.rows * blocks.columns, device=local.device)

    def work() -> None:
        for rows in local.split(blocks.rows):
            for columns in other.split(blocks.columns):
                torch.mm(rows, columns.T, out=buffer[: len(rows) * len(columns)].view(len(rows), len(columns)))

    return work


def bench_exact(local: Tensor, other: Tensor, repeats: int) -> None:
    """The exact scores against the bare product in the same tiles, and at smaller sizes in large ones too."""
    works: dict[str, harness.Work] = {
        "scores": lambda: GCA().log_weights(Evidence(local, "own", {"other": other}, 1, 1)),
        "tiles": bare_product(local, other, TileSize.suited(local.device)),
    }
    if len(local) < SIZES[-1]:
        works["large"] = bare_product(local, other, LARGE)
    times = harness.interleaved(works, repeats)
    clock = "wall" if local.is_cuda else "cpu"
    ratios = {name: getattr(times["scores"], clock) / getattr(timing, clock) for name, timing in times.items()}
    what = f"GCA scores, {len(local):,} samples, d {local.shape[1]}"
    harness.report(
        f"{what}: time",
        ratio=ratios["tiles"],
        against=f"the bare product in the same tiles, {clock} time",
        limit=TIME_LIMIT,
        seconds=getattr(times["scores"], clock),
        wall_ratio=times["scores"].wall / times["tiles"].wall,
        ratio_to_large_tiles=ratios.get("large"),
        device=local.device.type,
        **harness.conditions(),
    )
    extra = harness.peak_extra(works["scores"], local.device) / 1e6
    harness.report(f"{what}: memory", ratio=extra, unit="MB", against="nothing", limit=MEMORY_LIMIT)


def main() -> None:
    """Run all sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smallest size only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for size in SIZES[:1] if arguments.quick else SIZES:
        draw = generator(0, size, DIM)
        local, other = (F.normalize(torch.randn(size, DIM, generator=draw), dim=1).to(arguments.device) for _ in "uv")
        bench_exact(local, other, repeats=9 if size <= 5_000 else 3 if size <= 20_000 else 1)


if __name__ == "__main__":
    main()
