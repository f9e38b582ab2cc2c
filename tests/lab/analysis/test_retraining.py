from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from changed_runs import with_settings
from polyfed import Experiment, run
from polyfed.core.errors import ConfigError, DataError
from polyfed.data.union import union
from polyfed.lab.analysis.depth import depth_of
from polyfed.lab.analysis.distortion import run_distortion
from polyfed.lab.analysis.retraining import Plan, Retrainer, run_retraining
from polyfed.lab.analysis.simulated import Simulated, training_alone
from polyfed.runs.opened import open_run

# ---- which models


@pytest.mark.slow
def test_models_are_the_server_s_the_types_and_the_kept_ones(fedavg_run: Path, local_run: Path) -> None:
    opened = Simulated(open_run(fedavg_run))
    assert [subject.name for subject in opened.globals()] == ["server", "image"]  # the server shows that of paired
    server, paired = opened.trained("server"), opened.trained("paired")
    assert (server.round, paired.round, paired.head) == (1, 1, "retrieval")
    assert all(torch.equal(value, paired.model.state_dict()[name]) for name, value in server.model.state_dict().items())
    assert not opened.is_server_untrained
    assert list(opened.require_judges(server)) == ["paired-0", "paired-1"]
    assert list(opened.require_judges(opened.trained("image"))) == ["image"]
    local = Simulated(open_run(local_run))
    assert dict(local.keepers) == {"paired-0": 1, "paired-1": 1, "image": 1}
    assert [subject.name for subject in local.globals()] == ["server"]
    assert local.is_server_untrained
    assert local.trained("paired-1").name == "paired-1"


def test_a_run_without_a_server_model(fedavg_run: Path, local_run: Path) -> None:
    def alone(folder: Path, groups: tuple[str, ...]) -> Simulated:
        opened = Simulated(open_run(folder))
        clients = {name: opened.experiment.clients[name] for name in groups}
        alone = Simulated(with_settings(opened.run, server=None, clients=clients))
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
    opened = Simulated(open_run(fedavg_run))
    with pytest.raises(ConfigError, match=r"--of imge: .* did you mean 'image'\? valid: image, paired, server"):
        opened.trained("imge")
    image = opened.trained("image")
    nobody = replace(opened.trained("server"), settings=image.settings)
    with pytest.raises(ConfigError, match=r"no client of .* has test samples of the task, modalities and classes"):
        opened.require_judges(nobody)
    assert opened.judges(replace(image, classes={"label": ("other",)})) == {}


# ---- training


def test_frozen_layers_stay_as_they_were(fedavg_run: Path) -> None:
    opened = Simulated(open_run(fedavg_run))
    subject = opened.trained("server")
    member = opened.require_judges(subject)["paired-0"]
    names = [name for name, value in subject.model.state_dict().items() if value.is_floating_point()]
    layer = depth_of(subject.model).layer
    for part, depth in (("shallow", 1), ("deep", 1), ("shallow", 0), ("all", None)):
        before = {name: value.clone() for name, value in subject.model.state_dict().items()}
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
    opened = Simulated(open_run(fedavg_run))
    subject = opened.trained("server")
    encoder = subject.model.encoders["image"]
    picture = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    expected = encoder(picture)
    heads = frozenset(name for name in subject.model.state_dict() if name.startswith("heads."))
    with training_alone(subject.model, heads):
        subject.model.train()
        torch.testing.assert_close(encoder(picture), expected)
        assert [name for name, value in subject.model.named_parameters() if value.requires_grad] == [
            name for name in subject.model.state_dict() if name in heads
        ]
    subject.model.train()
    assert not torch.allclose(encoder(picture), expected)


def test_a_failed_training_leaves_the_model_as_it_was(fedavg_run: Path) -> None:
    opened = Simulated(open_run(fedavg_run))
    subject = opened.trained("server")
    member = opened.require_judges(subject)["paired-0"]
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
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
    one = Simulated(run(Experiment.load(content), tmp_path / "one"))
    content["run"]["rounds"] = 2
    two = (
        Simulated(open_run(run(Experiment.load(content), tmp_path / "two").folder)).trained("server").model.state_dict()
    )
    subject = one.trained("server")
    (member,) = one.require_judges(subject).values()
    work = Retrainer(one, subject, Plan(steps=None, epochs=1))
    with work.retrained("paired", one.train(subject, member), member.settings.training):
        assert all(torch.equal(value, two[name]) for name, value in subject.model.state_dict().items())
    found = run_distortion(one)
    assert list(found.figures["steps"].values()) == [10]  # 32 scenes with five captions each, in batches of 16


def test_the_union_is_that_of_the_private_samples(local_run: Path) -> None:
    opened = Simulated(open_run(local_run))
    subject = opened.trained("paired-0")
    members = opened.require_judges(subject)
    parts = [
        opened.federation.train(member) for member in opened.federation.members.values() if member.group == "paired"
    ]
    plan = Plan(steps=3)
    found = run_retraining(opened, "paired-0", "union", plan)
    work, training = Retrainer(opened, subject, plan), members["paired-0"].settings.training
    with work.retrained("union", union(parts), training):
        assert found.figures["rows"][0]["after"] == opened.figures(subject, members)


def test_each_kept_model_on_the_union(local_run: Path) -> None:
    opened = Simulated(open_run(local_run))
    with pytest.raises(ConfigError, match="--of each: 'paired-0' and 'image' differ in task"):
        run_retraining(opened, "each", "union", Plan(steps=1))
    opened.keepers  # noqa: B018  known from here on
    del opened.keepers["image"]  # type: ignore[attr-defined]
    found = run_retraining(opened, "each", "union", Plan("shallow", {"image": 1, "text": 1}, steps=2, lr=1e-3))
    assert [(row["of"], row["on"], row["steps"]) for row in found.figures["rows"]] == [
        ("paired-0", "union", 2),
        ("paired-1", "union", 2),
    ]
    assert list(found.figures["rows"][0]["after"]["paired-0"]) == ["R@1", "R@5", "R@10", "gallery"]


def test_rows_columns_and_differences(fedavg_run: Path) -> None:
    opened = Simulated(open_run(fedavg_run))
    found = run_retraining(opened, "server", "each", Plan("deep", steps=4, lr=0.05))
    one, row = found.figures["rows"]
    assert (one["on"], row["on"]) == tuple(row["after"]) == ("paired-0", "paired-1")
    assert one["before"] == row["before"] != one["after"]
    assert row["mean"]["after"]["R@5"] == pytest.approx(sum(at["R@5"] for at in row["after"].values()) / 2)
    (first, _) = found.tables
    assert first.columns == ("model", "paired-0", "paired-1", "average")
    assert [line[0] for line in first.rows] == [
        "server, round 1",
        "server, on paired-0, 4 steps",
        "server, on paired-1, 4 steps",
    ]
    assert found.picture is not None
    assert len(found.picture().axes) == 4
    again = run_retraining(Simulated(open_run(fedavg_run)), "server", "each", Plan("deep", steps=4, lr=0.05))
    assert again.figures == found.figures
    other = run_retraining(opened, "server", "each", Plan("deep", steps=4, lr=0.05, seed=1))
    assert other.figures["rows"] != found.figures["rows"]


def test_layers_that_are_not_there_or_hold_nothing_to_train(fedavg_run: Path, tiny_run: Path) -> None:
    opened = Simulated(open_run(fedavg_run))
    server = opened.trained("server")
    server.model.requires_grad_(False)
    with pytest.raises(ConfigError, match="--layers all: 'server' has no parameters to train in them"):
        Retrainer(opened, server, Plan())
    with pytest.raises(ConfigError, match=r"the encoder of 'text' .* has no layers to tell shallow from deep"):
        run_retraining(Simulated(open_run(tiny_run)), "server", "each", Plan("deep"))
