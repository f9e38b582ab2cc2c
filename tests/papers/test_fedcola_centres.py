from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from papers.fedafd.features import Separation
from papers.fedcola.centres import centre_distances, discriminants, representations, run_centres

from polyfed import Experiment, run
from polyfed.core.errors import ConfigError
from polyfed.data.assembly import assemble
from polyfed.data.samples import Samples
from polyfed.runs.opened import ServerModel, open_run


def samples_of(server: ServerModel, source: str, modality: str) -> Samples:
    data = server.run.conditions.data
    split = data.sources[source].open("test", name=source, data_dir=data.data_folder)
    return assemble(split, {modality: server.views[modality]}, server.context)


def test_distances_by_hand() -> None:
    euclidean, cosine = centre_distances(torch.tensor([[3.0, 0.0], [0.0, 4.0], [6.0, 0.0], [0.0, 0.0]]))
    assert euclidean[0].tolist() == [0.0, 5.0, 3.0, 3.0]
    assert cosine[0].tolist() == [0.0, 1.0, 0.0, 1.0]


def test_distances_are_symmetric_and_do_not_change_with_a_turn() -> None:
    stream = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 4, generator=stream, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=stream, dtype=torch.float64))[0]
    for values, turned in zip(centre_distances(centres), centre_distances(centres @ turn), strict=True):
        torch.testing.assert_close(values, values.T)
        torch.testing.assert_close(values, turned)
        assert values.diagonal().tolist() == [0.0] * 5
    torch.testing.assert_close(centre_distances(3 * centres)[1], centre_distances(centres)[1])


def test_centres_of_data_sets_are_means_of_representations(tiny_run: Path) -> None:
    opened = open_run(tiny_run).server_model("last")
    result = run_centres(opened)
    assert result.names == ("image: scenes", "image: private", "text: scenes", "text: private")
    assert result.counts.tolist() == [12, 8, 60, 40]
    values = representations(opened, samples_of(opened, "private", "text"), "text", torch.arange(40))
    torch.testing.assert_close(values.norm(dim=1), torch.ones(40))
    torch.testing.assert_close(result.values[3], values.double().mean(0))
    assert result.map.title == f"run, round {opened.round}"
    assert [len(points) for points in result.map.groups.values()] == result.counts.tolist()


def test_few_samples_are_drawn_at_random_and_the_same_each_time(tiny_run: Path) -> None:
    opened = open_run(tiny_run).server_model("last")
    result, again = (run_centres(opened, ["scenes", "private"], most=5) for _ in range(2))
    assert result.counts.tolist() == [5, 5, 5, 5]
    assert torch.equal(result.values, again.values)


def test_data_that_the_model_cannot_encode(tiny: dict[str, Any], tmp_path: Path) -> None:
    common = {"name": "scenes", "train": 8, "test": 8, "size": 16, "targets": {}}
    image = tiny["clients"]["image"]
    tiny["data"]["sources"]["texts"] = {**common, "columns": {"text": "text"}}
    tiny["server"] = {key: image[key] for key in ("model", "task", "source", "training")}
    tiny |= {"public": None, "clients": {"image": image}}
    tiny["run"]["rounds"] = 1
    opened = open_run(run(Experiment.load(tiny), tmp_path / "run").folder).server_model("last")
    with pytest.raises(ConfigError, match=r"'texts' has text, of which the model encodes none \(it encodes image\)"):
        run_centres(opened, ["private", "texts"])
    with pytest.raises(ConfigError, match="has one centre and no distance"):
        run_centres(opened, ["private"])


def test_discriminant_axes_separate_more_than_any_other() -> None:
    labels = torch.arange(4).repeat_interleave(30)
    stream = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(4, 6, generator=stream)[labels] + torch.randn(120, 6, generator=stream)
    positions = torch.cat(list(discriminants({str(k): x[labels == k] for k in range(4)}).values()))
    assert positions.shape == (120, 2)
    best = Separation.of(positions[:, :1], labels).ratio
    assert best > Separation.of(positions[:, 1:], labels).ratio
    assert all(best > Separation.of(x @ torch.randn(6, 1, generator=stream), labels).ratio for _ in range(20))
    first, second = discriminants({"a": torch.zeros(2, 2), "b": torch.tensor([[3.0, 4.0]] * 2)}).values()
    torch.testing.assert_close((first - second)[0].abs(), torch.tensor([5.0, 0.0], dtype=torch.float64))
