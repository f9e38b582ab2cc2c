"""Every statistic against a loop over Python floats, whatever the tiles, the temperature and the rows of a pass."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from naive import Largest
from polyfed.aggregation.statistics import Rivals, TileSize, row_statistics
from polyfed.core.errors import ConfigError, PayloadError

ALL = ("positive", "negatives_lse", "lse", "best_negative", "winner", "entropy", "variance")
SMALL = TileSize(4, 5)


def unit(*shape, seed=0, dtype=torch.float64):
    stream = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=stream, dtype=torch.float64), dim=-1).to(dtype)


def log_sum(terms):
    top = max(terms, default=-math.inf)
    return top if top == -math.inf else top + math.log(sum(math.exp(x - top) for x in terms))


def naive_row(logits, own, kin):
    """The statistics of one row, term by term; ``kin`` are the anchors of the own item."""
    others = [x for j, x in enumerate(logits) if j not in kin]
    full, mean, winner = log_sum(logits), sum(logits) / len(logits), logits.index(max(logits))
    return {
        "positive": logits[own],
        "negatives_lse": log_sum(others),
        "lse": full,
        "best_negative": max(others, default=-math.inf),
        "winner": own if winner in kin or logits[own] == logits[winner] else winner,
        "entropy": -sum(math.exp(x - full) * (x - full) for x in logits),
        "variance": sum((x - mean) ** 2 for x in logits) / len(logits),
    }


def naive(rows, anchors, own=None, tau=1.0, items=None):
    own = list(range(len(rows))) if own is None else own.tolist()
    numbers = list(range(len(anchors))) if items is None else items.tolist()
    result = []
    for k, u in zip(own, rows.double().tolist(), strict=True):
        logits = [sum(a * b for a, b in zip(u, g, strict=True)) / tau for g in anchors.double().tolist()]
        result.append(naive_row(logits, k, {j for j in range(len(anchors)) if numbers[j] == numbers[k]}))
    return {name: torch.tensor([row[name] for row in result], dtype=torch.float64) for name in ALL}


def close(ours, expected, tolerance=1e-9):
    expected = {name: expected[name] for name in ours}
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


@given(
    st.integers(2, 24),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([1.0, 0.1, 0.01, 0.001]),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_any_tile_temperature_and_family_size(size, height, width, tau, siblings, seed):
    rows, anchors = unit(size, 4, seed=seed), unit(size, 4, seed=seed + 100)
    items = torch.arange(size) // siblings
    ours = row_statistics(rows, anchors, ALL, tau=tau, items=items, blocks=TileSize(height, width))
    close(ours, naive(rows, anchors, tau=tau, items=items))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tau", [1.0, 0.001])
def test_each_statistic_is_the_same_alone(name, tau):
    rows, anchors = unit(9, 4), unit(9, 4, seed=1)
    alone = row_statistics(rows, anchors, [name], tau=tau, blocks=SMALL)
    assert list(alone) == [name]
    close(alone, naive(rows, anchors, tau=tau))


def test_single_precision_at_the_default_tiles_and_beyond_one():
    rows, anchors = (unit(1300, 8, seed=seed, dtype=torch.float32) for seed in (0, 1))
    close(row_statistics(rows, anchors, ALL), row_statistics(rows.double(), anchors.double(), ALL), 1e-5)


def test_half_precision_is_raised_to_fp32():
    rows, anchors = unit(9, 4, dtype=torch.float16), unit(9, 4, seed=1, dtype=torch.float32)
    ours = row_statistics(rows, anchors, ALL)
    assert all(value.dtype == torch.float32 for name, value in ours.items() if name != "winner")
    close(ours, naive(rows, anchors), 1e-5)


def test_rows_of_several_clients_share_a_pass():
    anchors = unit(13, 6, seed=9)
    sent = [unit(13, 6, seed=0), unit(6, 6, seed=1), unit(13, 6, seed=2)]
    own = [torch.arange(13), torch.tensor([12, 3, 0, 7, 7, 1]), torch.arange(13).flip(0)]
    items = torch.arange(13) // 2
    together = row_statistics(torch.cat(sent), anchors, ALL, own=torch.cat(own), items=items, blocks=SMALL)
    apart = [row_statistics(u, anchors, ALL, own=k, items=items, blocks=SMALL) for u, k in zip(sent, own, strict=True)]
    close(together, {name: torch.cat([part[name] for part in apart]) for name in ALL})
    close(together, naive(torch.cat(sent), anchors, torch.cat(own), items=items))


# ---- rows and anchors that several samples have

CAPTIONS = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 3, 3, 4])  # the image of each sample; each has a text of its own
PLACES = {"image_item": CAPTIONS, "text": torch.arange(11)}


@pytest.mark.parametrize("side", ["image_item", "text"])
@pytest.mark.parametrize("against", ["image_item", "text"])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("tau", [1.0, 0.01])
@pytest.mark.parametrize("blocks", [TileSize(2, 3), TileSize(1, 4), TileSize(50, 50)])
def test_repeated_rows_and_anchors_equal_the_loop_over_all_samples(side, against, masked, tau, blocks):
    of, own = PLACES[side], PLACES[against]
    rows, anchors = unit(int(of.max()) + 1, 4, seed=5), unit(int(own.max()) + 1, 4, seed=6)
    items = torch.unique_consecutive(CAPTIONS) if against == "image_item" else CAPTIONS
    ours = row_statistics(
        rows,
        anchors,
        ALL,
        of=of,
        own=own,
        tau=tau,
        items=items if masked else None,
        counts=torch.bincount(own).double(),
        blocks=blocks,
    )
    expected = naive(rows[of], anchors[own], tau=tau, items=CAPTIONS if masked else None)
    expected["winner"] = own[expected["winner"].long()]
    close(ours, expected)


def test_samples_of_a_row_need_not_follow_each_other():
    rows, anchors, of = unit(3, 4), unit(7, 4, seed=1), torch.tensor([2, 0, 1, 0, 2, 1, 1])
    close(row_statistics(rows, anchors, ALL, of=of, blocks=TileSize(2, 3)), naive(rows[of], anchors))


# ---- ties


@pytest.mark.parametrize("blocks", [TileSize(1, 1), TileSize(2, 3), TileSize(8, 8)])
def test_the_own_anchor_wins_ties_and_else_the_lowest_index(blocks):
    # anchors 0, 1 and 3 are one vector, 2 and 4 another
    anchors = torch.eye(2)[[0, 0, 1, 0, 1]]
    ours = row_statistics(torch.eye(2)[[0, 0, 0, 0, 1]], anchors, ["winner"], blocks=blocks)["winner"]
    assert ours.tolist() == [0, 1, 0, 3, 4]


def test_duplicates_tie_though_products_round_differently_in_different_tiles():
    half = unit(170, 37, dtype=torch.float32)
    anchors = torch.cat([half, half])
    for blocks in (TileSize(64, 48), TileSize(31, 333), TileSize(340, 7)):
        for tau in (1.0, 0.01):
            winner = row_statistics(anchors, anchors, ["winner"], tau=tau, blocks=blocks)["winner"]
            assert torch.equal(winner, torch.arange(340))


def test_a_sibling_that_wins_counts_as_the_sample_itself():
    anchors = torch.eye(3)[[0, 1, 2]]
    rows = torch.tensor([[0.5, 0.9, 0.1], [0.2, 0.3, 0.8], [0.0, 0.4, 0.3]])
    plain = row_statistics(rows, anchors, ["winner", "best_negative"])
    masked = row_statistics(rows, anchors, ["winner", "best_negative"], items=torch.tensor([0, 0, 1]))
    assert plain["winner"].tolist() == [1, 2, 1]
    assert masked["winner"].tolist() == [0, 2, 1]
    assert masked["best_negative"].tolist() == pytest.approx([0.1, 0.8, 0.4])


def test_both_searches_find_the_same_rivals():
    tiles = torch.randn(6, 7, 5, generator=torch.Generator().manual_seed(0)).mul_(2).round_()  # ties within and between
    tiles[0], tiles[3, 2] = -math.inf, math.nan
    result = []
    for sparse in (True, False):
        rivals = Rivals(torch.full((7,), -9.0))
        rivals.sparse = sparse
        for number, tile in enumerate(tiles):
            rivals.add(tile, 5 * number)
        result.append(rivals)
    every = torch.cat(list(tiles), 1)
    keep = torch.arange(7) != 2
    for rivals in result:
        torch.testing.assert_close(rivals.best, every.amax(1), equal_nan=True)
        assert torch.equal(rivals.index[keep], every.argmax(1)[keep])


# ---- edges


def test_an_anchor_without_rivals_has_no_rest():
    anchors = unit(4, 3)
    ours = row_statistics(anchors, anchors, ALL, items=torch.zeros(4, dtype=torch.int64), blocks=TileSize(3, 2))
    assert ours["negatives_lse"].tolist() == [-math.inf] * 4
    assert ours["best_negative"].tolist() == [-math.inf] * 4
    assert ours["winner"].tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(ours["lse"], (anchors @ anchors.T).logsumexp(1))


def test_no_rows_give_no_statistics():
    ours = row_statistics(torch.empty(0, 4), unit(5, 4), ALL)
    assert {name: value.shape for name, value in ours.items()} == dict.fromkeys(ALL, (0,))
    assert ours["winner"].dtype == torch.int64


def test_small_entropies_keep_their_digits():
    # orthogonal anchors at gap 16: H = p log(1 + r) + ..., about 3 e^-16 x 17; unshifted sums would give 0 +- 1e-5
    z = torch.eye(4)
    ours = row_statistics(z, z, ["entropy"], tau=1 / 12)["entropy"]
    assert ours.tolist() == pytest.approx(naive(z, z, tau=1 / 12)["entropy"].tolist(), rel=1e-2)


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_vectors_of_any_norm(scale):
    rows, anchors = scale * unit(9, 4), scale * unit(9, 4, seed=1)
    close(row_statistics(rows, anchors, ALL, blocks=SMALL), naive(rows, anchors))


def test_variance_of_crowded_anchors_keeps_its_digits():
    # cosines of 0.99 +- 0.003: a difference of mean squares would lose four of fp32's seven digits
    anchors = F.normalize(torch.tensor([1.0, 0, 0, 0]) + 0.01 * unit(50, 4), dim=1).float()
    ours = row_statistics(anchors, anchors, ["variance"])["variance"]
    torch.testing.assert_close(ours.double(), naive(anchors, anchors)["variance"], rtol=2e-3, atol=0)


def test_nan_stays_in_its_row():
    rows, anchors = unit(9, 4), unit(9, 4, seed=1)
    expected = naive(rows, anchors)
    rows[3, 2] = math.nan
    ours = row_statistics(rows, anchors, ALL, blocks=SMALL)
    assert all(math.isnan(ours[name][3]) for name in ALL if name != "winner")
    keep = torch.arange(9) != 3
    close({name: value[keep] for name, value in ours.items()}, {n: value[keep] for n, value in expected.items()})


def test_never_holds_public_times_public():
    rows, anchors = unit(1100, 4, dtype=torch.float32), unit(1100, 4, seed=1, dtype=torch.float32)
    with Largest() as seen:
        row_statistics(rows, anchors, ALL, items=torch.arange(1100) // 5)
    assert seen.elements <= 256 * 1024


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"anchors": torch.zeros(5, 3)}, PayloadError, "same width"),
        ({"own": torch.arange(4)}, PayloadError, "of 5 samples 4 have an own anchor"),
        ({"own": torch.arange(1, 6)}, PayloadError, "own anchors of samples reach from 1 to 5, but there are 5"),
        ({"items": torch.arange(4)}, PayloadError, "4 item numbers for 5"),
        ({"items": torch.tensor([0, 1, 0, 2, 2])}, ConfigError, "ascending"),
        ({"tau": 0.0}, ConfigError, "tau is 0"),
        ({"tau": math.nan}, ConfigError, "tau is nan"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_impossible_requests_are_refused(change, error, match):
    with pytest.raises(error, match=match):
        row_statistics(**({"rows": torch.zeros(5, 4), "anchors": torch.zeros(5, 4), "wanted": ALL} | change))
