"""Word-region contrast: against loops over pairs, words and regions; masks, hollow pairs, blocks, gradients."""

import math

import pytest
import torch
from papers.fedaid.objectives import local_contrast, word_region_scores
from torch.nn import functional as F

from naive import dot, softmax

SETTINGS = {"attention_scale": 3.0, "word_scale": 2.0}


def score(regions, words, attention_scale, word_scale, aggregate="sum"):
    """Score of the valid regions of one image and the valid words of one text, as lists of vectors."""
    over_words = [softmax([dot(region, word) for word in words]) for region in regions]
    total = 0.0
    for t, word in enumerate(words):
        attention = softmax([attention_scale * shares[t] for shares in over_words])
        context = [sum(a * region[c] for a, region in zip(attention, regions, strict=True)) for c in range(len(word))]
        cosine = dot(context, word) / math.sqrt(dot(context, context) * dot(word, word))
        total += math.exp(word_scale * cosine)
    return math.log(total if aggregate == "sum" else total / len(words))


def valid(features, mask):
    return [
        [row for row, kept in zip(sample.tolist(), marks.tolist(), strict=True) if kept]
        for sample, marks in zip(features, mask, strict=True)
    ]


def by_loops(regions, words, region_mask, word_mask, items=None, scale=10.0):
    """Mean of both directions over the batch; a pair without a region or word is 0 and not a negative."""
    pictures, texts = valid(regions, region_mask), valid(words, word_mask)
    complete = [i for i in range(len(pictures)) if pictures[i] and texts[i]]
    matrix = {(i, j): scale * score(pictures[i], texts[j], **SETTINGS) for i in complete for j in complete}
    total = 0.0
    for i in complete:
        seen = [j for j in complete if j == i or items is None or items[i] != items[j]]
        for line in ([matrix[i, j] for j in seen], [matrix[j, i] for j in seen]):
            total += math.log(sum(math.exp(x) for x in line)) - matrix[i, i]
    return total / (2 * len(pictures))


@pytest.fixture
def sides():
    stream = torch.Generator().manual_seed(0)
    regions = torch.randn(5, 4, 3, dtype=torch.float64, generator=stream)
    return regions, torch.randn(5, 6, 3, dtype=torch.float64, generator=stream)


@pytest.fixture
def masks():
    region_mask = torch.ones(5, 4, dtype=torch.bool)
    region_mask[0, 2:] = region_mask[3, 0] = False
    word_mask = torch.ones(5, 6, dtype=torch.bool)
    word_mask[1, 1:] = word_mask[2, 4:] = word_mask[4, :3] = False
    return region_mask, word_mask


@pytest.mark.parametrize("aggregate", ["sum", "mean"])
def test_scores_equal_loops_with_any_number_of_texts(sides, masks, aggregate):
    pictures, texts = valid(sides[0], masks[0]), valid(sides[1], masks[1])
    expected = [[score(picture, text, **SETTINGS, aggregate=aggregate) for text in texts[:3]] for picture in pictures]
    result = word_region_scores(sides[0], sides[1][:3], masks[0], masks[1][:3], **SETTINGS, aggregate=aggregate)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("items", [None, [0, 0, 1, 2, 2], [7] * 5])
def test_loss_equals_loops(sides, masks, items):
    result = local_contrast(*sides, *masks, None if items is None else torch.tensor(items), **SETTINGS)
    assert float(result) == pytest.approx(by_loops(*sides, *masks, items), abs=1e-9)


def test_sum_of_the_directions_is_twice_the_mean(sides):
    full = [torch.ones(side.shape[:2], dtype=torch.bool) for side in sides]
    mean = local_contrast(*sides, **SETTINGS)
    assert float(mean) == pytest.approx(by_loops(*sides, *full), abs=1e-9)
    assert float(local_contrast(*sides, **SETTINGS, reduction="sum")) == pytest.approx(2 * float(mean))


def test_constants_of_the_released_code(sides):
    expected = score(sides[0][0].tolist(), sides[1][1].tolist(), attention_scale=4.0, word_scale=5.0)
    assert float(word_region_scores(*sides)[0, 1]) == pytest.approx(expected)
    logits = 10 * word_region_scores(*sides)
    target = torch.arange(5)
    both = F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)
    assert float(local_contrast(*sides, reduction="sum")) == pytest.approx(float(both))


def test_hollow_pairs_count_as_nothing_and_harm_no_gradient(sides, masks):
    masks[0][1] = False
    masks[1][3] = False
    live = [side.clone().requires_grad_() for side in sides]
    result = local_contrast(*live, *masks, **SETTINGS)
    assert float(result.detach()) == pytest.approx(by_loops(*sides, *masks), abs=1e-9)
    result.backward()
    for side in live:
        assert torch.isfinite(side.grad).all()
        assert not side.grad[[1, 3]].any()
        assert side.grad[[0, 2, 4]].flatten(1).any(1).all()


def test_all_hollow_is_zero(sides, masks):
    assert float(local_contrast(*sides, masks[0], torch.zeros_like(masks[1]))) == 0.0


def test_what_is_masked_has_no_effect_and_no_gradient(sides, masks):
    live = [side.clone().requires_grad_() for side in sides]
    local_contrast(*live, *masks).backward()
    for side, mask in zip(live, masks, strict=True):
        assert not side.grad[~mask].any()
        assert side.grad[mask].any(-1).all()
    other = [side.masked_fill(~mask[..., None], 9.0) for side, mask in zip(sides, masks, strict=True)]
    assert float(local_contrast(*other, *masks)) == pytest.approx(float(local_contrast(*sides, *masks)))


@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_give_the_same_values_and_gradients(sides, masks, chunk, masked):
    def run(size):
        live = [side.clone().requires_grad_() for side in sides]
        loss = local_contrast(*live, *(masks if masked else (None, None)), **SETTINGS, chunk=size)
        loss.backward()
        return loss.detach(), *(side.grad for side in live)

    torch.testing.assert_close(run(chunk), run(None))
