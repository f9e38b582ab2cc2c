"""Recall evaluation against the released procedure of CreamFL and against a lean sort.

Limit: at least 40 x faster than the released procedure, to equal recalls.
"""

from __future__ import annotations

from collections.abc import Callable

import harness
import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.randomness import generator
from polyfed.tasks.metrics import ranks, recall_at

LIMIT = 40.0
COPIES, QUERIES_AT_A_TIME, CUTOFFS = 7, 32, (1, 5, 10)
CAPTIONS = 5
RIVALS = {"released": "the released procedure", "lean": "a lean float32 sort"}


def embeddings(images: int, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unit vectors of images and of five captions each, near their image, and the items of both."""
    draw = generator(0, "recall", images, dim)
    image = F.normalize(torch.randn(images, dim, generator=draw), dim=1)
    noise = torch.randn(CAPTIONS * images, dim, generator=draw)
    caption = F.normalize(image.repeat_interleave(CAPTIONS, 0) + 0.35 * noise, dim=1)
    items = torch.arange(images)
    return image, caption, items, items.repeat_interleave(CAPTIONS)


def released(queries: Tensor, gallery: Tensor, query_items: Tensor, gallery_items: Tensor) -> Tensor:
    """Ranks by the released CreamFL (``eval_coco.py``).

    Every embedding seven times over in float64, all pairs of copies summed, all scores sorted, and a search for each
    positive by itself.
    """
    copied_queries, copied_gallery = (
        x.double()[:, None].repeat(1, COPIES, 1).flatten(0, 1) for x in (queries, gallery)
    )
    best: list[int] = []
    for start in range(0, len(queries), QUERIES_AT_A_TIME):
        block = copied_queries[COPIES * start : COPIES * (start + QUERIES_AT_A_TIME)]
        scores = (block @ copied_gallery.T).view(-1, COPIES, len(gallery), COPIES).sum((1, 3))
        order = (-scores).sort().indices
        for row, item in zip(order, query_items[start : start + QUERIES_AT_A_TIME], strict=True):
            positives = (gallery_items == item).nonzero().flatten()
            best.append(min(int((row == positive).nonzero()[0]) for positive in positives))
    return torch.tensor(best)


def lean(queries: Tensor, gallery: Tensor, query_items: Tensor, gallery_items: Tensor) -> Tensor:
    """Ranks by sorting, done well: float32, one copy, blocks, no loop over positives."""
    parts = []
    for q, items in zip(queries.split(512), query_items.split(512), strict=True):
        order = (q @ gallery.T).argsort(1, descending=True)
        parts.append((gallery_items[order] == items[:, None]).int().argmax(1))
    return torch.cat(parts)


def bench(images: int, dim: int, repeats: int, *, against_released: bool) -> None:
    """Both directions of retrieval."""
    image, caption, image_items, caption_items = embeddings(images, dim)

    def both(method: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Callable[[], tuple[Tensor, Tensor]]:
        return lambda: (
            method(image, caption, image_items, caption_items),
            method(caption, image, caption_items, image_items),
        )

    works = {"ours": both(ranks), "lean": both(lean)} | ({"released": both(released)} if against_released else {})
    times = harness.interleaved(works, repeats)
    recalls = {name: [recall_at(direction, CUTOFFS) for direction in work()] for name, work in works.items()}
    for rival in list(works)[1:]:
        harness.report(
            f"recalls, {images:,} images x {len(caption):,} captions: times as fast",
            ratio=times[rival].cpu / times["ours"].cpu,
            against=RIVALS[rival],
            limit=LIMIT if rival == "released" else None,
            better="larger",
            equal_recalls=recalls["ours"] == recalls[rival],
            peak_extra_bytes=harness.peak_extra(works["ours"]),
        )


def main() -> None:
    """Run all."""
    quick = harness.parsed(harness.parser(__doc__)).quick
    bench(1000, 256, 1 if quick else 3, against_released=True)
    if not quick:
        bench(5000, 256, 3, against_released=False)


if __name__ == "__main__":
    main()
