"""Norms of updates, their median, and scaling down, against cases worked by hand and plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyfed.core.errors import ConfigError
from polyfed.core.settings import parse_settings
from polyfed.privacy.rules import median_norm, scaled, update_norm
from polyfed.privacy.settings import AggregationSettings
from polyfed.wire.payload import Logits, Weights

values = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=6)


def test_the_norm_is_one_of_all_floating_tensors() -> None:
    start = {"w": torch.ones(2), "n": torch.tensor(10)}
    new = Weights({"w": torch.tensor([4.0, 5.0]), "v": torch.tensor([12.0]), "n": torch.tensor(17)})
    assert update_norm(new, start) == 13.0  # 3, 4, and 12 from 0
    half = Weights({"w": torch.full((4,), 300.0, dtype=torch.float16)})  # whose squares are beyond float16
    assert update_norm(half, {}) == 600.0
    assert update_norm(Weights({"n": torch.tensor(17)}), {}) == 0.0
    rows = Logits({"image": torch.tensor([[3.0, 4.0], [0.0, 0.0]]), "text": torch.tensor([[12.0]])}, order="")
    assert update_norm(rows, {}) == 13.0


@given(values, values)
def test_norms_are_those_of_a_loop(new: list[float], start: list[float]) -> None:
    both = list(zip(new, start, strict=False))
    sent = {"w": torch.tensor([old for _, old in both]), "unused": torch.ones(3)}
    bundle = Weights({"w": torch.tensor([value for value, _ in both]), "v": torch.tensor(new)})
    squares = sum((value - old) ** 2 for value, old in both) + sum(value**2 for value in new)
    assert update_norm(bundle, sent) == pytest.approx(math.sqrt(squares), rel=1e-5, abs=1e-4)


def test_a_median_is_of_three_at_least_and_not_0() -> None:
    assert median_norm([1.0, 1e6, 2.0]) == 2.0
    assert median_norm([1.0, 2.0, 3.0, 4.0]) == 2.5
    assert median_norm([1.0, 1e6]) is None
    assert median_norm([0.0, 0.0, 1e6]) is None


@given(values, st.floats(0.01, 0.99))
def test_what_is_scaled_has_so_much_of_its_change_and_its_direction(new: list[float], factor: float) -> None:
    start = {"w": torch.full((len(new),), 0.5), "n": torch.tensor(3)}
    bundle = Weights({"w": torch.tensor(new), "v": torch.tensor(new), "n": torch.tensor(9)})
    seen = scaled(bundle, start, factor)
    for k, value in enumerate(new):
        assert float(seen["w"][k]) == pytest.approx(0.5 + factor * (value - 0.5), rel=1e-4, abs=1e-3)
        assert float(seen["v"][k]) == pytest.approx(factor * value, rel=1e-4, abs=1e-3)
    assert seen["n"] is bundle["n"]
    assert update_norm(seen, start) == pytest.approx(factor * update_norm(bundle, start), rel=1e-3, abs=1e-3)


def test_what_is_scaled_keeps_its_kind_and_types() -> None:
    rows = scaled(Logits({"label": torch.ones(2, 3, dtype=torch.float16)}, order="here"), {}, 0.5)
    assert isinstance(rows, Logits)
    assert rows.order == "here"
    assert rows["label"].dtype == torch.float16
    assert rows["label"].tolist() == [[0.5] * 3] * 2


def test_nothing_is_clipped_unless_asked_for() -> None:
    assert parse_settings(AggregationSettings, {}).clip is None
    clip = parse_settings(AggregationSettings, {"clip": {}}).clip
    assert clip is not None
    assert (clip.times, clip.weight) == (4.0, None)
    with pytest.raises(ConfigError, match="times"):
        parse_settings(AggregationSettings, {"clip": {"times": 0}})
