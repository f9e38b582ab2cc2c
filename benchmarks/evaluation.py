"""Recall evaluation against the released procedure and a lean sort, and the public pass of CreamFL's clients.

Limits: recalls at least 40 x faster than the released procedure, to equal recalls; a public pass with kept previous
representations in at most 0.85 of the time that it takes with a second forward pass through the old model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import federations
import harness
import torch
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.randomness import generator
from polyfed.runs.session import Session
from polyfed.tasks.metrics import ranks, recall_at
from polyfed.wire.messages import Request
from polyfed.wire.payload import Payload, Representations

RECALL_LIMIT = 40.0
PASS_LIMIT = 0.85
COPIES, QUERIES_AT_A_TIME, CUTOFFS = 7, 32, (1, 5, 10)
CAPTIONS = 5
RIVALS = {"released": "the released procedure", "lean": "a lean float32 sort"}


# ---- recalls


def embeddings(images: int, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unit vectors of pictures and of five captions each, near their picture, and the items of both."""
    draw = generator(0, "recall", images, dim)
    picture = F.normalize(torch.randn(images, dim, generator=draw), dim=1)
    noise = torch.randn(CAPTIONS * images, dim, generator=draw)
    caption = F.normalize(picture.repeat_interleave(CAPTIONS, 0) + 0.35 * noise, dim=1)
    items = torch.arange(images)
    return picture, caption, items, items.repeat_interleave(CAPTIONS)


def released(queries: Tensor, gallery: Tensor, query_items: Tensor, gallery_items: Tensor) -> Tensor:
    """Ranks as the released CreamFL takes them (``eval_coco.py``): every embedding seven times over in float64, all
    pairs of copies summed, all scores sorted, and each positive looked for by itself."""
    copied_queries, copied_gallery = (
        x.double()[:, None].repeat(1, COPIES, 1).flatten(0, 1) for x in (queries, gallery)
    )
    found: list[int] = []
    for start in range(0, len(queries), QUERIES_AT_A_TIME):
        block = copied_queries[COPIES * start : COPIES * (start + QUERIES_AT_A_TIME)]
        scores = (block @ copied_gallery.T).view(-1, COPIES, len(gallery), COPIES).sum((1, 3))
        order = (-scores).sort().indices
        for row, item in zip(order, query_items[start : start + QUERIES_AT_A_TIME], strict=True):
            positives = (gallery_items == item).nonzero().flatten()
            found.append(min(int((row == positive).nonzero()[0]) for positive in positives))
    return torch.tensor(found)


def lean(queries: Tensor, gallery: Tensor, query_items: Tensor, gallery_items: Tensor) -> Tensor:
    """Ranks by sorting, done well: float32, one copy, blocks, no loop over positives."""
    found = []
    for q, items in zip(queries.split(512), query_items.split(512), strict=True):
        order = (q @ gallery.T).argsort(1, descending=True)
        found.append((gallery_items[order] == items[:, None]).int().argmax(1))
    return torch.cat(found)


def bench_recall(images: int, dim: int, repeats: int, *, against_released: bool) -> None:
    """Both directions of retrieval."""
    picture, caption, picture_items, caption_items = embeddings(images, dim)

    def both(method: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Callable[[], tuple[Tensor, Tensor]]:
        return lambda: (
            method(picture, caption, picture_items, caption_items),
            method(caption, picture, caption_items, picture_items),
        )

    works = {"ours": both(ranks), "lean": both(lean)} | ({"released": both(released)} if against_released else {})
    times = harness.interleaved(works, repeats)
    recalls = {name: [recall_at(found, CUTOFFS) for found in work()] for name, work in works.items()}
    for rival in list(works)[1:]:
        ratio = times[rival].cpu / times["ours"].cpu
        harness.report(
            f"recalls, {images:,} pictures x {len(caption):,} captions: times as fast",
            ratio=ratio,
            against=RIVALS[rival],
            limit=RECALL_LIMIT if rival == "released" else None,
            better="larger",
            seconds=times["ours"].cpu,
            rival_seconds=times[rival].cpu,
            equal_recalls=recalls["ours"] == recalls[rival],
            recall_at_1=[round(found[1], 2) for found in recalls["ours"]],
            peak_extra_bytes=harness.peak_extra(works["ours"]),
            rival_bytes=harness.peak_extra(works[rival]),
            **harness.conditions(),
        )


# ---- the public pass


def creamfl(public: int, previous: str) -> dict[str, Any]:
    """Settings of one image client that goes over the public set once, after hardly any data of its own."""
    resnet = {"name": "resnet", "size": "tiny", "view": {"name": "pixels", "size": 16}}
    text = {"name": "bag", "view": {"name": "tokens", "length": 8, "tokenizer": {"name": "hashing", "size": 512}}}
    model, both = (
        {"dim": 128, "encoders": encoders} for encoders in ({"image": resnet}, {"image": resnet, "text": text})
    )
    training = {"optimizer": {"kind": "sgd", "lr": 0.01}, "batch_size": 16}
    return {
        "data": {
            "sources": {
                "public": federations.Noise(count=public),
                "private": federations.Noise(count=16),
            }
        },
        "public": {"source": "public"},
        "server": {"model": both, "task": "retrieval", "source": "private", "validation_split": None},
        "clients": {
            "client": {"count": 1, "source": "private", "model": model, "task": "classification", "training": training}
        },
        "algorithm": {
            "name": "creamfl",
            "local_epochs": 1,
            "contrast": {"schedule": "separate_pass", "intra": {"previous": previous}},
        },
        "run": {"rounds": 1000, "threads": torch.get_num_threads(), "device": "cpu"},
    }


def known(session: Session) -> Representations:
    """What a server would send: representations of both modalities of the public set."""
    size, dim = len(session.server.public_set), session.server.model.dim
    draw = generator(0, "known")
    values = {name: F.normalize(torch.randn(size, dim, generator=draw), dim=1) for name in ("image", "text")}
    return Representations(values, order=session.server.public.order)


def participation(session: Session, number: int) -> Payload:
    """One participation of the client, from what it kept of the one before."""
    (client,) = session.server.clients
    after = (number - 1, 0) if number > 1 else None
    sent = Payload({"representations": known(session)})
    (answer,) = session.engine.exchange([Request(client.id, "fit", number, 0, after, sent)], None)
    if answer.payload is None:
        raise SystemExit(f"the client failed: {answer.error}")
    return answer.payload


def bench_public_pass(public: int, repeats: int) -> None:
    """A client's second participation: previous representations kept, against asking the old model again."""
    with ExitStack() as stack:
        sessions = {
            name: stack.enter_context(federations.prepared(creamfl(public, name))) for name in ("cached", "on_the_fly")
        }
        for session in sessions.values():
            participation(session, 1)
        works: dict[str, harness.Work] = {
            name: lambda session=session: participation(session, 2)  # type: ignore[misc]
            for name, session in sessions.items()
        }
        times = harness.interleaved(works, repeats)
        ends = [participation(session, 2).bundles["representations"]["image"] for session in sessions.values()]
        ratio = times["cached"].cpu / times["on_the_fly"].cpu
        harness.report(
            f"pass over {public:,} public samples with kept representations: time",
            ratio=ratio,
            against="a second forward pass, CPU time",
            limit=PASS_LIMIT,
            wall_ratio=times["cached"].wall / times["on_the_fly"].wall,
            seconds=times["cached"].cpu,
            rival_seconds=times["on_the_fly"].cpu,
            largest_difference=float((ends[0] - ends[1]).abs().max()),
            peak_extra_bytes=harness.peak_extra(works["cached"]),
            rival_bytes=harness.peak_extra(works["on_the_fly"]),
            **harness.conditions(),
        )


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, one size")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    repeats = 1 if arguments.quick else 3
    bench_recall(1000, 256, repeats, against_released=True)
    if not arguments.quick:
        bench_recall(5000, 256, repeats, against_released=False)
    bench_public_pass(1000 if arguments.quick else 2000, 3 if arguments.quick else 7)


if __name__ == "__main__":
    main()
