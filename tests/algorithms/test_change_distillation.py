"""Change distillation: targets by hand, what cancels, who counts, loud rows, refusals, and that a server gains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import polyfed
from by_hand import play, unit, weights_of
from fixed_features import frozen_bag, latent, linear, projection
from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.core.errors import ConfigError, StepError
from polyfed.federation.participant import Participant
from polyfed.runs.experiment import Experiment
from polyfed.runs.session import Session
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, Representations
from sessions import first_cohort, metrics, prepared, round_records, site_of, watched, woken
from small_federations import Config

Rows = dict[str, Tensor]
Replies = dict[str, Rows]
CLIENTS = ("paired-0", "paired-1", "text")


def session_of(folder: Path, config: Config | None = None, **settings: Any) -> Session:
    return prepared(config or linear(**settings), folder)


def targets_of(session: Session) -> Rows:
    """The server's targets from the first round's replies."""
    actual = session.experiment.algorithm.changed(session.server, first_cohort(session))
    return {name: target.values for name, target in actual.items()}


def own(session: Session) -> Representations:
    return session.experiment.algorithm.public.server_outputs(session.server)


def answering(
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[str, Rows], Mapping[str, Tensor]] = lambda name, rows: rows,
) -> Replies:
    """Replies by client as ``change`` makes them of those that clients give; filled while the session goes on."""
    sent = Replies()

    def changed(request: Request, answer: Answer) -> Answer:
        assert answer.payload is not None, answer.failure
        rows = answer.payload.fields["representations"]
        sent[answer.client] = dict(change(answer.client, dict(rows)))
        known = {"representations": Representations(sent[answer.client], order=rows.order)}
        return Answer(answer.client, Payload(answer.payload.fields | known))

    watched(session, monkeypatch, changed)
    return sent


def per_sample(session: Session, rows: Rows) -> Rows:
    """Rows of all samples: captions of an image share its row."""
    samples = session.server.public_set
    return {name: values[torch.unique(samples.rows[name], return_inverse=True)[1]] for name, values in rows.items()}


# ---- the formula


def test_targets_are_the_servers_rows_and_eta_weighted_mean_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """normalise(S + eta sum_c n_c change_c / sum_c n_c), over the clients that have the modality, row by row."""
    config = linear(eta=1.5, teacher={"weights": {"name": "count"}})
    config["clients"]["paired"]["partition"] = {"name": "quantity", "min_size": 3}
    session = session_of(tmp_path, config)
    examples = {client.id: client.samples for client in session.server.clients}
    assert examples["paired-0"] != examples["paired-1"]
    invented = {name: 0.3 * unit(20, 8, seed=k) for k, name in enumerate(CLIENTS)}
    sent = answering(session, monkeypatch, lambda name, rows: {k: invented[name][: len(v)] for k, v in rows.items()})
    known, actual = own(session), targets_of(session)
    changes = {client: per_sample(session, rows) for client, rows in sent.items()}
    assert {name: list(rows) for name, rows in sent.items()}["text"] == ["text"]
    for modality, values in actual.items():
        for k, row in enumerate(known[modality].double()):
            senders = [name for name in CLIENTS if modality in changes[name]]
            total = sum(examples[name] for name in senders)
            mean = sum(examples[name] / total * changes[name][modality][k].double() for name in senders)
            ahead = row + 1.5 * mean
            torch.testing.assert_close(values[k].double(), ahead / ahead.norm(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("targets", ["change", "absolute"])
def test_a_change_cancels_the_bias_of_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: str) -> None:
    """Rows are S + b_c before and S + b_c + d_c after: absolute rows depend on b_c, changes do not."""
    session = session_of(tmp_path, only_paired(targets=targets))
    known, inner, calls = own(session), PublicExchange.outputs, list[str]()
    bias = {"paired-0": 0.4 * unit(1, 8, seed=1), "paired-1": 0.2 * unit(1, 8, seed=2)}
    drift = {"paired-0": 0.1 * unit(1, 8, seed=3), "paired-1": 0.3 * unit(1, 8, seed=4)}

    def outputs(public: PublicExchange, participant: Participant) -> Rows:
        if participant.name == "server":
            return inner(public, participant)
        calls.append(participant.name)
        after = targets == "absolute" or calls.count(participant.name) == 2
        shift = bias[participant.name] + after * drift[participant.name]
        return {name: rows + shift for name, rows in known.items()}

    monkeypatch.setattr(PublicExchange, "outputs", outputs)
    monkeypatch.setattr(Participant, "fit", lambda *given, **settings: 0)
    sent = answering(session, monkeypatch)
    for name, values in targets_of(session).items():
        if targets == "change":
            for client, rows in sent.items():
                torch.testing.assert_close(rows[name], drift[client].expand_as(rows[name]), atol=1e-6, rtol=0)
            ahead = known[name] + 2 * (drift["paired-0"] + drift["paired-1"]) / 2
        else:
            rows = [known[name] + bias[client] + drift[client] for client in bias]
            norms = [values_of.norm(dim=1, keepdim=True) for values_of in rows]
            ahead = sum(torch.where(norm > 1.01, row / norm, row) for row, norm in zip(rows, norms, strict=True))
        torch.testing.assert_close(values, F.normalize(ahead, dim=1), atol=1e-6, rtol=0)


def test_a_change_is_what_training_made_of_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients train alike in both forms; what they send differs by what they represented before."""
    replies: dict[str, Replies] = {}
    for targets in ("change", "absolute"):
        session = session_of(tmp_path / targets, targets=targets)
        with monkeypatch.context() as patch:
            replies[targets] = answering(session, patch)
            actual = targets_of(session)
    known = session.server.represent(session.server.public_set)
    client = woken(session, "paired-0")
    method = session.experiment.algorithm
    method.digest.fit(client, method.public, known)
    before = client.represent(client.public_set)
    for name in known:
        packed = per_sample(session, replies["absolute"]["paired-0"])[name]
        change = per_sample(session, replies["change"]["paired-0"])[name]
        torch.testing.assert_close(packed - change, before[name], atol=1e-6, rtol=0)
        assert float(change.norm(dim=1).min()) > 1e-3
    mean = sum(per_sample(session, replies["absolute"][name])["text"] for name in CLIENTS) / 3
    torch.testing.assert_close(actual["text"], F.normalize(mean, dim=1), atol=1e-6, rtol=0)


# ---- who changes nothing


@pytest.mark.parametrize("idle", [CLIENTS, ("paired-1",)])
def test_a_client_without_private_data_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: tuple[str, ...]
) -> None:
    """And of two it halves the change of the other."""
    session = session_of(tmp_path)
    for name in idle:
        data = site_of(session).data_of(session.federation.members[name])
        data.train = data.train.subset(torch.arange(0))
    sent = answering(session, monkeypatch)
    actual, known = targets_of(session), own(session)
    assert set(sent) == set(CLIENTS)
    assert [name for name in CLIENTS if not any(bool(rows.any()) for rows in sent[name].values())] == list(idle)
    change = sum(per_sample(session, sent[name])["image"] for name in ("paired-0", "paired-1")) / 2
    torch.testing.assert_close(actual["image"], F.normalize(known["image"] + 2 * change, dim=1), atol=1e-6, rtol=0)


def test_in_the_warm_up_no_client_is_asked_and_the_server_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = linear(warmup_rounds=2)
    config["run"]["rounds"] = 3
    session = session_of(tmp_path, config)
    asked = watched(session, monkeypatch)
    for number in (1, 2, 3):
        before = weights_of(session.server.model)
        play(session, number, number)
        assert [request.round for request, _ in asked] == ([3] * 3 if number == 3 else [])
        learnt = session.server.model.state_dict()
        assert not torch.equal(learnt["encoders.text.project.1.weight"], before["encoders.text.project.1.weight"])
        assert ("kd_distance_after.text" in metrics(session)) == (number == 3)


# ---- who counts


def test_groups_that_do_not_count_train_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(tmp_path, teacher={"groups": ["paired"]})
    sent = answering(session, monkeypatch)
    actual, known = targets_of(session), own(session)
    assert bool(sent["text"]["text"].any())
    assert set(session.cohorts.accepted) == set(CLIENTS)
    assert metrics(session)["senders.text"] == 3
    weights, senders = session.server.diagnostics.arrays["weights.text"]
    assert weights[senders.index("text")].eq(0).all()
    assert metrics(session)["weight_entropy.text"] == pytest.approx(100 * math.log(2) / math.log(3))
    changes = [per_sample(session, sent[name])["text"] for name in ("paired-0", "paired-1")]
    torch.testing.assert_close(actual["text"], F.normalize(known["text"] + sum(changes), dim=1), atol=1e-6, rtol=0)


# ---- loud and wrong rows


def test_one_client_moves_targets_no_further_than_a_row_of_norm_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(tmp_path)

    def shouted(name: str, rows: Rows) -> Rows:
        return {key: 90 * unit(len(value), 8, seed=5) for key, value in rows.items()} if name == "paired-0" else rows

    sent = answering(session, monkeypatch, shouted)
    actual, known = targets_of(session), own(session)
    assert not [record for record in round_records(session) if record["kind"] == "event"]
    honest = per_sample(session, sent["paired-1"])["image"]
    loud = F.normalize(per_sample(session, sent["paired-0"])["image"], dim=1) * 2
    expected = known["image"] + 2 * (honest + loud) / 2
    torch.testing.assert_close(actual["image"], F.normalize(expected, dim=1), atol=1e-5, rtol=0)


def test_a_reply_with_a_row_a_pair_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten images with two captions each have ten rows."""
    session = session_of(tmp_path, only_paired())
    answering(session, monkeypatch, lambda name, rows: rows | {"image": rows["image"].repeat(2, 1)})
    with pytest.raises(StepError, match=r"\[20, 8\], expected \[10, 8\]"):
        targets_of(session)


def only_paired(**settings: Any) -> Config:
    config = linear(**settings)
    del config["clients"]["text"]
    return config


# ---- refusals


def test_a_closed_form_is_refused_before_any_work_where_one_tower_is_not_linear(tmp_path: Path) -> None:
    config = only_paired(digest={"by": "closed_form"})
    models = config["clients"]["paired"]["models"]
    models[1] = {"dim": 8, "encoders": {"image": projection(hidden=6), "text": frozen_bag()}}
    message = "the 'image' encoder of a client trains more than one linear layer; set algorithm.digest.by=auto"
    with pytest.raises(ConfigError, match=message):
        polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    models.pop()
    session_of(tmp_path, config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher": {"groups": ["paird"]}}, "algorithm.teacher.groups: no clients are called 'paird'.*paired"),
        ({"distiller": None}, "task.order joint needs a distiller"),
    ],
)
def test_settings_without_sense_are_refused(tmp_path: Path, settings: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        session_of(tmp_path, **settings)


# ---- it serves


def recalls(folder: Path, config: Config) -> float:
    """R@1 sum of the server on 100 items after five rounds."""
    session = prepared(config, folder)
    play(session, 1, 5)
    return session.server.evaluate(session.server.test)["r1_sum"]


GAINS = {"name": "change_distillation", "local_epochs": 3, "distiller": {"epochs": 4}, "warmup_rounds": 1}


def test_a_server_gains_what_it_cannot_learn_alone(tmp_path: Path) -> None:
    """Against a server alone with as many steps, at the best of the rates below."""
    alone = recalls(tmp_path / "alone", latent(name="server_only", server_epochs=4))
    assert recalls(tmp_path / "federated", latent(**GAINS)) > alone + 30
