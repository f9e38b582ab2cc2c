"""Samples of whom an attacker asks whether clients trained on them: training samples, and others like them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from polyfed.core.randomness import generator
from polyfed.data.samples import Samples
from polyfed.data.union import union
from polyfed.federation.membership import Member
from polyfed.tasks.classification import Classification
from polyfed.tasks.task import Task

FEWEST_CANDIDATES = 10  # of each kind: below, no interval says anything


def one_an_item(items: Int64[Tensor, " n"]) -> Int64[Tensor, " k"]:
    """The place of the first sample of each item, in their order: samples of one item are members together."""
    firsts: dict[int, int] = {}
    for place, item in enumerate(items.tolist()):
        firsts.setdefault(item, place)
    return torch.tensor(list(firsts.values()), dtype=torch.int64)


@dataclass(frozen=True)
class Candidates:
    """Members and others, n together.

    Attributes:
        samples: of both.
        is_member: which were trained on.
    """

    samples: Samples
    is_member: Bool[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.samples)


def candidates_of(
    members: Sequence[Member],
    train: Callable[[Member], Samples],
    test: Callable[[Member], Samples | None],
    most: int,
    seed: int,
) -> Candidates | str:
    """Candidates for what the clients made together, or why there are none: one sample an item.

    A classification has as many members as others of each class: else the attacker would tell a client's classes
    instead of its samples.

    Args:
        members: the clients.
        train, test: samples of each.
        most: of each kind.
        seed: of what is drawn.
    """
    held, tests = [train(member) for member in members], [test(member) for member in members]
    # the clients of a group may share their test samples
    distinct = {id(samples): samples for samples in tests if samples is not None and len(samples)}
    if not distinct:
        return "no test samples, so nobody that was not trained on"
    inside, outside = union(held), union(list(distinct.values()))
    name = ",".join(member.id for member in members)
    inside, outside = (_shuffled(part, seed, name) for part in (inside, outside))
    inside, outside = _alike(inside, outside, members[0].settings.task)
    size = min(len(inside), len(outside), most)
    if size < FEWEST_CANDIDATES:
        return f"{size} training and test items of like classes, an attack needs {FEWEST_CANDIDATES} of each"
    both = union([inside.subset(torch.arange(size)), outside.subset(torch.arange(size))])
    return Candidates(both, torch.arange(2 * size) < size)


def _shuffled(samples: Samples, seed: int, name: str) -> Samples:
    order = torch.randperm(len(samples), generator=generator(seed, "candidates", name, len(samples)))
    return samples.subset(order[one_an_item(samples.items[order])])


def _alike(inside: Samples, outside: Samples, task: Task) -> tuple[Samples, Samples]:
    """Equally many of each class, in an order in which any beginning is mixed."""
    if not isinstance(task, Classification):
        return inside, outside
    places: list[Int64[Tensor, " k"]] = []
    labels = [part.targets[task.target].long() for part in (inside, outside)]
    classes = torch.unique(torch.cat(labels)).tolist()
    by_class = [[(own == name).nonzero().flatten() for own in labels] for name in classes]
    sizes = [min(len(a), len(b)) for a, b in by_class]
    for side in range(2):
        chosen = [pair[side][:size] for pair, size in zip(by_class, sizes, strict=True)]
        # the k-th of each class, then the next: both sides stop at the same classes
        turns = torch.cat([torch.arange(len(own)) for own in chosen])
        places.append(torch.cat(chosen)[turns.argsort(stable=True)])
    return inside.subset(places[0]), outside.subset(places[1])
