"""Server optimisers: against Algorithm 2 of Reddi et al. in plain numbers, their state, and in whole runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from by_hand import copies, same
from grids import mostly_slow
from polyfed.optim.servers import ServerOptimizer
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from sessions import prepared
from small_federations import Config, sized, transformers

Models = dict[str, dict[str, Tensor]]
SETTINGS: dict[str, Config] = {
    "replace": {"name": "replace"},
    "momentum": {"name": "momentum", "lr": 0.7, "momentum": 0.6},
    "adam": {"name": "adam", "lr": 0.05, "beta1": 0.8, "beta2": 0.95, "tau": 0.01},
    "adagrad": {"name": "adagrad", "lr": 0.05, "beta1": 0.8, "tau": 0.01},
}
STATEFUL = [name for name in SETTINGS if name != "replace"]


def made(name: str) -> ServerOptimizer:
    return ServerOptimizer.model_validate(SETTINGS[name])


# ---- one number


def sign(value: float) -> float:
    return (value > 0) - (value < 0)


SECOND: dict[str, Callable[[float, float], float]] = {
    "adam": lambda v, square: 0.95 * v + 0.05 * square,
    "adagrad": lambda v, square: v + square,
}


def algorithm_2(name: str, w: float, aggregates: list[float]) -> Iterator[float]:
    """Global models of one parameter, round by round."""
    m, v = 0.0, 0.01**2
    for aggregate in aggregates:
        delta = aggregate - w
        if name == "replace":
            w = aggregate
        elif name == "momentum":  # Hsu et al.
            m = 0.6 * m - delta
            w = w - 0.7 * m
        else:
            m = 0.8 * m + 0.2 * delta
            v = SECOND[name](v, delta * delta)
            w = w + 0.05 * m / (math.sqrt(v) + 0.01)
        yield w


@pytest.mark.parametrize("name", SETTINGS)
def test_three_rounds_equal_algorithm_2_number_by_number(name: str) -> None:
    stream = torch.Generator().manual_seed(3)
    start = torch.randn(2, 3, generator=stream, dtype=torch.float64)
    updates = [torch.randn(2, 3, generator=stream, dtype=torch.float64) * 0.1**k for k in range(3)]  # v - D^2 < 0, > 0
    optimizer, state = made(name), {}
    now, aggregates, actual = {"a": {"w": start.clone()}}, [], []
    for update in updates:
        aggregates.append(now["a"]["w"] + update)
        now = optimizer.step(now, {"a": {"w": aggregates[-1]}}, state)
        actual.append(now["a"]["w"])
    for row in range(2):
        for column in range(3):
            given = [float(value[row, column]) for value in aggregates]
            expected = list(algorithm_2(name, float(start[row, column]), given))
            assert [float(value[row, column]) for value in actual] == pytest.approx(expected, rel=1e-12)


def test_momentum_zero_at_rate_one_is_replacing() -> None:
    old, new = {"a": {"w": torch.tensor([1.0, -2.0])}}, {"a": {"w": torch.tensor([0.5, 4.0])}}
    plain = ServerOptimizer.model_validate({"name": "momentum", "momentum": 0.0})
    assert torch.equal(plain.step(old, new, {})["a"]["w"], new["a"]["w"])


@pytest.mark.parametrize("name", SETTINGS)
def test_integers_follow_the_aggregate(name: str) -> None:
    old = {"a": {"n": torch.tensor(3), "on": torch.tensor([True]), "w": torch.zeros(1)}}
    new = {"a": {"n": torch.tensor(8), "on": torch.tensor([False]), "w": torch.ones(1)}}
    state: Models = {}
    actual = made(name).step(old, new, state)["a"]
    assert actual["n"].item() == 8
    assert actual["n"].dtype == torch.int64
    assert not actual["on"]
    assert {key for group in state.values() for key in group} == (set() if name == "replace" else {"w"})


@pytest.mark.parametrize("name", SETTINGS)
def test_neither_given_nor_returned_models_are_written_to_later(name: str) -> None:
    optimizer, state = made(name), {}
    old, new = {"a": {"w": torch.zeros(2)}}, {"a": {"w": torch.ones(2)}}
    first = optimizer.step(old, new, state)
    kept = first["a"]["w"].clone()
    optimizer.step(first, {"a": {"w": torch.full((2,), 3.0)}}, state)
    assert old["a"]["w"].tolist() == [0, 0]
    assert new["a"]["w"].tolist() == [1, 1]
    assert torch.equal(first["a"]["w"], kept)


@pytest.mark.parametrize("name", STATEFUL)
def test_momenta_are_of_a_type_and_a_tensor(name: str) -> None:
    """Types that move together move as each would alone."""
    optimizer, together = made(name), {}
    alone: dict[str, Models] = {"a": {}, "b": {}}
    joint = {type_name: {"w": torch.zeros(1)} for type_name in alone}
    single = copies(joint)
    for number in range(3):
        new = {"a": {"w": joint["a"]["w"] + 1 + number}, "b": {"w": joint["b"]["w"] - 2}}
        joint = optimizer.step(joint, new, together)
        for type_name, state in alone.items():
            single |= optimizer.step({type_name: single[type_name]}, {type_name: new[type_name]}, state)
    assert all(torch.equal(joint[type_name]["w"], single[type_name]["w"]) for type_name in alone)
    assert sorted(together) == sorted(group for state in alone.values() for group in state)
    assert {group.partition(":")[2] for group in together} == {"a", "b"}


# ---- in a federation


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    actual = sized(transformers(local_steps=1), 48)
    for group in actual["clients"].values():
        group["items"] = 16
    return actual


def one_round(session: Session, number: int, absent: Sequence[str] = ()) -> None:
    session.server.begin(number)
    cohort = session.cohort(number, Ledger())
    cohort.clients = tuple(client for client in cohort.clients if client.group not in absent)
    session.experiment.algorithm.round(session.server, cohort)


def momenta(session: Session, type_name: str) -> dict[str, Tensor]:
    return {
        f"{group}/{name}": value.clone()
        for group, values in session.server.state.items()
        if group.endswith(f":{type_name}")
        for name, value in values.items()
    }


def followed_by(optimizer: Any, averaging: str = "by_type", **settings: Any) -> Config:
    """Settings of a method whose global models follow the averages by a server optimiser."""
    return {"averaging": {"name": averaging, "server_optimizer": optimizer, **settings}}


@pytest.mark.parametrize(("name", "mean"), [*((name, "exact") for name in STATEFUL), ("momentum", "sequential")])
def test_an_absent_type_is_left_alone_momenta_too(config: Config, tmp_path: Path, name: str, mean: str) -> None:
    config["algorithm"] |= followed_by(SETTINGS[name], mean=mean)
    session = prepared(config, tmp_path)
    one_round(session, 1)
    weights, before = copies(session.server.weights), momenta(session, "text")
    assert before
    one_round(session, 2, absent=["text"])
    assert same(session.server.weights["text"], weights["text"])
    assert same(momenta(session, "text"), before)
    assert not same(session.server.weights["image"], weights["image"])
    one_round(session, 3)
    assert not same(session.server.weights["text"], weights["text"])


def test_what_an_absent_type_shares_moves_and_the_rest_does_not(config: Config, tmp_path: Path) -> None:
    config["algorithm"] |= {"name": "fediot"} | followed_by("momentum", "fediot")
    session = prepared(config, tmp_path)
    one_round(session, 1)
    weights, before = copies(session.server.weights)["text"], momenta(session, "text")
    one_round(session, 2, absent=["text"])
    moved = {name for name, value in session.server.weights["text"].items() if not torch.equal(value, weights[name])}
    assert moved
    assert all(".blocks." in name for name in moved)
    after = momenta(session, "text")
    assert all(torch.equal(value, after[key]) for key, value in before.items() if ".blocks." not in key)


@pytest.mark.parametrize("name", mostly_slow(STATEFUL, "adam"))
def test_a_restored_server_goes_on_with_the_same_bits(config: Config, tmp_path: Path, name: str) -> None:
    config["algorithm"] |= followed_by(SETTINGS[name])
    complete, other = (prepared(config, tmp_path / which) for which in ("whole", "other"))
    one_round(complete, 1)
    one_round(complete, 2)
    groups = {
        group: {key: value.clone() for key, value in actual.items()}
        for group, actual in complete.server.snapshot().items()
    }
    assert any(group.startswith("state:server-") for group in groups)
    other.server.restore(2, groups)
    for session in (complete, other):
        one_round(session, 3)
    assert all(same(other.server.weights[type_name], actual) for type_name, actual in complete.server.weights.items())
    other.server.restore(2, {group: actual for group, actual in groups.items() if not group.startswith("state:")})
    one_round(other, 3)
    assert not same(other.server.weights["text"], complete.server.weights["text"])  # the momenta matter
