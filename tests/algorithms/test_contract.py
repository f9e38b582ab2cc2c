"""Promises of every method: equal bits on a wire and after an interruption, its bytes, who may fail or be absent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

import polyfed
from by_hand import copies, play
from grids import mostly_slow
from misbehaving import contents, cut_short
from polyfed.algorithms.algorithm import Algorithm
from polyfed.engines.outgoing import SiteTerms
from polyfed.federation.client import ClientInfo
from polyfed.federation.state import Lifetime, unflatten
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from polyfed.runs.session import Session
from polyfed.wire.framing import tensor_bytes, wire_size
from polyfed.wire.ledger import Ledger
from polyfed.wire.messages import Answer, Cause, Request
from sessions import prepared, round_records, site_of, watched
from small_federations import ADAPTED, METHODS, NAMED, Config, federation_for

FORMS: dict[str, Config] = {method: {} for method in METHODS} | {
    "change_distillation:few": {"public": {"samples": 10}, "targets": "absolute"},
    "creamfl:few": {"public": {"samples": 10}},
    "creamfl:similarity": {"distiller": {"loss": "similarity"}, "task": {"order": "joint"}, "public": {"samples": 10}},
    "fedafd:few": {"public": {"samples": 10}, "fusion": {"broadcast_every": 2}},
    "fedet:few": {"public": {"samples": 10}},
    "fedgems:few": {"public": {"samples": 10}},
    "fedmd:procrustes": {"teacher": {"alignment": {"kind": "procrustes"}}},
    "fedmd:few": {"public": {"samples": 10}},
    "fedmkd:few": {"public": {"samples": 10}},
    "fedcola:adam": {"averaging": {"name": "fedcola", "server_optimizer": "adam"}},
}
"""Methods with their defaults, and forms of them that exchange or keep other things."""
FEWER = {"change_distillation:few", "creamfl:few", "fedet:few", "fedgems:few", "fedmkd:few"}
"""Slow: fewer public samples cross by the same code in all methods, which ``fedmd:few`` runs."""
ALIKE = {"fedprox", "margin_weighted", "creamfl:similarity", "fedcola:adam"}
ALIKE |= {*ADAPTED, *NAMED, "creamfl_averaged", "fed_mae", "fedema", "fediot", "moon", "centralised", "fedafd:few"}
ALIKE |= {"fedet", "fedgems", "fedmd", "fedmkd", "fedmd:procrustes", "server_only", "feddra"}
ALIKE |= {"local"}
"""Slow: they exchange and keep what ``fedavg``, ``fedmd:few``, ``creamfl``, ``fedcola``, ``fedaid`` do; another loss,
weight or optimizer of the server changes numbers alone, and ``test_server_optimizers`` restores each.
Those with adapters have ``test_low_rank_methods``, and ``local`` exchanges nothing."""


def method_of(form: str) -> type[Algorithm]:
    return Algorithm.named(form.split(":")[0])


def config_of(form: str) -> Config:
    config = federation_for(form.split(":")[0], **FORMS[form])
    config["run"] |= {"rounds": 2, "eval_every": 2}
    return config


@pytest.fixture(scope="module", params=mostly_slow(FORMS, *FORMS.keys() - FEWER - ALIKE))
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def finished(form: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two rounds that nothing happens to, with which all else is compared."""
    return polyfed.run(Experiment.parse(config_of(form)), tmp_path_factory.mktemp("finished") / "run", quiet=True)


def test_interrupted_and_resumed_on_a_real_wire_it_ends_in_the_same_bits(
    form: str, finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At an institution, which answers an ask for one request, and no weights but those of its clients' models."""
    monkeypatch.setattr("polyfed.engines.engine.SiteTerms", partial(SiteTerms, private=tmp_path / ".privacy"))
    config = config_of(form)
    config["run"] |= {"engine": {"name": "local", "serialize": True}}
    if method_of(form).asks_clients:
        assert contents(polyfed.resume(cut_short(config, tmp_path / "run"), quiet=True)) == contents(finished)
    else:
        assert contents(polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)) == contents(finished)


# ---- what crosses

ELSEWHERE = {"fedaid", "feddra"}
"""Methods whose bytes depend on the step, which their own tests check."""
Sizes = dict[str, list[int]]


@dataclass
class Parts:
    """Bytes of what may cross between the server and a client in a round."""

    session: Session
    form: str
    client: ClientInfo

    @property
    def model(self) -> int:
        return tensor_bytes(self.session.server.weights_for(self.client))

    @property
    def parameters(self) -> int:
        member = self.session.federation.members[self.client.id]
        return sum(value.nbytes for value in self.session.federation.client_model(member).parameters())

    @property
    def encoders(self) -> int:
        encoders = self.session.server.model.encoders
        return sum(tensor_bytes(encoders[name].state_dict()) for name in self.client.modalities)

    @property
    def matrices(self) -> int:
        """Bytes of the blocks of the type with the one other modality."""
        server, other = self.session.server, {"image": "text", "text": "image"}
        blocks = server.weights[other[self.client.group]] if self.is_single else {}
        return sum(value.nbytes for name, value in blocks.items() if ".blocks." in name and value.ndim == 2)

    @property
    def is_single(self) -> bool:
        return len(self.client.modalities) == 1

    def public(self, *modalities: str, once: bool = True) -> list[int]:
        """Bytes of representations of public samples in each round; of images only ``once`` for all their captions."""
        server, sizes = self.session.server, list[int]()
        for number in (1, 2):
            server.begin(number)
            items = server.exchanged(FORMS[self.form].get("public", {}).get("samples")).items.tolist()
            rows = sum(len(set(items)) if once and modality == "image" else len(items) for modality in modalities)
            sizes.append(rows * server.model.dim * 4)
        return sizes

    @property
    def own(self) -> list[int]:
        """Bytes of representations of the client's modalities."""
        return self.public(*self.client.modalities)

    def less(self, part: str, *, up_only: bool = False) -> Sizes:
        """Bytes of the model but for tensors of that name."""
        left = sum(v.nbytes for name, v in self.session.server.weights_for(self.client).items() if part in name)
        return {"down weights": [self.model - (0 if up_only else left)] * 2, "up weights": [self.model - left] * 2}

    def weights(self, down: int | None = None, up: int | None = None) -> Sizes:
        """Bytes of the model in both rounds, and what is added in the second way down and in each way up."""
        return {"down weights": [self.model, self.model + (down or 0)], "up weights": [self.model + (up or 0)] * 2}


def _told(parts: Parts, down: list[int]) -> Sizes:
    return {"down representations": down, "up representations": parts.own}


CROSSING: dict[str, Callable[[Parts], Sizes]] = {
    "centralised": lambda its: {"down weights": [its.model, 0], "up weights": [its.model] * 2},
    "change_distillation": lambda its: _told(its, its.public("image", "text")),
    "creamfl": lambda its: _told(its, its.public("image", "text")),
    "creamfl_averaged": lambda its: its.weights() | (_told(its, its.public("image", "text")) if its.is_single else {}),
    "fedafd": lambda its: _told(its, its.public("image", "text")) | {"down weights": [its.encoders] * 2},
    "fedafd:few": lambda its: _told(its, its.public("image", "text")) | {"down weights": [its.encoders, 0]},
    "fedcola": lambda its: {"down weights": [its.model + its.matrices] * 2, "up weights": [its.model] * 2},
    "fedex_lora": lambda its: its.less(".offset", up_only=True),
    "ffa_lora": lambda its: its.less(".lora_A."),
    "flora": lambda its: its.less(".offset", up_only=True),
    "fedet": lambda its: its.weights() | _told(its, [0, 0]),
    "fedgems": lambda its: _told(its, its.own),
    "fedmd": lambda its: _told(its, its.public(*its.client.modalities, once=False)),
    "fedmkd": lambda its: _told(its, [0, 0]),
    "local": lambda its: {},
    "margin_weighted": lambda its: _told(its, its.public(*its.client.modalities, once=False)),
    "scaffold": lambda its: its.weights(down=its.parameters, up=its.parameters),
    "server_only": lambda its: {},
}
"""Bytes of tensors in rounds 1 and 2, by direction and kind; others do not cross. Without an entry: the model."""


def test_the_ledger_has_the_bytes_of_the_method(form: str, finished: Run, tmp_path: Path) -> None:
    if form in ELSEWHERE:
        pytest.skip("has a test of its own")
    session = prepared(config_of(form), tmp_path)
    expected = CROSSING.get(form) or CROSSING.get(form.split(":")[0], Parts.weights)
    for client in session.server.clients:
        crossed: dict[str, list[int]] = {}
        for line in finished.records.transfers:
            if line.client == client.id and line.kind != "framing" and not line.step.startswith("evaluate"):
                crossed.setdefault(f"{line.direction} {line.kind}", [0, 0])[line.round - 1] += line.bytes
        assert {key: sizes for key, sizes in crossed.items() if any(sizes)} == {
            key: sizes for key, sizes in expected(Parts(session, form, client)).items() if any(sizes)
        }, client.id


# ---- who fails, who is absent, what is kept


def test_a_client_whose_replies_are_lost_is_left_out_and_returns(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first round one client trains in vain; the second is as if it had not been there."""
    method = method_of(form)
    if not method.asks_clients:
        pytest.skip("asks no client")
    session = prepared(config_of(form), tmp_path)
    lost, sizes = session.server.clients[0].id, Counter[tuple[str, str]]()

    def lose(request: Request, answer: Answer) -> Answer:
        if (request.client, request.round) == (lost, 1):
            answer = Answer.failed(lost, Cause.LOST, "the line broke")
        sizes[request.client, "down"] += wire_size(request.payload)
        sizes[request.client, "up"] += wire_size(answer.payload) if answer.payload else 0
        return answer

    watched(session, monkeypatch, lose)
    ledger = Ledger()
    for number, events in ((1, [(lost, "client_excluded")]), (2, [(lost, "client_returned")])):
        session.server.begin(number)
        session.experiment.algorithm.round(session.server, session.cohort(number, ledger))
        notes = [(record["participant"], record.get("event")) for record in round_records(session)]
        assert [one for one in notes if one[1] in ("client_excluded", "client_returned")] == events
        assert (lost in session.cohorts.accepted) == (number == 2)
        values = [value for record in round_records(session) for value in record.get("metrics", {}).values()]
        assert torch.isfinite(torch.tensor(values)).all()
    assert all(bool(value.isfinite().all()) for group in session.server.snapshot().values() for value in group.values())
    for (client, direction), size in sizes.items():
        lines = [line for line in ledger.records if (line["client"], line["direction"]) == (client, direction)]
        assert sum(line["bytes"] for line in lines) == size

    lasting = {key for key, lifetime in method.keeps.items() if lifetime is Lifetime.RUN}
    for client, version in session.cohorts.accepted.items() if lasting else ():
        kept = unflatten(site_of(session).store.load(client, version))
        assert kept
        assert {key.split(":")[0] for key in kept} <= set(method.keeps)


def test_rounds_of_one_client(form: str, tmp_path: Path) -> None:
    """Most types and modalities are absent from most rounds."""
    config = config_of(form)
    config["run"] |= {"sampling": {"kind": "uniform", "cohort": 1}}
    session = prepared(config, tmp_path)
    for number in range(1, 4):
        play(session, number, number)
        assert not [record for record in round_records(session) if record["kind"] == "event"]
    assert len(session.cohorts.accepted) > 1 or not method_of(form).asks_clients


# ---- kin of FedAvg

OFF: dict[str, Config] = {"fedema": {"byol": None, "blending": None}, "fedprox": {"mu": 0.0}, "moon": {"mu": 0.0}}


@pytest.mark.slow
@pytest.mark.parametrize("method", OFF)
def test_without_what_it_adds_a_method_is_fedavg(tmp_path: Path, method: str) -> None:
    weights = {}
    for name, settings in ((method, OFF[method]), ("fedavg", {})):
        config = federation_for("fedavg") | {"algorithm": {"name": name, "local_epochs": 1} | settings}
        session = prepared(config, tmp_path / name)
        start = copies(session.server.weights)
        play(session, 1, 2)
        weights[name] = session.server.weights
        for type_name, model in start.items():
            assert not [key for key in model if key.startswith("extras.")], type_name
    for type_name, model in weights["fedavg"].items():
        assert all(torch.equal(value, weights[method][type_name][key]) for key, value in model.items()), type_name
