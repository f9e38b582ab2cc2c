"""The server's encoders at FedAFD's clients: fusion with them in evaluation, and when they are broadcast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fedafd_sessions import CLIENTS, Values, asked, encoders_of, known_of, session_of
from torch import Tensor
from torch.nn import functional as F

from by_hand import as_left, outcome, play, same
from polyfed.core.errors import RunError
from polyfed.federation.client import Client
from polyfed.models.fusion import FusionGuidance, SampleFeatures
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, Weights
from sessions import crossing, prepared, request, round_records, site_of, watched, woken
from small_federations import three_kinds

pytestmark = pytest.mark.slow


def heard(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, Values, Values]]:
    """(round, client, encoders it is sent, the server's at that time), filled while the session goes on."""
    actual: list[tuple[int, str, Values, Values]] = []

    def note(one: Request, answer: Answer) -> Answer:
        sent = {name: value.clone() for name, value in one.payload.fields.get("encoders", {}).items()}
        actual.append((one.round, one.client, sent, encoders_of(session)))
        return answer

    watched(session, monkeypatch, note)
    return actual


# ---- evaluation


def seen_by(session: Session, client: Client, teacher: Values) -> dict[str, Tensor]:
    """Fused representations of all test samples, not brought to unit norm again, one by one."""
    guide = session.federation.server_model()
    guide.load_state_dict(teacher, strict=False)
    guide.eval()
    client.model.eval()
    member = session.federation.members[client.name]
    own, there = client.test, session.federation.test(member, session.experiment.server.model)
    actual = {}
    with torch.no_grad():
        for name in own.modalities:
            rows = []
            for k in range(len(own)):
                index = torch.tensor([k])
                local = F.normalize(client.model.embed(name, own.batch(index).inputs[name]))
                received = F.normalize(guide.embed(name, there.batch(index).inputs[name]))
                rows.append(client.model.extras["fusion"](local, received))
            actual[name] = torch.cat(rows)
    return actual


def judged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, **algorithm: Any
) -> tuple[Client, dict[str, Any], dict[str, Tensor]]:
    """A client after a round, what it measures, and its fused representations."""
    session = session_of(folder, **algorithm)
    sent = heard(session, monkeypatch)
    play(session, 1, 1)
    (teacher,) = (encoders for _, client, encoders, _ in sent if client == name)
    client = as_left(session, name)
    return client, session.experiment.algorithm.assess(client).payload.scalars, seen_by(session, client, teacher)


@pytest.mark.parametrize("name", ["image", "text"])
def test_accuracy_is_that_of_fused_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    client, actual, fused = judged(tmp_path, monkeypatch, name, local_epochs=4)
    logits = client.head(fused[name]).detach()
    labels = client.test.targets[client.task.target]
    assert actual["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), abs=1e-5)
    assert actual["accuracy"] == pytest.approx(100 * float((logits.argmax(1) == labels).float().mean()))
    assert abs(client.evaluate(client.test)["loss"] - actual["loss"]) > 1e-4  # its own features give something else


@pytest.mark.parametrize("renormalise", [True, False])
def test_recall_is_that_of_fused_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renormalise: bool) -> None:
    fusion = {"renormalise": renormalise}
    client, actual, fused = judged(tmp_path, monkeypatch, "paired", fusion=fusion, local_epochs=3)
    norms = fused["image"].norm(dim=1)
    assert not torch.allclose(norms, torch.ones_like(norms), atol=1e-3)
    if renormalise:
        fused = {modality: F.normalize(values) for modality, values in fused.items()}
    items = client.test.items
    first = torch.stack([(items == item).nonzero()[0, 0] for item in items.unique()])  # an image has many captions
    pictures, captions = fused["image"][first], fused["text"]
    for cutoff in (1, 5, 10):
        hits = [
            bool((items[(picture @ captions.T).topk(cutoff).indices] == item).any())
            for picture, item in zip(pictures, items[first], strict=True)
        ]
        back = [
            bool((items[first][(caption @ pictures.T).topk(cutoff).indices] == item).any())
            for caption, item in zip(captions, items, strict=True)
        ]
        assert actual[f"image_to_text_r@{cutoff}"] == pytest.approx(100 * sum(hits) / len(hits))
        assert actual[f"text_to_image_r@{cutoff}"] == pytest.approx(100 * sum(back) / len(back))


def test_a_client_without_encoders_is_judged_by_its_own_features(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    for name in CLIENTS:
        client = woken(session, name)
        assert session.experiment.algorithm.assess(client).payload.scalars == client.evaluate(client.test)


# ---- broadcasts


@pytest.mark.parametrize("fusion", ["vectors", pytest.param("maps", marks=pytest.mark.slow)])
def test_kept_features_change_nothing(tmp_path: Path, fusion: str) -> None:
    runs = {}
    for every, cached in ((10, True), (10, False), (1, True)):
        settings = {"fusion": {"broadcast_every": every, "cache": cached, "level": fusion}}
        runs[every, cached] = outcome(play(session_of(tmp_path / f"{every}{cached}", **settings), 1, 3))
    furthest = 0.0
    for participant, values in runs[10, True].items():
        for key, value in values.items():
            torch.testing.assert_close(
                value, runs[10, False][participant][key], atol=1e-4, rtol=1e-5, msg=f"{participant} {key}"
            )
            furthest = max(furthest, float((value - runs[1, True][participant][key]).abs().max()))
    assert furthest > 1e-3


@pytest.mark.parametrize(("every", "times"), [(10, 1), (1, 2)])
def test_private_data_are_encoded_once_a_broadcast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, times: int
) -> None:
    encoded: list[int] = []
    encode = FusionGuidance.encoded

    def counted(guidance: FusionGuidance, name: str, rows: Tensor) -> SampleFeatures:
        encoded.append(len(rows))
        return encode(guidance, name, rows)

    monkeypatch.setattr(FusionGuidance, "encoded", counted)
    session = play(session_of(tmp_path, fusion={"broadcast_every": every}, local_epochs=2), 1, 2)
    distinct = 0
    for name in session.cohorts.accepted:
        train = session.federation.train(session.federation.members[name])
        distinct += sum(len(rows.unique()) for rows in train.rows.values())
    assert sum(encoded) == times * distinct


def test_late_clients_get_the_encoders_of_the_current_window_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = three_kinds(name="fedafd", fusion={"broadcast_every": 3})
    config["run"] |= {"sampling": {"cohort": 2}, "seed": 3}
    session = prepared(config, tmp_path)
    sent = heard(session, monkeypatch)
    play(session, 1, 7)
    current: Values = {}
    got: dict[str, int] = {}
    late = 0
    for number, client, encoders, now in sent:
        version = number - (number - 1) % 3
        current = now if number == version else current
        if got.get(client) == version:
            assert not encoders
            continue
        modalities = next(info.modalities for info in session.server.clients if info.id == client)
        wanted = tuple(f"encoders.{modality}." for modality in modalities)
        assert same(encoders, {name: value for name, value in current.items() if name.startswith(wanted)})
        got[client], late = version, late + (number > version)
        assert number == version or not same(encoders, {name: now[name] for name in encoders})
    assert late > 1
    assert not [event for event in round_records(session) if event["kind"] == "event"]


def test_a_client_that_lost_its_encoders_is_refused(tmp_path: Path) -> None:
    session = play(session_of(tmp_path, fusion={"broadcast_every": 10}), 1, 1)
    session.cohorts.accepted.pop("image")
    with pytest.raises(RunError, match="encoders of round 1 are needed, but this client has none"):
        asked(session, "image", known_of(session), number=2)
    session.cohorts.accepted["text"] = (1, 0)
    fields = {"representations": crossing(session, known_of(session)), "encoders": Weights({}), "version": 11}
    with pytest.raises(RunError, match="encoders of round 11 are needed, but this client has those of round 1"):
        site_of(session).handle(request("text", Payload(fields), (11, 0), (1, 0)))


def test_a_modality_that_the_server_does_not_encode_goes_unfused(tmp_path: Path) -> None:
    config = three_kinds(name="fedafd")
    server = config["server"]["model"]
    task = {"name": "classification", "target": "label"}
    config["server"] |= {"model": server | {"encoders": {"image": server["encoders"]["image"]}}, "task": task}
    session = play(prepared(config, tmp_path), 1, 2)
    assert not [event for event in round_records(session) if event["kind"] == "event"]
    actual = session.experiment.algorithm.evaluate_clients(session.server, session.cohort(3, Ledger()))
    assert set(actual) == {"image", "text", "paired-0", "paired-1"}
