"""Methods with images, texts, sounds and tables: what they compute with three modalities, and that they run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import polyfed
from polyfed.aggregation.ensemble import Ensembled, Rows, relational_losses
from polyfed.losses.distillation import relational_kl
from polyfed.runs.experiment import Experiment
from sessions import prepared, woken
from small_federations import ADAPTED, METHODS, NAMED, Config, federation_for, four_modalities

N, WIDTH = 6, 4


def unit(seed: int) -> Tensor:
    return F.normalize(torch.randn(N, WIDTH, generator=torch.Generator().manual_seed(seed)), dim=1)


SERVER = {"image": unit(1), "text": unit(2), "audio": unit(3)}


# ---- by hand


def test_a_relation_is_learnt_with_each_modality_that_a_client_has() -> None:
    """One client of images and sounds: texts, which it lacks, are not learnt."""
    rows = {name: {"a": Rows(unit(seed), torch.zeros(N))} for name, seed in (("image", 5), ("audio", 6))}
    targets = {
        name: Ensembled(torch.zeros(N, WIDTH), torch.ones(N, dtype=torch.bool), rows.get(name, {})) for name in SERVER
    }
    index = items = torch.arange(N)
    actual = relational_losses(SERVER, targets, index, items, tau=0.5)
    strangers = ~torch.eye(N, dtype=torch.bool)
    within = relational_kl(SERVER["image"], SERVER["image"], _cosines(rows, "image", "image"), strangers, 0.5)
    across = relational_kl(
        SERVER["image"], SERVER["audio"], _cosines(rows, "image", "audio"), torch.ones_like(strangers), 0.5
    )
    assert float(actual["image"]) == pytest.approx(float(within + across) / 3, abs=1e-6)
    assert float(actual["text"]) == 0


def _cosines(rows: dict[str, dict[str, Rows]], one: str, other: str) -> Tensor:
    return rows[one]["a"].values @ rows[other]["a"].values.T


def test_a_client_of_one_modality_is_contrasted_with_all_others(tmp_path: Path) -> None:
    """Eq. 1 once for each modality that the server has and the client has not, Eq. 2 for its own."""
    session = prepared(four_modalities(name="creamfl"), tmp_path)
    method, client = session.experiment.algorithm, woken(session, "audio")
    server = session.server.represent_public()
    batch = client.public_set.batch(torch.arange(4))
    previous = F.normalize(torch.randn(4, 64), dim=1)
    client.model.eval()
    with torch.no_grad():
        wanted = method.contrast.targets(client, method.public, server)
        actual = method.contrast.loss(client, batch, wanted, lambda *_: previous)
        own = client.model.represent("audio", batch.inputs["audio"])
    expected = F.softplus((own * (previous - server["audio"][:4])).sum(1)).mean()
    for other in ("image", "text", "table"):
        expected = expected + F.cross_entropy(own @ server[other].T, torch.arange(4))
    assert float(actual) == pytest.approx(float(expected), abs=1e-5)


def test_fedcola_complements_a_modality_with_the_mean_of_all_others(tmp_path: Path) -> None:
    session = prepared(four_modalities(name="fedcola"), tmp_path)
    method, server = session.experiment.algorithm, session.server
    kinds = {server.types[form].modalities: form for form in server.types}
    own = kinds["audio",]
    assert {*method.complement.sources(server, own)} == {kinds[name,] for name in ("image", "text", "table")}
    out = method.complement.out_weights(server, own)
    name = "blocks.0.attention.qkv.weight"
    others = [server.weights[kinds[one,]][f"encoders.{one}.{name}"] for one in ("image", "text", "table")]
    sizes = [server.weight(*server.types[kinds[one,]].clients) for one in ("image", "text", "table")]
    expected = sum(size * value for size, value in zip(sizes, others, strict=True)) / sum(sizes)
    torch.testing.assert_close(out[name], expected)


# ---- runs

OTHERS = {*ADAPTED, *NAMED, "fedaid", "feddra"}
"""Methods of adapters, of class names, and of an align module of two modalities, which this federation has not."""


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted({*METHODS} - OTHERS))
def test_it_runs(method: str, tmp_path: Path) -> None:
    full = polyfed.run(Experiment.parse(suited(method)), tmp_path / "whole", quiet=True)
    assert not full.records.events
    measured = [value for one in full.records.measurements for value in one.metrics.values()]
    assert all(math.isfinite(value) for value in measured)


def suited(method: str) -> Config:
    """The federation for a method; those that exchange class scores have clients that classify."""
    own = federation_for(method)
    config = four_modalities(name=method) | {"algorithm": own["algorithm"]}
    if method == "centralised":  # its server shows the model of one type of clients
        config["clients"] = {"all": config["clients"]["all"]}
    if "server" not in own or own["server"] is None:
        config.pop("server")
    config["run"] |= {"rounds": 2, "eval_every": 2}
    return config
