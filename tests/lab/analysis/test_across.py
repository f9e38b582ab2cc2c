from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import polyfed
from polyfed.core.errors import ConfigError
from polyfed.lab.analysis.across import run_across
from polyfed.lab.analysis.judgements import figures_of
from polyfed.lab.analysis.simulated import Simulated
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import open_run


@pytest.mark.slow
def test_every_model_at_every_client(local_run: Path) -> None:
    opened = Simulated(open_run(local_run))
    found = run_across(opened)
    assert found.figures["server_untrained"]
    paired, image = found.figures["tables"]
    assert [model["name"] for model in paired["models"]] == ["server", "paired-0", "paired-1", "mean of clients"]
    assert (paired["clients"], image["clients"]) == (("paired-0", "paired-1"), ("image",))
    assert list(image["models"][0]["summary"]) == ["accuracy"]
    client = opened.trained("paired-1")
    expected = opened.figures(client, opened.require_judges(client))
    assert paired["models"][2]["figures"] == expected
    first, second, local = (model["figures"] for model in paired["models"][1:])
    mean = (first["paired-0"]["R@1"] + second["paired-0"]["R@1"]) / 2
    assert local["paired-0"]["R@1"] == pytest.approx(mean)
    values = [at_client["R@5"] for at_client in first.values()]
    assert paired["models"][1]["summary"]["R@5"] == {
        "average": pytest.approx(sum(values) / 2),
        "worst": min(values),
        "disparity": max(values) - min(values),
    }
    tables = found.tables
    assert [len(table.rows) for table in tables] == [4, 4, 1]
    assert "as it was initialised" in tables[0].notes[0]
    assert not tables[2].notes
    assert found.picture is not None
    assert len(found.picture().axes) == 7  # four maps, one of them empty, and colour bars


def test_global_models_only(fedavg_run: Path) -> None:
    opened = Simulated(open_run(fedavg_run))
    found = run_across(opened).figures
    paired, image = found["tables"]
    assert [model["name"] for model in paired["models"]] == ["server"]
    assert [model["name"] for model in image["models"]] == ["image"]
    assert not found["server_untrained"]


def test_a_client_s_figures_are_those_of_the_run(tiny_run: Path) -> None:
    """Every client of the tiny run was evaluated in its last round by the global model of its type."""
    lines = [json.loads(line) for line in (tiny_run / "metrics.jsonl").read_text().splitlines()]
    told = {line["participant"]: line["metrics"] for line in lines if line["kind"] == "test" and line["round"] == 1}
    for table in run_across(Simulated(open_run(tiny_run))).figures["tables"]:
        for client, figures in table["models"][0]["figures"].items():
            primary = "r1_sum" if "r1_sum" in told[client] else "accuracy"
            assert figures == figures_of(told[client], primary)


def test_local_models_beside_their_average(tiny: dict[str, Any], tmp_path: Path) -> None:
    """The rows of FedAID's Table 11: the server after a round, and what its clients had trained in it."""
    tiny["run"] |= {"rounds": 1, "keep_client_models": True, "evaluate_clients": False}
    run = polyfed.run(Experiment.load(tiny), tmp_path / "run", quiet=True)
    tables = run_across(Simulated(run)).figures["tables"]
    names = [[model["name"] for model in table["models"]] for table in tables]
    assert ["server", "paired-0", "paired-1", "mean of clients"] in names
    server, first = tables[0]["models"][:2]
    assert (server["round"], first["round"]) == (1, 1)
    assert server["figures"] != first["figures"]


def test_nobody_can_judge(local_run: Path) -> None:
    opened = Simulated(open_run(local_run))
    for group in opened.federation.groups.values():
        object.__setattr__(group, "test_split", None)
    with pytest.raises(ConfigError, match="has no model, global or kept, that any client with test samples can judge"):
        run_across(opened)


def test_figures_are_means_over_directions() -> None:
    metrics = {"r1_sum": 30.0, "a_to_b_r@1": 10.0, "b_to_a_r@1": 20.0, "a_to_b_r@5": 40.0, "b_to_a_r@5": 80.0}
    assert figures_of(metrics, "r1_sum") == {"R@1": 15.0, "R@5": 60.0}
    others = {f"{name}_batch64": 90.0 for name in metrics if "_r@" in name} | {"gallery_b": 40.0, "gallery_a": 20.0}
    expected = {"R@1": 15.0, "R@5": 60.0, "R@1_batch64": 90.0, "R@5_batch64": 90.0, "gallery": 30.0}
    assert figures_of(others | metrics, "r1_sum") == expected  # a mean over galleries of several sizes says nothing
    assert list(figures_of(others | metrics, "r1_sum"))[:2] == ["R@1", "R@5"]
    assert figures_of({"accuracy": 3.0, "n": 9.0}, "accuracy") == {"accuracy": 3.0}
