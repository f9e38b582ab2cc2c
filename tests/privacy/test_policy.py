"""Protection of a run's replies: its description and its cost."""

from __future__ import annotations

from typing import Any

import pytest

from polyfed import Experiment
from polyfed.privacy.policy import Policy
from small_federations import topics

NOISE = {"reply": {"weights": 1.0, "noise_multiplier": 4.0}, "metrics": "clear"}


def policy(**sections: Any) -> Policy:
    return Experiment.parse(topics(name="fedavg") | sections).policy


def test_without_protection_replies_leave_as_they_are() -> None:
    seen = policy()
    assert seen.words() == "none: replies of 'fedavg' leave as they are"
    assert seen.against_false() == "nothing: each counts as it is"
    assert {seen.how(sent) for sent in seen.fields if sent.step == "fit"} == {"in the clear"}
    assert policy(aggregation={"clip": {}}).against_false() == "updates clipped to 4 medians"


def test_noise_is_described_with_its_cost() -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    seen = policy(privacy=NOISE, aggregation={"robust": "median", "clip": {"times": 2}})
    assert seen.words().startswith("fit of 'fedavg': weights clipped to norm 1; noise multiplier 4; planned epsilon")
    assert "at delta 1e-05" in seen.words()
    assert "at delta 0.001" in seen.words(1e-3)
    assert seen.against_false() == "updates clipped to 2 medians, median of each type"
    (weights,) = (sent for sent in seen.fields if (sent.step, sent.field) == ("fit", "weights"))
    assert seen.how(weights) == "with noise: clipped to norm 1, noise multiplier 4"


def test_masks_are_described() -> None:
    seen = policy(aggregation={"secure": "pairwise_masks"})
    assert seen.words() == "fit of 'fedavg' in masked sums"
    assert {sent.masked for sent in seen.fields if sent.step == "fit"} == {True}
