from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn import functional as F

from polyfed import Experiment, run
from polyfed.core.errors import ConfigError, DataError
from polyfed.lab.analysis.domain_gap import domain_gaps, mean_distance, mean_embedding
from polyfed.lab.analysis.encoders import Encoders, drawn, encoders_of, load_encoders
from polyfed.runs.opened import open_run


def table(rows: int = 50, seed: int = 0) -> Tensor:
    return torch.randn(rows, 7, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 7, 50, 100])
def test_the_mean_does_not_depend_on_the_batches(size: int) -> None:
    values = table()
    mean, count = mean_embedding(values.split(size))
    torch.testing.assert_close(mean, values.double().mean(0))
    assert count == 50
    mean, _ = mean_embedding(values.split(size), normalise=True)
    torch.testing.assert_close(mean, F.normalize(values.double()).mean(0))


def test_a_mean_of_many_small_numbers_beside_a_large_one() -> None:
    batches = [torch.full((1, 1), 1e8), *[torch.ones(100, 1)] * 50]
    assert float(mean_embedding(batches)[0]) * 5001 == pytest.approx(1e8 + 5000)


@pytest.mark.parametrize("batches", [[], [torch.zeros(0, 3)], [torch.full((2, 3), float("nan"))]])
def test_what_has_no_mean(batches: list[Tensor]) -> None:
    with pytest.raises(DataError, match="have no finite mean"):
        mean_embedding(batches)


def test_the_gap_is_a_distance_of_means() -> None:
    first, second = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[5.0, 5.0]])
    assert mean_distance(mean_embedding([first])[0], mean_embedding([second])[0]) == 5.0  # (2, 1) and (5, 5)
    a, b, c = (mean_embedding([table(seed=seed)])[0] for seed in range(3))
    assert mean_distance(a, a) == 0
    assert mean_distance(a, b) == mean_distance(b, a) == pytest.approx(mean_distance(a + 5, b + 5))
    assert mean_distance(a, c) <= mean_distance(a, b) + mean_distance(b, c)


def test_draws_are_the_same_each_time() -> None:
    assert drawn(5, None, "x").tolist() == drawn(5, 9, "x").tolist() == [0, 1, 2, 3, 4]
    few = drawn(100, 10, "x", "y")
    assert len(set(few.tolist())) == 10
    assert torch.equal(few, drawn(100, 10, "x", "y"))
    assert not torch.equal(few, drawn(100, 10, "x", "z"))


# ---- of runs


@pytest.fixture(scope="module")
def gap_run(tmp_path_factory: pytest.TempPathFactory, tiny_run: Path) -> Path:
    """A run with an image-text source, an image source, a text source and one of neither."""
    content = Experiment.load(tiny_run / "config.yaml").model_dump(mode="json")
    common = {"name": "scenes", "train": 30, "test": 10, "size": 16}
    content["data"]["sources"] |= {
        "pictures": {**common, "seed": 1, "domain": "night", "columns": {"image": "image"}},
        "texts": {**common, "seed": 2, "columns": {"text": "text"}, "targets": {"topic": "topic"}},
        "masks": {**common, "columns": {"mask": "mask"}},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyfed.reporting.reported.run_figures", lambda records: {})
        return run(Experiment.load(content), tmp_path_factory.mktemp("gap") / "run").folder


def test_gaps_of_a_run_are_those_of_its_embeddings(gap_run: Path) -> None:
    encoders = encoders_of(open_run(gap_run).server_model("last"), normalise=False)

    def mean(source: str, modality: str) -> Tensor:
        samples = encoders.samples(encoders.split(source, "train"), modality)
        return torch.cat(list(encoders.embeddings(samples, modality))).double().mean(0)

    found = domain_gaps(encoders, "scenes", ["pictures", "texts"]).figures
    expected = {
        "pictures": {"image": mean_distance(mean("scenes", "image"), mean("pictures", "image"))},
        "texts": {"text": mean_distance(mean("scenes", "text"), mean("texts", "text"))},
    }
    assert {other: pytest.approx(by_modality) for other, by_modality in expected.items()} == found["gaps"]
    assert found["total"] == pytest.approx(expected["pictures"]["image"] + expected["texts"]["text"])
    assert found["sums"]["texts"] == pytest.approx(expected["texts"]["text"])
    assert found["counts"] == {"scenes": {"image": 48, "text": 240}, "pictures": {"image": 30}, "texts": {"text": 30}}


def test_both_modalities_are_summed(gap_run: Path) -> None:
    encoders = encoders_of(open_run(gap_run).server_model("last"), normalise=False)
    found = domain_gaps(encoders, "scenes", ["private"]).figures
    assert set(found["gaps"]["private"]) == {"image", "text"}
    assert found["total"] == sum(found["gaps"]["private"].values())
    unit = domain_gaps(encoders, "scenes", ["private"], normalise=True, most=10).figures
    assert unit["counts"] == {"scenes": {"image": 10, "text": 10}, "private": {"image": 10, "text": 10}}
    assert 0 < unit["total"] < 4


@pytest.mark.parametrize(
    ("others", "split", "error", "message"),
    [
        (["picture"], "train", ConfigError, "no source 'picture' in data.sources; did you mean 'pictures'"),
        (["masks"], "train", ConfigError, r"'scenes' \(image, text\) and 'masks' \(mask\) have no modality in common"),
        (["scenes"], "train", ConfigError, "'scenes' is named 2 times"),
        (["pictures"], "tset", DataError, "no split 'tset'"),
    ],
)
def test_data_sets_that_cannot_be(
    gap_run: Path, others: list[str], split: str, error: type[Exception], message: str
) -> None:
    encoders = encoders_of(open_run(gap_run).server_model("last"), normalise=False)
    with pytest.raises(error, match=message):
        domain_gaps(encoders, "scenes", others, split=split)


# ---- of encoders that belong to no run


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))
    scenes = {"name": "scenes", "train": 10, "size": 16}
    image = {"name": "resnet", "widths": [8], "depths": [1], "block": "basic", "view": {"name": "pixels", "size": 16}}
    return {
        "name": "random",
        "data": {"sources": {"day": scenes, "night": {**scenes, "domain": "night"}}},
        "model": {"dim": 8, "encoders": {"image": image}},
        "device": "cpu",
    }


def written(tmp_path: Path, content: dict[str, Any]) -> Encoders:
    path = tmp_path / "gap.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_encoders(path)


def test_any_encoders(tmp_path: Path, settings: dict[str, Any]) -> None:
    found = domain_gaps(written(tmp_path, settings), "day", ["night"]).figures
    assert found["total"] > 0
    assert found == domain_gaps(written(tmp_path, settings), "day", ["night"]).figures
    assert found["encoders"] == "random"
    assert found["total"] != domain_gaps(written(tmp_path, settings | {"seed": 1}), "day", ["night"]).figures["total"]


def test_features_are_their_own_embeddings(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyfed.data.view import InputSpec
    from polyfed.data.views.features import Features

    class Flat:
        def __len__(self) -> int:
            return 10

        def __call__(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
            return torch.ones(len(rows), 3)

    monkeypatch.setattr(Features, "spec", lambda *_: InputSpec((3,)))
    monkeypatch.setattr(Features, "open", lambda *_: Flat())
    del settings["model"]
    encoders = written(tmp_path, settings | {"features": {"image": {"name": "features", "backbone": "x/clip"}}})
    assert domain_gaps(encoders, "day", ["night"]).figures["total"] == 0
    samples = encoders.samples(encoders.split("day", "train"), "image")
    assert torch.equal(next(encoders.embeddings(samples, "image")), torch.ones(10, 3))


PIXELS = {"image": {"name": "pixels", "size": 16}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None, "features": PIXELS}, r"view 'pixels' gives \[3, 16, 16\] a sample, not a vector"),
        ({"features": PIXELS}, "needs either 'features' or 'model'"),
        ({"modell": {}}, "unknown key 'modell'; did you mean 'model'"),
    ],
)
def test_settings_that_are_wrong(tmp_path: Path, settings: dict[str, Any], changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        written(tmp_path, settings | changes)
    with pytest.raises(ConfigError, match="cannot read config"):
        load_encoders(tmp_path / "nothing.yaml")
