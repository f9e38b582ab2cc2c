"""FedAID: losses and robust weights by hand, from round to round, and as factors of the loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned_sessions import CLIENTS, Values, config_of, furthest, global_model, heard, replies, session_of, stage_two
from fedaid_by_hand import loss_of, without_statistics

from by_hand import play
from polyfed.aggregation.robust import chi_square, mirror_step, mirror_step_of
from sessions import metrics, prepared
from small_federations import Config

pytestmark = pytest.mark.slow


def test_losses_and_weights_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, aggregated, _, _ = stage_two(tmp_path, monkeypatch)
    noted, losses = metrics(session), list[float]()
    for client in CLIENTS:
        losses.append(loss_of(session, client, aggregated))
        assert noted[f"loss.{client}"] == pytest.approx(losses[-1], rel=1e-5)
    assert max(losses) - min(losses) > 1e-3
    shares = [math.exp(0.5 * loss) for loss in losses]
    w = [share / sum(shares) for share in shares]
    for client, expected in zip(CLIENTS, w, strict=True):
        assert noted[f"weight.{client}"] == pytest.approx(expected, rel=1e-5)
        assert float(session.server.state["robust_weights"][client]) == noted[f"weight.{client}"]
    assert noted["worst_loss"] == pytest.approx(max(losses), rel=1e-5)
    pairs = session.server.validation or session.server.test
    assert noted["robust.r1_sum"] == session.server.evaluate(pairs)["r1_sum"]
    session.server.update_weights({"hospital": aggregated})
    assert noted["averaged.r1_sum"] == session.server.evaluate(pairs)["r1_sum"]
    assert noted["chi_square"] == pytest.approx(sum((3 * share - 1) ** 2 for share in w) / 6, rel=1e-4)


def test_weights_go_on_from_round_to_round(tmp_path: Path) -> None:
    session = session_of(tmp_path, teacher={"weights": {"gamma": 2.0, "rho": 1e-4}})
    w = torch.full((3,), 1 / 3, dtype=torch.float64)
    for number in (1, 2):
        play(session, number, number)
        noted = metrics(session)
        v = torch.tensor([noted[f"loss.{client}"] for client in CLIENTS], dtype=torch.float64)
        w = mirror_step(w, v, gamma=2.0, rho=1e-4)
        for client, expected in zip(CLIENTS, w, strict=True):
            assert noted[f"weight.{client}"] == pytest.approx(float(expected), rel=1e-12)
        assert float(chi_square(w)) <= 1e-4 + 1e-12
    assert float(chi_square(w)) == pytest.approx(1e-4, abs=1e-9)  # the ball binds


def test_weights_of_absent_clients_stay(tmp_path: Path) -> None:
    config = config_of(teacher={"weights": {"gamma": 3.0}})
    config["run"] |= {"sampling": {"cohort": 2}, "seed": 1}
    session = prepared(config, tmp_path)
    before, absent = dict.fromkeys(CLIENTS, 1 / 3), set()
    for number in range(1, 5):
        play(session, number, number)
        noted = metrics(session)
        now = {client: noted[f"weight.{client}"] for client in CLIENTS}
        (away,) = (client for client in CLIENTS if f"loss.{client}" not in noted)
        assert now[away] == before[away]
        assert sum(now.values()) == pytest.approx(1, abs=1e-12)
        present = torch.tensor([client != away for client in CLIENTS])
        v = torch.tensor([noted[f"loss.{client}"] for client in CLIENTS if client != away])
        expected = mirror_step_of(torch.tensor(list(before.values()), dtype=torch.float64), present, v, 3.0, 1.0)
        assert list(now.values()) == pytest.approx(expected.tolist(), rel=1e-6)
        before, absent = now, absent | {away}
    assert len(absent) > 1


def teaching(folder: Path, monkeypatch: pytest.MonkeyPatch, use: str, optimizer: Config | None) -> tuple[Values, Any]:
    """The start, and what clients send in stage 2, where w is 2/3, 1/6, 1/6 and stays so; one step."""
    teacher = {"steps": 1, "weights": {"use": use, "gamma": 0, "divergence": "none"}}
    session = session_of(folder, optimizer=optimizer, teacher=teacher)
    w = dict(zip(CLIENTS, (2 / 3, 1 / 6, 1 / 6), strict=True))
    session.server.state["robust_weights"] = {name: torch.tensor(x, dtype=torch.float64) for name, x in w.items()}
    start, messages = global_model(session), heard(session, monkeypatch)
    play(session, 1, 1)
    return start, {client: without_statistics(reply["weights"]) for client, reply in replies(messages, "teach").items()}


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_as_factor_of_the_loss_a_weight_scales_steps_but_those_of_adam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    adamw = {"kind": "adamw", "lr": 0.01, "weight_decay": 0.0, "eps": 1e-30, "clip": None}
    optimizer = adamw if kind == "adamw" else None
    start, plain = teaching(tmp_path / "a", monkeypatch, "none", optimizer)
    _, scaled = teaching(tmp_path / "b", monkeypatch, "loss", optimizer)
    for client, factor in zip(CLIENTS, (2.0, 0.5, 0.5), strict=True):
        for name, value in scaled[client].items():
            step, other = value - start[name], plain[client][name] - start[name]
            if kind == "adamw":
                torch.testing.assert_close(step, other, atol=1e-6, rtol=0)
            else:
                torch.testing.assert_close(step, factor * other, atol=1e-6, rtol=1e-3)
        assert furthest(plain[client], start) > 1e-3
