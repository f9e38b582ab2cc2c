from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from polyfed.core.errors import DataError
from polyfed.tasks.recall import positives_per_query, ranks, recall_at


def sorted_ranks(queries, gallery, query_items, gallery_items):
    """By sorting each query's scores, positives placed after all others of equal score."""
    found = []
    for scores, item in zip((queries @ gallery.T).tolist(), query_items.tolist(), strict=True):
        entries = [(-s, g == item) for s, g in zip(scores, gallery_items.tolist(), strict=True)]
        best = next(i for i, (_, positive) in enumerate(sorted(entries)) if positive)
        found.append(best)
    return torch.tensor(found)


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 20),
    m=st.integers(1, 40),
    levels=st.sampled_from([1, 2, 50]),
)
def test_equals_a_sort_with_ties_against_the_model(seed, n, m, levels):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda rows: torch.randint(-levels, levels + 1, (rows, 3), generator=generator).float()  # noqa: E731
    queries, gallery = draw(n), draw(m)
    gallery_items = torch.randint(0, max(1, m // 2), (m,), generator=generator)
    query_items = gallery_items[torch.randint(0, m, (n,), generator=generator)]
    expected = sorted_ranks(queries, gallery, query_items, gallery_items)
    assert ranks(queries, gallery, query_items, gallery_items).equal(expected)


def test_block_size_changes_nothing():
    generator = torch.Generator().manual_seed(1)
    queries, gallery = torch.randn(300, 8, generator=generator), torch.randn(400, 8, generator=generator)
    items = torch.arange(400) % 300
    whole = ranks(queries, gallery, torch.arange(300), items, block_scores=1 << 30)
    for block in (1, 64 * 448, 150 * 448):
        assert ranks(queries, gallery, torch.arange(300), items, block_scores=block).equal(whole)


def test_five_captions_hit_by_any_of_them():
    images = torch.eye(3)
    texts = torch.cat([F.normalize(torch.ones(4, 3), dim=1), images[:1], images[2:], images[1:2]])
    text_items = torch.tensor([0, 0, 0, 0, 0, 1, 2])
    # the captions of 1 and 2 are swapped, four captions of 0 lie in the middle of all, and zeros tie
    found = ranks(images, texts, torch.arange(3), text_items)
    assert found.tolist() == [0, 6, 6]
    assert ranks(texts, images, text_items, torch.arange(3)).tolist() == [2, 2, 2, 2, 0, 2, 2]


def test_nan_never_helps():
    nan = torch.full((1, 2), math.nan)
    gallery = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    items, query = torch.arange(3), torch.tensor([[1.0, 0.0]])
    assert ranks(nan, gallery, torch.tensor([0]), items).tolist() == [2]
    assert ranks(query, torch.cat([nan, gallery[1:]]), torch.tensor([0]), items).tolist() == [2]
    assert ranks(query, torch.cat([gallery[:2], nan]), torch.tensor([0]), items).tolist() == [1]
    # one positive is NaN, the other is the best
    assert ranks(query, torch.cat([nan, gallery]), torch.tensor([0]), torch.tensor([0, 0, 1, 2])).tolist() == [0]


def test_half_precision_is_scored_in_full():
    z = F.normalize(torch.randn(60, 16, generator=torch.Generator().manual_seed(3)), dim=1)
    items = torch.arange(60)
    half = z.bfloat16()
    assert ranks(half, half, items, items).equal(ranks(half.float(), half.float(), items, items))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ranks(z, z, items, items).equal(torch.zeros(60, dtype=torch.int64))


def test_a_query_without_positive_is_an_error_that_names_it():
    z = torch.eye(3)
    with pytest.raises(DataError, match=r"query 1 \(item 7\) has no positive"):
        ranks(z, z, torch.tensor([0, 7, 2]), torch.arange(3))


def test_no_queries():
    empty = ranks(torch.empty(0, 4), torch.eye(4), torch.empty(0, dtype=torch.int64), torch.arange(4))
    assert empty.tolist() == []
    assert math.isnan(recall_at(empty, (1,))[1])
    assert math.isnan(positives_per_query(empty, torch.arange(4)))


def test_recall_at_and_positives():
    assert recall_at(torch.tensor([0, 1, 4, 5]), (1, 5, 10)) == {1: 25.0, 5: 75.0, 10: 100.0}
    assert positives_per_query(torch.tensor([0, 1, 2]), torch.tensor([0, 0, 0, 1, 1, 2])) == 2.0
