"""Objectives of pairs by plain loops, and in federations: ConVIRT, GLoRIA and MGCA."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from papers.fedaid.objectives import (
    MGCA,
    GLoRIA,
    PrototypeLayer,
    local_contrast,
    prototype_alignment,
    token_alignment,
    token_weights,
    uniform_weights,
)
from task_samples import captioned, identity_model, make_samples
from torch import Tensor, nn
from torch.nn import functional as F

from by_hand import copies, play
from polyfed import Experiment, run
from polyfed.aggregation.mean import WeightedMean
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import isolated
from polyfed.data.samples import Batch, Samples
from polyfed.losses.info_nce import info_nce
from polyfed.models.aligner import Detail
from polyfed.models.model import CachedModel, Model
from polyfed.tasks.retrieval import ConVIRT
from polyfed.tasks.task import Task
from sessions import prepared, woken
from small_federations import Config, bag, scenes, three_kinds, training, transformers, words
from small_federations import aligned as hospitals

DIM = 6


class FixedModel:
    """A model with fixed outputs, indexed by its input."""

    device = torch.device("cpu")

    def __init__(self, details: Mapping[str, Detail]) -> None:
        self.details = details

    def embed(self, modality: str, x: Tensor) -> Tensor:
        return self.details[modality].embedding[x]

    def represent(self, modality: str, x: Tensor) -> Tensor:
        return F.normalize(self.embed(modality, x), dim=-1)

    def detail(self, modality: str, x: Tensor) -> Detail:
        return Detail(*(None if part is None else part[x] for part in self.details[modality]))


class Flat:
    """A model without features by position."""

    device = torch.device("cpu")

    def embed(self, modality: str, x: Tensor) -> Tensor:
        return torch.ones(len(x), DIM)

    represent = embed


@pytest.fixture
def samples() -> Samples:
    """Six samples of three items, whose input is their number."""
    rows, items = torch.arange(6), torch.tensor([0, 0, 1, 1, 2, 2])
    return make_samples({"image": rows, "text": rows}, {"image": rows, "text": rows}, items)


@pytest.fixture
def model() -> FixedModel:
    stream = torch.Generator().manual_seed(0)

    def side(length: int, mask: Tensor | None) -> Detail:
        attention = torch.rand(6, length, generator=stream)
        attention = attention if mask is None else attention * mask
        embedding, positions = torch.randn(6, DIM, generator=stream), torch.randn(6, length, DIM, generator=stream)
        return Detail(
            embedding.requires_grad_(), positions.requires_grad_(), mask, attention / attention.sum(1)[:, None]
        )

    words = torch.arange(5) < torch.tensor([5, 2, 1, 4, 3, 5])[:, None]
    return FixedModel({"image": side(4, None), "text": side(5, words)})


def full_batch(samples: Samples) -> Batch:
    return samples.batch(torch.arange(len(samples)))


def units(model: FixedModel) -> tuple[Tensor, Tensor]:
    first, second = (F.normalize(model.details[name].embedding, dim=-1) for name in ("image", "text"))
    return first, second


# ---- settings


@pytest.mark.parametrize(
    ("task_type", "settings", "message"),
    [
        (ConVIRT, {"between": ("a", "a")}, "twice"),
        (ConVIRT, {"weight": 1.5}, "weight"),
        (ConVIRT, {"in_batch": 1}, "in_batch"),
        (GLoRIA, {"global_weight": 0, "local_weight": 0}, "both 0"),
        (MGCA, {"instances": None, "tokens": None, "assignments": None}, "all null"),
        (MGCA, {"assignments": None, "prototypes": 7}, "assignments: null"),
    ],
)
def test_settings_that_make_no_sense_are_refused(task_type: type[Task], settings: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task_type(**settings)


@pytest.mark.parametrize("task_type", [ConVIRT, GLoRIA, MGCA])
def test_a_missing_modality_is_named(task_type: type[Task]) -> None:
    with pytest.raises(ConfigError, match=f"{task_type.component_name()} between .* needs 'text'"):
        task_type().head(DIM, captioned(3, 1).only(["image"]))


# ---- losses


def test_convirt_weighs_its_directions(model: FixedModel, samples: Samples) -> None:
    u, v = units(model)
    task = ConVIRT(temperature=0.1, learn_temperature=False, weight=0.75)
    head = task.head(DIM, samples)
    assert not list(head.parameters())
    expected = info_nce(u, v, 10.0, weight=0.75)
    torch.testing.assert_close(task.loss(model, head, full_batch(samples)), expected)
    assert not torch.isclose(expected, info_nce(v, u, 10.0, weight=0.75))
    both = ConVIRT(reduction="sum", mask_siblings=True)
    actual = both.loss(model, both.head(DIM, samples), full_batch(samples))
    torch.testing.assert_close(actual, 2 * info_nce(u, v, 1 / 0.07, samples.items))


def test_gloria_is_the_sum_of_its_contrasts(model: FixedModel, samples: Samples) -> None:
    image, text = model.details["image"], model.details["text"]
    parts = image.positions, text.positions, image.mask, text.mask, samples.items
    local = local_contrast(*parts, scale=3.0, attention_scale=2.0, word_scale=1.5, aggregate="mean", reduction="sum")
    scales = {"global_scale": 7.0, "local_scale": 3.0, "attention_scale": 2.0, "word_scale": 1.5}
    task = GLoRIA(global_weight=0.5, local_weight=2.0, aggregate="mean", chunk=2, mask_siblings=True, **scales)
    assert task.head(DIM, samples) is None
    expected = 0.5 * info_nce(*units(model), 7.0, samples.items, reduction="sum") + 2.0 * local
    torch.testing.assert_close(task.loss(model, None, full_batch(samples)), expected)


def test_mgca_is_the_sum_of_its_alignments(model: FixedModel, samples: Samples) -> None:
    image, text = model.details["image"], model.details["text"]
    task = MGCA(
        instances={"weight": 0.3}, tokens={"weight": 0.5}, assignments={"weight": 2.0, "iterations": 2}, prototypes=7
    )
    head = task.head(DIM, samples)
    weights = token_weights(image.attention), token_weights(text.attention, text.mask)
    tokens = token_alignment(image.positions, text.positions, weights[0], None, text.mask)
    tokens = tokens + token_alignment(text.positions, image.positions, weights[1], text.mask, None)
    prototypes = prototype_alignment(*units(model), head.weight, iterations=2)
    expected = 0.3 * info_nce(*units(model), 1 / 0.07, reduction="sum") + 0.5 * tokens + 2.0 * prototypes
    torch.testing.assert_close(task.loss(model, head, full_batch(samples)), expected)


def test_mgca_with_uniform_tokens_needs_no_attention(model: FixedModel, samples: Samples) -> None:
    image, text = (model.details[name]._replace(attention=None) for name in ("image", "text"))
    bare = FixedModel({"image": image, "text": text})
    task = MGCA(tokens={"weights": "uniform", "weight": 1}, instances=None, assignments=None)
    weights = uniform_weights(image.positions), uniform_weights(text.positions, text.mask)
    expected = token_alignment(image.positions, text.positions, weights[0], None, text.mask)
    expected = expected + token_alignment(text.positions, image.positions, weights[1], text.mask, None)
    torch.testing.assert_close(task.loss(bare, task.head(DIM, samples), full_batch(samples)), expected)
    with pytest.raises(ConfigError, match=r"encoder of 'image'.*aligner.*uniform"):
        MGCA().loss(bare, MGCA().head(DIM, samples), full_batch(samples))


@pytest.mark.parametrize("task_type", [ConVIRT, GLoRIA, MGCA])
def test_one_sample_and_all_siblings_are_finite(model: FixedModel, samples: Samples, task_type: type[Task]) -> None:
    task = task_type(mask_siblings=True)
    head = task.head(DIM, samples)
    for index in (torch.tensor([3]), torch.tensor([2, 3])):
        assert torch.isfinite(task.loss(model, head, samples.batch(index)))


def test_siblings_are_those_that_match(model: FixedModel, samples: Samples) -> None:
    """Items of equal reports are excluded from each other's negatives."""
    batch = full_batch(samples)
    same = Batch(batch.inputs, batch.targets, batch.index, batch.items, torch.tensor([0, 0, 0, 0, 1, 1]))
    task = ConVIRT(mask_siblings=True, learn_temperature=False)
    expected = info_nce(*units(model), 1 / 0.07, same.matches)
    torch.testing.assert_close(task.loss(model, task.head(DIM, samples), same), expected)
    assert not torch.isclose(expected, task.loss(model, task.head(DIM, samples), batch))


@pytest.mark.parametrize("task", [GLoRIA(), MGCA()])
def test_models_without_positions_are_refused(samples: Samples, task: Task) -> None:
    head = task.head(DIM, samples)
    with pytest.raises(ConfigError, match=f"task '{task.component_name()}' needs features by position.*Flat"):
        task.loss(Flat(), head, full_batch(samples))
    pairs = captioned(3, 1)
    with pytest.raises(ConfigError, match=r"'image' \(Linear\).*model.aligner"):
        task.loss(identity_model("image", "text"), head, full_batch(pairs))


@pytest.mark.parametrize(("task", "without"), [(GLoRIA, "aligner.local"), (MGCA, "aligner.local"), (MGCA, "aligner")])
@pytest.mark.parametrize("participant", ["server", "hospital"])
def test_a_model_that_cannot_be_trained_stops_a_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: type[Task], without: str, participant: str
) -> None:
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    config = copy.deepcopy(hospitals(name="local"))
    for own in (config["server"], config["clients"]["hospital"]):
        own["task"] = {"name": task.component_name()}
        own["model"] = own["model"] | {"aligner": {"hidden": 16, "local": True}}
    own = config["server"] if participant == "server" else config["clients"]["hospital"]
    own["model"] = own["model"] | {"aligner": {"hidden": 16} if without == "aligner.local" else None}
    with pytest.raises(ConfigError, match=r"set model\.aligner(\.| with )local"):
        run(Experiment.parse(config), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_one_pass_serves_the_task_and_the_method() -> None:
    """A model that embeds a batch once gives the same loss."""
    stream = torch.Generator().manual_seed(0)
    model = Model({name: _Positioned(stream) for name in ("image", "text")}, {}, DIM)
    inputs = {name: torch.randn(4, 3, DIM, generator=stream) for name in ("image", "text")}
    items = torch.arange(4)
    batch = Batch(inputs, {}, items, items)
    once, task = CachedModel(model), GLoRIA()
    torch.testing.assert_close(task.loss(once, None, batch), task.loss(model, None, batch))
    assert once.embed("image", inputs["image"]) is once.detail("image", inputs["image"]).embedding


class _Positioned(nn.Module):
    def __init__(self, stream: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM, generator=stream))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).mean(1)

    def positions(self, x: Tensor) -> tuple[Tensor, None]:
        return x @ self.weight, None


# ---- prototypes


def test_prototypes_have_unit_norm_and_are_frozen_at_first() -> None:
    head = PrototypeLayer(9, DIM, frozen_steps=2)
    torch.testing.assert_close(head.weight.norm(dim=1), torch.ones(9))
    reached = []
    for _ in range(4):
        head.zero_grad()
        (head() * torch.ones(DIM)).sum().backward()
        reached.append(bool(head.weight.grad.any()))
    assert reached == [False, False, True, True]
    assert int(head.steps) == 4


def test_only_training_counts() -> None:
    head = PrototypeLayer(3, DIM, frozen_steps=1)
    with torch.no_grad():
        assert torch.equal(head(), head.weight)
    assert head.eval()() is head.weight
    assert int(head.steps) == 0


def test_averaged_prototypes_stand_for_the_mean_number_of_steps() -> None:
    mean = WeightedMean()
    for steps, weight in ((4, 1), (8, 3)):
        head = PrototypeLayer(3, DIM)
        head.steps += steps
        mean.add(head.state_dict(), weight)
    assert mean.result()["steps"] == torch.tensor(7)


# ---- in federations


def aligned(task: Config, *, aligner: bool = True) -> Config:
    """Two paired clients with a small residual net and a bag of words, on scenes."""
    config = three_kinds(name="fedavg")
    paired = config["clients"]["paired"]
    image = paired["model"]["encoders"]["image"] | {"widths": [16, 32]}
    model = {"dim": 32, "encoders": {"image": image, "text": bag(words(16, 400), 32)}}
    if aligner:
        model["aligner"] = {"head": "linear", "local": True}
    sources = {"scenes": scenes(48, 8, 8, difficulty=0.0, columns={"image": "image", "text": "text"})}
    clients = {"paired": paired | {"model": model, "task": task, "training": training("adamw", 0.003, 16)}}
    kept = {key: value for key, value in config.items() if key not in ("server", "public")}
    return kept | {"data": {"sources": sources}, "clients": clients}


def of_blocks(task: Config) -> Config:
    """The same with transformers and without an aligner."""
    config = aligned(task, aligner=False)
    views = {name: one["view"] for name, one in transformers()["clients"]["paired"]["model"]["encoders"].items()}
    config["clients"]["paired"]["model"]["encoders"] = {
        "image": {"name": "vit", "size": "nano", "patch": 8, "view": views["image"]},
        "text": {"name": "bert", "size": "tiny", "view": views["text"]},
    }
    return config


SMALL = {"name": "papers.fedaid.objectives.MGCA", "prototypes": 16, "freeze_prototypes_steps": 3}
FEDERATIONS = {
    "convirt": lambda: aligned({"name": "convirt"}),
    "gloria": lambda: aligned({"name": "papers.fedaid.objectives.GLoRIA", "mask_siblings": True}),
    "mgca": lambda: aligned(SMALL),
    "mgca without aligner": lambda: of_blocks(SMALL | {"tokens": {"weights": "uniform"}}),
}


# by FedAvg and through MOON's view of a model each
@pytest.mark.parametrize("method", [{"name": "fedavg"}, {"name": "moon", "mu": 1.0}], ids=["fedavg", "moon"])
@pytest.mark.parametrize(
    "name", [name if name in ("gloria", "mgca") else pytest.param(name, marks=pytest.mark.slow) for name in FEDERATIONS]
)
def test_goes_through_rounds(name: str, method: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    config = FEDERATIONS[name]()
    config["algorithm"] = method | {"local_steps": 2}
    session = prepared(config, tmp_path / "run")
    (start,) = copies(session.server.weights).values()
    play(session, 1, 2)
    (end,) = session.server.weights.values()
    assert all(torch.isfinite(value).all() for value in end.values())
    trained = {name for name, value in end.items() if value.is_floating_point() and not value.equal(start[name])}
    assert any(".local." in name for name in trained) == ("aligner" in str(sorted(end)) and "convirt" not in name)
    assert {name.split(".")[1] for name in trained if name.startswith("encoders.")} == {"image", "text"}
    counts = [int(value) for name, value in end.items() if name.startswith("heads.") and name.endswith(".steps")]
    assert counts == ([4] if "mgca" in name else [])
    if counts:  # frozen for three steps, then not
        assert any(name.startswith("heads.") for name in trained)


@pytest.mark.slow
def test_learns_its_training_scenes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """48 scenes in 60 steps: chance is an R@1 sum of 4.2 percent, of 200."""
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    config = FEDERATIONS["mgca"]()
    config["clients"]["paired"] |= {"count": 1}
    client = woken(prepared(config, tmp_path / "run"), "paired")
    assert len(client.train) == 48
    assert client.evaluate(client.train)["r1_sum"] < 15
    with isolated(0, "learn"):
        client.fit(client.train, epochs=1, steps=60)
    assert client.evaluate(client.train)["r1_sum"] > 40
