"""MMiC: replaced layers by hand, the portfolio's inertia, who is chosen, what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from by_hand import assert_mean, copies, plain_training, play
from gap_rounds import with_gaps
from polyfed.aggregation.coalitions import banzhaf
from polyfed.algorithms.mmic import ClientChoice, FiguresCheck, MMiC
from polyfed.core.errors import ConfigError, PayloadError
from polyfed.federation.cohort import Reply
from polyfed.privacy.rules import RobustRule
from polyfed.runs.protection import require_combinable
from polyfed.runs.session import Session
from polyfed.wire.payload import Weights
from sessions import first_cohort, metrics, prepared

PLAIN: dict[str, Any] = {"averaging": {"server_optimizer": "replace"}, "portfolio": None, "choice": None, "clusters": 1}


def mended(start: dict[str, Tensor], trained: dict[str, dict[str, Tensor]], sizes: dict[str, int]) -> dict[str, Any]:
    """Of clients that all have gaps: the layer that moved most beside the others', from those with another one."""
    matrices = [name for name, value in start.items() if value.ndim > 1]
    rates = {
        client: {k: float((own[k] - start[k]).abs().mean() / start[k].abs().mean()) for k in matrices}
        for client, own in trained.items()
    }
    usual = {k: sum(own[k] for own in rates.values()) / len(rates) for k in matrices}
    moved = [k for k in matrices if usual[k] > 0]
    poorest = {client: max(moved, key=lambda k: own[k] / usual[k]) for client, own in rates.items()}
    found = {}
    for client, own in trained.items():
        layer = poorest[client]
        others = [other for other in trained if poorest[other] != layer]
        mean = sum(sizes[other] * trained[other][layer] for other in others) / max(1, sum(sizes[o] for o in others))
        found[client] = own | ({layer: mean} if others else {})
    return found


def test_a_round_of_replaced_layers_equals_a_plain_loop(tmp_path: Path) -> None:
    config = with_gaps("mmic", **PLAIN)
    config["clients"]["paired"]["count"] = 3
    session = prepared(config, tmp_path)
    server, start = session.server, copies(session.server.weights)
    session.experiment.algorithm.round(server, first_cohort(session))
    for kind, members in server.types.items():
        sizes = {info.id: server.weight(info) for info in members.clients}
        trained = {name: plain_training(session, name, start[kind]) for name in sizes}
        sent = mended(start[kind], trained, sizes) if kind == "paired" else trained
        assert_mean(server.weights[kind], sent, sizes)
    replaced = metrics(session)["replaced"]
    assert 0 < replaced <= 3


def test_inertia_is_of_the_clusters_costs(tmp_path: Path) -> None:
    session = play(prepared(with_gaps("mmic", clusters=1), tmp_path), 1, 3)
    returns, server = session.server.state["returns"], session.server
    cost, samples = 0.0, 0
    for members in server.types.values():
        sizes = torch.tensor([float(server.weight(info)) for info in members.clients], dtype=torch.float64)
        own = torch.stack([returns[info.id] for info in members.clients])
        assert own.shape[1] == 3
        assert float(own[:, 0].abs().max()) == 0.0  # before a first loss is known
        assert bool((own[:, 1:] != 0).all())
        whole = sizes / sizes.sum() @ own
        cost += float(sizes.sum()) * (0.5 * float(whole.var()) - 0.5 * float(whole[-1]))
        samples += int(sizes.sum())
    assert metrics(session)["inertia"] == pytest.approx(0.9 + math.tanh(cost / samples) / 10)


def test_the_powerful_are_chosen_more_often(tmp_path: Path) -> None:
    config = with_gaps("mmic", clusters=1, choice={"after": 0, "share": 0.5})
    session = prepared(config, tmp_path)
    server, method = session.server, session.experiment.algorithm
    assert isinstance(method, MMiC)
    server.state["sketches"] = {f"paired-{k}": torch.ones(256) for k in range(2)}
    server.state["power"] = {f"paired-{k}": torch.tensor(k / 1.0, dtype=torch.float64) for k in range(2)}
    counts = {info.id: 0 for info in server.clients}
    for number in range(1, 301):
        server.begin(number)
        for info in method.chosen(server, server.clients, ClientChoice(share=0.5)):
            counts[info.id] += 1
    assert counts["image"] == 300  # alone in its type
    assert counts["paired-0"] + counts["paired-1"] == 300
    assert counts["paired-1"] / 300 == pytest.approx(math.exp(2) / (1 + math.exp(2)), abs=0.06)


def test_those_that_are_not_chosen_take_no_part(tmp_path: Path) -> None:
    session = prepared(with_gaps("mmic", clusters=1, choice={"after": 1, "share": 0.3}), tmp_path)
    play(session, 1, 2)
    asked = {name: version for name, version in session.cohorts.accepted.items()}
    assert sum(round_number == 2 for round_number, _ in asked.values()) == 2


def power(session: Session) -> dict[str, float]:
    return {name: float(value) for name, value in session.server.state["power"].items()}


def test_power_is_of_samples_and_returns(tmp_path: Path) -> None:
    session = play(prepared(with_gaps("mmic", clusters=1), tmp_path), 1, 2)
    own = power(session)
    assert own["image"] == 1.0
    assert own["paired-0"] + own["paired-1"] == pytest.approx(1.0)


def test_a_portfolio_needs_a_first_moment() -> None:
    with pytest.raises(ConfigError, match="'momentum' has none; choose adagrad, adam or yogi, or set portfolio=null"):
        MMiC(averaging={"server_optimizer": "momentum"})


@pytest.mark.parametrize(("field", "value"), [("complete", -1.0), ("complete", 1.5), ("loss", 1e308)])
def test_a_client_with_an_impossible_figure_is_refused(tmp_path: Path, field: str, value: float) -> None:
    session = prepared(with_gaps("mmic"), tmp_path)
    sender = next(info for info in session.server.clients if info.id == "paired-0")
    figures = {"loss": 1.0, "complete": 0.5, "num_examples": 3}
    weights = Weights(session.server.weights_for(sender))
    check = FiguresCheck(session.server)
    check(Reply.received(Reply(weights=weights, **figures).payload, sender))
    with pytest.raises(PayloadError, match=f"{field} is"):
        check(Reply.received(Reply(weights=weights, **figures | {field: value}).payload, sender))


def test_what_makes_all_replies_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="gives all clients of a type one reply, and 'mmic' tells them apart"):
        require_combinable(RobustRule.named("median")(), MMiC())


def test_of_many_equal_players_all_have_the_same_power() -> None:
    assert banzhaf(torch.ones(2500)).tolist() == pytest.approx([1 / 2500] * 2500)
