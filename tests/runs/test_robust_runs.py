"""Runs with attackers and robust rules: what rules save, marked reports, resuming, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import polyfed
from grids import mostly_slow
from misbehaving import contents, cut_short, facts, happened
from polyfed import Experiment
from polyfed.core.errors import ConfigError
from polyfed.federation.filters import RobustReplies
from polyfed.reporting.api import run
from polyfed.runs.opened import Run
from sessions import first_cohort, prepared
from small_federations import METHODS, Config, federation_for, sized, topics

FAR = {"name": "sign_flip", "factor": 8.0, "clients": 2}


def combining(how: Any) -> Config:
    return {"clip": {"times": 1.0, "weight": 1.0}} if how == "clip" else {"robust": how}


def federation(robust: Any = None, attackers: Any = None, clients: int = 7, **run_settings: Any) -> Config:
    """Clients of FedAvg that classify topics of texts; with 'clip' in place of a rule, clipping to the median."""
    config = topics(name="fedavg")
    config["clients"]["text"]["count"] = clients
    config["data"]["sources"]["texts"]["train"] = 120 * clients
    config["aggregation"] = combining(robust)
    config["run"] |= {"attackers": attackers, "rounds": 3, "evaluate_clients": 1} | run_settings
    return config


def accuracy(config: Config, folder: Path) -> float:
    config["run"]["rounds"] = 6
    return polyfed.run(Experiment.parse(config), folder, quiet=True).records.last("text-0")["accuracy"]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Accuracy of six topics without attackers and rule; chance is 17 %."""
    seen = accuracy(federation(), tmp_path_factory.mktemp("honest") / "run")
    assert seen > 60
    return seen


def test_two_attackers_of_seven_destroy_a_mean(tmp_path: Path, honest: float) -> None:
    assert accuracy(federation(attackers=FAR), tmp_path / "run") < honest / 2


# the values of others are tested by tensors
@pytest.mark.parametrize("name", mostly_slow(["geometric_median", "krum"], "krum"))
def test_a_rule_keeps_what_attackers_would_destroy(tmp_path: Path, honest: float, name: str) -> None:
    assert accuracy(federation({"name": name, "tolerated": 2}, FAR), tmp_path / "run") > 0.6 * honest


def test_clipping_bounds_what_they_do(tmp_path: Path, honest: float) -> None:
    assert accuracy(federation("clip", FAR), tmp_path / "run") > 0.5 * honest


@pytest.mark.parametrize("name", ["clip", pytest.param("krum", marks=pytest.mark.slow)])
def test_a_rule_costs_honest_clients_little(tmp_path: Path, honest: float, name: str) -> None:
    least = 0.6 if name == "krum" else 0.8  # what one client of seven has learnt
    robust = name if name == "clip" else {"name": name, "tolerated": 1}
    assert accuracy(federation(robust), tmp_path / "run") > least * honest


def test_a_run_with_attackers_is_marked_everywhere(tmp_path: Path) -> None:
    result = run(Experiment.parse(federation("median", FAR, rounds=1)), tmp_path / "run")
    attackers = [(0, f"text-{number}", "attacker") for number in range(7)]
    reported = happened(result)
    assert len(reported) == 2
    assert set(reported) < set(attackers)
    names = ", ".join(name for _, name, _ in reported)
    printed = f"experiment with attackers: run.attackers makes 2 clients attack ({names})"
    for page in ("report.md", "report.html"):
        assert printed in (result.folder / page).read_text(), page
    assert [event.reason for event in result.records.events] == ["is made to attack: sign_flip (run.attackers)"] * 2
    assert not polyfed.run(Experiment.parse(federation(rounds=1)), tmp_path / "honest", quiet=True).records.warnings


def left(result: Run | Path) -> dict[str, bytes]:
    folder = result if isinstance(result, Path) else result.folder
    return contents(folder) | {"weights": (folder / "checkpoints/round-000003.safetensors").read_bytes()}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attack"), [("clip", "noise"), ("geometric_median", "copied")])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path, name: str, attack: str) -> None:
    config = federation(name, {"name": attack, "clients": 2})
    complete = polyfed.run(Experiment.parse(config), tmp_path / "complete", quiet=True)
    folder = cut_short(config, tmp_path / "cut")
    if name == "clip":  # norms of the last round bound those of the next
        assert any(key.startswith("fit/weights") for key in facts(folder, 1)["recent_norms"])
    assert left(polyfed.resume(folder, quiet=True)) == left(complete)


def test_honest_runs_without_a_rule_have_none_of_it(tmp_path: Path) -> None:
    without = {key: value for key, value in federation(rounds=1).items() if key != "aggregation"}
    del without["run"]["attackers"]
    session = prepared(without, tmp_path)
    assert session.experiment.aggregation.robust is None
    assert type(session.engine).__name__ == "LocalEngine"
    assert not any(isinstance(link, RobustReplies) for link in first_cohort(session).filters)
    assert not session.experiment.spec("a-run", "").attackers


def test_a_twin_in_which_nothing_is_combined_has_neither_rule_nor_attackers() -> None:
    twin = Experiment.load(federation("median", FAR) | {"twin": {"kind": "local"}})
    assert twin.algorithm.component_name() == "local"
    assert twin.aggregation.robust is None
    assert twin.run.attackers == ()


QUICK = ("fedmd",)  # the runs above send weights
SILENT = ("centralised", "local", "server_only")  # whose clients send nothing, or are alone


@pytest.mark.parametrize("method", mostly_slow([method for method in METHODS if method not in SILENT], *QUICK))
def test_every_method_that_sends_tensors_has_robust_rules(tmp_path: Path, method: str) -> None:
    config = federation_for(method)
    for group in config["clients"].values():
        group["count"] = 3
        group.pop("items", None)
    config["aggregation"] = {"robust": {"name": "median", "tolerated": 1}}
    config["run"] |= {"rounds": 2, "attackers": {"name": "sign_flip", "clients": 1}, "sampling": {}}
    result = polyfed.run(Experiment.parse(sized(config, 48)), tmp_path / "run", quiet=True)
    assert result.records.rounds == 2
    assert {event for _, _, event in happened(result)} <= {"attacker"}


# ---- what is refused before any work


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (federation({"name": "median", "tolerated": 4}), r"tolerates 4 of 7 .* needs 9"),
        (federation("median", sampling={"cohort": 2}), r"round 1: .* needs 3 replies of it, and type 'text' has 2"),
    ],
)
def test_what_cannot_be_robust_is_refused_before_any_work(tmp_path: Path, config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
