"""Every method with images, texts, sounds and tables, and with half of the samples lacking a modality."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional as F

import polyfed
from grids import mostly_slow
from misbehaving import contents
from polyfed.aggregation.ensemble import Ensembled, Rows, relational_losses
from polyfed.data.samples import Inputs, Samples
from polyfed.losses.distillation import relational_kl
from polyfed.runs.experiment import Experiment
from polyfed.tasks.imputations import Imputation
from sessions import prepared, woken
from small_federations import ADAPTED, METHODS, NAMED, Config, federation_for, four_modalities, tiny_experiment

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


# ---- half of the samples lack one modality


loaded = Samples._loaded


def poisoned(
    samples: Samples, inputs: Inputs, rows: Tensor, generator: torch.Generator | None, there: Bool[Tensor, " b"]
) -> Tensor:
    """Inputs that must not be read: NaN in place of a missing modality, or a number that no table has."""
    filled = loaded(samples, inputs, rows, generator, there)
    assert isinstance(filled, Tensor)
    poison = float("nan") if filled.is_floating_point() else torch.iinfo(filled.dtype).max
    return filled.clone().index_fill_(0, (~there).nonzero()[:, 0], poison)


def incomplete(config: Config, rate: float) -> Config | None:
    """The federation with modalities missing wherever a client has several; None if no client has."""
    several = [group for group in config["clients"].values() if len(_encoders(group)) > 1 and "names" not in str(group)]
    for group in several:
        group["missing"] = {"rates": dict.fromkeys(sorted(_encoders(group)), rate), "test": True}
    return config if several else None


def _encoders(group: Config) -> Config:
    return dict((group.get("models") or [group["model"]])[0]["encoders"])


ALIKE = {"fedit", "ffa_lora", "fedex_lora", "flora", "flexlora", "hetlora", "fediot", "fedprox"}
ALIKE |= {"margin_weighted", "fedgems", "fedmkd", "fedet", "fedmd", "server_only", "local", "centralised"}
ALIKE |= {"change_distillation", "creamfl_averaged", "fed_mae", "feddra", "fedema", "fedcola", "moon", "scaffold"}
"""Slow: what clients do with their own samples is what others do."""


@pytest.mark.parametrize("method", mostly_slow(METHODS, *{*METHODS} - ALIKE))
def test_what_a_sample_lacks_is_never_looked_at(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = incomplete(federation_for(method), 0.25)
    if config is None:
        pytest.skip("all clients have one modality")
    config["run"] |= {"rounds": 2, "eval_every": 2}
    monkeypatch.setattr(Samples, "_loaded", poisoned)
    run = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
    assert not run.records.events
    measured = [value for one in run.records.measurements for value in one.metrics.values()]
    assert measured
    assert all(math.isfinite(value) for value in measured)


def classifying(**task: object) -> Config:
    """Clients that classify an image and its text by topic, of whose samples most lack one of the two."""
    config = tiny_experiment()
    paired = config["clients"]["paired"] | {"task": {"name": "classification", "target": "label"} | task}
    config["clients"] = {"paired": paired | {"missing": {"rates": {"image": 0.4, "text": 0.4}, "test": True}}}
    config["data"]["sources"]["scenes"]["targets"] = {"label": "label"}
    config["run"] |= {"rounds": 2, "eval_every": 2}
    return config | {"server": None}


@pytest.mark.parametrize("imputation", mostly_slow(Imputation.available(), "nearest"))
def test_every_imputation_trains_and_is_averaged_alike_on_a_wire(
    imputation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = classifying(imputation={"name": imputation, "dropout": 0.3}, given="each")
    monkeypatch.setattr(Samples, "_loaded", poisoned)
    run = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
    assert not run.records.events
    assert {"accuracy", "accuracy_given_image", "accuracy_given_text"} <= run.records.last("paired-0").keys()
    config["run"]["engine"] = {"name": "local", "serialize": True}
    assert contents(run) == contents(polyfed.run(Experiment.parse(config), tmp_path / "again", quiet=True))


def noised(imputation: str) -> Config:
    config = classifying(imputation=imputation)
    config["clients"]["paired"]["model"]["encoders"]["image"]["norm"] = "group"
    config["privacy"] = {"samples": {"noise_multiplier": 1.0, "clip": 1.0}, "metrics": "clear"}
    return config


@pytest.mark.slow
@pytest.mark.parametrize("imputation", ["drop", "placeholder"])
def test_noise_in_training_holds_for_samples_that_lack_something(imputation: str, tmp_path: Path) -> None:
    run = polyfed.run(Experiment.parse(noised(imputation)), tmp_path / "run", quiet=True)
    assert not [event for event in run.records.events if "privacy" not in event.incident]


def test_a_modality_that_one_sample_of_a_batch_has_is_left_out(tmp_path: Path) -> None:
    client = woken(prepared(classifying(), tmp_path / "run"), "paired-0")
    pictures = torch.full_like(client.train.rows["image"], -1).index_fill_(0, torch.tensor([3]), 0)
    few = replace(client.train, rows={"image": pictures, "text": client.train.rows["text"].clamp(min=0)})
    client.model.encoders["image"] = torch.nn.BatchNorm1d(3)  # of a single row it would not be defined
    for batch in client.batches(few, "task", len(few)):
        assert not bool(batch.present["image"].any())
        assert bool(client.task_loss(batch).isfinite())


def test_a_batch_without_a_pair_has_a_loss_of_zero_and_trains_nothing(tmp_path: Path) -> None:
    client = woken(prepared(tiny_experiment(), tmp_path / "run"), "paired-0")
    items = client.train.items.unique()
    half = len(items) // 2
    apart = client.train.lacking({"image": items[:half], "text": items[half:]})
    loss = client.task_loss(apart.batch(torch.arange(len(apart))))
    assert (float(loss), loss.requires_grad) == (0.0, False)
    before = {name: value.clone() for name, value in client.weights.items()}
    for _ in client.epochs(1):
        client.trainer().step(loss)
        with pytest.raises(RuntimeError, match="does not require grad"):
            client.trainer().step(loss + 1)
    assert all(torch.equal(value, before[name]) for name, value in client.weights.items())
