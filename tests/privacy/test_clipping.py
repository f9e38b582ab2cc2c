"""Lengths of updates, what is usual, and scaling down, against cases worked by hand."""

from __future__ import annotations

import pytest
import torch

from polyfed.core.errors import ConfigError
from polyfed.core.settings import parse_settings
from polyfed.privacy.clipping import clipped, excess, lengths, medians, reach_of, update_norms
from polyfed.privacy.settings import AggregationSettings
from polyfed.wire.payload import Logits, Weights

ZERO = {"w": torch.zeros(4), "n": torch.tensor(10)}


def test_lengths_are_norms_of_what_moved_and_of_rows() -> None:
    new = Weights({"w": torch.tensor([3.0, 4.0, 0.0, 0.0]), "v": torch.tensor([12.0]), "n": torch.tensor(17)})
    assert lengths(update_norms(new, ZERO)) == {"w": 5.0, "v": 12.0, "n": 7.0}
    half = Weights({"w": torch.full((4,), 300.0, dtype=torch.float16)})  # whose squares are beyond float16
    assert lengths(update_norms(half, {})) == {"w": 600.0}
    rows = Logits({"image": torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 2.0]])}, order="")
    assert update_norms(rows, {})["image"].tolist() == [5.0, 1.0, 2.0]
    assert lengths(update_norms(rows, {})) == {"image": 2.0}


def test_what_is_usual_is_the_median_of_three_at_least() -> None:
    seen = [{"w": 1.0, "n": 3.0}, {"w": 2.0, "n": 3.0}, {"w": 1e6, "n": 1e18}]
    assert medians(seen, {"w": 4}) == {"w": 2.0, "n": 3.0}
    assert medians(seen[1:], {"w": 4}) == {}
    assert medians([{"w": 0.0}, {"w": 0.0}, {"w": 1.0}], {"w": 4}) == {}  # most do not move at all
    assert medians([{"image": 2.0}, {"image": 3.0}, {"image": 9.0}], {}) == {"image": 3.0}


def test_a_tensor_that_most_leave_alone_may_move_as_far_as_entries_do_on_average() -> None:
    found = medians([{"w": 3.0, "b": 0.0, "n": 0.0}] * 3, {"w": 8, "b": 1})
    assert found == {"w": 3.0, "b": pytest.approx(1.0), "n": 1.0}


def test_weights_may_move_as_far_as_they_are_long_vectors_and_statistics_farther() -> None:
    sent = {"w": torch.full((3, 1), 2.0), "b": torch.zeros(1), "running_mean": torch.zeros(9), "n": torch.tensor(1)}
    reach = reach_of(sent, Weights(sent), samples=7)
    assert reach == {"w": pytest.approx(12**0.5), "b": pytest.approx(4 * 3**0.5), "running_mean": 12.0, "n": 7.0}
    assert reach_of({}, Weights({"w": torch.ones(2, 2)}), samples=7) == {}


def test_what_is_r_bounds_long_counts_as_one_over_r() -> None:
    new = Weights({"w": torch.full((4,), 8.0), "n": torch.tensor(110), "v": torch.ones(1)})  # 16 long, 100 counted
    norms = update_norms(new, ZERO)
    assert excess(norms, {"w": 4.0, "n": 50.0}) == (4.0, "w")
    found = clipped(new, ZERO, norms, {"w": 4.0, "n": 50.0})
    assert torch.equal(found["w"], torch.full((4,), 0.5))  # 1 long, a quarter of the bound
    assert int(found["n"]) == 10 + 25
    assert found["v"] is new["v"]  # of which nothing is known


def test_it_is_on_where_the_server_sees_replies() -> None:
    assert parse_settings(AggregationSettings, {}).clip is not None
    assert parse_settings(AggregationSettings, {"secure": "unmasked"}).clip is None
    with pytest.raises(ConfigError, match="times"):
        parse_settings(AggregationSettings, {"clip": {"times": 0}})
