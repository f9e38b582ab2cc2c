"""Runs in which a minority of the clients lies, which alone is named, however unequal clients are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import polyfed
from grids import mostly_slow
from misbehaving import cut_short, happened, lying
from polyfed import Experiment
from polyfed.engines.local import LocalEngine
from polyfed.federation.filters import each
from polyfed.reporting.api import run
from polyfed.runs.opened import Run
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from sessions import crossing, prepared
from small_federations import Config

LIARS = ("image-0", "image-3")


def left(result: Run) -> dict[str, bytes]:
    """Files of a run without a server model that must be equal."""
    files = ("metrics.jsonl", "ledger.jsonl", "partition.json", "checkpoints/round-000002.safetensors")
    return {name: (result.folder / name).read_bytes() for name in files}


REFUSED = ("negative", "half", "double", "flags", "back")  # of minus three times the weights, for variances below 0


@pytest.mark.parametrize("how", mostly_slow(["huge", *REFUSED], "huge", "flags"))
def test_liars_alone_are_named_in_every_round(tiny: Config, tmp_path: Path, how: str) -> None:
    config = lying(tiny, how, LIARS, since=2)  # what norms are usual is known then
    config["run"] |= {"rounds": 3}
    result = polyfed.run(Experiment.parse(config), tmp_path / "run", quiet=True)
    event = "client_excluded" if how in REFUSED else "update_clipped"
    reported = [what for what in happened(result) if what[2] != "client_returned"]
    assert reported == [(number, liar, event) for number in (2, 3) for liar in LIARS]


def test_weights_a_million_times_too_long_move_a_mean_by_nothing(tiny: Config, tmp_path: Path) -> None:
    def after(liars: tuple[str, ...]) -> Any:
        session = prepared(lying(tiny, "huge", liars, since=2), tmp_path / str(len(liars)))
        for number in (1, 2):
            session.experiment.algorithm.round(session.server, session.cohort(number, Ledger()))
        return session.server.weights["image"]

    lied = after(LIARS)
    for name, value in after(()).items():
        if value.is_floating_point():
            assert float((lied[name] - value).norm()) < 0.2 * float(value.norm()) + 0.2, name


def test_a_run_with_liars_resumes_to_the_same_bits(tiny: Config, tmp_path: Path) -> None:
    config = lying(tiny, "far", LIARS, since=2)
    config["run"] = config["run"] | {"rounds": 3, "evaluate_clients": False}
    complete = run(Experiment.parse(config), tmp_path / "complete", quiet=True)
    assert {event[1:] for event in happened(complete)} == {(liar, "update_clipped") for liar in LIARS}
    assert left(polyfed.resume(cut_short(config, tmp_path / "cut"), quiet=True)) == left(complete)


def test_honest_clients_give_the_same_bits_with_and_without_bounds(tiny: Config, tmp_path: Path) -> None:
    config = lying(tiny, "huge", ())
    free = config | {"aggregation": {}}
    runs = [polyfed.run(Experiment.parse(one), tmp_path / str(k), quiet=True) for k, one in enumerate((config, free))]
    assert left(runs[0]) == left(runs[1])


def claiming(monkeypatch: pytest.MonkeyPatch, client: str, samples: int, *, joins: bool = True) -> None:
    """One client sends so many samples in every reply, with which it also joins."""
    infos, exchange = LocalEngine.clients, LocalEngine.exchange

    def clients(self: LocalEngine) -> Any:
        return tuple(replace(info, samples=samples) if info.id == client else info for info in infos(self))

    def exchanged(self: LocalEngine, requests: Any, deadline: float | None) -> Any:
        for answer in exchange(self, requests, deadline):
            fields = dict(answer.payload.fields)
            if answer.client == client and "num_examples" in fields:
                fields["num_examples"] = samples
            yield replace(answer, payload=replace(answer.payload, fields=fields))

    if joins:
        monkeypatch.setattr(LocalEngine, "clients", clients)
    monkeypatch.setattr(LocalEngine, "exchange", exchanged)


def test_a_large_claim_is_capped_and_recorded(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claiming(monkeypatch, "image-0", 10**12)
    result = polyfed.run(Experiment.parse(lying(tiny, "huge", ())), tmp_path / "run", quiet=True)
    assert happened(result) == [(0, "image-0", "weight_capped")]
    (event,) = result.records.events
    assert event.reason == "joined with 1000000000000 samples, counts for 96 in averages (aggregation.clip.weight)"


@pytest.mark.parametrize("algorithm", ["fedavg", "creamfl"])
def test_a_method_sees_no_more_samples_than_a_client_counts_for(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    claiming(monkeypatch, "paired-0", 10**12)
    tiny["clients"]["paired"]["count"] = 3
    tiny["aggregation"] = {"clip": {"weight": 6}}
    session = prepared(tiny | {"algorithm": {"name": algorithm, "local_epochs": 1}}, tmp_path)
    reported: dict[str, int] = examples(session)
    joined = {info.id: info.samples for info in session.server.clients}
    assert joined["paired-0"] == 10**12
    assert reported["paired-0"] == 6 * sorted(joined[f"paired-{k}"] for k in range(3))[1]
    assert all(reported[client] == joined[client] for client in reported if client != "paired-0")


def examples(session: Session) -> dict[str, int]:
    """Sample counts of replies, as a method sees them."""
    method: Any = session.experiment.algorithm
    cohort = session.cohort(1, Ledger())
    sent: dict[str, Any] = {}
    if method.component_name() == "creamfl":
        sent["representations"] = crossing(session, session.server.represent_public())
    else:
        sent["weights"] = each(session.server.weights_for)
    return {reply.sender.id: reply.num_examples for reply in cohort.ask(method.fit, **sent)}


@pytest.mark.parametrize("claimed", [-1, 10**6])
def test_other_samples_are_refused(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: int) -> None:
    claiming(monkeypatch, "image", claimed, joins=False)
    session = prepared(tiny | {"run": tiny["run"] | {"on_error": "exclude"}}, tmp_path)
    assert set(examples(session)) == {"paired-0", "paired-1"}


def test_who_was_sent_too_much_is_not_to_blame(tiny: Config, tmp_path: Path) -> None:
    session = prepared(lying(tiny, "huge", (), count=2), tmp_path)
    limit = session.experiment.run.exchange.limits.tensor_norm
    name = next(name for name in session.server.weights["image"] if name.startswith("heads") and "weight" in name)
    session.server.weights["image"][name] = torch.full_like(session.server.weights["image"][name], limit / 3)
    cohort = session.cohort(1, Ledger())
    norm = float(session.server.weights["image"][name].norm())
    site: Any = session.engine
    site.site.limits = session.experiment.run.exchange.limits.model_copy(update={"tensor_norm": 1e12})
    session.experiment.algorithm.round(session.server, cohort)
    assert norm > limit
    assert len(cohort.clients) == 2


@pytest.mark.slow
def test_honest_clients_of_unequal_sizes_are_left_alone(tiny: Config, tmp_path: Path) -> None:
    """Eight of which some have many times the samples of others."""
    config = lying(tiny, "huge", (), count=8)
    config["clients"]["image"]["partition"] = {"name": "quantity", "alpha": 0.5, "min_size": 4}
    config["data"]["sources"]["private"]["train"] = 600
    config["run"] |= {"rounds": 2, "evaluate_clients": 1, "eval_every": 2}
    bounded = polyfed.run(Experiment.parse(config), tmp_path / "bounded", quiet=True)
    free = polyfed.run(Experiment.parse(config | {"aggregation": {}}), tmp_path / "free", quiet=True)
    assert [what for what in happened(bounded) if what[2] != "weight_capped"] == []
    weightless = config | {"aggregation": {"clip": {}}}
    lengths_only = polyfed.run(Experiment.parse(weightless), tmp_path / "lengths", quiet=True)
    last = "checkpoints/round-000002.safetensors"
    assert (lengths_only.folder / last).read_bytes() == (free.folder / last).read_bytes()
