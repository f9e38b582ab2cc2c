from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from changed_runs import with_settings
from polyfed import Experiment, run
from polyfed.core.errors import ConfigError
from polyfed.lab.analysis import fused_features
from polyfed.lab.analysis.fused_features import features_by_kind, run_features
from polyfed.runs.opened import Run, open_run
from polyfed.runs.records import RunRecords


def algorithm(opened: Run, **changes: object) -> Run:
    changed = opened.experiment.algorithm.model_copy(update=changes)
    return with_settings(opened, algorithm=changed)


def test_the_head_on_fused_features_is_what_the_run_measured(fedafd_run: Path) -> None:
    found = run_features(open_run(fedafd_run), samples=None, method="pca").figures
    assert (found["run"], found["client"], found["round"]) == ("run", "image", 1)
    measured = RunRecords.load(fedafd_run).last("image")
    assert found["features"]["fused"]["head"] == pytest.approx(dict(measured))
    assert found["features"]["local"]["head"]["loss"] != pytest.approx(measured["loss"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"level": "maps"}, {"inputs": "embeddings", "broadcast_every": 2}])
def test_other_fusions(fedafd_run: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    content = yaml.safe_load((fedafd_run / "config.yaml").read_text())
    content["algorithm"]["fusion"] |= changes
    folder = run(Experiment.load(content), tmp_path / "run").folder
    found = features_by_kind(open_run(folder), None, None)
    assert found.metrics["fused"] == pytest.approx(dict(RunRecords.load(folder).last("image")))
    norms = found.values["local"].norm(dim=1)
    assert bool(torch.allclose(norms, torch.ones(8))) == ("inputs" not in changes)


def test_local_and_global_features_are_those_of_the_encoders(fedafd_run: Path) -> None:
    opened = open_run(fedafd_run)
    found = features_by_kind(opened, "image", None)
    member = opened.federation.members["image"]
    test = opened.federation.test(member)
    assert test is not None
    assert torch.equal(found.labels, test.targets["label"])
    batch = test.batch(torch.arange(8)).inputs["image"]
    torch.testing.assert_close(found.values["local"], opened.client_model("image").represent("image", batch))
    server = opened.federation.shared_model(member.model)  # the encoders of both have one architecture here
    kept = opened.client_state("image")["encoders"]
    server.load_state_dict({name: kept[name] for name in server.state_dict()})
    torch.testing.assert_close(found.values["global"], server.represent("image", batch))


def test_few_samples_are_the_same_each_time_and_are_drawn(fedafd_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_features, "MOST_POINTS", 4)
    found, again = (run_features(open_run(fedafd_run), samples=6, method="pca") for _ in range(2))
    assert found.figures == again.figures
    assert found.figures["samples"] == 6
    assert found.picture is not None
    axes = found.picture().axes
    assert [sum(len(dots.get_offsets()) for dots in each.collections) for each in axes] == [4, 4, 4, 12]
    assert [row[0] for row in found.tables[0].rows] == ["local", "global", "fused"]


def test_what_cannot_be(fedafd_run: Path) -> None:
    opened = open_run(fedafd_run)
    with pytest.raises(ConfigError, match=r"clients of 'fedafd' in .* do not fuse"):
        run_features(algorithm(opened, fusion=None))
    untested = opened.federation.members["image"].settings.model_copy(update={"test_split": None})
    opened.federation.members["image"] = replace(opened.federation.members["image"], settings=untested)
    with pytest.raises(ConfigError, match=r"no client of .* classifies test samples of its own"):
        run_features(opened)
