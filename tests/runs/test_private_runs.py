"""Runs with differential privacy: bits on engines and after kills, budgets, what the server can know, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")

import polyfed
from grids import mostly_slow
from misbehaving import contents, cut_short
from polyfed import Experiment
from polyfed.core.errors import BudgetError, ConfigError, ExchangeError, PayloadError
from polyfed.core.randomness import generator
from polyfed.engines.site import Site
from polyfed.federation.client import ClientInfo
from polyfed.privacy.accounting import PrivacyCost, epsilon_of, noise_for
from polyfed.privacy.guard import PRIVATE
from polyfed.privacy.settings import Budget, protected_steps
from polyfed.reporting.api import run
from polyfed.runs.cohorts import Expenses
from polyfed.runs.opened import Run, open_run
from polyfed.runs.preflight import planned_epsilon
from polyfed.wire.messages import Request
from polyfed.wire.payload import Payload, Weights
from polyfed.wire.schema import steps_of
from sessions import prepared, site_of
from small_federations import ENGINES, Config, federation_for, topics


def federation(secret: Path | None = None, **privacy: Any) -> Config:
    """Two clients of FedAvg that classify topics, with noise on their updates."""
    config = topics(name="fedavg")
    config["data"]["sources"]["texts"] |= {"train": 120, "test": 60}
    reply = {"weights": 1.0, "noise_multiplier": 4.0} | privacy.pop("reply", {})
    config["privacy"] = {"reply": reply, "metrics": "clear", "secret": secret and str(secret)} | privacy
    config["run"] |= {"rounds": 3, "evaluate_clients": 1}
    return config


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    return path


def finished(config: Config, folder: Path, **run_settings: Any) -> Run:
    return polyfed.run(Experiment.parse(config | {"run": config["run"] | run_settings}), folder, quiet=True)


# ---- the same bits


@pytest.mark.parametrize(
    ("engine", "method"),
    [
        ("serialized", "fedavg"),
        pytest.param("serialized", "creamfl", marks=pytest.mark.slow),
        pytest.param("ray", "fedavg", marks=pytest.mark.slow),  # which starts Ray, as a test of engines does
        pytest.param("flower", "creamfl", marks=pytest.mark.slow),
    ],
)
def test_noise_is_the_same_on_every_engine(tmp_path: Path, secret: Path, engine: str, method: str) -> None:
    config = federation(secret)
    if method == "creamfl":
        config = federation_for("creamfl") | {"privacy": config["privacy"] | {"reply": {"representations": 1.0}}}
        config["privacy"]["budget"] = {"epsilon": 8.0}
    if engine == "ray":
        pytest.importorskip("ray", reason="ray is not installed")
    expected = contents(finished(config, tmp_path / "local").folder)
    assert contents(finished(config, tmp_path / "other", engine=ENGINES[engine]).folder) == expected


def spent(folder: Path) -> list[int]:
    """How often each client was charged."""
    ledgers = [path.read_text().splitlines() for path in sorted((folder / PRIVATE).glob("*.jsonl"))]
    return [sum(json.loads(line)["cost"] is not None for line in lines) for lines in ledgers]


def test_one_secret_gives_the_same_bits_another_others_and_none_a_new_one(tmp_path: Path, secret: Path) -> None:
    first, again = (contents(finished(federation(secret), tmp_path / name).folder) for name in "ab")
    assert first == again
    secret.write_bytes(bytes(range(1, 33)))
    assert contents(finished(federation(secret), tmp_path / "c").folder) != first
    own = [finished(federation(), tmp_path / name) for name in "de"]
    assert contents(own[0].folder) != contents(own[1].folder)
    assert len({(run.folder / PRIVATE / "secret").read_bytes() for run in own}) == 2


def test_a_resumed_run_ends_in_the_same_bits_and_spends_nothing_twice(tmp_path: Path, secret: Path) -> None:
    complete = finished(federation(secret), tmp_path / "whole").folder
    cut = cut_short(federation(secret), tmp_path / "cut")
    polyfed.resume(cut, quiet=True)
    assert contents(cut) == contents(complete)
    assert spent(cut) == [3, 3]
    assert open_run(cut).records.last("server", "privacy") == open_run(complete).records.last("server", "privacy")


_KILLED = """
import os, sys
from pathlib import Path
from polyfed import Experiment, run
from polyfed.wire.transport import Transport
out, encode, calls = Path(sys.argv[2]), Transport.encode, []
def dying(self, payload, received=None):
    if received is not None:
        calls.append(payload)
        if len(calls) == 5:  # the first client's reply of the second round: spent, and not sent
            os.kill(os.getpid(), 9)
    return encode(self, payload, received)
Transport.encode = dying
run(Experiment.load(sys.argv[1]), out, quiet=True)
"""


@pytest.mark.slow  # a process that starts; sites that die over a spent reply are tested in one process
def test_a_kill_between_ledger_and_reply_neither_spends_twice_nor_changes_bits(tmp_path: Path, secret: Path) -> None:
    config = federation(secret)
    config["run"]["evaluate_clients"] = False
    complete = finished(config, tmp_path / "whole").folder
    (tmp_path / "plan.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", _KILLED, str(tmp_path / "plan.json"), str(tmp_path / "run")]
    ended = subprocess.run(command, check=False, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert sorted(spent(tmp_path / "run")) == [2, 3]  # one is ahead of what the server has
    polyfed.resume(tmp_path / "run", quiet=True)
    assert contents(tmp_path / "run") == contents(complete)
    assert spent(tmp_path / "run") == [3, 3]


# ---- what the server can know


def asked(site: Site, round_number: int = 1) -> tuple[Request, Payload]:
    client = next(iter(site.federation.members))
    weights = site.federation.client_model(site.federation.members[client]).state_dict()
    payload = Payload({"weights": Weights({name: value.clone() for name, value in weights.items()})})
    return Request(client, "fit", round_number, 0, None, payload), payload


def weights_of(site: Site, request: Request) -> dict[str, torch.Tensor]:
    return dict(site.handle(request).bundles["weights"])


def test_a_server_that_knows_the_seed_cannot_take_the_noise_off(tmp_path: Path) -> None:
    """A server with seed, data and method computes the update itself; the difference would be the noise."""
    bare = federation()
    del bare["privacy"]
    session = prepared(federation(), tmp_path / "private")
    request, _ = asked(site_of(session))
    true = weights_of(site_of(prepared(bare, tmp_path / "bare")), request)
    seen = weights_of(site_of(session), request)
    name = max(true, key=lambda key: true[key].numel())
    noise = (seen[name] - true[name]).flatten().double()
    seed = session.experiment.run.seed
    parts: list[tuple[int | str, ...]] = [
        (seed,),
        (seed, 1, request.client),
        (seed, 1, request.client, "fit", 0),
        (seed, 1, request.client, "noise"),
        (seed, "attack", request.client, "fit", 1, 0),
    ]
    guesses = [torch.randn(noise.shape, generator=generator(*part)).double() for part in parts]
    # another site with another secret: all else is the same
    other = weights_of(site_of(prepared(federation(), tmp_path / "other")), request)
    guesses.append((other[name] - true[name]).flatten().double())
    for guess in guesses:
        assert abs(float(torch.corrcoef(torch.stack([noise, guess]))[0, 1])) < 5 / len(noise) ** 0.5
    assert float(noise.std()) == pytest.approx(4.0, rel=0.1)


def test_a_repeated_request_repeats_its_noise_for_nothing_and_another_costs(tmp_path: Path) -> None:
    site = site_of(prepared(federation(), tmp_path / "run"))
    request, payload = asked(site)
    first, again = weights_of(site, request), weights_of(site, request)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert spent(tmp_path / "run") == [1]
    other = weights_of(site, replace(request, round=2))
    assert spent(tmp_path / "run") == [2]
    assert not any(torch.equal(first[name], other[name]) for name in first if first[name].numel() > 1)
    moved = Payload({"weights": Weights({name: value + 1e-3 for name, value in payload.bundles["weights"].items()})})
    weights_of(site, replace(request, payload=moved))
    assert spent(tmp_path / "run") == [3]


def test_another_multiplier_does_not_scale_the_same_noise(tmp_path: Path, secret: Path) -> None:
    """Or two replies would be two equations for the update and the noise."""
    request, changes = None, []
    for number, noise in enumerate((4.0, 8.0)):
        site = site_of(prepared(federation(secret, reply={"noise_multiplier": noise}), tmp_path / str(number)))
        request = request or asked(site)[0]
        received = request.payload.bundles["weights"]
        made = weights_of(site, request)
        changes.append(torch.cat([(made[name] - received[name]).flatten() for name in made]).double())
    assert abs(float(torch.corrcoef(torch.stack(changes))[0, 1])) < 0.05


def test_a_query_for_metrics_is_refused_by_the_client_itself(tmp_path: Path) -> None:
    config = federation(metrics="none")
    config["run"]["evaluate_clients"] = False
    site = site_of(prepared(config, tmp_path / "run"))
    request, _ = asked(site)
    with pytest.raises(PayloadError, match="does not cover the metrics of 'assess'"):
        site.handle(replace(request, step="assess", payload=Payload()))


# ---- budgets


def test_a_client_that_has_spent_its_budget_changes_nothing_and_drops_out(tmp_path: Path) -> None:
    config = federation(budget={"epsilon": 3.0})  # two replies of noise 4 / 2 cost 2.9, three 3.7
    config["run"]["sampling"] = {"cohort": 2}  # so that requests per client are unknown beforehand
    with pytest.raises(ExchangeError, match=r"round 3: 0 of 2 .*BudgetError: client 'text-0' has spent its privacy"):
        finished(config, tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert spent(run.folder) == [2, 2]
    assert run.records.last("server", "privacy")["epsilon"] == pytest.approx(2.935, abs=0.01)


def test_the_run_goes_on_without_those_who_have_spent_theirs(tmp_path: Path) -> None:
    config = federation(budget={"epsilon": 3.0})
    config["run"] |= {"sampling": {"cohort": 1}, "rounds": 8, "exchange": {"min_clients": 0}}
    run = finished(config, tmp_path / "run")
    assert max(spent(run.folder)) == 2
    dropped = {event.participant for event in run.records.events if "has spent its privacy budget" in event.reason}
    assert dropped
    for client in dropped:
        assert run.records.last(client, "privacy")["replies"] == 2


def test_noise_follows_from_a_budget_and_the_run_spends_just_that(tmp_path: Path) -> None:
    run = finished(federation(reply={"noise_multiplier": None}, budget={"epsilon": 5.0}), tmp_path / "run")
    assert run.records.last("server", "privacy")["epsilon"] == pytest.approx(5.0, rel=1e-4)
    assert [run.records.series("text-0", "replies", "privacy")[k] for k in (1, 2, 3)] == [1, 2, 3]


def test_a_budget_of_the_site_counts_over_its_runs(tmp_path: Path) -> None:
    site: Any = site_of(prepared(federation(), tmp_path / "run"))
    site.guard = replace(site.guard, site_budget=Budget(epsilon=2.1))
    request, _ = asked(site)
    weights_of(site, request)
    with pytest.raises(BudgetError, match=r"1 replies spent epsilon 1.99 at delta 1e-05, one more would make it 2.9"):
        weights_of(site, replace(request, round=2))
    weights_of(site, request)  # what was sent may be sent again


# ---- refusals


@pytest.mark.parametrize(
    ("method", "privacy", "message"),
    [
        ("fedavg", {"reply": {"weights": 1.0}}, "the noise is missing"),
        ("fedavg", {"reply": {"noise_multiplier": 1.0}}, "reply covers nothing"),
        ("fedavg", {"reply": {"representations": 1.0, "noise_multiplier": 1}}, "'weights' .*no clipping norm: privacy"),
        ("scaffold", {}, r"'controls' in the reply to 'controlled_fit' \(weights that are not an update"),
        ("fedema", {}, "numbers in the reply to 'fit', such as losses"),
        ("fedaid", {}, "numbers in the reply to 'guide'"),
        ("creamfl", {}, "'representations' .*no clipping norm: privacy.reply.representations"),
        ("local", {}, "privacy has no effect: clients of 'local' send nothing"),
        ("fedavg", {"metrics": "none"}, "set run.evaluate_clients: false, or accept it"),
        ("fedavg", {"budget": {"epsilon": 1.0}}, r"budget.epsilon is 1, but 2 replies .* cost epsilon 2.9"),
        ("fedavg", {"secret": "/no/such/file"}, "the secret '/no/such/file' cannot be read"),
        ("fedavg", {"reply": {"weights": 1.0, "noise_multiplier": 1, "votes": True}}, "votes .*has no effect"),
    ],
)
def test_what_would_not_be_protected_is_refused(tmp_path: Path, method: str, privacy: Config, message: str) -> None:
    config = federation_for(method)
    config["privacy"] = {"reply": {"weights": 1.0, "noise_multiplier": 4.0}, "metrics": "clear"} | privacy
    with pytest.raises(ConfigError, match=message):
        finished(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", mostly_slow(["fedcola", "creamfl_averaged", "fedmd"], "creamfl_averaged"))
def test_methods_of_all_kinds_run_protected(tmp_path: Path, method: str) -> None:
    config = federation_for(method)
    clips = {"weights": 1.0, "representations": 1.0, "logits": 1.0}
    config["privacy"] = {"reply": clips, "budget": {"epsilon": 8.0}, "metrics": "clear", "releases": 2}
    config["run"] |= {"rounds": 1}
    assert 0 < finished(config, tmp_path / "run").records.last("server", "privacy")["epsilon"] <= 8.0


# ---- reports


def test_reports_state_the_privacy_cost_and_what_it_leaves_out(tmp_path: Path) -> None:
    result = run(Experiment.parse(federation(budget={"epsilon": 9.0})), tmp_path / "run")
    printed = "gave away more than epsilon 3.71 at delta 1e-05, between any two sets of its size of training data"
    for page in ("report.md", "report.html"):
        assert printed in (result.folder / page).read_text(), page
        assert "test metrics of clients crossed as they are" in (result.folder / page).read_text()
    frame = open_run(result.folder).records.frame("metrics").query("kind == 'privacy' and participant == 'server'")
    assert list(frame["round"]) == [1, 2, 3]
    assert list(frame["value"]) == sorted(frame["value"])


def test_epsilon_is_reported_of_clients_at_sites() -> None:
    config = federation()
    config["privacy"] = {"samples": {"noise_multiplier": 1.0}, "metrics": "clear"}
    experiment = Experiment.parse(config).model_copy(update={"clients": {}})
    expenses = Expenses(experiment, [ClientInfo("ward", "ward", ("text",), "classification", 60, 12, "any")])
    expenses.note("fit", ["ward"])
    epsilon = epsilon_of([PrivacyCost(1.0, 12 / 60, 3 * 60 // 12)], 1e-5)
    assert dict(expenses.epsilons()) == {"ward": {"epsilon": epsilon, "replies": 1.0}, "server": {"epsilon": epsilon}}


def test_runs_without_privacy_have_none_of_it(tmp_path: Path) -> None:
    bare = federation()
    del bare["privacy"]
    result = finished(bare, tmp_path / "run", rounds=1)
    assert not (result.folder / PRIVATE).exists()
    assert not result.records.warnings
    assert {record.kind for record in result.records.measurements} == {"test"}


# ---- what a step sends as it is set


def test_a_reply_costs_by_the_kind_that_crosses() -> None:
    reply, length = {"representations": 1.0}, 2.0
    config = federation_for("fedmd")
    config["privacy"] = {"reply": reply | {"noise_multiplier": 4.0}, "metrics": "clear"}
    config["run"]["rounds"] = 2
    experiment = Experiment.parse(config)
    private: Any = experiment.policy.privacy
    (cost,) = [private.cost(schema) for schema in protected_steps(private, steps_of(experiment.algorithm)).values()]
    assert cost == PrivacyCost(4.0 / length)
    reported = planned_epsilon(experiment, ClientInfo("image", "image", ("image",), "classification", 14, 5, "any"))
    assert reported == pytest.approx(epsilon_of([PrivacyCost(4.0 / length)] * 2, 1e-5))
    config["privacy"] = {"reply": reply, "metrics": "clear", "budget": {"epsilon": 3.0}}
    calibrated: Any = Experiment.parse(config).policy.privacy
    assert calibrated.reply.noise_multiplier == pytest.approx(length * noise_for(3.0, 1e-5, 2))


@pytest.mark.parametrize("method", ["fedmd", "fedgems"])
def test_a_norm_for_what_does_not_cross_does_not_pass_for_one_of_what_does(tmp_path: Path, method: str) -> None:
    config = federation_for(method)
    config["privacy"] = {"reply": {"logits": 1.0, "weights": 1.0, "noise_multiplier": 4.0}, "metrics": "clear"}
    named = r"'knowledge' in the reply to '\w+' \(no clipping norm: privacy\.reply\.representations\)"
    with pytest.raises(ConfigError, match=named):
        finished(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_request_is_charged_whether_its_reply_is_used_or_not(tmp_path: Path, secret: Path) -> None:
    config = federation(secret)
    late = {"name": "buffered", "replies": 1, "max_staleness": 0, "clients": {"name": "drawn", "skew": 9}}
    config["run"] |= {"rounds": 8, "pace": late}
    result = run(Experiment.parse(config), tmp_path / "run", quiet=True)
    lines = [json.loads(line) for line in (result.folder / "pace.jsonl").read_text().splitlines()]
    assert {line["event"] for line in lines} == {"started", "replied", "dropped"}
    seen = [(line["client"], line["event"]) for line in lines]
    for client in ("text-0", "text-1"):
        assert result.records.last(client, "privacy")["replies"] == seen.count((client, "started"))
    # a client has no ledger where all that it did was dropped, so not computed
    assert sum(spent(result.folder)) == sum(event == "replied" for _, event in seen)
