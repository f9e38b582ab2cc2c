"""Attacks on runs: overfitted models leak their samples, fresh ones do not; protections; the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from polyfed import Experiment, open_run
from polyfed.core.device import cpu_threads
from polyfed.core.errors import RunError
from polyfed.lab.analysis.leakage import Discrimination, Leakage, MembershipAttack, Simulated, sample_scores, seen_round
from polyfed.reporting.run_tables import tables
from small_federations import Config, three_kinds, tiny_experiment, topics

SMALL = Leakage(clients=1, samples=60)
Cli = Callable[..., tuple[int, str, str]]


def overfitted(clients: int = 2, **sections: Any) -> Config:
    """Clients that learn the topics of 60 hard texts each by heart."""
    config = topics()
    config["clients"]["text"]["count"] = clients
    for source in config["data"]["sources"].values():
        source |= {"train": 60 * clients, "difficulty": 1.0}
    config["algorithm"] |= {"local_epochs": 10} | sections.pop("algorithm", {})
    config["run"] |= {"rounds": 2, "evaluate_clients": False}
    return config | sections


FORMS: dict[str, Callable[[], Config]] = {
    "plain": overfitted,
    "noise": lambda: overfitted(privacy={"reply": {"weights": 1.0, "noise_multiplier": 4.0}}),
    "masked": lambda: overfitted(3, aggregation={"secure": "pairwise_masks"}),
}


@pytest.fixture(scope="module")
def overfitted_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a finished run by its form, run when first asked for."""

    @cache
    def finished(form: str) -> Path:
        folder = tmp_path_factory.mktemp(form) / "run"
        return polyfed.run(Experiment.parse(FORMS[form]()), folder, quiet=True).folder

    return finished


@pytest.fixture(scope="module")
def overfitted_run(overfitted_runs: Callable[[str], Path]) -> Path:
    return overfitted_runs("plain")


@pytest.fixture(scope="module")
def leakage(overfitted_run: Path) -> dict[str, Any]:
    """Findings in that run."""
    return leaked(Simulated(open_run(overfitted_run)), SMALL)


def simulated(config: Config, folder: Path) -> Simulated:
    return Simulated(open_run(polyfed.run(Experiment.parse(config), folder, quiet=True).folder))


def leaked(opened: Simulated, plan: Leakage) -> dict[str, Any]:
    return plan.answer(opened.run).figures


def by_name(leakage: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["on"], one["attack"]): one for one in leakage["findings"]}


@pytest.mark.parametrize(("config", "label"), [(topics(), "weights"), (three_kinds(name="creamfl"), "representations")])
def test_the_last_round_asked_again_is_that_of_the_run(config: Config, label: str, tmp_path: Path) -> None:
    opened = simulated(config, tmp_path / "run")
    with cpu_threads(1), seen_round(opened) as seen:
        assert seen.is_exact
        assert seen.number == opened.experiment.run.rounds
        assert {reply.step for reply in seen.replies} == {"fit"}
        assert {bundle.label for reply in seen.replies for bundle in reply.content.bundles.values()} == {label}
        assert [reply.clients[0] for reply in seen.replies] == list(opened.federation.members)


@pytest.mark.slow
def test_noise_is_the_runs_and_only_sums_are_seen_of_masked_replies(overfitted_runs: Callable[[str], Path]) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    noisy, masked = (Simulated(open_run(overfitted_runs(form))) for form in ("noise", "masked"))
    with cpu_threads(1), seen_round(noisy) as seen:
        assert seen.is_exact  # with other noise the server would end elsewhere
    with cpu_threads(1), seen_round(masked) as seen:
        (reply,) = seen.replies
        assert seen.is_exact
        assert reply.is_sum
        assert reply.sender == "sum of 3 clients (fit)"


@pytest.mark.slow
def test_an_overfitted_model_leaks_and_a_fresh_one_does_not(overfitted_run: Path, leakage: dict[str, Any]) -> None:
    opened, findings = Simulated(open_run(overfitted_run)), by_name(leakage)
    assert leakage["exact"]
    assert leakage["protection"] == "none"
    one = findings["weights of text-0 (fit)", "loss threshold"]
    assert one["auc"]["low"] > 0.8
    assert one["verdict"] == "much"
    assert findings["final model of text", "loss threshold"]["auc"]["value"] > 0.7
    with cpu_threads(1), seen_round(opened) as seen:
        attack = MembershipAttack(opened, seen, SMALL)
        candidates, member = attack.candidates(("text-0",)), attack.member("text-0")
        assert not isinstance(candidates, str)
        model = attack.fresh(member)
        scores = sample_scores(model, member.settings.task, model.heads[member.head], candidates.samples).numpy()
        inside = candidates.is_member.numpy()
        fresh = Discrimination.of(scores[inside], scores[~inside], 0).auc
        assert fresh.low < 0.5 < fresh.high
        labels = candidates.samples.targets["topic"]
        # as many of each class on both sides, or classes would be recognised in place of samples
        assert torch.equal(labels[candidates.is_member].sort().values, labels[~candidates.is_member].sort().values)
        assert not set(candidates.samples.ids[i] for i in candidates.samples.items[: int(inside.sum())]) & set(
            candidates.samples.ids[i] for i in candidates.samples.items[int(inside.sum()) :]
        )


@pytest.mark.slow
def test_results_depend_on_the_seed_alone(overfitted_run: Path, leakage: dict[str, Any]) -> None:
    assert leaked(Simulated(open_run(overfitted_run)), SMALL) == leakage


@pytest.mark.slow
def test_noise_hides_samples(overfitted_runs: Callable[[str], Path]) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    leakage = leaked(Simulated(open_run(overfitted_runs("noise"))), SMALL)
    one = by_name(leakage)["weights of text-0 (fit)", "loss threshold"]
    assert one["auc"]["low"] < 0.5
    assert one["verdict"] == "nothing found"
    assert "noise on replies" in leakage["protection"]


@pytest.mark.slow
def test_a_sum_is_attacked_as_a_sum(overfitted_runs: Callable[[str], Path]) -> None:
    leakage = leaked(Simulated(open_run(overfitted_runs("masked"))), SMALL)
    assert ("weights of sum of 3 clients (fit)", "loss threshold") in by_name(leakage)
    assert leakage["protection"] == "secure aggregation"


@pytest.mark.slow
def test_a_target_without_an_attack_has_a_reason_and_no_figure(tmp_path: Path) -> None:
    leakage = leaked(simulated(three_kinds(name="creamfl"), tmp_path / "run"), Leakage(clients=3))
    reasons = {one["on"]: one["reason"] for one in leakage["no_attack"]}
    assert "no attack on representations is known" in reasons["representations of text (fit)"]


@pytest.mark.slow
def test_named_tensors_that_are_not_a_model_are_not_attacked_as_one(tmp_path: Path) -> None:
    leakage = leaked(simulated(overfitted(algorithm={"name": "scaffold"}), tmp_path / "run"), Leakage(clients=1))
    attacked = [one["on"] for one in leakage["findings"]]
    assert "weights of text-0 (controlled_fit)" in attacked
    assert not any(on.startswith("controls") for on in attacked)
    assert "controls of text-0 (controlled_fit)" in [one["on"] for one in leakage["no_attack"]]


def test_the_command_writes_its_files_and_the_report_shows_them(overfitted_run: Path, analyse: Cli) -> None:
    code, _, _ = analyse("leakage", overfitted_run, "--set", "clients=1")
    assert code == 0
    assert json.loads((overfitted_run / "analysis" / "leakage.json").read_text())["exact"] is True
    for page in ("report.md", "report.html"):
        assert "leaked: was this sample trained on" in (overfitted_run / page).read_text()
    records = open_run(overfitted_run).records
    assert any(" leaked" in table.title for table in tables(records))
    (overfitted_run / "analysis" / "leakage.json").write_text("{")
    with pytest.raises(RunError, match=r"leakage\.json' is damaged"):
        tables(records)


def test_a_run_that_lost_the_state_before_its_last_round_is_refused(tmp_path: Path) -> None:
    opened = Simulated(open_run(polyfed.run(Experiment.parse(tiny_experiment()), tmp_path / "run", quiet=True).folder))
    for manifest in (tmp_path / "run" / "checkpoints").glob("round-000001.*"):
        manifest.unlink()
    with pytest.raises(RunError, match="has lost its state before round 2"), seen_round(opened):
        pass
