"""Paces: when rounds end, what late replies count for, and how long clients take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings, parse_settings
from polyfed.federation.client import ClientInfo
from polyfed.federation.paced_cohort import moved
from polyfed.federation.paces import ConstantStaleness, Pace, Polynomial, ResponseTimes, SampledResponseTimes, Staleness


def info(name: str, *modalities: str) -> ClientInfo:
    return ClientInfo(name, name[0], modalities or ("image",), "classification", 10, 5, "arch")


CLIENTS = (info("a0"), info("a1"), info("b0", "text"), info("c0", "image", "text"))


@pytest.mark.parametrize(
    ("rule", "weights"),
    [(ConstantStaleness(), [1.0] * 3), (Polynomial(), [1.0, 2**-0.5, 3**-0.5]), (Polynomial(a=2), [1.0, 1 / 4, 1 / 9])],
)
def test_weights_by_staleness(rule: Staleness, weights: list[float]) -> None:
    assert [rule.weight(tau) for tau in range(3)] == pytest.approx(weights, rel=1e-15)


@pytest.mark.parametrize(
    ("pace", "most"),
    [
        ({"name": "sync"}, 4),
        ({"name": "buffered", "replies": 2}, 2),
        ({"name": "buffered", "replies": 0.5}, 2),
        ({"name": "buffered", "replies": 0.3}, 2),
        ({"name": "buffered", "replies": 1.0}, 4),
    ],
)
def test_a_round_ends_after_its_number_of_replies(pace: dict[str, Any], most: int) -> None:
    assert parse_settings(Pace, pace).most(CLIENTS) == most


def test_what_was_learnt_is_put_upon_the_model_of_now() -> None:
    now, then, trained = (torch.randn(3, 2, generator=torch.Generator().manual_seed(k)) for k in range(3))
    result = moved(now, then, trained, 0.25)
    for i in range(3):
        for j in range(2):
            expected = float(now[i, j] + 0.25 * (trained[i, j] - then[i, j]))
            assert float(result[i, j]) == pytest.approx(expected, abs=1e-6)
    large = 2**60
    assert int(moved(torch.tensor(large + 8), torch.tensor(3), torch.tensor(11), 0.5)) == large + 12


# ---- how long clients take


def test_drawn_times_are_a_clients_own() -> None:
    many = [info(f"a{k}") for k in range(300)]
    drawn = SampledResponseTimes(seconds=2, skew=20).of(many, seed=1)
    logs = torch.tensor([seconds / 2 for seconds in drawn.values()]).log() / torch.tensor(20.0).log()
    assert 0 <= float(logs.min()) < 0.05
    assert 0.95 < float(logs.max()) <= 1
    assert abs(float(logs.mean()) - 0.5) < 0.05
    assert SampledResponseTimes(seconds=2, skew=20).of(many[5:7], 1) == {one.id: drawn[one.id] for one in many[5:7]}
    slower = SampledResponseTimes(seconds=2, skew=20, groups={"a": 3}).of(many[:1], seed=1)
    assert slower["a0"] == pytest.approx(3 * drawn["a0"])


# ---- what is refused


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (Pace, {"name": "buffered", "replies": 1.5}, "K is a number of clients"),
        (Pace, {"name": "buffered", "replies": 5}, "run.pace.replies is 5, but there are 4 clients"),
        (Pace, {"name": "buffered", "concurrency": 5}, "run.pace.concurrency is 5, but there are 4 clients"),
        (Pace, {"name": "late"}, "unknown pace 'late'"),
        (ResponseTimes, {"name": "drawn", "groups": {"x": 2}}, "no clients are called 'x'"),
    ],
)
def test_refused(family: type[Settings], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        used(family, settings)


def used(family: type[Settings], settings: dict[str, Any]) -> None:
    """Read settings of a family, and lay them out for some clients."""
    made: Any = parse_settings(family, settings)
    if family is Pace:
        made.require(CLIENTS)
    else:
        made.of(CLIENTS, 0)
