"""FedProto: rounds by hand, class spaces, inference, errors, resuming, learning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyfed
from by_hand import descend
from polyfed.aggregation.prototypes import GlobalPrototypes, by_space
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import isolated
from polyfed.federation import types
from polyfed.models.model import CachedModel
from polyfed.runs.experiment import Experiment
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from prototype_sessions import NAMES, SPACE, began, global_of, play
from sessions import Excluded, first_cohort, prepared, woken
from small_federations import Config, classifiers, with_retrieval

Means = dict[int, tuple[list[float], int]]


# ---- by hand


class ByHand:
    """A client in plain loops; remembers its model."""

    def __init__(self, session: Session, name: str) -> None:
        self.session, self.name = session, name
        self.settings = session.experiment.algorithm
        self.model = session.federation.client_model(session.federation.members[name])

    def fit(self, number: int, prototypes: Mapping[int, list[float]]) -> Means:
        member = self.session.federation.members[self.name]
        model, client = self.model.train(), woken(self.session, self.name, (number, 0))
        with isolated(0, number, self.name, "fit", 0):
            for batch in client.batches(client.train, "task-0"):
                once = CachedModel(model)
                loss = member.settings.task.loss(once, model.heads[member.head], batch)
                (modality,) = batch.inputs
                features, labels = once.embed(modality, batch.inputs[modality]), batch.targets["label"].tolist()
                if self.settings.normalise:
                    features = features / features.norm(dim=1, keepdim=True)
                pairs = zip(features, labels, strict=True)
                found = [self.distance(own, prototypes[label]) for own, label in pairs if label in prototypes]
                if found:
                    loss = loss + self.settings.proto_weight * sum(found) / len(found)
                descend(model, loss, 0.05)
        return self.means()

    def distance(self, own: Tensor, to: list[float]) -> Tensor:
        square = (own - torch.tensor(to)).square()
        return square.sum().sqrt() if self.settings.distance == "l2" else square.mean()

    @torch.no_grad()
    def means(self) -> Means:
        self.model.eval()
        samples = self.session.federation.train(self.session.federation.members[self.name])
        found: dict[int, list[Tensor]] = {}
        for k in range(len(samples)):
            batch = samples.batch(torch.tensor([k]))
            (modality,) = batch.inputs
            feature = self.model.embed(modality, batch.inputs[modality])[0].double()
            if self.settings.normalise:
                feature = feature / feature.norm()
            found.setdefault(int(batch.targets["label"]), []).append(feature)
        return {label: ((sum(rows) / len(rows)).tolist(), len(rows)) for label, rows in found.items()}


def averaged(sent: list[Means], weighting: str) -> dict[int, list[float]]:
    found = {}
    for label in {label for one in sent for label in one}:
        rows = [one[label] for one in sent if label in one]
        shares = [count if weighting == "count" else 1 for _, count in rows]
        mean = sum(share * torch.tensor(row, dtype=torch.float64) for share, (row, _) in zip(shares, rows, strict=True))
        found[label] = (mean / sum(shares)).tolist()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"distance": "mse", "proto_weight": 10.0, "weighting": "uniform"},
        {"normalise": True},
    ],
)
def test_rounds_equal_plain_loops(tmp_path: Path, options: Config) -> None:
    session = prepared(classifiers(largest_norm=None, **options), tmp_path)
    clients, prototypes = [ByHand(session, name) for name in NAMES], {}
    for number in (1, 2, 3):
        play(session, number)
        sent = [client.fit(number, prototypes) for client in clients]
        assert len({frozenset(one) for one in sent}) > 1  # they have different classes
        prototypes = averaged(sent, options.get("weighting", "count"))
        found = global_of(session)
        assert found.keys() == prototypes.keys()
        for label, mean in prototypes.items():
            assert found[label] == pytest.approx(mean, abs=1e-5 if number == 3 else 1e-6)
    for client in clients:
        kept = woken(session, client.name, (4, 0), after=(3, 0)).model.state_dict()
        for name, value in client.model.state_dict().items():
            assert torch.allclose(kept[name].float(), value.float(), atol=1e-5), name


def test_without_the_distance_clients_train_as_alone(tmp_path: Path) -> None:
    config = classifiers(proto_weight=0.0)
    ours, alone = (
        began(config | {"algorithm": algorithm}, tmp_path / algorithm["name"], 2)
        for algorithm in (config["algorithm"], {"name": "local", "local_epochs": 1})
    )
    for name in NAMES:
        a, b = (woken(session, name, (3, 0), after=(2, 0)).model.state_dict() for session in (ours, alone))
        assert all(torch.equal(value, b[key]) for key, value in a.items())


def test_encoders_run_once_a_batch(tmp_path: Path) -> None:
    session = began(classifiers(), tmp_path)
    client = woken(session, "text-0", (2, 0), after=(1, 0))
    known, modes = session.experiment.algorithm.prototypes_for(session.server, client.info), []
    client.model.encoders["text"].register_forward_hook(lambda module, *_: modes.append(module.training))
    session.experiment.algorithm.fit(client, known)
    client.model.encoders["text"]._forward_hooks.clear()
    batches = -(-len(client.train) // 12)
    assert modes == [True] * batches + [False]  # training, and one large batch for the means


# ---- class spaces


def test_clients_without_classes_train_alone_and_send_nothing(tmp_path: Path) -> None:
    config, ledger = with_retrieval(classifiers()), Ledger()
    session = prepared(config, tmp_path / "a")
    play(session, 1, ledger)
    play(session, 2, ledger)
    alone = began(config | {"algorithm": {"name": "local", "local_epochs": 1}}, tmp_path / "b", 2)
    a, b = (woken(one, "paired", (3, 0), after=(2, 0)).model.state_dict() for one in (session, alone))
    assert all(torch.equal(value, b[key]) for key, value in a.items())
    sizes = [line["bytes"] for line in ledger.records if line["client"] == "paired" and line["kind"] == "prototypes"]
    assert sizes == [0, 0, 0, 0]
    metrics = session.experiment.algorithm.evaluate_clients(session.server, session.cohort(3, Ledger()))
    assert "prototype_accuracy" not in metrics["paired"]
    assert metrics["paired"]["r1_sum"] >= 0


def two_sources(**algorithm: Any) -> Config:
    """Pictures and texts of two sources that call their classes alike."""
    config = classifiers(**algorithm)
    for name in ("image", "text"):
        config["data"]["sources"][name] = config["data"]["sources"]["scenes"] | {"columns": {name: name}}
        config["clients"][name]["source"] = name
    del config["data"]["sources"]["scenes"]
    return config


def test_prototypes_mix_within_a_class_space_only(tmp_path: Path) -> None:
    config = two_sources()
    config["clients"]["text"]["type"] = "notes"
    apart = began(config, tmp_path / "a")
    spaces = by_space(apart.server.state["prototypes"], GlobalPrototypes)
    assert list(spaces) == [SPACE, f"{SPACE}:notes"]
    infos = {info.id: info for info in apart.server.clients}
    for name in NAMES:
        sent = apart.experiment.algorithm.prototypes_for(apart.server, infos[name])
        assert list(by_space(sent, GlobalPrototypes)) == [SPACE if name == "image" else f"{SPACE}:notes"]
    alike = began(two_sources(), tmp_path / "b")
    assert list(by_space(alike.server.state["prototypes"], GlobalPrototypes)) == [SPACE]
    config["algorithm"]["shared"] = {"image": "things", "text": "things"}
    together = began(config, tmp_path / "c")
    assert list(by_space(together.server.state["prototypes"], GlobalPrototypes)) == ["things"]


def test_targets_of_one_source_are_spaces_of_their_own(tmp_path: Path) -> None:
    config = classifiers()
    config["data"]["sources"]["scenes"]["targets"] = {"label": "label", "topic": "topic"}
    config["clients"]["text"]["task"] = {"name": "classification", "target": "topic"}
    session = began(config, tmp_path, 2)
    spaces = by_space(session.server.state["prototypes"], GlobalPrototypes)
    assert list(spaces) == [SPACE, "topic:6x453400fc"]
    assert spaces["topic:6x453400fc"].shape[0] == 6
    metrics = session.experiment.algorithm.evaluate_clients(session.server, session.cohort(3, Ledger()))
    assert metrics["text-0"]["prototype_classes"] <= 6


def test_widths_and_classes_must_agree_within_a_space(tmp_path: Path) -> None:
    config = classifiers()
    config["clients"]["text"]["model"]["dim"] = 6
    session, excluded = prepared(config, tmp_path), Excluded()
    reasons = excluded.reasons
    for number in (1, 2):
        cohort = session.cohort(number, Ledger())
        cohort.listener = excluded
        session.server.begin(number)
        session.experiment.algorithm.round(session.server, cohort)
        assert reasons.keys() == {"text-0", "text-1"}
        assert "of width 6" in reasons["text-0"]
        assert "set task.classes and model.dim alike" in reasons["text-0"]
        reasons.clear()


@pytest.mark.parametrize(("source", "space"), [("a b", "label:a b"), ("a/b", "label:a/b"), ("a:b", "label:a%3Ab")])
def test_any_name_of_a_source_will_do(tmp_path: Path, source: str, space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = classifiers()
    config["data"]["sources"] = {source: config["data"]["sources"]["scenes"]}
    for client in config["clients"].values():
        client["source"] = source
    monkeypatch.setattr(types, "type_classes", lambda target, split: split.source)  # as if classes had no names
    session = began(config, tmp_path, 2)
    assert list(by_space(session.server.state["prototypes"], GlobalPrototypes)) == [space]
    groups = session.server.snapshot()
    assert by_space(groups["state:prototypes"], GlobalPrototypes)[space].shape[1] == 8


# ---- inference


@pytest.mark.parametrize("inference", ["prototypes", "classifier"])
def test_accuracies_are_those_of_plain_loops(tmp_path: Path, inference: str) -> None:
    session = began(classifiers(inference=inference), tmp_path, 2)
    metrics = session.experiment.algorithm.evaluate_clients(session.server, session.cohort(3, Ledger()))
    prototypes = global_of(session)
    for name in NAMES:
        client = woken(session, name, (3, 0), after=(2, 0))
        model = client.model.eval()
        near, right = 0, 0
        for k in range(len(client.test)):
            batch = client.test.batch(torch.tensor([k]))
            (modality,) = batch.inputs
            with torch.no_grad():
                feature = model.embed(modality, batch.inputs[modality])
                logits = client.head(feature)[0].tolist()
            gaps = {label: math.dist(feature[0].tolist(), mean) for label, mean in prototypes.items()}
            near += min(gaps, key=gaps.__getitem__) == int(batch.targets["label"])
            right += logits.index(max(logits)) == int(batch.targets["label"])
        found = metrics[name]
        assert found["prototype_accuracy"] == pytest.approx(100 * near / len(client.test))
        assert found["classifier_accuracy"] == pytest.approx(100 * right / len(client.test))
        chosen = "prototype_accuracy" if inference == "prototypes" else "classifier_accuracy"
        assert found["accuracy"] == found[chosen]
        assert found["prototype_classes"] == len(prototypes)


def test_without_prototypes_nothing_is_recognised_by_them(tmp_path: Path) -> None:
    session = prepared(classifiers(), tmp_path)
    metrics = session.experiment.algorithm.evaluate_clients(session.server, first_cohort(session))
    for found in metrics.values():
        assert found["prototype_accuracy"] == found["accuracy"] == found["balanced_accuracy"] == 0
        assert found["prototype_classes"] == 0


def test_who_took_no_part_is_judged_by_the_new_prototypes(tmp_path: Path) -> None:
    config = classifiers()
    config["run"] |= {"sampling": {"cohort": 1}}
    result = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
    assert len(result.records.series("image", "prototype_classes", "test")) == 3


# ---- errors


def test_a_federation_without_classes_is_no_prototype_federation(tmp_path: Path) -> None:
    config = with_retrieval(classifiers())
    config["clients"] = {"paired": config["clients"]["paired"]}
    with pytest.raises(ConfigError, match="give some the task 'classification'"):
        prepared(config, tmp_path)


def test_clients_with_too_few_of_every_class_are_named(tmp_path: Path) -> None:
    session = prepared(classifiers(min_count=1000), tmp_path)
    with pytest.raises(ConfigError, match=r"algorithm.min_count \(1000\)"):
        play(session, 1)


# ---- whole runs
