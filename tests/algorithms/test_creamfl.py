"""CreamFL by hand, and in a federation that averages weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyfed
from by_hand import assert_mean, copies, descend, naive_gca, plain_training, play, unit, weights_of
from grids import mostly_slow
from polyfed.algorithms.creamfl_averaged import CreamFLAveraged, StepContrast
from polyfed.algorithms.shared.distiller import Distiller
from polyfed.algorithms.shared.public_training import Reference
from polyfed.core.errors import ExchangeError
from polyfed.data.samples import Batch
from polyfed.federation.client import Client
from polyfed.federation.cohort import ReplyPolicy
from polyfed.federation.settings import TrainingSettings
from polyfed.models.model import Model
from polyfed.optim.settings import OptimizerSettings
from polyfed.runs.config_files import merged
from polyfed.runs.experiment import Experiment
from polyfed.runs.session import Session
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, Representations
from sessions import Excluded, crossing, first_cohort, metrics, of_samples, prepared, request, site_of, taught, woken
from small_federations import Config, plain_sgd, sized, transformers


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


# ---- CreamFL with averaged weights


Tensors = dict[str, Tensor]
GAMMA = 10.0
ROWS, WIDTH = 30, 64  # of the public set: 6 images of 5 captions


@pytest.fixture
def config() -> Config:
    actual = sized(transformers(name="creamfl_averaged", contrast={"weight": 1.0, "batch_size": ROWS}), 48)
    actual["public"] = {"source": "scenes", "items": ROWS // 5}
    actual["clients"]["image"]["items"] = 24
    actual["clients"]["text"]["items"] = 48
    actual["clients"]["paired"]["items"] = 10
    return actual


# ---- by hand


def naive_contrasts(
    session: Session, client_id: str, start: Tensors, known: Representations
) -> Callable[[Model, Batch], Tensor]:
    """Equations 1 and 2 at temperature 0.5, summed over both, of the whole public set in the order of its passes."""
    client = woken(session, client_id)
    (modality,) = client.info.modalities
    (partner,) = [name for name in known if name != modality]
    client.load_weights(start)
    previous = client.represent(client.public_set)[modality].clone()
    passes = iter([client.public_batches(f"contrast-{k}", ROWS) for k in range(2)])

    def extra(model: Model, private: Batch) -> Tensor:
        (batch,) = next(passes)
        u, total = model.represent(modality, batch.inputs[modality]), torch.zeros(())
        for row, k in enumerate(batch.index.tolist()):
            logits = torch.stack([u[row] @ known[partner][j] for j in range(ROWS)]) / 0.5
            total = total + (logits.exp().sum().log() - logits[k]) / ROWS
            pair = torch.stack([u[row] @ known[modality][k], u[row] @ previous[k]]) / 0.5
            total = total + (pair.exp().sum().log() - pair[0]) / ROWS
        return GAMMA * total

    return extra


def trained_by_hand(session: Session, known: Representations) -> dict[str, Tensors]:
    """Two steps of every client."""
    server, actual = session.server, {}
    start = copies(server.weights)
    for info in server.clients:
        own = start[server.type_of(info)]
        extra = {} if len(info.modalities) > 1 else {"extra": naive_contrasts(session, info.id, own, known)}
        actual[info.id] = plain_training(session, info.id, own, step="contrasted_fit", **extra)
    return actual


def test_models_are_averaged_by_type_and_only_single_modalities_are_contrasted(config: Config, tmp_path: Path) -> None:
    config["algorithm"] |= {"distiller": None, "contrast": {"weight": GAMMA, "batch_size": ROWS}}
    config["clients"]["paired"]["items"] = 4
    session = prepared(plain_sgd(config, batch_size=12), tmp_path)
    server = session.server
    stream = torch.Generator().manual_seed(1)
    for value in (*server.weights["image"].values(), *server.weights["text"].values()):
        value += 0.1 * torch.randn(value.shape, generator=stream)  # previous and known representations then differ
    samples = {info.id: info.samples for info in server.clients}
    assert set(samples.values()) <= {10, 24}
    trained = trained_by_hand(session, server.represent_public())
    play(session, 1, 1)
    for form, members in server.types.items():
        assert_mean(server.weights[form], {info.id: trained[info.id] for info in members.clients}, samples)


def replies_of(session: Session, known: Tensors) -> tuple[dict[str, Tensors], dict[str, Tensor]]:
    """Client -> weights, and modality -> representations [clients, rows, d], asked one by one."""
    weights: dict[str, Tensors] = {}
    sent: dict[str, list[Tensor]] = {name: [] for name in known}
    for info in session.server.clients:
        noted = crossing(session, Representations(known if len(info.modalities) == 1 else {}))
        reply = session.experiment.algorithm.fit(woken(session, info.id), session.server.weights_for(info), noted)
        weights[info.id] = {name: value.clone() for name, value in reply.weights.items()}
        for modality, value in of_samples(session, reply.representations).items():
            sent[modality].append(value.double())
    return weights, {name: torch.stack(values) for name, values in sent.items()}


def distilled(session: Session, start: Tensors, targets: Tensors, rate: float) -> Tensors:
    """One pass of SGD on the mean squared error, summed over modalities, over the public set."""
    model = session.server.model
    model.load_state_dict(start)
    model.train()
    for batch in session.server.public_batches("distil-0", 16):
        errors = [model.represent(name, batch.inputs[name]) - targets[name][batch.index] for name in targets]
        descend(model, sum(error.square().mean() for error in errors), rate)
    return weights_of(model)


def test_the_averaged_paired_model_learns_what_single_modalities_sent(config: Config, tmp_path: Path) -> None:
    rate = 0.5
    optimizer = {"kind": "sgd", "lr": rate, "momentum": 0.0}
    config["algorithm"]["distiller"] = {"training": {"optimizer": optimizer, "batch_size": 16}}
    session, other = (prepared(plain_sgd(config, batch_size=12), tmp_path / name) for name in ("a", "b"))
    known = dict(session.server.represent_public())
    play(session, 1, 1)

    weights, sent = replies_of(other, known)
    assert {name: len(values) for name, values in sent.items()} == {"image": 1, "text": 2}
    partner = {"image": "text", "text": "image"}
    targets = {name: naive_gca(local, known[partner[name]].double()).float() for name, local in sent.items()}
    paired = {info.id: info.samples for info in session.server.clients if info.group == "paired"}
    mean = {
        name: sum(weights[client][name] * (samples / sum(paired.values())) for client, samples in paired.items())
        for name in session.server.model.state_dict()
    }
    expected = distilled(other, mean, targets, rate)
    for name, value in session.server.model.state_dict().items():
        assert torch.allclose(value, expected[name], rtol=0, atol=1e-6), name
        assert torch.equal(session.server.weights["paired"][name], value), name
    assert max(float((value - mean[name]).abs().max()) for name, value in expected.items()) > 1e-4


# ---- what crosses


def test_a_reply_with_more_than_was_asked_for_is_refused(config: Config, tmp_path: Path) -> None:
    session = prepared(config, tmp_path)
    cohort, refused = first_cohort(session), Excluded()
    packed = crossing(session, session.server.represent_public())
    cohort.listener, cohort.reply_policy = refused, lambda step: ReplyPolicy()

    def answered(request: Request) -> Answer:
        fields = {"weights": request.payload.fields["weights"], "representations": packed, "num_examples": 1}
        return Answer(request.client, Payload(fields))

    cohort.channel = replace(cohort.channel, exchange=lambda requests, deadline: map(answered, requests))
    with pytest.raises(ExchangeError, match="0 of 5 clients"):
        session.experiment.algorithm.round(session.server, cohort)
    assert all("representations of ['image', 'text'], expected" in reason for reason in refused.reasons.values())


# ---- settings


def test_defaults_are_those_of_fedcolas_paper() -> None:
    method = CreamFLAveraged()
    assert method.contrast == StepContrast(weight=1e-7, batch_size=128)
    adamw = TrainingSettings(optimizer=OptimizerSettings(kind="adamw", lr=1e-4, clip=2.0), batch_size=128)
    assert method.distiller == Distiller(loss="mse", weight=1.0, epochs=1, training=adamw)
