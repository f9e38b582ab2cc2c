"""Twins: an experiment without its clients, or without their private data, to tell what a federation brings."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from polyfed.algorithms.algorithm import Algorithm, LocalTraining
from polyfed.algorithms.local import LocalOnly
from polyfed.core.effects import require_default
from polyfed.core.errors import ConfigError, nearest
from polyfed.core.settings import Settings
from polyfed.runs.zero_shot import untouched_server, zero_shot_obstacle
from polyfed.wire.schema import steps_of

log = logging.getLogger(__name__)

_MEANING = {
    "server-only": "the server alone on the public set",
    "no-private": "clients hold public data only",
    "local": "every client alone",
    "pooled": "the server alone on the public set and what clients hold of its source",
    "zero-shot": "the server's pretrained encoders as they come",
}
_TUNED = ("server-only", "pooled")
RATE, PASSES = "server.training.optimizer.lr", "algorithm.server_epochs"
"""What is tuned of a twin whose server trains alone."""

_Content = dict[str, Any]


class TwinSettings(Settings):
    """Which twin of the experiment is run in its place."""

    kind: Literal["server-only", "no-private", "local", "pooled", "zero-shot"] = Field(
        description="the server alone on the public set; clients that hold public data only; every client alone; the "
        "server alone on the public set and all that clients hold of its source; the server's pretrained encoders as "
        "they come"
    )
    rate: PositiveFloat | None = Field(
        default=None, description="factor of server.training.optimizer.lr; null: chosen on validation"
    )
    passes: PositiveInt | None = Field(
        default=None, description="factor of the method's passes over P a round; null: chosen on validation"
    )
    candidates: PositiveInt = Field(default=9, description="rates and numbers of passes that are tried at most")
    of: str = Field(default="", description="name of the experiment; not to be given, a twin that is made says it")
    tuned: dict[str, int | float] | None = Field(
        default=None, description="settings that were chosen -> what the method has; not to be given"
    )

    @model_validator(mode="after")
    def _tuned_kinds(self) -> Self:
        if self.kind not in _TUNED:
            require_default(self, f"with kind: {self.kind}", "rate", "passes", "candidates")
        if (self.rate is None) != (self.passes is None):
            raise ValueError("rate and passes: give both, or neither")
        if self.rate is not None:
            require_default(self, "with rate and passes given", "candidates")
        return self

    @property
    def is_to_be_tuned(self) -> bool:
        """Whether rate and passes are still those of the method, which are not those of a server alone."""
        return self.kind in _TUNED and self.tuned is None


def twin_content(content: Mapping[str, Any], algorithm: Algorithm) -> _Content:
    """An experiment's resolved settings, with ``twin``, as those of the twin.

    Raises:
        ConfigError: the experiment has no such twin; the message says which it has.
    """
    name, kind = content["name"], content["twin"]["kind"]
    obstacles = _obstacles(content, algorithm)
    if obstacles[kind]:
        others = ", ".join(other for other, obstacle in obstacles.items() if not obstacle)
        raise ConfigError(f"twin.kind is {kind}, but {obstacles[kind]}; twins of '{name}': {others or 'none'}")
    changes = {
        "name": f"{name}-{kind}",
        "description": f"{kind} twin of {name}: {_MEANING[kind]}",
        "twin": {**content["twin"], "of": name},
    }
    if kind == "no-private":
        changes |= _without_private_data(content)
    elif kind == "local":
        changes |= _every_client_alone(content["run"], algorithm)
    elif kind == "zero-shot":
        changes |= _as_they_come(content)
    else:
        changes |= _server_alone(content, algorithm)
    if kind == "pooled":
        changes["public"] = {**content["public"], "items": _pooled_items(content), "per_item": None}
    return {**content, **changes}


def chosen_in_words(content: Mapping[str, Any]) -> str:
    """Rate and passes of a tuned twin, from its settings; empty if it is not tuned."""
    twin = content.get("twin") or {}
    if twin.get("tuned") is None:
        return ""
    how = "chosen on validation" if twin.get("rate") is None else "as given"
    rate, passes = content["server"]["training"]["optimizer"]["lr"], content["algorithm"]["server_epochs"]
    return f"rate {rate:g} and {passes} passes a round {how}"


def _obstacles(content: Mapping[str, Any], algorithm: Algorithm) -> dict[str, str]:
    """Kind -> what keeps the experiment from having that twin; empty if nothing does."""
    unsaid = f"algorithm '{algorithm.component_name()}' does not say how long"
    alone = _first_of(
        (algorithm.server_passes is None, f"{unsaid} its server trains (server_passes)"),
        (not content["server"], "there is no server model"),
        (not content["public"], "there is no public set"),
        (
            not (content["server"] or {}).get("validation_split"),
            "server.validation_split is null, and tuning needs validation",
        ),
    )
    public = content["public"] or {"source": "", "split": "", "items": 0}
    source = public["source"]
    return {
        "server-only": alone,
        "no-private": _first_of(
            (not source, "there is no public set"),
            (not _groups_of(source, content), f"no group has the source '{source}' of P"),
        ),
        "local": _first_of(
            (not algorithm.asks_clients, f"algorithm '{algorithm.component_name()}' asks no clients"),
            (algorithm.local_training is None, f"{unsaid} its clients train (local_training)"),
        ),
        "pooled": alone
        or _first_of(
            (public["items"] is None, "public.items is null: all that there is is public"),
            (not _held(content, public), f"no client holds private items of '{source}'"),
        ),
        "zero-shot": zero_shot_obstacle(content["server"]),
    }


def _first_of(*obstacles: tuple[bool, str]) -> str:
    return next((obstacle for is_there, obstacle in obstacles if is_there), "")


# ---- the server alone

_NOBODY_ASKED: _Content = {"evaluate_clients": False, "sampling": {}, "phases": {}, "pace": "sync", "attackers": []}


def _server_alone(content: Mapping[str, Any], algorithm: Algorithm) -> _Content:
    alone = {**_NOBODY_ASKED, "engine": "local"}
    passes = max(1, algorithm.server_passes or 0)
    method = {"name": "server_only", "server_epochs": passes}
    run = {**content["run"], **alone}
    changes = {"clients": {}, "algorithm": method, "aggregation": {}, "privacy": None, "run": run}
    return changes if content["twin"]["rate"] is None else {**changes, **_as_given(content, passes)}


def _as_given(content: Mapping[str, Any], passes: int) -> _Content:
    """With the factors that the twin names."""
    twin, server = content["twin"], copy.deepcopy(content["server"])
    optimizer = server["training"]["optimizer"]
    tuned = {RATE: optimizer["lr"], PASSES: passes}
    optimizer["lr"] = float(f"{optimizer['lr'] * twin['rate']:.12g}")
    method = {"name": "server_only", "server_epochs": passes * twin["passes"]}
    return {"server": server, "algorithm": method, "twin": {**twin, "of": content["name"], "tuned": tuned}}


# ---- nobody trains


def _as_they_come(content: Mapping[str, Any]) -> _Content:
    run = {**content["run"], **_NOBODY_ASKED, "rounds": 1}
    method = {"name": "server_only", "server_epochs": 0}
    server = untouched_server(content["server"])
    return {"server": server, "clients": {}, "algorithm": method, "aggregation": {}, "privacy": None, "run": run}


def _pooled_items(content: Mapping[str, Any]) -> int | None:
    """As many items as are public or held; a larger draw of P has the smaller one in it. None: the whole split."""
    held = _held(content, content["public"])
    return None if None in held else content["public"]["items"] + sum(count for count in held if count is not None)


def _held(content: Mapping[str, Any], public: Mapping[str, Any]) -> list[int | None]:
    """How many private items each group has of the split that P is drawn from, None for all; other groups are not in
    the list."""
    origin = public["source"], public["split"]
    parts = [part for group in content["clients"].values() for part in (group, group["also"]) if part]
    return [part["items"] for part in parts if (part["source"], part["split"]) == origin and part["items"] != "public"]


# ---- clients


def with_groups(content: Mapping[str, Any], names: Sequence[str]) -> _Content:
    """Resolved settings with these client groups alone, and cohorts and quorums of no more clients than they have.

    Raises:
        ConfigError: there is no such group.
    """
    for name in names:
        if name not in content["clients"]:
            raise ConfigError(f"groups: no group '{name}' in '{content['name']}'; {nearest(name, content['clients'])}")
    clients = {name: group for name, group in content["clients"].items() if name in names}
    return {**content, "clients": clients, "run": _asking(clients, content["run"])}


def _groups_of(source: str, content: Mapping[str, Any]) -> dict[str, _Content]:
    return {name: group for name, group in content["clients"].items() if group["source"] == source}


def _without_private_data(content: Mapping[str, Any]) -> _Content:
    public, groups = content["public"], _groups_of(content["public"]["source"], content)
    if left_out := [name for name in content["clients"] if name not in groups]:
        message = "twin no-private: %s left out, as the public set has nothing of their sources"
        log.warning(message, ", ".join(left_out))
    held = {"split": public["split"], "items": "public", "also": None}
    clients = {name: {**group, **held} for name, group in groups.items()}
    return {"clients": clients, "run": _asking(clients, content["run"])}


def _asking(clients: _Content, run: _Content) -> _Content:
    """Cohorts, quorums and buffers of no more clients than there are."""
    there = sum(group["count"] for group in clients.values())

    def capped(number: Any) -> Any:
        return min(number, there) if isinstance(number, int) else number

    cohort = run["sampling"]["cohort"]
    if isinstance(cohort, dict):
        cohort = {name: share for name, share in cohort.items() if name in clients}
    phases = {name: {**phase, "min_clients": capped(phase["min_clients"])} for name, phase in run["phases"].items()}
    sampling = {**run["sampling"], "cohort": capped(cohort)}
    pace = {key: capped(value) if key in ("replies", "concurrency") else value for key, value in run["pace"].items()}
    return {**run, "sampling": sampling, "min_clients": capped(run["min_clients"]), "phases": phases, "pace": pace}


def _every_client_alone(run: _Content, algorithm: Algorithm) -> _Content:
    """As much training a round as with the method, in all its stages; nobody sends anything that privacy would
    protect, nor has use for a server's model."""
    epochs, steps, others = algorithm.local_training or LocalTraining()
    training = {"local_epochs": epochs} if steps is None else {"local_steps": steps + others}
    training["idle_rounds"] = algorithm.rounds_without_clients
    phases = {name: phase for name, phase in run["phases"].items() if name in steps_of(LocalOnly())}
    own: _Content = {"evaluate_clients": run["evaluate_clients"] or True, "phases": phases, "attackers": []}
    method = {"name": "local", **training}
    return {"server": None, "algorithm": method, "aggregation": {}, "privacy": None, "run": {**run, **own}}
