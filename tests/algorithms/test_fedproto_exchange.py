"""What crosses in FedProto, and which replies are bounded or refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyfed
from polyfed.aggregation.prototypes import ClassMeans, by_space, prototype_tensors
from polyfed.algorithms.algorithm import Reply, client_step
from polyfed.algorithms.fedproto import FedProto
from polyfed.algorithms.shared.class_prototypes import PrototypeCheck
from polyfed.core.errors import PayloadError
from polyfed.federation.client import Client
from polyfed.runs.experiment import Experiment
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from polyfed.wire.payload import Prototypes
from prototype_sessions import NAMES, SPACE, began, global_of, known_of
from sessions import Excluded, first_cohort, prepared, round_records
from small_federations import classifiers, with_retrieval

# ---- what crosses


def test_the_ledger_has_the_bytes_of_the_prototypes(tmp_path: Path) -> None:
    result = polyfed.run(Experiment.parse(with_retrieval(classifiers(min_count=2))), tmp_path / "run", quiet=True)
    session = prepared(classifiers(), tmp_path / "sizes")
    labels = {name: session.federation.train(session.federation.members[name]).targets["label"] for name in NAMES}
    classes = known_of(began(classifiers(), tmp_path / "one")).shape[0]
    owned = {name: int((torch.bincount(own, minlength=classes) >= 2).sum()) for name, own in labels.items()}
    everybody = torch.stack([torch.bincount(own, minlength=classes) >= 2 for own in labels.values()]).any(0)
    for line in result.records.transfers:
        if line.kind == "framing":
            continue
        down = int(everybody.sum()) * 8 * 4 + classes if line.round > 1 or line.step.startswith("evaluate") else 0
        up = 0 if line.client == "paired" else owned[line.client] * (8 * 4 + 4) + classes
        assert line.kind == "prototypes"
        assert line.bytes == ((0 if line.client == "paired" else down) if line.direction == "down" else up), line
    assert {line.client for line in result.records.transfers} == {*NAMES, "paired"}
    assert owned["image"] < classes


def test_a_class_that_nobody_sent_keeps_its_prototype(tmp_path: Path) -> None:
    session = began(classifiers(), tmp_path)
    before = global_of(session)
    session.server.begin(2)
    cohort = session.cohort(2, Ledger())
    cohort.clients = cohort.clients[:1]
    session.experiment.algorithm.round(session.server, cohort)
    own = set(session.federation.train(session.federation.members["image"]).targets["label"].tolist())
    after = global_of(session)
    assert after.keys() == before.keys() != own
    for label, mean in after.items():
        assert (mean == before[label]) == (label not in own)


def test_the_order_of_clients_does_not_matter(tmp_path: Path) -> None:
    config = classifiers()
    turned = config | {"clients": dict(reversed(config["clients"].items()))}
    a, b = (global_of(began(one, tmp_path / name, 2)) for name, one in (("a", config), ("b", turned)))
    assert a.keys() == b.keys()
    for label, mean in a.items():
        assert b[label] == pytest.approx(mean, abs=1e-5)


# ---- what is bounded and refused


class Lies(FedProto):
    """One client sends other prototypes than it has."""

    how: str

    @client_step(prototypes=Prototypes)
    def fit(self, client: Client, prototypes: Prototypes) -> Reply:
        reply = super().fit(client, prototypes)
        if client.name != "text-1":
            return reply
        own = by_space(reply.prototypes, ClassMeans)[SPACE]
        return Reply(prototypes=Prototypes(LIES[self.how](own)))


def _counts(own: ClassMeans, add: int) -> dict[str, Tensor]:
    return prototype_tensors(SPACE, own._replace(counts=own.counts + add))


LIES: dict[str, Any] = {
    "nan": lambda own: prototype_tensors(SPACE, own._replace(means=own.means * math.nan)),
    "huge": lambda own: prototype_tensors(SPACE, own._replace(means=own.means * 1e9)),
    "many": lambda own: _counts(own, 100),
    "none": lambda own: _counts(own, -100),
    "float counts": lambda own: prototype_tensors(SPACE, own._replace(counts=own.counts.float())),
    "short": lambda own: prototype_tensors(SPACE, own._replace(means=own.means[:-1])),
    "flags": lambda own: prototype_tensors(SPACE, own._replace(present=~own.present)),
    "wide": lambda own: prototype_tensors(SPACE, own._replace(means=torch.cat([own.means, own.means], 1))),
    "other": lambda own: prototype_tensors("label:18x00000000", own),
    "two": lambda own: prototype_tensors(SPACE, own) | prototype_tensors("topic:6x453400fc", own),
    "empty": lambda own: prototype_tensors(
        SPACE, ClassMeans(own.means[:0], own.counts[:0], torch.zeros_like(own.present))
    ),
    "part": lambda own: {f"{SPACE}.means": own.means},
}


def lying(folder: Path, how: str, **algorithm: Any) -> tuple[Session, dict[str, str]]:
    config = classifiers(**algorithm)
    config["algorithm"] |= {"name": f"{Lies.__module__}.Lies", "how": how}
    session, excluded = prepared(config, folder), Excluded()
    cohort = first_cohort(session)
    cohort.listener = excluded
    session.experiment.algorithm.round(session.server, cohort)
    return session, excluded.reasons


@pytest.mark.parametrize("how", LIES)
def test_what_cannot_be_is_left_out(tmp_path: Path, how: str) -> None:
    session, reasons = lying(tmp_path / "a", how)
    assert reasons.keys() == {"text-1"}
    honest = prepared(classifiers(), tmp_path / "b")
    cohort = first_cohort(honest)
    cohort.clients = cohort.clients[:2]
    honest.experiment.algorithm.round(honest.server, cohort)
    assert torch.equal(known_of(session).means, known_of(honest).means)


def test_long_rows_are_bounded_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIES, "long", lambda own: prototype_tensors(SPACE, own._replace(means=own.means * 1000)))
    session, reasons = lying(tmp_path / "a", "long")
    assert not reasons
    honest = known_of(began(classifiers(), tmp_path / "b"))
    (record,) = round_records(session)
    assert 0 < record["metrics"]["bounded"] <= len(honest.means)
    assert record["metrics"]["prototypes"] == len(honest.means)
    longest = float(honest.means.norm(dim=1).max())
    assert float(known_of(session).means.norm(dim=1).max()) < 10 * longest
    free, _ = lying(tmp_path / "c", "long", largest_norm=None)
    assert float(known_of(free).means.norm(dim=1).max()) > 50 * longest


def test_a_reply_is_checked_against_what_the_space_is(tmp_path: Path) -> None:
    session = began(classifiers(), tmp_path)
    method, known = session.experiment.algorithm, known_of(session)
    assert isinstance(method, FedProto)
    info = session.server.clients[0]
    fewer = ClassMeans(torch.ones(1, 8), torch.ones(1, dtype=torch.int32), torch.tensor([True, False]))
    reply = Reply.received(Reply(prototypes=Prototypes(prototype_tensors(SPACE, fewer))).payload, info)
    with pytest.raises(PayloadError, match=f"have 2 classes of width 8, expected {known.shape[0]} of width 8"):
        PrototypeCheck(method.admits, session.server)(reply)
