from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from changed_runs import with_settings
from polyfed.algorithms.baselines import ServerOnly
from polyfed.core.errors import ConfigError
from polyfed.lab.analysis.distortion import distortion_result, run_distortion, similarity
from polyfed.lab.analysis.retraining import Retrained
from polyfed.lab.analysis.simulated import Simulated
from polyfed.runs.opened import open_run


def test_similarity_by_loop(fedavg_run: Path) -> None:
    opened = Simulated(open_run(fedavg_run))
    subject = opened.trained("server")
    member = opened.require_judges(subject)["paired-1"]
    test = opened.test(subject, member)
    total = 0.0
    for k in range(len(test)):
        batch = test.batch(torch.tensor([k]))
        u, v = (subject.model.embed(name, batch.inputs[name])[0].double().tolist() for name in ("image", "text"))
        total += sum(a * b for a, b in zip(u, v, strict=True)) / (math.hypot(*u) * math.hypot(*v))
    participant = opened.participant(subject, "paired-1", member.settings.training)
    assert similarity(participant, test) == pytest.approx(total / len(test), abs=1e-6)


def test_similarity_of_three_modalities_is_the_mean_over_pairs() -> None:
    values = {
        name: F.normalize(torch.randn(5, 4, generator=torch.Generator().manual_seed(ord(name)))) for name in "abc"
    }

    class Seeing:
        def represent(self, samples: Any) -> dict[str, torch.Tensor]:
            return values

    expected = [float((values[a] * values[b]).sum(1).mean()) for a, b in ("ab", "ac", "bc")]
    assert similarity(Seeing(), None) == pytest.approx(sum(expected) / 3)  # type: ignore[arg-type]


def test_without_training_there_is_no_distortion(fedavg_run: Path) -> None:
    found = run_distortion(Simulated(open_run(fedavg_run)), steps=0).figures
    assert found["steps"] == {"paired-0": 0, "paired-1": 0}
    assert all(after == found["before"] for after in found["after"].values())
    assert {fall for by_client in found["decrease"].values() for fall in by_client.values()} == {0}


def test_distortion_is_before_minus_after(fedavg_run: Path) -> None:
    opened = Simulated(open_run(fedavg_run))
    found = run_distortion(opened)
    content = found.figures
    assert list(content["steps"]) == ["paired-0", "paired-1"]
    members = opened.require_judges(opened.trained("server"))
    passes = [divmod(len(opened.federation.train(member)), 16) for member in members.values()]
    assert list(content["steps"].values()) == [batches + (left > 1) for batches, left in passes]
    before, after = content["before"]["similarity"], content["after"]["paired-1"]["similarity"]
    assert content["decrease"]["paired-1"]["paired-0"] == before["paired-0"] - after["paired-0"] != 0
    assert content["overall_decrease"] == pytest.approx(sum(content["mean_decrease"].values()) / 2)
    assert "similarity" not in content["before"]["figures"]["paired-0"]
    assert content == run_distortion(Simulated(open_run(fedavg_run))).figures
    table, first, _ = found.tables
    assert [line[0] for line in table.rows] == ["on paired-0", "on paired-1", "average"]
    assert first.rows[0][0] == "server, round 1"
    assert found.picture is not None
    assert len(found.picture().axes) == 6  # two figures beside the decrease, each with its colours


def test_means_over_who_trained() -> None:
    before = {"a": {"similarity": 0.6, "R@1": 5.0}, "b": {"similarity": 0.3, "R@1": 5.0}}
    after = {
        name: {"a": {"similarity": low, "R@1": 10 * low}, "b": {"similarity": high, "R@1": 10 * high}}
        for name, low, high in (("a", 0.1, 0.3), ("b", 0.5, 0.2))
    }
    found = distortion_result("run", [Retrained("server", 3, name, 2, before, after[name]) for name in "ab"])
    assert found.figures["mean_decrease"]["a"] == pytest.approx((0.5 + 0.1) / 2)
    assert found.figures["mean_decrease"]["b"] == pytest.approx((0.0 + 0.1) / 2)
    assert found.tables[1].rows[-1][:2] == ("average of re-trained", "3.00")


def test_what_cannot_be_distorted(fedavg_run: Path, fedafd_run: Path) -> None:
    opened = Simulated(open_run(fedavg_run))
    bare = with_settings(opened.run, algorithm=ServerOnly())
    with pytest.raises(ConfigError, match="'server_only' does not say how long clients train; say it with --steps"):
        run_distortion(Simulated(bare))
    assert list(run_distortion(Simulated(open_run(fedafd_run)), steps=1).figures["steps"].values()) == [1, 1]
