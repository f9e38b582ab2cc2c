"""Work and memory of a run apart from training: linear in clients, and without tensors that nothing needs."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from polyfed.federation.client import ClientInfo
from polyfed.federation.population import Population
from polyfed.federation.types import Blueprint, GlobalModels
from polyfed.runs.loop import Loop
from sessions import prepared
from small_federations import federation_for


def calls(work: Callable[[], object]) -> int:
    """Calls of functions, those written in C included, that ``work`` makes."""
    count = 0

    def seen(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


class Name(str):
    """A text of which a comparison is a call."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other)


def made(clients: int, types: int = 1) -> tuple[ClientInfo, ...]:
    return tuple(ClientInfo(f"c{k}", "all", ("image",), "any", 9, 3, Name(f"a{k % types}")) for k in range(clients))


def choosing(clients: int) -> int:
    """Calls to choose the clients to measure, all of which have changed."""
    server: Any = SimpleNamespace(clients=made(clients))
    experiment: Any = SimpleNamespace(run=SimpleNamespace(evaluate_clients=True))
    unused: Any = None
    loop = Loop(experiment, unused, server, unused, unused, unused, unused, None, {one.id for one in server.clients})
    assert loop.due() == server.clients
    return calls(loop.due)


def typing(clients: int, types: int) -> int:
    models = GlobalModels(made(clients, types), dict)
    assert models.type_of(models.clients[-1]) == list(models.types)[(clients - 1) % types]
    return calls(lambda: models.samples_by_type(models.clients))


def test_choosing_who_is_measured_is_linear_in_clients() -> None:
    assert choosing(2000) < 4.1 * choosing(500)


def test_types_of_clients_are_found_without_a_search() -> None:
    assert typing(2000, 1) < 4.1 * typing(500, 1)
    assert typing(500, 100) < 1.5 * typing(500, 1)


def test_initial_tensors_are_dropped_once_rounds_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = list[weakref.ref[Tensor]]()
    blueprints = Population.blueprints

    def watched(population: Population) -> dict[str, Blueprint]:
        drawn = blueprints(population)
        kept.extend(weakref.ref(value) for one in drawn.values() for value in one.tensors.values())
        return drawn

    monkeypatch.setattr(Population, "blueprints", watched)
    session = prepared(federation_for("fedavg"), tmp_path)
    gc.collect()
    assert kept
    assert all(reference() is not None for reference in kept)
    session.loop().round(1)
    gc.collect()
    assert not any(reference() is not None for reference in kept)
