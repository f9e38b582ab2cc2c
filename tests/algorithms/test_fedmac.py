"""FedMAC: a round by hand, its contrasts against plain loops, and what has nothing to contrast."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch
from gap_rounds import embedded, mean_of_present, with_gaps
from torch import Tensor
from torch.nn import functional as F

from by_hand import assert_mean, copies, plain_training
from polyfed.algorithms.shared.local_losses import SampleEmbeddings
from polyfed.data.samples import Batch
from polyfed.models.model import CachedModel, Model
from polyfed.tasks.imputations import Embeddings, Imputer
from sessions import first_cohort, prepared, woken


def contrast(pairs: list[tuple[Tensor, Tensor]], tau: float) -> Tensor:
    """Both directions of InfoNCE, one logarithm after the other."""
    total = torch.zeros(())
    for k, (u, v) in enumerate(pairs):
        there = [F.cosine_similarity(u, other, dim=0) / tau for _, other in pairs]
        back = [F.cosine_similarity(v, other, dim=0) / tau for other, _ in pairs]
        for scores in (there, back):
            total = total - (scores[k].exp() / torch.stack(scores).exp().sum()).log() / 2
    return total / len(pairs)


def by_hand(model: Model, batch: Batch) -> Tensor:
    """0.3 between modalities, 0.2 between what is classified and each modality, tau 0.5."""
    z = embedded(model, batch)
    between = [
        contrast([(z[a][k], z[b][k]) for k in z[a] if k in z[b]], 0.5)
        for a, b in combinations(z, 2)
        if len(z[a].keys() & z[b].keys()) > 1
    ]
    fused = [contrast([(mean_of_present(z, k), own[k]) for k in own], 0.5) for own in z.values() if len(own) > 1]
    return sum((0.3 * one / len(between) for one in between), torch.zeros(())) + sum(
        0.2 * one / len(fused) for one in fused
    )


def test_a_round_equals_a_plain_loop(tmp_path: Path) -> None:
    session = prepared(with_gaps("fedmac", between=0.3, fused=0.2, tau=0.5), tmp_path)
    server, start = session.server, copies(session.server.weights)
    session.experiment.algorithm.round(server, first_cohort(session))
    for kind, members in server.types.items():
        trained = {
            info.id: plain_training(
                session, info.id, start[kind], extra=by_hand if len(info.modalities) > 1 else lambda model, batch: 0.0
            )
            for info in members.clients
        }
        assert_mean(server.weights[kind], trained, {info.id: server.weight(info) for info in members.clients})


def test_the_contrasts_see_the_modality_dropout_of_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_gaps("fedmac", between=0.0)
    for group in config["clients"].values():
        group["task"] = {"name": "classification", "imputation": {"name": "drop", "dropout": 0.99}}
    session, draws, fused = prepared(config, tmp_path), list[Embeddings](), list[Tensor | None]()
    draw = Imputer.thinned
    monkeypatch.setattr(Imputer, "thinned", lambda *given: draws.append(draw(*given)) or draws[-1])
    client = woken(session, "paired-0")
    client.model.train()

    def noted(model: CachedModel, batch: Batch) -> Tensor:
        fused.append(SampleEmbeddings.of(client, model, batch).fused)
        return batch.no_loss

    batch = next(client.batches(client.train, "task"))
    client.training_loss(batch, regulariser=noted)
    (thin,) = draws
    z = {name: dict(zip(part.index.tolist(), part.values, strict=True)) for name, part in thin.items()}
    assert sum(map(len, z.values())) < sum(map(len, embedded(client.model, batch).values()))
    assert fused[0] is not None
    expected = torch.stack([mean_of_present(z, k) for k in range(len(fused[0]))])
    torch.testing.assert_close(fused[0], expected)
