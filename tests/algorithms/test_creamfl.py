"""CreamFL: its equations end to end, and guards against the faults of the released code."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from by_hand import naive_gca, unit
from grids import mostly_slow
from polyfed.algorithms.shared.public_training import Reference
from polyfed.data.samples import Batch
from polyfed.federation.client import Client
from polyfed.runs.config_files import merged
from polyfed.runs.experiment import Experiment
from polyfed.runs.session import Session
from polyfed.wire.payload import Payload, Representations
from sessions import crossing, metrics, of_samples, prepared, request, site_of, taught, woken

Config = dict[str, Any]


@pytest.fixture
def creamfl(three_groups: Config) -> Config:
    return three_groups | {"algorithm": {"name": "creamfl", "local_epochs": 1, "contrast": {"batch_size": 16}}}


def session_of(config: Config, folder: Path, **algorithm: Any) -> Session:
    config = config | {"algorithm": merged(config["algorithm"], algorithm)}
    return prepared(config, folder)


def ask(session: Session, client: str, known: Representations, number: int = 1) -> Representations:
    """Representations of all public samples, of a client that gets the server's."""
    sent = Payload({"representations": crossing(session, known)})
    return of_samples(session, site_of(session).handle(request(client, sent, (number, 0))).fields["representations"])


# ---- the server half, by hand


def test_aggregation_is_equations_4_to_6(creamfl: Config, tmp_path: Path) -> None:
    session = session_of(creamfl, tmp_path, teacher={"weights": {"name": "gca", "tau": 0.2}})
    known = session.server.represent_public()
    targets = taught(session)

    other = session_of(creamfl, tmp_path / "again", teacher={"weights": {"name": "gca", "tau": 0.2}})
    for modality, partner in (("image", "text"), ("text", "image")):
        senders = [info for info in other.server.clients if modality in info.modalities]
        local = [ask(other, info.id, known)[modality].double() for info in senders]
        expected = naive_gca(torch.stack(local), known[partner].double(), 0.2)
        assert torch.allclose(targets[modality].values.double(), expected, atol=1e-5)


@pytest.mark.parametrize(("form", "factor"), [("iot", 100.0), *mostly_slow([("mean", None), ("count", 1.0)])])
def test_ablations_of_the_weights(creamfl: Config, tmp_path: Path, form: str, factor: float | None) -> None:
    settings = {"teacher": {"weights": form}, "contrast": None}
    session = session_of(creamfl, tmp_path, **settings)
    known = session.server.represent_public()
    targets = taught(session)
    other = session_of(creamfl, tmp_path / "again", **settings)
    senders = [info for info in other.server.clients if "image" in info.modalities]
    local = [ask(other, info.id, known)["image"] for info in senders]
    weights = [
        1.0 if factor is None else info.samples * (factor if len(info.modalities) > 1 else 1.0) for info in senders
    ]
    expected = sum(w * value for w, value in zip(weights, local, strict=True)) / sum(weights)
    assert torch.allclose(targets["image"].values, expected, atol=1e-6)
    shares, noted = [w / sum(weights) for w in weights], metrics(session)
    entropy = -sum(share * math.log(share) for share in shares) / math.log(len(shares))
    assert noted["weight_entropy.image"] == pytest.approx(100 * entropy, rel=1e-5)
    gaps = [torch.dist(value.mean(0), known["image"].mean(0)).item() for value in local]
    assert noted["centre_gap.image"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)


def test_a_federation_without_clients_trains_on_the_public_set(creamfl: Config, tmp_path: Path) -> None:
    creamfl["clients"] = {}
    creamfl["run"]["exchange"] = {"min_clients": 0}
    assert polyfed.run(Experiment.parse(creamfl), tmp_path / "run", quiet=True).metrics()["gallery_image"] == 12


# ---- the client half


def reference_of(session: Session, client: Client) -> Reference:
    method = session.experiment.algorithm
    return method.contrast.reference(client, method.public)


def contrasted(
    config: Config, folder: Path, name: str, contrast: Config
) -> tuple[Client, Batch, Representations, torch.Tensor]:
    """A client with random earlier representations, three samples, the server's, and its loss."""
    session = session_of(config, folder, contrast=contrast)
    method, known, client = session.experiment.algorithm, session.server.represent_public(), woken(session, name)
    client.state["previous"] = {key: unit(len(client.public.pairs), 8, seed=k) for k, key in enumerate(known)}
    client.model.eval()
    batch = client.public.pairs.batch(torch.tensor([3, 0, 7]))
    targets = method.contrast.targets(client, method.public, known)
    return client, batch, known, method.contrast.loss(client, batch, targets, reference_of(session, client))


def test_contrasts_are_equations_1_and_2(creamfl: Config, tmp_path: Path) -> None:
    contrast = {"inter": {"tau": 0.5}, "intra": {"tau": 0.25}}
    client, batch, known, loss = contrasted(creamfl, tmp_path, "paired-0", contrast)
    previous = client.state["previous"]
    expected = 0.0
    for modality, partner in (("image", "text"), ("text", "image")):
        u = client.model.represent(modality, batch.inputs[modality])
        for row, k in enumerate(batch.index.tolist()):
            logits = torch.stack([u[row] @ known[partner][j] for j in range(len(known[partner]))]) / 0.5
            expected += (logits.exp().sum().log() - logits[k]) / 3
            pair = torch.stack([u[row] @ known[modality][k], u[row] @ previous[modality][k]]) / 0.25
            expected += (pair.exp().sum().log() - pair[0]) / 3
    assert torch.allclose(loss, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["paired-0", "image"])
def test_intra_modal_contrasts_are_averaged_over_all_stacked_rows_as_released(
    creamfl: Config, tmp_path: Path, name: str
) -> None:
    contrast = {"intra": {"tau": 0.5, "reduction": "mean"}, "inter": None}
    client, batch, known, loss = contrasted(creamfl, tmp_path, name, contrast)
    rows = []
    for modality in client.model.modalities:
        u = client.model.represent(modality, batch.inputs[modality])
        for row, k in enumerate(batch.index.tolist()):
            towards = u[row] @ known[modality][k] / 0.5
            away = u[row] @ client.state["previous"][modality][k] / 0.5
            rows.append(-(towards.exp() / (towards.exp() + away.exp())).log())
    assert len(rows) == 3 * len(client.model.modalities)
    assert torch.allclose(loss, torch.stack(rows).mean(), atol=1e-6)


def test_previous_representations_are_those_uploaded_last(creamfl: Config, tmp_path: Path) -> None:
    session = session_of(creamfl, tmp_path)
    sent = ask(session, "image", session.server.represent_public())["image"].clone()
    client = woken(session, "image", (2, 0), after=(1, 0))
    assert torch.equal(client.state["previous"]["image"], sent)
    reference = reference_of(session, client)
    batch = client.public.pairs.batch(torch.arange(4))
    before = reference("image", batch).clone()
    client.fit(client.train, epochs=1)  # the live model moves on
    assert not torch.equal(client.represent(client.public.pairs)["image"], sent)
    assert torch.equal(reference("image", batch), before)


def test_extraction_is_deterministic_and_leaves_the_model_alone(creamfl: Config, tmp_path: Path) -> None:
    server = session_of(creamfl, tmp_path).server
    server.model.train()
    before = {name: value.clone() for name, value in server.model.state_dict().items()}
    first, second = server.represent_public(), server.represent_public()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(value, before[name]) for name, value in server.model.state_dict().items())
    assert server.model.training
    moved = server.represent_public(training=True)  # the released code's way does change batch-norm buffers
    assert not torch.equal(moved["image"], first["image"])
    assert any(not torch.equal(value, before[name]) for name, value in server.model.state_dict().items())


@pytest.mark.parametrize(
    ("settings", "private", "public"),
    [
        ({"contrast": {"schedule": "joint"}}, 3, 3),
        ({"contrast": {"schedule": "joint", "batches_per_epoch": 2}}, 3, 2),
        ({"contrast": {"schedule": "joint", "batches_per_epoch": 8}}, 3, 8),
        ({"contrast": {"schedule": "separate_pass"}}, 3, 5),
        ({"contrast": {"schedule": "separate_pass", "batches_per_epoch": 2}}, 3, 2),
        ({"contrast": None}, 3, 0),
    ],
)
def test_public_batches_of_an_epoch(
    creamfl: Config, tmp_path: Path, settings: Config, private: int, public: int
) -> None:
    creamfl["clients"]["image"]["training"] = {"batch_size": 8}
    session = session_of(creamfl, tmp_path, **settings)
    client = woken(session, "image")
    steps = list(session.experiment.algorithm.batches(client, 0))
    assert len(client.train) == 24
    assert len(client.public.pairs) == 80
    assert sum(batch is not None for batch, _ in steps) == private
    assert sum(batch is not None for _, batch in steps) == public
    if (settings["contrast"] or {}).get("schedule") == "separate_pass":
        assert [batch is None for batch, _ in steps] == [False] * private + [True] * public
