"""The program behind the tables on two orderings: rows of paired clients alone, rates, what it prints."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyfed.federation.population import Population
from polyfed.runs.experiment import Experiment
from polyfed.runs.runner import run_experiment
from small_federations import transformers

PROGRAMS = Path(__file__).parents[1] / "benchmarks" / "results"


@pytest.fixture
def orderings(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    return importlib.import_module("orderings")


@pytest.fixture
def long(orderings: Any, tmp_path: Path) -> Any:
    content = transformers()
    content["clients"]["paired"]["count"] = 6
    content["run"] = content.get("run", {}) | {"sampling": {"kind": "stratified", "cohort": 0.5}}
    preset = tmp_path / "preset.yaml"
    preset.write_text(yaml.safe_dump(content, sort_keys=False))
    return orderings.Long(tmp_path, str(preset), 0.3)


def test_paired_clients_alone_give_fedavgs_paired_model(orderings: Any, long: Any, tmp_path: Path) -> None:
    found = []
    for row in (orderings.FEDCOLA, orderings.FEDAVG):
        preset = long.planned(row, 0.001, 0, 2).preset
        settings = ["algorithm={name: fedavg, local_steps: 1}", "run.rounds=2", "run.plots=false"]
        experiment = Experiment.load(preset, [*settings, "run.eval_every=2", "run.evaluate_clients=false"])
        found.append(run_experiment(experiment, tmp_path / row).records)
    everybody, paired = found
    assert set(everybody.groups) == {"paired", "image", "text"}
    assert set(paired.groups) == {"paired"}
    assert everybody.last("server") == paired.last("server")


def test_the_server_rate_is_the_share_of_the_paired_clients_samples(orderings: Any, long: Any, tmp_path: Path) -> None:
    cfg = Experiment.load(long.preset)
    federation = Population(cfg.data, cfg.public, cfg.server, cfg.clients, cfg.run.seed)
    held = {name: federation.holding(member)["samples"] for name, member in federation.members.items()}
    paired = sum(samples for name, samples in held.items() if name.startswith("paired"))
    assert 0 < paired < sum(held.values())
    assert orderings.server_rate(long.preset, tmp_path) == paired / sum(held.values())


def test_the_damped_row_steps_by_that_rate_and_trains_as_long_as_the_others(orderings: Any, long: Any) -> None:
    runs = {row: long.planned(row, 0.002, 0, 6) for row in long.rows()}
    loaded: dict[str, Any] = {row: Experiment.load(run.preset, run.overrides) for row, run in runs.items()}
    optimiser = loaded[orderings.DAMPED].algorithm.averaging.server_optimizer
    assert (optimiser.lr, optimiser.momentum) == (0.3, 0)
    assert {(cfg.algorithm.local_steps, cfg.run.rounds) for cfg in loaded.values()} == {(140, 6)}
    assert {group.training.optimizer.lr for cfg in loaded.values() for group in cfg.clients.values()} == {0.002}
    assert len({run.name for run in runs.values()}) == 3


def test_rates_are_searched_on_another_seed_and_seeds_are_not_validated(orderings: Any, long: Any) -> None:
    searched, final = long.search(orderings.GRID, 3), long.final({orderings.FEDAVG: 0.001}, 5, 6)
    assert {run.seed for run in searched.values()} == {100}
    assert [run.seed for run in final.values()] == [0, 1, 2, 3, 4]

    def splits(runs: Any) -> set[str | None]:
        loaded: list[Any] = [Experiment.load(run.preset, run.overrides) for run in runs.values()]
        return {cfg.server.validation_split for cfg in loaded}

    assert splits(searched) == {"validation"}
    assert splits(final) == {None}


def test_means_and_paired_differences_by_hand(orderings: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        "a": {seed: {"Rec@1": value, "other": 1.0} for seed, value in enumerate((3.0, 5.0, 7.0))},
        "b": {seed: {"Rec@1": 2.0 + seed, "other": 0.0} for seed in range(3)},
    }
    orderings.print_table("title", found, [("a", "b")], ["Rec@1"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[1:3] == ["| a (3) | 5.00 ± 2.00 | 1.00 ± 0.00 |", "| b (3) | 3.00 ± 1.00 | 0.00 ± 0.00 |"]
    # differences 1, 2, 3: 2 -+ 4.303 x 1 / sqrt(3)
    assert rows[-1] == "| a - b: Rec@1 | 3 | +2.00 | 1.00 | -0.48 to +4.48 | +1.00 |"
