"""MFCPL: two rounds by hand, complete prototypes, what is refused, what crosses."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from gap_rounds import embedded, mean_of_present, with_gaps
from torch import Tensor
from torch.nn import functional as F

import polyfed
from by_hand import assert_mean, copies, model_of, plain_training
from polyfed.aggregation.prototypes import ClassMeans
from polyfed.algorithms.mfcpl import global_prototypes
from polyfed.data.samples import Batch
from polyfed.models.model import Model
from polyfed.runs.experiment import Experiment
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from sessions import prepared, woken

SETTINGS: dict[str, Any] = {"regularisation": 0.4, "contrast": 0.3, "alignment": 0.2, "tau": 0.25}
Known = dict[int, Tensor]


def extra(model: Model, batch: Batch, known: Known) -> Tensor:
    """The three terms, sample by sample."""
    z, loss, labels = embedded(model, batch), torch.zeros(()), batch.targets["label"].tolist()
    pairs = [(a, b) for a, b in combinations(z, 2) if len(z[a].keys() & z[b].keys()) > 1]
    for a, b in pairs:
        both = [k for k in z[a] if k in z[b]]
        for k in both:
            gap = F.normalize(z[a][k], dim=0) - F.normalize(z[b][k], dim=0)
            loss = loss + 0.2 * gap.square().sum() / len(both) / len(pairs)
    seen = [k for k in range(len(batch)) if labels[k] in known]
    for k in seen:
        gap = F.normalize(mean_of_present(z, k), dim=0) - known[labels[k]]
        loss = loss + 0.4 * gap.square().sum() / len(seen)
    for own in z.values() if known else ():
        told = [k for k in own if labels[k] in known]
        for k in told:
            scores = {c: F.cosine_similarity(own[k], row, dim=0) / 0.25 for c, row in known.items()}
            chance = scores[labels[k]].exp() / torch.stack(list(scores.values())).exp().sum()
            loss = loss - 0.3 * chance.log() / len(told) / len(z)
    return loss


def complete_means(session: Session, name: str, weights: dict[str, Tensor]) -> Known:
    """Means of unit features by class, of the samples that have all."""
    model, client = model_of(session, name, weights).eval(), woken(session, name)
    rows: dict[int, list[Tensor]] = {}
    batch = client.train.batch(torch.arange(len(client.train)))
    z = embedded(model, batch)
    for k in z["image"].keys() & z["text"].keys():
        rows.setdefault(int(batch.targets["label"][k]), []).append(F.normalize(mean_of_present(z, k), dim=0).detach())
    return {label: torch.stack(own).mean(0) for label, own in rows.items()}


def test_two_rounds_equal_plain_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = prepared(with_gaps("mfcpl", **SETTINGS), tmp_path)
    server, known = session.server, Known()
    for number in (1, 2):
        server.begin(number)
        start = copies(server.weights)
        session.experiment.algorithm.round(server, session.cohort(number, Ledger()))
        if number == 2:  # ``plain_training`` draws the batches of round 1
            monkeypatch.setattr("by_hand.woken", lambda session, name: woken(session, name, (2, 0)))
        sent = list[Known]()
        for kind, members in server.types.items():
            trained = {}
            for info in members.clients:
                trained[info.id] = plain_training(
                    session, info.id, start[kind], extra=lambda model, batch, now=known: extra(model, batch, now)
                )
                if len(info.modalities) > 1:
                    sent.append(complete_means(session, info.id, trained[info.id]))
            assert_mean(server.weights[kind], trained, {info.id: server.weight(info) for info in members.clients})
        new = {
            label: torch.stack([own[label] for own in sent if label in own]).mean(0)
            for label in sorted({label for own in sent for label in own})
        }
        known = dict(sorted((known | new).items()))
        (found,) = global_prototypes(server).values()
        assert found.present.nonzero().flatten().tolist() == list(known)
        torch.testing.assert_close(found.means, torch.stack(list(known.values())), rtol=0, atol=1e-5)


def test_prototypes_go_to_all_of_the_class_space_and_come_from_those_with_several_modalities(tmp_path: Path) -> None:
    session, ledger = prepared(with_gaps("mfcpl"), tmp_path), Ledger()
    for number in (1, 2):
        session.server.begin(number)
        session.experiment.algorithm.round(session.server, session.cohort(number, ledger))
    (known,) = global_prototypes(session.server).values()
    size = known.means.nbytes + known.present.nbytes
    sent = [line for line in ledger.records if line["kind"] == "prototypes"]
    down = {(line["client"], line["round"]): line["bytes"] for line in sent if line["direction"] == "down"}
    assert {key: value for key, value in down.items() if value} == {
        (info.id, 2): size for info in session.server.clients
    }
    up = {line["client"] for line in sent if line["direction"] == "up" and line["bytes"]}
    assert up == {"paired-0", "paired-1"}


def test_a_mean_of_unit_vectors_counts_as_no_longer_than_they() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    means = ClassMeans(rows, torch.ones(2, dtype=torch.int32), torch.tensor([True, True]))
    torch.testing.assert_close(means.clipped().means, torch.tensor([[0.6, 0.8], [0.3, 0.4]]))


def test_rounding_on_the_wire_excludes_nobody(tmp_path: Path) -> None:
    config = with_gaps("mfcpl")
    config["run"] = config["run"] | {"rounds": 3, "exchange": {"transport": {"representations": "int8"}}}
    result = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
    assert not result.records.excluded()
