"""Alignment and uniformity: naive loops, the noise between two passes, clients without labels, a refusal."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from task_samples import captioned, identity_model
from torch import Tensor, nn
from torch.nn import functional as F

from by_hand import play
from fixed_features import frozen_bag, linear, projection
from polyfed.core.errors import ConfigError
from polyfed.losses.self_supervised import alignment, uniformity
from polyfed.models.model import CachedModel, Model
from polyfed.tasks.alignment_uniformity import AlignmentUniformity
from sessions import metrics, prepared, woken
from small_federations import Config, training


def unit(rows: int, seed: int) -> Tensor:
    return F.normalize(torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed)), dim=1)


def noisy(*modalities: str, rate: float = 0.3) -> Model:
    return Model({name: nn.Sequential(nn.Dropout(rate), nn.Linear(6, 6)) for name in modalities}, {}, 6)


def test_terms_are_the_means_over_pairs() -> None:
    u, v, groups = unit(6, 1), unit(6, 2), [3, 0, 3, 1, 0, 3]
    squares = [[float(((u[i] - v[j]) ** 2).sum()) for j in range(6)] for i in range(6)]
    near = [squares[i][j] for i in range(6) for j in range(6) if groups[i] == groups[j]]
    far = [math.exp(-2 * squares[i][j]) for i in range(6) for j in range(6) if groups[i] != groups[j]]
    assert float(alignment(u, v, torch.tensor(groups))) == pytest.approx(sum(near) / len(near), rel=1e-5)
    assert float(uniformity(u, v, torch.tensor(groups))) == pytest.approx(math.log(sum(far) / len(far)), rel=1e-5)


def test_two_opposite_samples_by_hand() -> None:
    """Views that agree have no distance; opposite ones are 2 apart, exp(-2 x 4)."""
    u = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert float(alignment(u, u, torch.arange(2))) == 0
    assert float(uniformity(u, u, torch.arange(2))) == pytest.approx(-8)
    assert float(alignment(u, u, torch.zeros(2, dtype=torch.int64))) == pytest.approx(2)


def test_samples_of_one_thing_have_nothing_to_be_apart_from() -> None:
    u = unit(4, 1).requires_grad_()
    loss = uniformity(u, unit(4, 2), torch.zeros(4, dtype=torch.int64))
    assert loss.item() == 0
    torch.autograd.backward(loss)
    assert u.grad is not None
    assert not u.grad.any()


def test_the_loss_compares_two_passes_that_differ_by_dropout() -> None:
    samples, model = captioned(4, 2, noise=0.5), noisy("text")
    batch, shared = samples.batch(torch.arange(8), modalities=["text"]), CachedModel(model)
    torch.manual_seed(3)
    loss = AlignmentUniformity(uniformity=0.25).loss(shared, None, batch)
    torch.manual_seed(3)
    rows = model.represent("text", batch.inputs["text"].repeat(2, 1))
    first, second = rows[:8], rows[8:]
    assert not torch.equal(first, second)
    expected = alignment(first, second, batch.items) + 0.25 * uniformity(first, second, batch.items)
    torch.testing.assert_close(loss, expected)


def test_modalities_have_the_same_weight() -> None:
    """Nothing compares one with the other."""
    samples, model = captioned(4, 2, noise=0.5), identity_model("image", "text")
    task, batch = AlignmentUniformity(), samples.batch(torch.arange(8))
    alone = [task.loss(model, None, samples.batch(torch.arange(8), modalities=[name])) for name in ("image", "text")]
    torch.testing.assert_close(task.loss(model, None, batch), sum(alone) / 2)


def test_metrics_are_those_of_representations_without_noise() -> None:
    samples, model = captioned(5, 2, noise=0.5), noisy("text")
    model.train()
    found = AlignmentUniformity(uniformity=0.5).evaluate(model, None, samples.only(["text"]), batch_size=3)
    assert model.training
    model.eval()
    rows = model.represent("text", samples.batch(torch.arange(10)).inputs["text"]).detach()
    near, spread = float(alignment(rows, rows, samples.items)), float(uniformity(rows, rows, samples.items))
    assert found["text_alignment"] == pytest.approx(near, rel=1e-5)
    assert found["text_uniformity"] == pytest.approx(spread, rel=1e-5)
    assert found["agreement"] == pytest.approx(-near - 0.5 * spread, rel=1e-5)
    assert found["n"] == 10


# ---- clients of one modality without labels


def without_labels(rate: float = 0.3) -> Config:
    """Three kinds of clients: pairs, pictures without captions, captions without pictures."""
    config = linear(warmup_rounds=0)
    group = {key: value for key, value in config["clients"]["text"].items() if key not in ("models", "model")}
    group |= {"task": "alignment_uniformity", "source": config["clients"]["paired"]["source"], "count": 1}
    group["training"] = training("adam", 0.01, 12)
    towers = {"pictures": {"image": projection(dropout=rate)}, "captions": {"text": frozen_bag()}}
    del config["clients"]["text"]
    for name, encoders in towers.items():
        config["clients"][name] = {**group, "models": [{"dim": 8, "encoders": encoders}]}
    return config


def test_clients_without_labels_or_a_second_modality_take_part(tmp_path: Path) -> None:
    """They train on what they have, one sample a picture or a caption, and what they send is counted."""
    session = prepared(without_labels(), tmp_path)
    clients = {name: woken(session, name) for name in ("pictures", "captions")}
    assert {name: client.train.modalities for name, client in clients.items()} == {
        "pictures": ("image",),
        "captions": ("text",),
    }
    assert len(clients["captions"].train) > len(clients["pictures"].train)
    for client in clients.values():
        before = client.evaluate(client.train)["agreement"]
        client.fit(client.train, epochs=3)
        assert client.evaluate(client.train)["agreement"] > before
    play(session, 1, 1)
    assert metrics(session)["kd_distance_before.image"] > 0


def test_an_encoder_without_noise_is_refused(tmp_path: Path) -> None:
    session = prepared(without_labels(rate=0.0), tmp_path)
    with pytest.raises(ConfigError, match="compares two noisy passes, but the 'image' encoder has no dropout"):
        session.federation.require_sound()
