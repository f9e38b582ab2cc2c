"""FedAID: both stages by hand, what learns, how a round is put together, learning."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from aligned_sessions import (
    CLIENTS,
    assert_close,
    config_of,
    furthest,
    global_model,
    heard,
    parts_of,
    replies,
    same,
    session_of,
    shrink,
    stage_two,
    staged,
)
from fedaid_by_hand import contrast, guided, taught, without_statistics

from by_hand import assert_mean, play
from grids import mostly_slow
from polyfed.algorithms import fedaid
from polyfed.algorithms.shared.robust_alignment import local_view
from polyfed.federation.state import unflatten
from polyfed.models.binding import frozen_aligners
from polyfed.runs.session import Session
from polyfed.tasks.task import Task
from sessions import metrics, prepared, site_of, woken
from small_federations import Config, aligned, participants, training

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


@pytest.mark.parametrize("name", mostly_slow(ROBUST, "default", "contrast", "mean"))
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
    assert Task.named(name)().contrast_reduction == reduction  # type: ignore[attr-defined]


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


@pytest.mark.parametrize("use", ["aggregate", "none", "loss"])
def test_the_server_puts_a_round_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    teacher = {"weights": {"use": use, "gamma": 3.0}}
    session = session_of(tmp_path, task={"learn_temperature": True}, teacher=teacher)
    shrink(session, "hospital-2", 15)
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
