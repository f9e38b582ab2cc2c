"""The head of the page: what was run, how far it came, and the few figures that matter most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from polyfed.reporting.advice import advice
from polyfed.reporting.client_spread import judged_by, main_metric
from polyfed.reporting.facts import component, recorded_environment, setting
from polyfed.reporting.headline import common_chance, interval_in_words, last_measured
from polyfed.reporting.outcome import verdict
from polyfed.reporting.recalls import chance_of, scale_of
from polyfed.reporting.tables import TextTable, count, duration, format_number
from polyfed.reporting.traffic import byte_size
from polyfed.runs.records import SERVER, RunRecords


class Card(NamedTuple):
    """One figure, what it is, and what it must be compared with."""

    label: str
    value: str
    context: str = ""


class Completion(NamedTuple):
    """Whether a run is complete: a word or two, its mood (``good``, ``bad`` or ``odd``), and an explanation."""

    shown: str
    mood: str
    hint: str = ""


def page_head(records: RunRecords) -> dict[str, Any]:
    """Name, description, state, facts, warnings, versions and cards.

    Raises:
        RunError: the file of the environment is damaged.
    """
    environment = recorded_environment(records.folder)
    return {
        "title": component(setting(records.config, "name")) or records.name,
        "description": component(setting(records.config, "description")),
        "verdict": verdict(records),
        "advice": advice(records),
        "status": _status(records),
        "facts": {name: value for name, value in _facts(records, environment).items() if value},
        "warnings": records.warnings,
        "versions": _versions(environment),
        "cards": [*_server_cards(records), *_group_cards(records), *_effort(records)],
    }


def _rounds(records: RunRecords) -> tuple[int, int | None]:
    planned = setting(records.config, "run", "rounds")
    # the setting may be of any type: a page is written for an edited or damaged configuration too
    return max(records.seconds, default=records.rounds), planned if isinstance(planned, int) else None


def _status(records: RunRecords) -> Completion:
    done, planned = _rounds(records)
    if planned is None:
        return Completion(f"{done} rounds", "odd")
    if done >= planned:
        return Completion("complete", "good")
    hint = "Killed or interrupted, or still at work when this page was written; polyfed resume continues it."
    return Completion(f"stopped after round {done} of {planned}", "bad", hint)


def _facts(records: RunRecords, environment: Mapping[str, Any]) -> dict[str, str]:
    done, planned = _rounds(records)
    seed = setting(records.config, "run", "seed")
    seconds = sum(records.seconds.values())
    return {
        "method": component(setting(records.config, "algorithm")),
        "seed": "" if seed is None else str(seed),
        "rounds": f"{done} of {planned}" if planned is not None else str(done),
        "duration": duration(seconds) if seconds else "",
        "replies": records.replies_in_words.removeprefix("replies: "),
        "device": str(environment.get("device", "")),
        "run folder": records.name,
    }


def _versions(environment: Mapping[str, Any]) -> TextTable:
    versions = environment.get("versions")
    states = {key: environment.get(key) for key in ("python", "platform", "threads", "git")}
    rows = [(name, str(value)) for name, value in states.items() if value is not None]
    rows += [(str(name), str(value)) for name, value in versions.items()] if isinstance(versions, Mapping) else []
    return TextTable("Environment", ("what", "version or state"), rows)


def _server_cards(records: RunRecords) -> Iterator[Card]:
    """The server's main metric and recalls at 1, after the last test or else the last validation."""
    # a server without test data may still have validation
    kind = "test" if records.last(SERVER) else "validation"
    metrics = records.last(SERVER, kind)
    main = main_metric(records, [SERVER], kind)
    for name in [main, *(name for name in metrics if name.endswith("_r@1"))] if main in metrics else []:
        best, chance = records.best(SERVER, name, kind), chance_of(name, metrics)
        context = [f"best {format_number(best[1])} in round {best[0]}"] if best else []
        context += [f"chance {format_number(chance)}"] if math.isfinite(chance) else []
        context += interval_in_words(records.interval(SERVER, name)) if kind == "test" else []
        yield Card(f"server {_label(name)}, {kind}", _value(name, metrics[name], metrics), " · ".join(context))


def _group_cards(records: RunRecords) -> Iterator[Card]:
    """The mean of each group of clients that was measured, and its worst client."""
    for group, spread in judged_by(records)[1].items():
        if not spread.values:
            continue
        name, members = spread.metric, records.groups[group]
        judged, several = last_measured(records, members, name), len(spread.values) > 1
        worst = (
            f"worst {format_number(spread.worst)} ({spread.worst_client}) · disparity {format_number(spread.disparity)}"
        )
        context = [f"{worst} over {len(spread.values)} clients" if several else f"of {spread.worst_client} alone"]
        chance = common_chance(name, judged)
        context += [f"chance {format_number(chance)}"] if math.isfinite(chance) else []
        label = f"{group} clients, mean {_label(name)}" if several else f"{group}, {_label(name)}"
        yield Card(label, _value(name, spread.mean, judged[0]), " · ".join(context))


def _effort(records: RunRecords) -> Iterator[Card]:
    if records.transfers:
        up, down = records.total_bytes("up"), records.total_bytes("down")
        yield Card("bytes sent", byte_size(up + down), f"up {byte_size(up)} · down {byte_size(down)}")
    if records.seconds:
        times = list(records.seconds.values())
        spread = f"{duration(min(times))} to {duration(max(times))}" if len(times) > 1 else ""
        yield Card("time a round", duration(fmean(times)), spread)
    if records.clients:
        groups = " · ".join(f"{len(members):,} {group}" for group, members in records.groups.items())
        yield Card("clients", f"{len(records.clients):,}", groups)
        excluded = records.excluded()
        # one client may be excluded in many rounds
        participants = len({event.participant for event in excluded})
        context = f"of {participants:,} client{'s' if participants > 1 else ''}" if excluded else "nobody was left out"
        yield Card("exclusions", f"{len(excluded):,}", context)


def _value(name: str, value: float, metrics: Mapping[str, float]) -> str:
    """In percent; of a sum of recalls with what it can reach."""
    scale = scale_of(name, metrics)
    return f"{format_number(value)} %" if scale == 100 else f"{format_number(value)} of {count(scale)} %"


def _label(name: str) -> str:
    return name.replace("_r@", " R@").replace("_to_", " to ")
