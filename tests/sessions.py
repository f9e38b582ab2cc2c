"""Runs that are prepared and not begun, for tests that look inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyfed.aggregation.ensemble import Ensembled
from polyfed.algorithms.shared.distiller import Distiller
from polyfed.engines.local import LocalEngine
from polyfed.engines.site import Site
from polyfed.federation.client import Client, ClientInfo
from polyfed.federation.cohort import Cohort, CohortListener
from polyfed.federation.population import Population
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import RunFolder
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from polyfed.wire.messages import Answer, Failure, Request, StateVersion
from polyfed.wire.payload import Payload, Representations, Weights


def asked(site: Site, scale: float = 1.0, **more: Any) -> Request:
    """The first request of a run to the first client of a site, for ``fit``, with its own weights times ``scale``."""
    client = next(iter(site.federation.members))
    weights = site.federation.client_model(site.federation.members[client]).state_dict()
    payload = Payload({"weights": Weights({name: scale * value for name, value in weights.items()})})
    return replace(Request(client, "fit", 1, 0, None, payload), **more)


class Excluded(CohortListener):
    """Notes why clients are out of a round."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def excluded(self, client: ClientInfo, failure: Failure) -> None:
        self.reasons[client.id] = failure.text


def population(config: Mapping[str, Any], seed: int | None = None) -> Population:
    """Holdings of each client of an experiment, by its own seed or another."""
    experiment = Experiment.parse(config)
    seed = experiment.run.seed if seed is None else seed
    return Population(experiment.data, experiment.public, experiment.server, experiment.clients, seed)


def prepared(config: Mapping[str, Any], folder: Path) -> Session:
    """A session on the local engine that has entered round 1; nothing is written but what clients keep."""
    folder.mkdir(parents=True, exist_ok=True)
    session = Session(Experiment.parse(config), RunFolder(folder), "a-test")
    session.attach(LocalEngine(session.hosting.here()))
    session.experiment.algorithm.setup(session.server)
    session.server.begin(1)
    return session


def round_records(session: Session) -> list[dict[str, Any]]:
    """Records of the current round."""
    return [dict(record) for record in session.recorder.records if record["round"] == session.server.clock.round]


def metrics(session: Session) -> dict[str, float]:
    """Measurements of the current round."""
    return {name: value for record in round_records(session) for name, value in record.get("metrics", {}).items()}


def taught(session: Session, number: int = 1) -> dict[str, Ensembled]:
    """Targets of a round that is played without distilling them."""
    kept: dict[str, Ensembled] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Distiller, "distil", lambda self, server, public, targets, **_: kept.update(targets))
        session.experiment.algorithm.round(session.server, session.cohort(number, Ledger()))
    return kept


def distil(session: Session, targets: Mapping[str, Ensembled]) -> None:
    """Plays the part of a round that follows its targets."""
    method: Any = session.experiment.algorithm
    seen = method.teacher.diagnostic_samples
    method.distiller.distil(session.server, method.public, targets, task=method.task, diagnostic_samples=seen)


def watched(
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Request, Answer], Answer] = lambda request, answer: answer,
) -> list[tuple[Request, Answer]]:
    """All that clients are asked from now on, and what they answer; ``change`` may alter what reaches the server."""
    seen, carry = list[tuple[Request, Answer]](), session.engine.exchange

    def exchange(requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        for request, answer in zip(requests, carry(requests, deadline), strict=True):
            seen.append((request, change(request, answer)))
            yield seen[-1][1]

    monkeypatch.setattr(session.engine, "exchange", exchange)
    return seen


def site_of(session: Session) -> Site:
    """Where the clients of a prepared session live."""
    assert isinstance(session.engine, LocalEngine)
    return session.engine.site


def first_cohort(session: Session) -> Cohort:
    """The cohort of round 1, with a ledger of its own."""
    return session.cohort(1, Ledger())


def woken(session: Session, client: str, label: StateVersion = (1, 0), after: StateVersion | None = None) -> Client:
    """A client as a step finds it."""
    return site_of(session).build_client(session.federation.members[client], label, after)


def request(client: str, payload: Payload, label: StateVersion = (1, 0), after: StateVersion | None = None) -> Request:
    """Request that an engine carries to a client for ``fit``."""
    return Request(client, "fit", *label, after, payload)


# ---- outputs on the public set: representations cross once for each distinct input


def crossing(session: Session, known: Representations) -> Representations:
    """Outputs on exchanged samples, in evaluation views, as they cross: packed by a plain loop."""
    found = {}
    for name, values in known.items():
        rows, distinct = _public_rows(session, name)
        found[name] = values[[rows.index(row) for row in distinct]]
    return Representations(found, order=known.order)


def of_samples(session: Session, payload: Representations) -> Representations:
    """Outputs on all exchanged samples, of what crossed: unpacked by a plain loop."""
    found = {}
    for name, values in payload.items():
        rows, distinct = _public_rows(session, name)
        assert len(values) == len(distinct), f"{len(values)} rows of '{name}' crossed, not {len(distinct)}"
        found[name] = values[[distinct.index(row) for row in rows]]
    return Representations(found, order=payload.order)


def _public_rows(session: Session, output: str) -> tuple[list[int], list[int]]:
    """The input behind each exchanged sample, and the distinct inputs."""
    exchange = getattr(session.experiment.algorithm, "public", None)
    samples = session.server.exchanged(exchange.samples if exchange else None)
    rows = samples.rows[output].tolist() if output in samples.rows else list(range(len(samples)))
    return rows, sorted(set(rows))
