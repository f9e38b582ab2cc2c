from __future__ import annotations

from itertools import permutations
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polyfed.downstream.search import Gallery, chance_recalls, random_blocks, recalls_between

Pair = tuple[Gallery, Gallery]


def pairs(n: int, items: int | None = None, seed: int = 0) -> Pair:
    stream = torch.Generator().manual_seed(seed)
    first, noise = torch.randn(n, 6, generator=stream), torch.randn(n, 6, generator=stream)
    matches = torch.arange(n) if items is None else torch.randint(items, (n,), generator=stream)
    return Gallery(F.normalize(first, dim=1), matches), Gallery(F.normalize(first + noise, dim=1), matches)


def naive(queries: Tensor, gallery: Tensor, matches: list[int], cutoff: int) -> list[bool]:
    """Whether the best right answer is among the first, where every wrong one that scores as high comes first."""
    hits = []
    for number, query in enumerate(queries.double()):
        scores = (gallery.double() @ query).tolist()
        best = max(s for s, m in zip(scores, matches, strict=True) if m == matches[number])
        rank = sum(s >= best - 1e-9 for s, m in zip(scores, matches, strict=True) if m != matches[number])
        hits.append(rank < cutoff)
    return hits


@pytest.mark.parametrize("items", [None, 9])
@pytest.mark.parametrize("size", [4, 8, 30, 64])
def test_block_recalls_are_those_of_a_loop(size: int, items: int | None) -> None:
    first, second = pairs(30, items)
    blocks = random_blocks(30, size, torch.Generator().manual_seed(3))
    galleries = [(first.at(index), second.at(index)) for index in blocks]
    found = recalls_between(galleries, (1, 5))
    for cutoff in (1, 5):
        hits: dict[str, list[bool]] = {"forward": [], "backward": []}
        for a, b in galleries:
            hits["forward"] += naive(a.values, b.values, a.matches.tolist(), cutoff)
            hits["backward"] += naive(b.values, a.values, a.matches.tolist(), cutoff)
        for way, values in hits.items():
            assert found[way][cutoff] == pytest.approx(100 * sum(values) / len(values))


def test_blocks_are_a_seeded_division_of_all() -> None:
    found = random_blocks(30, 8, torch.Generator().manual_seed(0))
    assert [len(part) for part in found] == [8, 8, 8, 6]
    assert sorted(torch.cat(found).tolist()) == list(range(30))
    again, other = (random_blocks(30, 8, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert torch.equal(torch.cat(found), torch.cat(again))
    assert not torch.equal(torch.cat(found), torch.cat(other))


@pytest.mark.parametrize(("count", "sizes"), [(17, [8, 8]), (18, [8, 8, 2]), (1, []), (8, [8])])
def test_a_last_gallery_of_one_is_left_out(count: int, sizes: list[int]) -> None:
    assert [len(part) for part in random_blocks(count, 8, torch.Generator().manual_seed(0))] == sizes


def test_equal_texts_count_as_right() -> None:
    """Two pictures share a report: without matches each finds the other's first, with them both are right."""
    x = F.normalize(torch.tensor([[1.0, 0.2], [1.0, -0.2], [0.0, 1.0]]), dim=1)
    texts = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), dim=1)
    alone, shared = torch.arange(3), torch.tensor([7, 7, 2])
    assert recalls_between([(Gallery(x, alone), Gallery(texts, alone))], (1,))["forward"][1] == pytest.approx(100 / 3)
    assert recalls_between([(Gallery(x, shared), Gallery(texts, shared))], (1,)) == {
        "forward": {1: 100},
        "backward": {1: 100},
    }


def test_constant_representations_find_nothing() -> None:
    same = Gallery(torch.ones(12, 3) / 3**0.5, torch.arange(12))
    assert recalls_between([(same, same)], (1, 5))["forward"] == {1: 0.0, 5: 0.0}


def test_order_does_not_matter() -> None:
    first, second = pairs(25, 10)
    order = torch.randperm(25, generator=torch.Generator().manual_seed(5))
    assert recalls_between([(first.at(order), second)], (1, 5, 10)) == recalls_between([(first, second)], (1, 5, 10))


def test_chance_is_the_mean_over_all_orders() -> None:
    queries = [torch.tensor([0, 0, 1, 2]), torch.tensor([1, 2])]
    galleries = [torch.tensor([0, 0, 1, 2]), torch.tensor([2, 1, 2])]
    for cutoff in (1, 2, 3):
        hits = []
        for searching, there in zip(queries, galleries, strict=True):
            orders = list(permutations(there.tolist()))
            hits += [fmean(query in order[:cutoff] for order in orders) for query in searching.tolist()]
        assert chance_recalls(queries, galleries, (cutoff,))[cutoff] == pytest.approx(100 * fmean(hits))


def test_a_query_without_an_answer_is_never_right() -> None:
    queries, galleries = [torch.tensor([9, -1, 3])], [torch.tensor([3, 5])]
    assert chance_recalls(queries, galleries, (1, 2)) == {1: pytest.approx(100 / 6), 2: pytest.approx(100 / 3)}


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
        self.elements = max([self.elements, *(value.numel() for value in tensors)])
        return out


def test_chance_never_holds_queries_times_gallery() -> None:
    queries, galleries = [torch.arange(700) % 350], [torch.arange(500)]
    with Largest() as seen:
        chance_recalls(queries, galleries, (1, 5))
    assert seen.elements <= 700 + 500
