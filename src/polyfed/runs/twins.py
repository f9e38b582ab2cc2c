"""Twins: an experiment without its clients, or without their private data, to show the gain of a federation."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from polyfed.core.errors import ConfigError, nearest
from polyfed.core.settings import Settings

if TYPE_CHECKING:  # pages of finished runs do without torch
    from polyfed.algorithms.algorithm import Algorithm

_NOBODY_ASKED = {"evaluate_clients": False, "sampling": {}, "exchange": {}, "pace": "sync", "attackers": []}

_Content = dict[str, Any]


class TwinSettings(Settings):
    """Which twin of the experiment is run in its place."""

    kind: Literal["server-only", "no-private", "local", "pooled", "zero-shot"] = Field(
        description="the server alone on the public set; clients that hold public data only; every client alone; the "
        "server alone on the public set and all that clients hold of its source; the server's pretrained encoders as "
        "they come"
    )
    of: str = Field(default="", description="name of the experiment, written when the twin is made; not to be given")


def twin_content(content: Mapping[str, Any], algorithm: Algorithm) -> _Content:
    """An experiment's resolved settings, with ``twin``, as those of the twin.

    Raises:
        ConfigError: the experiment does not have this twin; the message lists those that it has.
    """
    name, twin = content["name"], content["twin"]["kind"]
    try:
        changes = _TWINS[twin](content, algorithm)
    except ConfigError as error:
        own = []
        for other, changes_of in _TWINS.items():
            with contextlib.suppress(ConfigError):
                changes_of(content, algorithm)
                own.append(other)
        raise ConfigError(f"twin.kind is {twin}, but {error}; twins of '{name}': {', '.join(own) or 'none'}") from error
    made = {"name": f"{name}-{twin}", "description": f"{twin} twin of {name}", "twin": {"kind": twin, "of": name}}
    return {**content, **made, **changes}


def _require(there: object, obstacle: str) -> None:
    if not there:
        raise ConfigError(obstacle)


def _unsaid(algorithm: Algorithm, what: str) -> str:
    return f"algorithm '{algorithm.component_name()}' does not define how long {what}"


# ---- a twin each: an experiment's settings -> what is another in the twin's


def _server_only(content: Mapping[str, Any], algorithm: Algorithm) -> _Content:
    server, passes = content["server"], algorithm.server_passes
    _require(passes is not None, _unsaid(algorithm, "its server trains (server_passes)"))
    _require(server, "it has no server model")
    _require(content["public"], "it has no public set")
    _require(server and server["validation_split"], "server.validation_split is null: no model is chosen")
    method = {"name": "server_only", "server_epochs": max(1, passes or 0)}
    run = {**content["run"], **_NOBODY_ASKED, "engine": "local"}
    return {"clients": {}, "algorithm": method, "aggregation": {}, "privacy": None, "run": run}


def _pooled(content: Mapping[str, Any], algorithm: Algorithm) -> _Content:
    """A larger draw of P has the smaller one in it."""
    changes, public = _server_only(content, algorithm), content["public"]
    _require(public["items"] is not None, "public.items is null: all that there is is public")
    parts = [part for group in content["clients"].values() for part in (group, group["also"]) if part]
    beside = [part for part in parts if all(part[key] == public[key] for key in ("source", "split"))]
    held = [part["items"] for part in beside if part["items"] != "public"]
    _require(held, f"no client holds private items of '{public['source']}'")
    items = None if None in held else public["items"] + sum(held)  # None: the whole split
    return {**changes, "public": {**public, "items": items, "per_item": None}}


def _no_private(content: Mapping[str, Any], algorithm: Algorithm) -> _Content:
    public = content["public"]
    _require(public, "it has no public set")
    names = [name for name, group in content["clients"].items() if group["source"] == public["source"]]
    _require(names, f"no group has the source '{public['source']}' of P")
    held = {"split": public["split"], "items": "public", "also": None}
    there = with_groups(content, names)
    return {"clients": {name: {**group, **held} for name, group in there["clients"].items()}, "run": there["run"]}


def _local(content: Mapping[str, Any], algorithm: Algorithm) -> _Content:
    """The training per round of the method, in all its stages; clients send nothing that privacy would protect,
    and have no use for a server's model."""
    _require(algorithm.asks_clients, f"algorithm '{algorithm.component_name()}' asks no clients")
    if (training := algorithm.local_training) is None:
        raise ConfigError(_unsaid(algorithm, "its clients train (local_training)"))
    epochs, steps, others = training
    length = {"local_epochs": epochs} if steps is None else {"local_steps": steps + others}
    method = {"name": "local", **length, "idle_rounds": algorithm.rounds_without_clients}
    run = content["run"]
    phases = {name: phase for name, phase in run["exchange"]["phases"].items() if name == "fit"}
    exchange = {**run["exchange"], "phases": phases}
    run = {**run, "evaluate_clients": run["evaluate_clients"] or True, "exchange": exchange, "attackers": []}
    return {"server": None, "algorithm": method, "aggregation": {}, "privacy": None, "run": run}


def _zero_shot(content: Mapping[str, Any], algorithm: Algorithm) -> _Content:
    server, run = untouched_server(content["server"]), {**content["run"], **_NOBODY_ASKED, "rounds": 1}
    method = {"name": "server_only", "server_epochs": 0}
    return {"server": server, "clients": {}, "algorithm": method, "aggregation": {}, "privacy": None, "run": run}


_TWINS: Mapping[str, Callable[[Mapping[str, Any], Algorithm], _Content]] = {
    "server-only": _server_only,
    "no-private": _no_private,
    "local": _local,
    "pooled": _pooled,
    "zero-shot": _zero_shot,
}

# ---- parts of an experiment


def untouched_server(server: Mapping[str, Any] | None) -> _Content:
    """The server's settings with its encoders as they come: nothing of them is trained.

    Raises:
        ConfigError: it has a layer that is new, or there is none.
    """
    if not server:
        raise ConfigError("it has no server model")
    encoders = server["model"]["encoders"]
    new = ", ".join(name for name, encoder in encoders.items() if encoder.get("projection") != "own")
    _require(not new, f"the encoders of {new} end in a layer that is new, not in a common space")
    tasks = server["task"].get("tasks", [server["task"]])
    _require(
        all(one.get("name") != "classification" or one.get("names") for one in tasks),
        "the classifier of server.task is new; classify by names of classes (server.task.names)",
    )
    untouched = copy.deepcopy(dict(server))
    for name, encoder in encoders.items():
        kept = {key: value for key, value in encoder.items() if key not in ("trainable", "adapter")}
        if encoder["view"]["name"] == "states":  # the view of what is trained no more
            kept["view"] = {key: encoder["view"][key] for key in ("size", "fit", "length", "precision")}
        untouched["model"]["encoders"][name] = kept
    if untouched.get("training"):
        untouched["training"].pop("schedule", None)  # of training that there is not
    return untouched


def with_groups(content: Mapping[str, Any], names: Sequence[str]) -> _Content:
    """Resolved settings with these client groups alone, and cohorts and quorums of no more clients than they have.

    Raises:
        ConfigError: a group does not exist.
    """
    for name in names:
        if name not in content["clients"]:
            raise ConfigError(f"groups: no group '{name}' in '{content['name']}'; {nearest(name, content['clients'])}")
    clients, run = {name: group for name, group in content["clients"].items() if name in names}, content["run"]
    there = sum(group["count"] for group in clients.values())

    def capped(number: Any) -> Any:
        return min(number, there) if isinstance(number, int) else number

    cohort = run["sampling"]["cohort"]
    if isinstance(cohort, dict):
        cohort = {name: share for name, share in cohort.items() if name in clients}
    exchange = run["exchange"]
    phases = {name: {**one, "min_clients": capped(one["min_clients"])} for name, one in exchange["phases"].items()}
    exchange = {**exchange, "min_clients": capped(exchange["min_clients"]), "phases": phases}
    sampling = {**run["sampling"], "cohort": capped(cohort)}
    pace = {key: capped(value) if key in ("replies", "concurrency") else value for key, value in run["pace"].items()}
    fitted = {"sampling": sampling, "exchange": exchange, "pace": pace}
    return {**content, "clients": clients, "run": {**run, **fitted}}
