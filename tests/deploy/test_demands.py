"""What a site demands of the protection of runs: refused where it opens a run, printed by its check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")

from federations import experiment_settings

from polyfed.core.errors import BudgetError, PayloadError
from polyfed.deploy import host
from polyfed.deploy.check import check_site
from polyfed.deploy.files import SiteFolder
from polyfed.deploy.host import open_host
from polyfed.deploy.init import create_federation
from polyfed.deploy.settings import SiteConfig
from polyfed.federation.privacy_guard import PRIVATE
from polyfed.runs.experiment import Experiment
from polyfed.wire.messages import Request
from polyfed.wire.payload import Payload, Weights

NOISE = {"reply": {"weights": 1.0, "noise_multiplier": 4.0}}  # epsilon 1.99 at delta 1e-5 a reply, 2.94 in two


@pytest.fixture(autouse=True)
def _new_processes() -> Iterator[None]:
    host._opened.cache_clear()
    yield
    host._opened.cache_clear()


def experiment(privacy: Any = None, **run: Any) -> Experiment:
    settings = experiment_settings()
    settings["run"] |= {"rounds": 2, "evaluate_clients": False} | run
    return Experiment.load(settings | {"privacy": privacy})


def site(folder: Path, made_of: Experiment | None = None, **demands: Any) -> SiteFolder:
    create_federation(folder, made_of or experiment(), ["localhost"], keys=True)
    path = folder / "hospital" / "site.yaml"
    if demands:
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"demands": demands}))
    return SiteFolder(folder / "hospital")


def opened(site: SiteFolder, run: Experiment, name: str = "a-run") -> host.Host:
    return open_host(run.spec(name, "").model_dump_json(), {"config": str(site.config)})


@pytest.mark.parametrize(
    ("demands", "privacy", "message"),
    [
        ({"max_epsilon": 2.0}, None, r"epsilon 2 at most \(demands.max_epsilon\); add 'privacy'"),
        ({"max_epsilon": 2.0}, NOISE, r"2 rounds of the run would give away 2.9"),
        ({"weights": "protected"}, None, "weights leave it protected only"),
        ({"weights": "never"}, NOISE, "no weights leave it .*; 'fedavg' sends them"),
        ({"max_epsilon": 9.0}, NOISE | {"metrics": "clear"}, "no test metrics leave it as they are"),
    ],
)
def test_a_run_that_protects_less_is_refused(tmp_path: Path, demands: Any, privacy: Any, message: str) -> None:
    with pytest.raises(PayloadError, match=f"site 'hospital' demands .*{message}"):
        opened(site(tmp_path / "f", **demands), experiment(privacy))
    assert not list((tmp_path / "f" / "hospital" / "state").glob("*"))


def test_a_run_that_protects_enough_is_let_in_and_counted_with_those_before(tmp_path: Path) -> None:
    made = site(tmp_path / "f", max_epsilon=3.0, weights="protected")
    for number in (1, 2):
        place = opened(made, experiment(NOISE), f"run-{number}").site
        assert place.guard is not None
        client = place.infos[0].id
        model = place._wake(place.federation.members[client], (1, 0)).model.state_dict()
        sent = Payload({"weights": Weights({name: value + number for name, value in model.items()})})
        place.handle(Request(client, "fit", 1, 0, None, sent))
    assert len(place.guard.ledger(client).releases()) == 2
    with pytest.raises(BudgetError, match=r"2 replies gave away epsilon 2\.94 at delta 1e-05, one more"):
        place.handle(Request(client, "fit", 2, 0, None, sent))
    assert (made.path / "state" / PRIVATE / "secret").is_file()
    found = {finding.what: finding for finding in check_site(made.path, network=False)}
    assert found["demands"].detail == (
        "epsilon 3 at most at delta 1e-05 over all runs, weights protected, test metrics never in protected runs"
    )
    assert found["protection in run-1"].detail == (
        "fit of 'fedavg': weights clipped to norm 1; noise multiplier 4; planned epsilon 2.94 at delta 1e-05 in 2 "
        "replies"
    )
    assert found[f"given away by {client}"].detail == "epsilon 2.94 at delta 1e-05 in 2 replies, of 3"


def test_sites_of_a_protected_experiment_demand_what_it_plans(tmp_path: Path) -> None:
    plan = experiment({"reply": {"weights": 1.0}, "budget": {"epsilon": 5.0, "delta": 1e-6}})
    made = site(tmp_path / "f", plan)
    demands = SiteConfig.load(made.config).demands
    assert demands is not None
    assert (demands.max_epsilon, demands.delta, demands.weights, demands.metrics) == (5.0, 1e-6, "protected", False)
    opened(made, plan)
    with pytest.raises(PayloadError, match="add 'privacy'"):
        opened(made, experiment(), "bare")


def test_a_site_without_demands_says_so(tmp_path: Path) -> None:
    found = {finding.what: finding for finding in check_site(site(tmp_path / "f").path, network=False)}
    assert found["demands"].detail.startswith("none: replies may leave without noise")
