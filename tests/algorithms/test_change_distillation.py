"""Change distillation by hand; digests: ridge regression, which towers are linear, steps by gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import polyfed
from by_hand import play, unit, weights_of
from fixed_features import frozen_bag, latent, linear, projection
from grids import mostly_slow
from polyfed.algorithms.shared.digest import Digest, fit_in_closed_form, only_layer, ridge_regression
from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.core.errors import ConfigError, StepError
from polyfed.data.view import DataContext, InputSpec
from polyfed.federation.client import Client
from polyfed.federation.participant import Participant
from polyfed.losses.distillation import DISTILLATIONS, Distillation
from polyfed.models.aligner import AlignerSettings
from polyfed.models.encoder import Encoder
from polyfed.models.encoders.from_config import FeatureProjection
from polyfed.models.encoders.resnet import ResNet
from polyfed.models.encoders.words import Bag
from polyfed.models.model import Model
from polyfed.runs.experiment import Experiment
from polyfed.runs.session import Session
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, Representations
from sessions import first_cohort, metrics, prepared, round_records, site_of, watched, woken
from small_federations import Config, three_kinds, training

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


# ---- digests


TEXTS = InputSpec((12,), ("<pad>", "<unk>", *(f"w{i}" for i in range(20))), pad=0)
CONTEXT = DataContext(Path("unused"))
PUBLIC = PublicExchange()
PAIRED = {"image": 20, "text": 20}
"""Modality -> public samples of ``linear``."""


# ---- ridge


def normal_equations(x: Tensor, z: Tensor, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """Over [X 1], with a penalty on all but the last row of the solution."""
    one = np.concatenate([x.double().numpy(), np.ones((len(x), 1))], axis=1)
    weight = penalty * len(x) * x.double().numpy().var(0).mean()
    gram = one.T @ one + weight * np.diag([*np.ones(x.shape[1]), 0.0])
    solved = np.linalg.solve(gram, one.T @ z.double().numpy())
    return solved[:-1], solved[-1]


@pytest.mark.parametrize("penalty", [1e-6, 0.01, 3.0])
@pytest.mark.parametrize(("samples", "features"), [(40, 5), (6, 9)])  # also with more features than samples
def test_ridge_solves_the_normal_equations(samples: int, features: int, penalty: float) -> None:
    stream = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, features, generator=stream) * torch.logspace(-1, 1, features) + 7
    z = torch.randn(samples, 3, generator=stream) - 2
    weight, intercept = ridge_regression(x, z, penalty)
    expected = normal_equations(x, z, penalty)
    np.testing.assert_allclose(weight.numpy(), expected[0], rtol=2e-4, atol=2e-6)
    np.testing.assert_allclose(intercept.numpy(), expected[1], rtol=2e-4, atol=2e-5)


def test_the_penalty_is_relative_and_the_intercept_free() -> None:
    x, z = torch.randn(30, 4, generator=torch.Generator().manual_seed(1)), unit(30, 3)
    weight, intercept = ridge_regression(x, z, 0.5)
    scaled, same = ridge_regression(100 * x, z, 0.5)
    torch.testing.assert_close(100 * scaled, weight, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(same, intercept, atol=1e-5, rtol=1e-4)
    shifted, moved = ridge_regression(x + 3, z + 5, 0.5)
    torch.testing.assert_close(shifted, weight, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(moved, intercept + 5 - 3 * weight.sum(0), atol=1e-4, rtol=1e-4)


def test_inputs_without_variance_leave_the_mean() -> None:
    z = unit(5, 3)
    weight, intercept = ridge_regression(torch.full((5, 4), 2.0), z, 0.01)
    assert torch.equal(weight, torch.zeros(4, 3))
    torch.testing.assert_close(intercept, z.mean(0))


# ---- which towers are linear

VECTORS, FROZEN, TRAINED = InputSpec((9,)), Bag(width=6, freeze_embedding=True), Bag(width=6)
TOWERS: dict[str, tuple[Encoder, InputSpec, dict[str, Any], bool]] = {
    "projection": (FeatureProjection(), VECTORS, {}, True),
    "projection standardised over batches": (FeatureProjection(standardise="batch", dropout=0.5), VECTORS, {}, True),
    "projection of positions": (FeatureProjection(), InputSpec((4, 9)), {}, True),
    "projection with a hidden layer": (FeatureProjection(hidden=5), VECTORS, {}, False),
    "projection with attention": (FeatureProjection(pie=True), InputSpec((4, 9)), {}, False),
    "projection before a norm": (FeatureProjection(), VECTORS, {"final_norm": nn.LayerNorm(7)}, False),
    "bag of frozen words": (FROZEN, TEXTS, {}, True),
    "bag of words": (TRAINED, TEXTS, {}, False),
    "bag of frozen words with a hidden layer": (Bag(width=6, freeze_embedding=True, hidden=5), TEXTS, {}, False),
    "resnet": (ResNet(widths=(8, 12), depths=(1, 1)), InputSpec((3, 16, 16)), {}, False),
}


@pytest.mark.parametrize("name", TOWERS)
def test_only_a_tower_that_trains_one_linear_layer_is_linear(name: str) -> None:
    encoder, spec, more, is_linear = TOWERS[name]
    model = Model({"a": encoder.build(7, spec, CONTEXT)}, {}, 7, **more)
    layer = only_layer(model, "a")
    assert (layer is not None) == is_linear
    if layer is not None:
        assert layer.out_features == 7
        assert {id(value) for value in model.parameters() if value.requires_grad} == set(map(id, layer.parameters()))


def test_an_aligned_tower_is_not_linear_and_a_layer_without_bias_has_no_intercept() -> None:
    aligned = AlignerSettings(hidden=5).around(FROZEN.build(7, TEXTS, CONTEXT), "text", 7)
    assert only_layer(Model({"text": aligned}, {}, 7), "text") is None
    assert only_layer(Model({"a": nn.Sequential(nn.Linear(4, 7))}, {}, 7), "a") is not None
    assert only_layer(Model({"a": nn.Sequential(nn.Linear(4, 7, bias=False))}, {}, 7), "a") is None


# ---- real clients


def digesting(folder: Path, **settings: Any) -> Session:
    config = linear(**settings)
    config["public"] |= {"unpaired": {"image": 6}}
    return prepared(config, folder)


def take_in(session: Session, client: Client, targets: dict[str, Tensor]) -> None:
    method = session.experiment.algorithm
    method.digest.fit(client, method.public, targets)


def goals_of(seed: int = 3) -> dict[str, Tensor]:
    return {"image": unit(20, 8, seed=seed), "text": unit(20, 8, seed=seed + 1), "unpaired/image": unit(6, 8, seed=9)}


def features_of(client: Client, modality: str) -> Tensor:
    """Inputs of the last layer for all samples with targets, by hand."""
    samples = {"": client.public_set} | {name: part for name, part in client.public.parts.items() if modality in name}
    actual = []
    for part in samples.values():
        x = part.batch(torch.arange(len(part)), modalities=[modality]).inputs[modality]
        if modality == "image":  # one layer norm a sample, without affine
            actual.append((x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt())
        else:
            table = client.model.encoders["text"].embedding.weight.detach()
            actual.append(
                torch.stack([table[row[row != 0]].mean(0) if (row != 0).any() else 0 * table[0] for row in x])
            )
    return torch.cat(actual)


@pytest.mark.parametrize("modality", ["image", "text"])
def test_the_closed_form_is_the_least_squares_optimum_of_a_real_tower(tmp_path: Path, modality: str) -> None:
    """A small penalty and more samples than features: what is reached is what lstsq reaches."""
    session = digesting(tmp_path, digest={"penalty": 1e-6})
    client, targets = woken(session, "paired-1"), goals_of()  # 20 features of images, 12 of words
    x = features_of(client, modality)
    goal = torch.cat([targets[name] for name in targets if modality in name])
    assert len(x) == len(goal) > x.shape[1]
    one = torch.cat([x, torch.ones(len(x), 1)], dim=1).double()
    solution = torch.linalg.lstsq(one, goal.double(), driver="gelsd").solution
    take_in(session, client, targets)
    # in evaluation mode: with dropout there would have been other features and another optimum
    parts = [client.public_set, *(part for name, part in client.public.parts.items() if modality in name)]
    inputs = torch.cat([part.batch(torch.arange(len(part)), modalities=[modality]).inputs[modality] for part in parts])
    reached = client.model.eval().embed(modality, inputs).detach().double()
    torch.testing.assert_close(reached, one @ solution, atol=2e-3, rtol=1e-3)
    best = (one @ solution - goal).square().sum()
    torch.testing.assert_close((reached - goal).square().sum(), best, atol=1e-3, rtol=0)


def test_the_closed_form_changes_nothing_but_the_layers_and_ignores_what_the_model_knew(tmp_path: Path) -> None:
    session = digesting(tmp_path)
    client = woken(session, "paired-0")
    before = weights_of(client.model)
    take_in(session, client, goals_of())
    after = weights_of(client.model)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {f"encoders.{name}.project.1.{part}" for name in PAIRED for part in ("weight", "bias")}
    with torch.no_grad():
        for name in changed:
            client.model.state_dict()[name].add_(1.0)
    client.model.train()
    take_in(session, client, goals_of())
    assert all(torch.equal(value, after[name]) for name, value in client.model.state_dict().items())


def test_representing_and_training_have_their_own_modes_after_a_digest(tmp_path: Path) -> None:
    session = digesting(tmp_path)
    client, modes = woken(session, "paired-0"), list[bool]()
    take_in(session, client, goals_of())
    once = client.represent(client.public_set)
    assert all(torch.equal(rows, once[name]) for name, rows in client.represent(client.public_set).items())
    client.model.encoders["image"].register_forward_pre_hook(lambda module, given: modes.append(module.training))
    client.fit(client.train, epochs=1)
    assert modes
    assert all(modes)  # with dropout


def test_rows_of_zeros_do_not_count(tmp_path: Path) -> None:
    """Rows of zeros change nothing; without other rows the layer stays as it is."""
    session, targets = digesting(tmp_path), goals_of()
    client = woken(session, "paired-0")
    layer = only_layer(client.model, "image")
    assert layer is not None
    client.model.eval()
    start = layer.weight.clone()
    fit_in_closed_form(PUBLIC, client, "image", layer, {n: 0 * v for n, v in targets.items()}, 0.01)
    assert torch.equal(layer.weight, start)
    targets["image"][5:] = 0
    fit_in_closed_form(PUBLIC, client, "image", layer, targets, 0.01)
    x = features_of(client, "image")
    wanted = torch.cat([torch.arange(5), torch.arange(20, 26)])
    weight, intercept = ridge_regression(x[wanted], torch.cat([targets["image"][:5], targets["unpaired/image"]]), 0.01)
    torch.testing.assert_close(layer.weight, weight.T, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(layer.bias, intercept, atol=1e-4, rtol=1e-3)


# ---- by gradient


@pytest.mark.parametrize("loss", mostly_slow(["cosine", "l2", "mse", "l1"], "cosine"))
def test_a_digest_by_gradient_lowers_the_distance(tmp_path: Path, loss: Distillation) -> None:
    """On pairs and on captions without an image."""
    config = three_kinds(name="change_distillation", warmup_rounds=0)
    config["public"]["unpaired"] = {"text": 3}
    config["clients"]["paired"]["training"] = training("adam", 0.02, 12)
    client = woken(prepared(config, tmp_path), "paired-0")
    targets = {"image": unit(16, 8), "text": unit(16, 8, seed=1), "unpaired/text": unit(6, 8, seed=2)}

    def distances() -> dict[str, float]:
        rows = PUBLIC.outputs(client)
        return {name: float(DISTILLATIONS[loss](rows[name], targets[name], None)) for name in targets}

    before = distances()
    Digest(epochs=15, batch_size=4, loss=loss).fit(client, PUBLIC, targets)
    after = distances()
    assert all(after[name] < 0.9 * before[name] for name in targets), (before, after)


def test_rows_without_a_goal_give_no_gradient(tmp_path: Path) -> None:
    """Samples without a target do not count at all."""
    client = woken(prepared(three_kinds(name="change_distillation", warmup_rounds=0), tmp_path), "text")
    before = weights_of(client.model)
    Digest(epochs=3, batch_size=4, loss="cosine").fit(client, PUBLIC, {"text": torch.zeros(16, 8)})
    assert all(torch.equal(value, before[name]) for name, value in client.model.state_dict().items())


def test_towers_that_are_linear_are_solved_and_the_others_descend(tmp_path: Path) -> None:
    """``auto``, on a client with frozen words and trained images: each modality in its own way."""
    config = linear()
    config["clients"]["paired"]["models"] = [{"dim": 8, "encoders": config["server"]["model"]["encoders"]}]
    session = prepared(config, tmp_path)
    client = woken(session, "paired-0")
    start = weights_of(client.model)
    take_in(session, client, {name: unit(20, 8, seed=k) for k, name in enumerate(PAIRED)})
    changed = {name for name, value in client.model.state_dict().items() if not torch.equal(value, start[name])}
    solved = {"encoders.text.project.1.weight", "encoders.text.project.1.bias"}
    assert {name for name in changed if name.startswith("encoders.text.")} == solved
    assert any(name.startswith("encoders.image.") for name in changed)
