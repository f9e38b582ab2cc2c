"""FedAID: rounds by hand, settings that are refused, and other methods on aligned models."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from aligned_sessions import (
    CLIENTS,
    Values,
    config_of,
    events,
    global_model,
    heard,
    parts_of,
    replies,
    session_of,
    stage_two,
    staged,
)
from fedaid_by_hand import contrast, guided, loss_of, taught, without_statistics

from by_hand import assert_close, assert_mean, copies, furthest, play, same
from grids import mostly_slow
from polyfed.aggregation.robust import chi_square, mirror_step, mirror_step_of
from polyfed.algorithms import fedaid
from polyfed.algorithms.fedaid import FedAID
from polyfed.algorithms.shared.robust_alignment import local_view
from polyfed.core.errors import ConfigError
from polyfed.federation.state import unflatten
from polyfed.models.binding import frozen_aligners
from polyfed.runs.session import Session
from polyfed.tasks.task import Task
from sessions import metrics, prepared, site_of, woken
from small_federations import Config, aligned, participants, training, transformers

# ---- stage 1

CONTRASTIVE: Config = {"guidance": {"distance": "contrastive"}}
GUIDES: dict[str, tuple[Config, Config]] = {
    "sum": ({}, {}),
    "mean": ({"guidance": {"reduction": "mean"}}, {"how": "mean"}),
    "element": ({"guidance": {"reduction": "element", "weight": 3.0}}, {"how": "element", "guide": 3.0}),
    "contrastive": (CONTRASTIVE, {"how": "contrastive"}),
    "all negatives": (CONTRASTIVE | {"task": {"mask_siblings": False}}, {"how": "contrastive"}),
    "task": ({"guidance": None, "task_weight": 0.5}, {"guide": 0.0, "alpha": 0.5}),
    "both": ({"guidance": {"weight": 5.0}, "task_weight": 0.5}, {"guide": 5.0, "alpha": 0.5}),
}


def test_guidance_alone_moves_nothing_while_aligner_and_teacher_are_equal(tmp_path: Path) -> None:
    session = session_of(tmp_path, task_weight=0, teacher=None)
    start = without_statistics(global_model(session))
    play(session, 1, 1)
    assert furthest(without_statistics(global_model(session)), start) == 0.0


@pytest.mark.parametrize("name", mostly_slow(GUIDES, "sum", "contrastive"))
def test_stage_one_equals_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    settings, factors = GUIDES[name]
    session = session_of(tmp_path, **settings)
    start, messages = global_model(session), heard(session, monkeypatch)
    play(session, 1, 1)
    actual = replies(messages, "guide")["hospital-1"]["weights"]
    expected = guided(session, "hospital-1", start, **factors)
    assert_close(actual, expected)
    assert furthest(actual, start) > 5e-3
    if factors.get("how") != "contrastive" and name != "task":
        other = guided(session, "hospital-1", start, cut=True, **factors)
        assert furthest(other, expected) > 1e-3  # gradient flows through g*


# ---- stage 2


def test_gradients_reach_the_distorted_encoder_and_the_teacher_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(tmp_path, task={"learn_temperature": True})
    algorithm, client, still = session.experiment.algorithm, woken(session, CLIENTS[0]), []
    client.load_weights(global_model(session))
    g = frozen_aligners(client.model, client.model.state_dict())
    freeze = fedaid.frozen_copy
    monkeypatch.setattr(fedaid, "frozen_copy", lambda module: still.append(freeze(module)) or still[-1])
    loss = algorithm.teacher.loss(client, g)
    client.model.train()
    loss(client.model, next(client.batches(client.train, "x"))).backward()
    trained = {name for name, value in client.model.named_parameters() if value.grad is not None}
    parts = parts_of(session)
    learnable = {name for name, _ in client.model.named_parameters()}
    assert trained == learnable & {*parts.encoder, *parts.aligner}
    assert learnable - trained == {"heads.retrieval-info_nce.log_scale"}
    assert len(still) == 2  # f* and the head
    assert not [value for module in (*still, *g.values()) for value in module.parameters() if value.grad is not None]


ROBUST: dict[str, tuple[Config, Config]] = {
    "default": ({}, {}),
    "beta": ({"teacher": {"beta": 0}}, {"beta": 0.0}),
    "contrast": ({"teacher": {"contrast": None}}, {"weight": 0.0}),
    "all negatives": ({"task": {"mask_siblings": False}}, {}),
    "mean": (
        {"teacher": {"reduction": "mean", "beta": 5.0, "contrast": {"weight": 0.5}}, "guidance": {"reduction": "mean"}},
        {"how": "mean", "beta": 5.0, "weight": 0.5},
    ),
}


@pytest.mark.parametrize("name", mostly_slow(ROBUST, "default", "mean"))
def test_stage_two_equals_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    settings, factors = ROBUST[name]
    session, aggregated, start, messages = stage_two(tmp_path, monkeypatch, **settings)
    actual = without_statistics(replies(messages, "teach")["hospital-2"]["weights"])
    assert_close(actual, without_statistics(taught(session, "hospital-2", aggregated, start, **factors)))
    assert furthest(actual, start) > 5e-3


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_contrast_weighs_as_much_as_a_task_that_is_a_contrast(tmp_path: Path, reduction: str) -> None:
    """Eq. 5 adds L_CL and L_task: where both are the same contrast, of the same representations they are equal."""
    session = session_of(tmp_path, task={"name": "convirt", "learn_temperature": False, "reduction": reduction})
    algorithm, client = session.experiment.algorithm, woken(session, CLIENTS[0])
    client.load_weights(global_model(session))
    client.model.eval()
    batch, view = next(client.batches(client.train, "x")), local_view(client.model)
    z = {name: view.represent(name, x) for name, x in batch.inputs.items()}
    one_direction_each = 2 * contrast(z["image"], z["text"], 0.07, list(range(len(batch.matches))))
    expected = one_direction_each if reduction == "sum" else one_direction_each / 2
    actual = algorithm.teacher.contrast.loss(client, view, batch)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
    assert actual.item() == pytest.approx(client.task.loss(view, client.head, batch).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        ("retrieval", "mean"),
        ("convirt", "mean"),
        ("papers.fedaid.objectives.GLoRIA", "sum"),
        ("papers.fedaid.objectives.MGCA", "sum"),
    ],
)
def test_how_tasks_put_the_directions_of_a_contrast_together(name: str, reduction: str) -> None:
    assert Task.named(name)().contrast_reduction == reduction


@pytest.mark.slow
def test_heads_for_positions_learn_in_stage_one_and_no_teacher_resets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = copy.deepcopy(config_of())
    for participant in participants(config):
        participant["model"] = participant["model"] | {"aligner": {"hidden": 16, "local": True}}
        participant["task"] = {"name": "papers.fedaid.objectives.GLoRIA"}
    session = prepared(config, tmp_path)
    messages = heard(session, monkeypatch)
    names = {f"encoders.{side}.aligner.local.{form}" for side in ("image", "text") for form in ("weight", "bias")}
    before = global_model(session)
    assert names <= set(before)
    for number in (1, 2):
        play(session, number, number)
        after = global_model(session)
        moved = {name: float((after[name] - before[name]).abs().max()) for name in names}
        assert min(value for name, value in moved.items() if name.endswith("weight")) > 1e-4
        assert not names & set(parts_of(session).aligner)
        before = after
    taught_names = {name for reply in replies(messages, "teach").values() for name in reply["weights"]}
    assert taught_names
    assert not names & taught_names


def test_the_distorted_copy_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, aggregated, _, messages = stage_two(tmp_path, monkeypatch)
    parts = parts_of(session)
    for reply in replies(messages, "teach").values():
        assert set(reply) == {"weights"}
        assert set(reply["weights"]) == set(parts.aligner)
    for client in CLIENTS:
        kept = unflatten(site_of(session).store.load(client, session.cohorts.accepted[client]))
        assert same(kept["encoder"], {name: aggregated[name] for name in parts.encoder})
    for one in messages:
        if one.step == "judge":
            assert set(one.sent) == {"weights"}
            assert set(one.reply) == {"loss"}


# ---- putting a round together


@pytest.mark.parametrize("use", mostly_slow(["aggregate", "none", "loss"], "aggregate"))
def test_the_server_puts_a_round_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    teacher = {"weights": {"use": use, "gamma": 3.0}}
    session = session_of(tmp_path, task={"learn_temperature": True}, teacher=teacher)
    data = site_of(session).data_of(session.federation.members["hospital-2"])
    data.train = data.train.subset(torch.arange(15))
    messages = heard(session, monkeypatch)
    play(session, 1, 1)
    parts, actual, noted = parts_of(session), global_model(session), metrics(session)
    uniform = dict.fromkeys(CLIENTS, 1.0)
    stage_one = {client: reply["weights"] for client, reply in replies(messages, "guide").items()}
    assert_mean({name: actual[name] for name in (*parts.encoder, *parts.others)}, stage_one, uniform)
    w = {client: noted[f"weight.{client}"] for client in CLIENTS}
    assert sum(w.values()) == pytest.approx(1)
    assert max(w.values()) - min(w.values()) > 0.05
    stage_two = {client: reply["weights"] for client, reply in replies(messages, "teach").items()}
    robust = {name: actual[name] for name in parts.aligner}
    assert_mean(robust, stage_two, w if use == "aggregate" else uniform)
    other = uniform if use == "aggregate" else w
    with pytest.raises(AssertionError):
        assert_mean(robust, stage_two, other)
    assert_mean(next(one.sent["weights"] for one in messages if one.step == "judge"), stage_one, uniform)
    shown = session.server.model.state_dict()
    assert same({name: shown[name] for name in actual}, actual)


def test_without_a_robust_teacher_it_is_guided_averaging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(tmp_path, teacher=None)
    messages = heard(session, monkeypatch)
    play(session, 1, 2)
    assert {one.step for one in messages} == {"guide"}
    stage_one = {client: reply["weights"] for client, reply in replies(messages, "guide", 2).items()}
    assert_mean(global_model(session), stage_one, dict.fromkeys(CLIENTS, 1.0))
    assert metrics(session) == {}


# ---- learning


def learning(folder: Path, **algorithm: Any) -> Session:
    """Two clients with easy pairs, five a scene."""
    config = copy.deepcopy(aligned(**staged(20, **algorithm)))
    for participant in participants(config):
        model = participant["model"] | {"dim": 32, "aligner": {"head": "linear"}}
        model["encoders"]["image"] |= {"widths": [16, 32]}
        model["encoders"]["text"] |= {"width": 32}
        participant["model"] = model
    config["clients"]["hospital"] |= {"count": 2, "training": training("adamw", 0.003, 32, clip=2.0)}
    config["data"]["sources"]["scenes"] |= {"train": 180, "test": 60, "difficulty": 0.0}
    return prepared(config, folder)


def recall(session: Session) -> float:
    server = session.server
    return server.evaluate(server.test)["text_to_image_r@5"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"guidance": {"reduction": "mean"}, "teacher": {"reduction": "mean"}}, {"name": "feddra"}]
)
def test_it_learns_to_retrieve(tmp_path: Path, settings: Config) -> None:
    session, chance = learning(tmp_path, **settings), 100 * 5 / 60
    assert recall(session) < 1.5 * chance
    play(session, 1, 8)
    assert recall(session) > 2.5 * chance


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def teaching(folder: Path, monkeypatch: pytest.MonkeyPatch, use: str, optimizer: Config | None) -> tuple[Any, Any]:
    """The start, and what clients send in stage 2, where w is 2/3, 1/6, 1/6 and stays so; one step."""
    teacher = {"steps": 1, "weights": {"use": use, "gamma": 0, "divergence": "none"}}
    session = session_of(folder, optimizer=optimizer, teacher=teacher)
    w = dict(zip(CLIENTS, (2 / 3, 1 / 6, 1 / 6), strict=True))
    session.server.state["robust_weights"] = {name: torch.tensor(x, dtype=torch.float64) for name, x in w.items()}
    start, messages = global_model(session), heard(session, monkeypatch)
    play(session, 1, 1)
    return start, {client: without_statistics(reply["weights"]) for client, reply in replies(messages, "teach").items()}


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.slow
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


# ---- settings, and other methods on aligned models


# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"guidance": None, "task_weight": 0}, "no loss trains"),
        ({"teacher": {"weights": {"divergence": "released", "rho": 0}}}, "use chi_square"),
        ({"teacher": {"beta": 0, "contrast": None}}, "no teacher would be learnt"),
        ({"local_epochs": 2}, "local_epochs has no effect with local_steps"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FedAID(**settings)


# ---- other methods on aligned models

OTHERS: dict[str, Config] = {"fedavg": {}, "moon": {}, "fedema": {"byol": {"predictor_width": 8}}, "local": {}}


@pytest.mark.parametrize("name", mostly_slow(OTHERS, "fedema"))
def test_other_methods_train_aligned_models(tmp_path: Path, name: str) -> None:
    config = copy.deepcopy(aligned())
    config["algorithm"] = {"name": name, "local_epochs": 1} | OTHERS[name]
    session = prepared(config, tmp_path)
    before = copies({"model": session.server.model.state_dict()})["model"]
    play(session, 1, 2)
    after = session.server.model.state_dict()
    if name == "local":
        after = woken(session, CLIENTS[0], (99, 0), after=session.cohorts.accepted[CLIENTS[0]]).model.state_dict()
    moved = {
        key.split(".")[2] for key, value in before.items() if "encoders" in key and not torch.equal(value, after[key])
    }
    assert moved == {"trunk", "aligner"}
    assert not events(session)


def test_masked_autoencoding_inside_an_aligned_model(tmp_path: Path) -> None:
    config = transformers(name="fed_mae", decoder_depth=1, decoder_width=32, decoder_heads=4)
    model = copy.deepcopy(config["clients"]["paired"]["model"])
    model |= {"final_norm": False, "aligner": {"hidden": 16}}
    model["encoders"]["image"]["patch"] = 4
    paired = config["clients"]["paired"] | {"model": model}
    config |= {"clients": {"paired": paired}, "server": config["server"] | {"model": model}}
    session = prepared(config, tmp_path)
    before = global_of(session)
    play(session, 1, 1)
    after = global_of(session)
    assert [name for name in before if "aligner" in name and not torch.equal(before[name], after[name])]
    assert any("extras.mae_image" in name for name in before)
    assert not events(session)


def global_of(session: Session) -> Values:
    return copies(session.server.weights)["paired"]
