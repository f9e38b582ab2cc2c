"""Clients that train together in stacks end as those that train one after the other, but for rounding."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from packing_methods import Drawing, Halting, Mislabelled, Slow
from torch import Tensor

from by_hand import play
from misbehaving import contents, cut_short
from polyfed.algorithms.local import LocalOnly
from polyfed.core.errors import ConfigError
from polyfed.engines import packed
from polyfed.engines.local import LocalEngine
from polyfed.federation import packing
from polyfed.federation.packing import Kind
from polyfed.runs.experiment import Experiment
from polyfed.runs.runner import resume_run, run_experiment
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from polyfed.wire.payload import Payload
from sessions import prepared, site_of
from small_federations import UNBOUND, bag, experiment, pixels, scenes, training, words

Config = dict[str, Any]
SIZES = (17, 16, 9, 24, 1)
"""Samples of clients whose batches are of 8: last batches of 1, 8, 1, 8 and a client that has none to train on."""
DROPPING = {"drop": 0.3, "delete": 0.2}
"""Of tokens: widths of batches then differ from client to client."""


def named(method: type[LocalOnly]) -> str:
    return f"{method.__module__}.{method.__name__}"


def crowd(optimizer: str = "adam", sizes: tuple[int, ...] = SIZES, algorithm: str = "local", **more: Any) -> Config:
    """Clients of unequal size that tell the topics of texts by a bag of words with dropout."""
    rules = {key: more.pop(key) for key in ("clip", "weight_decay", "momentum", "nesterov") if key in more}
    encoder = more.pop("encoder", bag(words(12, 60) | DROPPING) | {"hidden": 6})
    (modality,) = {"text"} if "pixels" not in str(encoder) else {"image"}
    target = {"text": "topic", "image": "label"}[modality]
    client = {
        "source": "scenes",
        "model": {"dim": 8, "encoders": {modality: encoder}},
        "task": {"name": "classification", "target": target, "classes": 40},
        "training": training(optimizer, 0.1 if optimizer == "sgd" else 0.01, 8, **rules),
    }
    sources = {"scenes": scenes(sum(sizes), 4, 12, columns={modality: modality}, targets={target: target})}
    groups = {f"c{number}": client | {"count": 1, "items": size} for number, size in enumerate(sizes)}
    config = experiment("crowd", sources, {"name": algorithm} | _epochs(more), clients=groups)
    config["run"]["bounds"] = UNBOUND
    return config


def _epochs(algorithm: Config) -> Config:
    return algorithm if "local_steps" in algorithm else {"local_epochs": 2} | algorithm


def played(config: Config, folder: Path, pack: Any, rounds: int = 2) -> Session:
    session = prepared(config, folder)
    session.attach(LocalEngine(site_of(session), pack=pack))
    session.experiment.algorithm.setup(session.server)
    return play(session, 1, rounds)


def kept(session: Session) -> dict[str, dict[str, Tensor]]:
    """What clients keep, and what the server sends."""
    store, accepted = site_of(session).store, session.cohorts.accepted
    keeps = bool(session.experiment.algorithm.keeps)
    states = {name: dict(store.load(name, version)) for name, version in accepted.items() if keeps}
    return states | {f"server {kind}": dict(tensors) for kind, tensors in session.server.weights.items()}


def taken(caplog: pytest.LogCaptureFixture) -> dict[str, int]:
    """Steps of clients by how they were taken, as the engine tells."""
    lines = [record.getMessage() for record in caplog.records if record.name == "polyfed.engines.packed"]
    parts = [part.split() for line in lines for part in line.removeprefix("steps of clients: ").split(", ")]
    return {how: sum(int(count) for count, name in parts if name == how) for how in ("together", "alone")}


def assessed(session: Session) -> dict[str, dict[str, float]]:
    algorithm, server = session.experiment.algorithm, session.server
    metrics = algorithm.evaluate_clients(server, session.cohort(2, Ledger()))
    return {name: dict(values) for name, values in metrics.items()}


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "polyfed.engines.packed")
    caplog.set_level(logging.INFO, "polyfed.federation.packing")


def assert_same(one: Session, other: Session, tolerance: float = 1e-5) -> None:
    expected, found = kept(one), kept(other)
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].keys() == expected[name].keys(), name
        for key, value in expected[name].items():
            assert torch.allclose(found[name][key], value, atol=tolerance, rtol=1e-4), f"{name} {key}"


RESNET = {
    "name": "resnet",
    "widths": [4],
    "depths": [1],
    "block": "basic",
    "view": pixels() | {"augment": {"flip": True}},
}


@pytest.mark.parametrize(
    "form",
    [
        {"optimizer": "sgd", "momentum": 0.0, "local_steps": 5},
        {"optimizer": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"optimizer": "adam", "weight_decay": 0.01, "clip": 0.5},
        {"optimizer": "adamw", "weight_decay": 0.1},
        {"optimizer": "adamp", "weight_decay": 0.1, "clip": 0.5},
        {"optimizer": "sgd", "encoder": RESNET, "local_steps": 1},
        {"algorithm": "fedavg"},
        {"algorithm": "fedprox", "mu": 0.1, "optimizer": "sgd"},
        {"algorithm": "fedprox", "mu": 0.1, "norm": "plain", "optimizer": "sgd"},
        {"algorithm": "scaffold", "optimizer": "sgd"},
        {"algorithm": "moon", "optimizer": "sgd", "projection": 4},
        {"algorithm": "fedproto", "optimizer": "sgd"},
    ],
    ids=lambda form: "-".join(str(value) for value in form.values() if isinstance(value, str)),
)  # fmt: skip
def test_packed_equals_the_loop(form: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights, and kept momenta and counters, of clients with dropout, damaged texts, batch norm and short batches."""
    loop = played(crowd(**form), tmp_path / "loop", None)
    stacked = played(crowd(**form), tmp_path / "stacked", 8)
    assert_same(loop, stacked)
    steps = taken(caplog)
    assert steps["together"] > 3 * steps["alone"], steps  # those alone are of who has more batches than others
    for client, metrics in assessed(loop).items():
        assert assessed(stacked)[client] == pytest.approx(metrics, abs=1e-4)


@pytest.mark.parametrize("method", [Halting, Mislabelled])
def test_a_failing_client_fails_alone(method: type[LocalOnly], tmp_path: Path) -> None:
    """In its own code, or in the loss of all: the others end as if nothing had happened, and so does its state."""
    config = crowd(algorithm=named(method), sizes=(16, 16, 16))
    loop, stacked = (played(config, tmp_path / str(pack), pack) for pack in (None, 8))
    assert sorted(kept(stacked)) == ["c0", "c2"]
    assert_same(loop, stacked)
    assert stacked.cohorts.away == loop.cohorts.away == {"c1"}


def test_lateness_is_judged_client_by_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = prepared(crowd(algorithm=named(Slow), sizes=(16, 16, 16)), tmp_path / "run")
    session.attach(LocalEngine(site_of(session), pack=3))
    requests = session.cohort(1, Ledger())._requests(
        "fit", 0, dict.fromkeys(("c0", "c1", "c2"), (Payload({}), Payload({})))
    )
    monkeypatch.setattr(packed.time, "monotonic", lambda: Slow.now[0])
    answers = session.engine.exchange(requests, 1.0)
    assert [(answer.client, answer.error) for answer in answers if answer.error] == [("c1", "no answer within 1 s")]


def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    config = crowd(sizes=(17, 16, 9))
    config["run"] |= {"rounds": 3, "engine": {"name": "local", "pack": 2}}
    whole = run_experiment(Experiment.parse(config), tmp_path / "whole")
    assert contents(resume_run(cut_short(config, tmp_path / "cut"))) == contents(whole)


GRU = {"name": "gru", "width": 6, "hidden": 6, "view": words(12, 60)}


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"algorithm": named(Drawing)}, "the method's regulariser is not a module"),
        ({"encoder": GRU}, "vmap"),
    ],
)  # fmt: skip
def test_what_cannot_be_stacked_is_told_and_trains_in_the_loop(
    form: Config, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop, stacked = (played(crowd(sizes=(16, 16), **form), tmp_path / str(pack), pack) for pack in (None, 8))
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert "train one after the other: " in told[0]
    assert reason in told[0]
    assert_same(loop, stacked, tolerance=0.0)
    assert not taken(caplog)["together"]


def test_auto_does_not_try_large_models(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "LARGEST", 100)
    played(crowd(sizes=(16, 16)), tmp_path / "run", "auto")
    assert "it trains 950 weights" in caplog.text
    assert not taken(caplog)["together"]


@pytest.mark.parametrize(("together", "wins"), [(0.5, True), (1.5, False)])
def test_auto_compares_times(together: float, wins: bool) -> None:
    kind = Kind((), "bags", alone=[3.0, 1.0, 2.0], together=[9.0, together, 7.0])
    assert (kind.loss_of_time == "") == wins


@pytest.mark.parametrize(
    ("gain", "counts"), [(float("inf"), {"together": 28, "alone": 4}), (0.0, {"together": 9, "alone": 4 + 3})]
)
def test_auto_times_all_steps_of_a_client_by_itself_before_it_stacks_others(
    gain: float,
    counts: dict[str, int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "_GAIN", gain)
    loop, stacked = (played(crowd(sizes=(16, 16, 16, 16)), tmp_path / str(pack), pack) for pack in (None, "auto"))
    assert_same(loop, stacked)
    assert taken(caplog) == counts


def test_clients_of_two_kinds_are_stacked_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = crowd(sizes=(16, 16, 16, 16))
    for name in ("c1", "c3"):
        config["clients"][name]["training"] = training("sgd", 0.1, 8)
    loop, stacked = (played(config, tmp_path / str(pack), pack) for pack in (None, 8))
    assert_same(loop, stacked)
    assert taken(caplog) == {"together": 32, "alone": 0}


@pytest.mark.parametrize("value", [1, 0, -3, "some", 2.5])
def test_only_numbers_of_several_clients_and_auto_can_be_packed(value: object) -> None:
    config = crowd()
    config["run"]["engine"] = {"name": "local", "pack": value}
    with pytest.raises(ConfigError, match=r"run\.engine\.pack"):
        Experiment.parse(config)


@pytest.mark.parametrize("value", [None, False, "off"])
def test_off_is_the_loop(value: object) -> None:
    config = crowd()
    config["run"]["engine"] = {"name": "local", "pack": value}
    assert Experiment.parse(config).run.engine.pack is None  # type: ignore[attr-defined]
