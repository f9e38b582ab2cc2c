"""Runs that are stopped and clients that misbehave, for tests of the runner."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest

import polyfed
from polyfed.algorithms.algorithm import Reply, client_step
from polyfed.algorithms.creamfl import CreamFL
from polyfed.algorithms.fedavg import FedAvg
from polyfed.federation.client import Client
from polyfed.runs.events import Callback, ClientDone, Event, RoundStarted
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from polyfed.wire.payload import Representations, Weights
from small_federations import Config, tiny_experiment

COMPARED = ("metrics.jsonl", "ledger.jsonl", "partition.json")


def raising(error: BaseException) -> Callable[..., NoReturn]:
    """Something that fails whatever it is called with."""

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise error

    return fail


def noted(patch: pytest.MonkeyPatch, owner: Any, name: str, of: Callable[..., Any] = lambda *given: given) -> list[Any]:
    """Records the arguments of a function from now on."""
    seen, original = list[Any](), getattr(owner, name)

    def noting(*given: Any, **options: Any) -> Any:
        seen.append(of(*given))
        return original(*given, **options)

    patch.setattr(owner, name, noting)
    return seen


def creamfl() -> Config:
    """Three rounds, with two of three clients each."""
    config = tiny_experiment()
    config["data"]["sources"]["scenes"]["train"] = 24  # of which 16 are public
    config["algorithm"] = {"name": "creamfl", "local_epochs": 1, "contrast": {"batch_size": 16}}
    config["run"] |= {"rounds": 3, "sampling": {"cohort": 2}}
    return config


def contents(result: Run | Path) -> dict[str, bytes]:
    """Digests that are equal in runs of one experiment: figures, bytes, partition, models."""
    folder = result if isinstance(result, Path) else result.folder
    models = sorted(str(path.relative_to(folder)) for path in (folder / "models").rglob("*.safetensors"))
    return {name: (folder / name).read_bytes() for name in (*COMPARED, *models)}


def happened(result: Run) -> list[tuple[int, str, str]]:
    return [(event.round, event.participant, event.incident) for event in result.records.events]


def facts(folder: Path, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"checkpoints/round-{number:06d}.json").read_text())["facts"]
    return found


class Stopping(Callback):
    """Stops the run in the middle of a round: one client has done its step, and keeps what it keeps."""

    def __init__(self, at: int) -> None:
        self.at, self.round = at, 0

    def handle(self, event: Event) -> None:
        if isinstance(event, RoundStarted):
            self.round = event.round
        elif isinstance(event, ClientDone) and self.round == self.at:
            raise KeyboardInterrupt


def cut_short(config: Config, folder: Path, at: int = 2) -> Path:
    """A run that was interrupted in the middle of round ``at``; gives its folder."""
    with pytest.raises(KeyboardInterrupt):
        polyfed.run(Experiment.parse(config), folder, [Stopping(at)], quiet=True)
    return folder


class Stops(CreamFL):
    """Stops the process's work in one round, as often as a file says."""

    home_of: ClassVar[str] = "tests"
    marker: str
    at: int = 2

    def round(self, server: Any, cohort: Any) -> None:
        super().round(server, cohort)
        marker = Path(self.marker)
        if server.clock.round == self.at and marker.exists():
            marker.unlink()
            raise KeyboardInterrupt


def interrupted(config: Config, folder: Path, marker: Path, at: int = 2) -> None:
    marker.touch()
    name = f"{Stops.__module__}.Stops"
    config["algorithm"] = config["algorithm"] | {"name": name, "marker": str(marker), "at": at}
    with pytest.raises(KeyboardInterrupt):
        polyfed.run(Experiment.parse(config), folder, quiet=True)


class Fails(CreamFL):
    """One client misbehaves in round 2."""

    client: str = "paired-0"
    how: str = "raise"

    @client_step(representations=Representations, num_examples=int)
    def fit(self, client: Client, representations: Representations) -> Reply:
        reply = super().fit(client, representations)
        if client.name != self.client or client.clock.round != 2:
            return reply
        if self.how == "raise":
            raise ValueError("no GPU left")
        own = dict(reply.representations)
        bad = {name: value[:-1] if self.how == "short" else value * float("nan") for name, value in own.items()}
        tensors = Representations(bad, order=representations.order)
        return Reply(representations=tensors, num_examples=client.num_examples)


def failing(config: Config, how: str) -> Config:
    algorithm = config["algorithm"] | {"name": f"{Fails.__module__}.Fails", "how": how}
    run = config["run"] | {"sampling": {"cohort": None}, "on_error": "exclude"}
    return config | {"algorithm": algorithm, "run": run}


class Lies(FedAvg):
    """Some clients falsify the weights that they send, from a round on."""

    liars: tuple[str, ...] = ()
    how: str = "huge"
    since: int = 1

    @client_step(weights=Weights, num_examples=int)
    def fit(self, client: Client, weights: Weights) -> Reply:
        reply = super().fit(client, weights)
        if client.name not in self.liars or client.clock.round < self.since:
            return reply
        false = {name: LIES[self.how](value, weights[name]) for name, value in reply.weights.items()}
        return Reply(weights=Weights(false), num_examples=client.num_examples)


def _unless_whole(change: Any) -> Any:
    return lambda value, sent: change(value, sent) if value.is_floating_point() else value


LIES: dict[str, Any] = {
    "huge": _unless_whole(lambda value, sent: value.abs() + 0.9e6 / max(value.numel(), 1) ** 0.5),
    "negative": _unless_whole(lambda value, sent: -3 * value),
    "far": _unless_whole(lambda value, sent: value if value.min() >= 0 else sent + 6 * (value - sent)),
    "half": _unless_whole(lambda value, sent: value.half()),
    "double": _unless_whole(lambda value, sent: value.double()),
    "flags": lambda value, sent: value if value.is_floating_point() else value.bool(),
    "back": lambda value, sent: value if value.is_floating_point() else sent - 1,
}


def lying(config: Config, how: str, liars: tuple[str, ...], count: int = 6, since: int = 1) -> Config:
    """Image clients of FedAvg, with batch normalisation and norm clipping, of which some lie from a round on."""
    method = {"name": f"{Lies.__module__}.Lies", "how": how, "liars": list(liars), "since": since}
    config["aggregation"], config["run"] = {"clip": {"weight": 6}}, config["run"] | {"on_error": "exclude"}
    clients = {"image": config["clients"]["image"] | {"count": count}}
    config["data"]["sources"]["private"]["train"] = 16 * count
    return config | {"algorithm": method | {"local_epochs": 1}, "clients": clients, "server": None, "public": None}
