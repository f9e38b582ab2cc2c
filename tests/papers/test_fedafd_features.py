from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from papers.fedafd import features
from papers.fedafd.features import Features, Separation, features_by_kind
from torch import Tensor

from changed_runs import with_settings
from polyfed import Experiment, run
from polyfed.core.errors import ConfigError
from polyfed.runs.opened import open_run
from polyfed.runs.records import RunRecords


def test_the_head_on_fused_features_is_what_the_run_measured(fedafd_run: Path) -> None:
    result = Features(samples=None, method="pca").answer(open_run(fedafd_run)).figures
    assert (result["run"], result["client"], result["round"]) == ("run", "image", 1)
    measured = RunRecords.load(fedafd_run).last("image")
    assert result["features"]["fused"]["head"] == pytest.approx(dict(measured))
    assert result["features"]["local"]["head"]["loss"] != pytest.approx(measured["loss"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"level": "maps"}, {"inputs": "embeddings", "broadcast_every": 2}])
def test_other_fusions(fedafd_run: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    content = yaml.safe_load((fedafd_run / "config.yaml").read_text())
    content["algorithm"]["fusion"] |= changes
    folder = run(Experiment.load(content), tmp_path / "run").folder
    result = features_by_kind(open_run(folder), None, None)
    assert result.metrics["fused"] == pytest.approx(dict(RunRecords.load(folder).last("image")))
    assert bool(torch.allclose(result.values["local"].norm(dim=1), torch.ones(8))) == ("inputs" not in changes)


def test_local_and_global_features_are_those_of_the_encoders(fedafd_run: Path) -> None:
    opened = open_run(fedafd_run)
    result = features_by_kind(opened, "image", None)
    member = opened.federation.members["image"]
    test = opened.federation.test(member)
    assert torch.equal(result.labels, test.targets["label"])
    batch = test.batch(torch.arange(8)).inputs["image"]
    torch.testing.assert_close(result.values["local"], opened.client_model("image").represent("image", batch))
    server = opened.federation.shared_model(member.model)  # the encoders of both have one architecture here
    kept = opened.client_state("image")["encoders"]
    server.load_state_dict({name: kept[name] for name in server.state_dict()})
    torch.testing.assert_close(result.values["global"], server.represent("image", batch))


def test_few_samples_are_the_same_each_time_and_are_drawn(fedafd_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "MOST_POINTS", 4)
    result, again = (Features(samples=6, method="pca").answer(open_run(fedafd_run)) for _ in range(2))
    assert result.figures == again.figures
    assert result.figures["samples"] == 6
    axes = result.draw().axes
    assert [sum(len(dots.get_offsets()) for dots in each.collections) for each in axes] == [4, 4, 4, 12]
    assert [row[0] for row in result.tables[0].rows] == ["local", "global", "fused"]


def test_what_cannot_be(fedafd_run: Path) -> None:
    opened = open_run(fedafd_run)
    plain = opened.experiment.algorithm.model_copy(update={"fusion": None})
    with pytest.raises(ConfigError, match=r"clients of 'fedafd' in .* do not fuse"):
        Features().answer(with_settings(opened, algorithm=plain))
    untested = opened.federation.members["image"].settings.model_copy(update={"test_split": None})
    opened.federation.members["image"] = replace(opened.federation.members["image"], settings=untested)
    with pytest.raises(ConfigError, match=r"no client of .* classifies test samples of its own"):
        Features().answer(opened)


STREAM = torch.Generator().manual_seed(0)
X = torch.randn(25, 3, generator=STREAM, dtype=torch.float64)
LABELS = torch.randint(3, (25,), generator=STREAM) * 7
LABELS[0] = 100  # alone in its class
X += LABELS[:, None] / 10


def naive(x: Tensor, labels: Tensor) -> Separation:
    """The definitions, sample by sample."""
    classes = {label: [i for i, own in enumerate(labels.tolist()) if own == label] for label in labels.tolist()}
    silhouettes, right, between, within = [], [], 0.0, 0.0
    for i, own in enumerate(labels.tolist()):
        others = {label: [j for j in members if j != i] for label, members in classes.items()}
        far = {label: [math.dist(x[i], x[j]) for j in members] for label, members in others.items()}
        inner = far.pop(own)
        a, b = sum(inner) / max(1, len(inner)), min(sum(each) / len(each) for each in far.values())
        silhouettes.append((b - a) / max(a, b) if inner else 0.0)
        if others[own]:
            gaps = {label: math.dist(x[i], x[members].mean(0)) for label, members in others.items() if members}
            right.append(all(gaps[own] < gap for label, gap in gaps.items() if label != own))
        mean = x[classes[own]].mean(0)
        between += math.dist(mean, x.mean(0)) ** 2
        within += math.dist(x[i], mean) ** 2
    return Separation(sum(silhouettes) / len(x), between / within, 100 * sum(right) / len(right))


def test_measures_are_as_defined() -> None:
    assert vars(Separation.of(X, LABELS)) == pytest.approx(vars(naive(X, LABELS)))
    assert 40 < Separation.of(X, LABELS).nearest_mean < 100


def test_nothing_depends_on_place_scale_order_or_numbers_of_classes() -> None:
    order = torch.randperm(25, generator=torch.Generator().manual_seed(1))
    changed = Separation.of(5 * (X @ torch.linalg.qr(X[:3])[0])[order] + 2, 3 * LABELS[order] + 1)
    assert vars(changed) == pytest.approx(vars(Separation.of(X, LABELS)))


@pytest.mark.parametrize(
    ("points", "labels", "expected"),
    [
        ([0, 0, 1, 1], [0, 0, 1, 1], Separation(1.0, math.inf, 100.0)),  # classes without width
        ([0, 1, 0, 1], [0, 0, 1, 1], Separation(-0.5, 0.0, 0.0)),  # that lie on each other
        ([0, 1, 2], [0, 1, 2], Separation(0.0, math.inf, math.nan)),  # single samples
        ([0, 1, 2], [0, 0, 0], Separation(math.nan, math.nan, math.nan)),
        # a tie counts as wrong: without itself the first point's class is at 2, as far as the other class
        ([0, 2, -2, -2], [0, 0, 1, 1], Separation((0 + 0.5 + 2 * 1) / 4, 9 / 2, 75.0)),
    ],
)
def test_edges(points: list[float], labels: list[int], expected: Separation) -> None:
    measured = Separation.of(torch.tensor(points)[:, None].float(), torch.tensor(labels))
    assert vars(measured) == pytest.approx(vars(expected), nan_ok=True)
