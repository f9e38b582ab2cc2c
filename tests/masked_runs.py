"""Federations whose replies are summed unseen, and engines that lose answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from misbehaving import contents
from polyfed.engines.local import LocalEngine
from polyfed.runs.session import Session
from polyfed.wire.messages import Answer, Cause, Request
from small_federations import Config, topics


def federation(secure: Any = "pairwise_masks", clients: int = 4, method: Any = "fedavg", **run: Any) -> Config:
    config = topics(name=method) if isinstance(method, str) else topics(**method)
    config["clients"]["text"]["count"] = clients
    config["data"]["sources"]["texts"]["train"] = 60 * clients
    config["aggregation"] = {"secure": secure}
    config["run"] |= {"rounds": 2} | run
    return config


def left(folder: Path) -> dict[str, bytes]:
    # the ledger differs by the key phases, and nothing else may
    return {name: value for name, value in contents(folder).items() if name != "ledger.jsonl"}


@dataclass
class Faulty:
    """An engine that loses answers, and remembers what the server gets."""

    engine: LocalEngine
    loses: dict[tuple[str, str], str] = field(default_factory=dict)
    seen: list[tuple[Request, Answer]] = field(default_factory=list)
    changes: Callable[[Request], Request] = lambda request: request

    def clients(self) -> Any:
        return self.engine.clients()

    def exchange(self, requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        for answer, request in zip(
            self.engine.exchange([self.changes(one) for one in requests], deadline), requests, strict=True
        ):
            self.seen.append((request, answer))
            reason = self.loses.get((request.client, request.step))
            yield Answer.failed(request.client, Cause.LOST, reason) if reason else answer


def between(session: Session, kind: type[Faulty] = Faulty, **faults: Any) -> Faulty:
    """Puts it between the server and its engine."""
    assert isinstance(session.engine, LocalEngine)
    session.engine = session.cohorts.engine = engine = kind(session.engine, **faults)
    return engine
