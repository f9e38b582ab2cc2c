from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from papers.fedaid.retraining import (
    Plan,
    Retrainable,
    Retrained,
    Retrainer,
    chosen_tensors,
    depth_of,
    distortion_result,
    figures_at_clients,
    run_distortion,
    run_retraining,
    similarity,
    trainer_of,
    training_alone,
)
from torch import Tensor, nn
from torch.nn import functional as F

from changed_runs import with_settings
from polyfed import Experiment, run
from polyfed.algorithms.baselines import ServerOnly
from polyfed.core.errors import ConfigError, DataError
from polyfed.data.samples import union
from polyfed.data.view import DataContext, InputSpec
from polyfed.federation.membership import Member
from polyfed.lab.analysis.leakage import TrainedModel
from polyfed.models.aligner import AlignerSettings
from polyfed.models.encoders.blocks import Blocks
from polyfed.models.encoders.from_config import Bert, ViT
from polyfed.models.encoders.resnet import ResNet
from polyfed.models.encoders.words import GRU, Bag
from polyfed.models.model import Model
from polyfed.runs.opened import open_run

# ---- which models


@pytest.mark.slow
def test_models_are_the_server_s_the_types_and_the_kept_ones(fedavg_run: Path, local_run: Path) -> None:
    opened = Retrainable(open_run(fedavg_run))
    assert [subject.name for subject in opened.globals()] == ["server", "image"]  # the server shows that of paired
    server, paired = opened.trained("server"), opened.trained("paired")
    assert (server.round, paired.round, paired.head) == (1, 1, "retrieval")
    assert all(torch.equal(value, paired.model.state_dict()[name]) for name, value in server.model.state_dict().items())
    assert not opened.is_server_untrained
    assert list(opened.require_judges(server)) == ["paired-0", "paired-1"]
    assert list(opened.require_judges(opened.trained("image"))) == ["image"]
    local = Retrainable(open_run(local_run))
    assert dict(local.keepers) == {"paired-0": 1, "paired-1": 1, "image": 1}
    assert [subject.name for subject in local.globals()] == ["server"]
    assert local.is_server_untrained
    assert local.trained("paired-1").name == "paired-1"


def test_a_run_without_a_server_model(fedavg_run: Path, local_run: Path) -> None:
    def alone(folder: Path, groups: tuple[str, ...]) -> Retrainable:
        opened = Retrainable(open_run(folder))
        clients = {name: opened.experiment.clients[name] for name in groups}
        alone = Retrainable(with_settings(opened.run, server=None, clients=clients))
        alone.federation.groups = clients
        return alone

    one = alone(fedavg_run, ("paired",))
    assert one.trained("server").name == "server"
    assert not one.is_server_untrained
    with pytest.raises(ConfigError, match=r"no server model and 2 global models.*valid: image, paired$"):
        alone(fedavg_run, ("paired", "image")).trained("server")
    with pytest.raises(ConfigError, match="no server model and 0 global models"):
        alone(local_run, ("paired",)).trained("server")


def test_models_that_are_not_there(fedavg_run: Path) -> None:
    opened = Retrainable(open_run(fedavg_run))
    with pytest.raises(ConfigError, match=r"of imge: .* did you mean 'image'\? valid: image, paired, server"):
        opened.trained("imge")
    image = opened.trained("image")
    nobody = replace(opened.trained("server"), settings=image.settings)
    with pytest.raises(ConfigError, match=r"no client of .* has test samples of the task, modalities and classes"):
        opened.require_judges(nobody)
    assert opened.judges(replace(image, classes={"label": ("other",)})) == {}


# ---- training


def trainable(run_folder: Path) -> tuple[Retrainable, TrainedModel, Member, dict[str, Tensor]]:
    """A run, its server's model, a client that may train it, and its tensors as they are."""
    opened = Retrainable(open_run(run_folder))
    subject = opened.trained("server")
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    return opened, subject, opened.require_judges(subject)["paired-0"], before


def test_frozen_layers_stay_as_they_were(fedavg_run: Path) -> None:
    opened, subject, member, before = trainable(fedavg_run)
    names = [name for name, value in before.items() if value.is_floating_point()]
    layer = depth_of(subject.model).layer
    for part, depth in (("shallow", 1), ("deep", 1), ("shallow", 0), ("all", None)):
        work = Retrainer(opened, subject, Plan(part, depth, steps=2))
        with work.retrained("paired-0", opened.train(subject, member), member.settings.training) as done:
            moved = {name for name in before if not torch.equal(before[name], subject.model.state_dict()[name])}
            assert done == 2
            assert not subject.model.training
        assert moved <= work.names
        # all that can move does: weights by their gradients, statistics of batch norms by the batches
        still = work.names & set(names) - moved
        assert not still, still
        assert any("running_mean" in name for name in moved) == (part != "deep" or depth < 2)
        assert all(torch.equal(value, before[name]) for name, value in subject.model.state_dict().items())
        assert all(value.requires_grad and value.grad is None for value in subject.model.parameters())
        if part == "shallow":
            assert {layer[name] for name in moved} == set(range(depth + 1))


def test_batch_norms_outside_are_fixed_functions(fedavg_run: Path) -> None:
    _, subject, *_ = trainable(fedavg_run)
    encoder = subject.model.encoders["image"]
    picture = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    expected = encoder(picture)
    heads = frozenset(name for name in subject.model.state_dict() if name.startswith("heads."))
    with training_alone(subject.model, heads):
        subject.model.train()
        torch.testing.assert_close(encoder(picture), expected)
        assert {name for name, value in subject.model.named_parameters() if value.requires_grad} == heads
    subject.model.train()
    assert not torch.allclose(encoder(picture), expected)


def test_a_failed_training_leaves_the_model_as_it_was(fedavg_run: Path) -> None:
    opened, subject, member, before = trainable(fedavg_run)
    work, one = Retrainer(opened, subject, Plan(steps=2)), opened.train(subject, member).subset(torch.tensor([0]))
    with (
        pytest.raises(DataError, match="the 1 samples of 'paired-0' make no batch"),
        work.retrained("paired-0", one, member.settings.training),
    ):
        pass
    assert all(torch.equal(value, before[name]) for name, value in subject.model.state_dict().items())


def test_it_is_what_the_next_round_would_have_done(tiny_run: Path, tmp_path: Path) -> None:
    """One client: the average of a round is the model that it trained."""
    content = yaml.safe_load((tiny_run / "config.yaml").read_text())
    content["clients"] = {"paired": content["clients"]["paired"] | {"count": 1}}
    content["run"] |= {"evaluate_clients": False, "rounds": 1}
    one = Retrainable(run(Experiment.load(content), tmp_path / "one"))
    content["run"]["rounds"] = 2
    two = Retrainable(run(Experiment.load(content), tmp_path / "two")).trained("server").model.state_dict()
    subject = one.trained("server")
    (member,) = one.require_judges(subject).values()
    work = Retrainer(one, subject, Plan(steps=None, epochs=1))
    with work.retrained("paired", one.train(subject, member), member.settings.training):
        assert all(torch.equal(value, two[name]) for name, value in subject.model.state_dict().items())
    result = run_distortion(one)
    assert list(result.figures["steps"].values()) == [10]  # 32 scenes with five captions each, in batches of 16


def test_the_union_is_that_of_the_private_samples(local_run: Path) -> None:
    opened = Retrainable(open_run(local_run))
    subject = opened.trained("paired-0")
    members = opened.require_judges(subject)
    parts = [opened.federation.train(each) for each in opened.federation.members.values() if each.group == "paired"]
    plan = Plan(steps=3)
    result = run_retraining(opened, "paired-0", "union", plan)
    work, training = Retrainer(opened, subject, plan), members["paired-0"].settings.training
    with work.retrained("union", union(parts), training):
        assert result.figures["rows"][0]["after"] == figures_at_clients(opened, subject, members)


def test_each_kept_model_on_the_union(local_run: Path) -> None:
    opened = Retrainable(open_run(local_run))
    with pytest.raises(ConfigError, match="of each: 'paired-0' and 'image' differ in task"):
        run_retraining(opened, "each", "union", Plan(steps=1))
    opened.keepers  # noqa: B018  known from here on
    del opened.keepers["image"]  # type: ignore[attr-defined]
    result = run_retraining(opened, "each", "union", Plan("shallow", {"image": 1, "text": 1}, steps=2, lr=1e-3))
    of = [(row["of"], row["on"], row["steps"]) for row in result.figures["rows"]]
    assert of == [("paired-0", "union", 2), ("paired-1", "union", 2)]
    assert list(result.figures["rows"][0]["after"]["paired-0"]) == ["R@1", "R@5", "R@10", "gallery"]


@pytest.mark.slow
def test_rows_columns_and_differences(fedavg_run: Path) -> None:
    opened = Retrainable(open_run(fedavg_run))
    result = run_retraining(opened, "server", "each", Plan("deep", steps=4, lr=0.05))
    one, row = result.figures["rows"]
    assert (one["on"], row["on"]) == tuple(row["after"]) == ("paired-0", "paired-1")
    assert one["before"] == row["before"] != one["after"]
    assert row["mean"]["after"]["R@5"] == pytest.approx(sum(at["R@5"] for at in row["after"].values()) / 2)
    (first, _) = result.tables
    assert first.columns == ("model", "paired-0", "paired-1", "average")
    on = [f"server, on paired-{k}, 4 steps" for k in range(2)]
    assert [line[0] for line in first.rows] == ["server, round 1", *on]
    assert len(result.draw().axes) == 4
    again = run_retraining(Retrainable(open_run(fedavg_run)), "server", "each", Plan("deep", steps=4, lr=0.05))
    assert again.figures == result.figures
    other = run_retraining(opened, "server", "each", Plan("deep", steps=4, lr=0.05, seed=1))
    assert other.figures["rows"] != result.figures["rows"]


def test_layers_that_hold_nothing_to_train(fedavg_run: Path) -> None:
    opened = Retrainable(open_run(fedavg_run))
    server = opened.trained("server")
    server.model.requires_grad_(False)
    with pytest.raises(ConfigError, match="layers all: 'server' has no parameters to train in them"):
        Retrainer(opened, server, Plan())


PICTURES, WORDS = InputSpec((3, 32, 32)), InputSpec((16,), ("", "one", "two", "three"))
SMALL = ResNet(widths=(8, 8, 8), depths=(1, 2, 1), block="basic")


def model(aligner: AlignerSettings | None = None, **encoders: Any) -> Model:
    context = DataContext(Path("nowhere"))
    specs = {name: WORDS if type(each) in (Bag, Bert, GRU) else PICTURES for name, each in encoders.items()}
    built = {name: each.build(8, specs[name], context) for name, each in encoders.items()}
    if aligner is not None:
        built = {name: aligner.around(each, name, 8) for name, each in built.items()}
    return Model(built, {"labels": nn.Linear(8, 3)}, 8, final_norm=nn.LayerNorm(8))


@pytest.mark.parametrize(
    ("encoder", "count", "before", "first", "last", "behind"),
    [
        (SMALL, 3, "trunk.embedder.", "trunk.encoder.stages.0.", "trunk.encoder.stages.2.", "project."),
        (ResNet(widths=(8, 8), depths=(1, 1), pie=True), 2, "trunk.embedder.", "trunk.", "trunk.", "pie."),
        (ViT(), 4, "trunk.model.embeddings.", "trunk.model.layers.0.", "trunk.model.layers.3.", "project."),
        (Bert(), 2, "trunk.model.embeddings.", "trunk.model.encoder.layer.0.", "trunk.model.encoder.", "project."),
        (Blocks(depth=3), 3, "embedding.", "blocks.0.", "blocks.2.", "norm."),
    ],
)  # fmt: skip
def test_layers_of_every_encoder(encoder: Any, count: int, before: str, first: str, last: str, behind: str) -> None:
    result = depth_of(model(sound=encoder))
    assert result.counts == {"sound": count}
    for part, number in ((before, 0), (first, 1), (last, count), (behind, count + 1)):
        assert number in {layer for name, layer in result.layer.items() if name.startswith(f"encoders.sound.{part}")}
    assert {layer for name, layer in result.layer.items() if name.startswith("encoders.sound.")} == {*range(count + 2)}
    assert all(layer == count + 1 for name, layer in result.layer.items() if not name.startswith("encoders."))
    assert any(name.startswith("heads.labels.") for name in result.layer)


@pytest.mark.parametrize("encoder", [SMALL, Blocks(depth=3)])
def test_an_aligner_is_deep(encoder: Any) -> None:
    result = depth_of(model(AlignerSettings(layers=2, hidden=8), sound=encoder))
    assert result.counts == {"sound": 3}
    assert {layer for name, layer in result.layer.items() if ".aligner." in name} == {4}


def test_shallow_is_up_to_a_depth_half_by_default_and_deep_the_rest() -> None:
    built = model(sound=SMALL, words=Bert(size="mini"))
    layer = depth_of(built).layer
    assert chosen_tensors(built, "all") == set(built.state_dict())
    for depth, deepest in ((None, [1, 2]), (3, [3, 3]), ({"words": 4}, [1, 4]), (1, [1, 1]), (0, [0, 0])):
        shallow, deep = chosen_tensors(built, "shallow", depth), chosen_tensors(built, "deep", depth)
        assert shallow | deep == set(built.state_dict())
        assert not shallow & deep
        assert [max(layer[name] for name in shallow if f".{one}." in name) for one in ("sound", "words")] == deepest


@pytest.mark.parametrize("encoder", [Bag(width=8), GRU(width=8)])
def test_encoders_without_layers(encoder: Any) -> None:
    with pytest.raises(ConfigError, match=r"encoder of 'words' \(_\w+\) has no layers to separate shallow from deep"):
        chosen_tensors(model(words=encoder), "deep")
    assert chosen_tensors(model(words=encoder), "all")


@pytest.mark.parametrize(
    ("part", "depth", "message"),
    [
        ("middle", None, r"layers middle; valid: all, deep, shallow"),
        ("all", 2, "depth has no effect with layers all"),
        ("deep", 4, r"depth 4: the encoder of 'sound' has 3 layers"),
        ("shallow", {"sund": 1}, r"depth names 'sund', which the model does not encode; did you mean 'sound'\?"),
    ],
)
def test_what_cannot_be(part: str, depth: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen_tensors(model(sound=SMALL), part, depth)


def test_similarity_by_loop(fedavg_run: Path) -> None:
    opened = Retrainable(open_run(fedavg_run))
    subject = opened.trained("server")
    member = opened.require_judges(subject)["paired-1"]
    test = opened.test(subject, member)
    total = 0.0
    for k in range(len(test)):
        batch = test.batch(torch.tensor([k]))
        u, v = (subject.model.embed(name, batch.inputs[name])[0].double().tolist() for name in ("image", "text"))
        total += sum(a * b for a, b in zip(u, v, strict=True)) / (math.hypot(*u) * math.hypot(*v))
    participant = trainer_of(opened, subject, "paired-1", member.settings.training)
    assert similarity(participant, test) == pytest.approx(total / len(test), abs=1e-6)


def test_similarity_of_three_modalities_is_the_mean_over_pairs() -> None:
    stream = torch.Generator().manual_seed(0)
    values = {name: F.normalize(torch.randn(5, 4, generator=stream)) for name in "abc"}

    class Seeing:
        def represent(self, samples: Any) -> dict[str, Tensor]:
            return values

    expected = [float((values[a] * values[b]).sum(1).mean()) for a, b in ("ab", "ac", "bc")]
    assert similarity(Seeing(), None) == pytest.approx(sum(expected) / 3)  # type: ignore[arg-type]


def test_without_training_the_distortion_is_0(fedavg_run: Path) -> None:
    result = run_distortion(Retrainable(open_run(fedavg_run)), plan=Plan(steps=0)).figures
    assert result["steps"] == {"paired-0": 0, "paired-1": 0}
    assert all(after == result["before"] for after in result["after"].values())
    assert {fall for by_client in result["decrease"].values() for fall in by_client.values()} == {0}


@pytest.mark.slow
def test_distortion_is_before_minus_after(fedavg_run: Path) -> None:
    opened = Retrainable(open_run(fedavg_run))
    result = run_distortion(opened)
    content = result.figures
    members = opened.require_judges(opened.trained("server"))
    passes = {name: divmod(len(opened.federation.train(member)), 16) for name, member in members.items()}
    assert content["steps"] == {name: batches + (left > 1) for name, (batches, left) in passes.items()}
    before, after = content["before"]["similarity"], content["after"]["paired-1"]["similarity"]
    assert content["decrease"]["paired-1"]["paired-0"] == before["paired-0"] - after["paired-0"] != 0
    assert content["overall_decrease"] == pytest.approx(sum(content["mean_decrease"].values()) / 2)
    assert "similarity" not in content["before"]["figures"]["paired-0"]
    assert content == run_distortion(Retrainable(open_run(fedavg_run))).figures
    table, first, _ = result.tables
    assert [line[0] for line in table.rows] == ["on paired-0", "on paired-1", "average"]
    assert first.rows[0][0] == "server, round 1"
    assert len(result.draw().axes) == 6  # two figures and the decrease, each with its colours


def test_means_over_who_trained() -> None:
    def values(a: float, b: float) -> dict[str, dict[str, float]]:
        return {name: {"similarity": value, "R@1": 10 * value} for name, value in (("a", a), ("b", b))}

    before, after = values(0.6, 0.3), {"a": values(0.1, 0.3), "b": values(0.5, 0.2)}
    result = distortion_result("run", [Retrained("server", 3, name, 2, before, after[name]) for name in "ab"])
    assert result.figures["mean_decrease"]["a"] == pytest.approx((0.5 + 0.1) / 2)
    assert result.figures["mean_decrease"]["b"] == pytest.approx((0.0 + 0.1) / 2)
    assert result.tables[1].rows[-1][:2] == ("average of re-trained", "3.00")


def test_what_cannot_be_distorted(fedavg_run: Path, fedafd_run: Path) -> None:
    bare = with_settings(Retrainable(open_run(fedavg_run)).run, algorithm=ServerOnly())
    with pytest.raises(ConfigError, match="'server_only' has no length of local training; set steps"):
        run_distortion(Retrainable(bare))
    figures = run_distortion(Retrainable(open_run(fedafd_run)), plan=Plan(steps=1)).figures
    assert list(figures["steps"].values()) == [1, 1]
