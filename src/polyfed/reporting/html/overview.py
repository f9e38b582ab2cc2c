"""The head of the page: what was run, how far it came, and the few figures that matter most."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from polyfed.reporting.client_spread import client_spread
from polyfed.reporting.html.cells import Column, data_table, folded, size
from polyfed.reporting.html.curves import chance_of, main_metric
from polyfed.reporting.html.facts import complete_rounds, component, environment, planned_rounds, setting
from polyfed.reporting.html.markup import Markup, tag
from polyfed.reporting.tables import duration, figure
from polyfed.runs.records import SERVER, RunRecords


@dataclass(frozen=True)
class Card:
    """One figure, what it is, and what it must be compared with."""

    label: str
    value: str
    more: str = ""


def title(records: RunRecords) -> str:
    """The name that the run was given, or that of its folder."""
    return component(setting(records.config, "name")) or records.name


def header(records: RunRecords) -> Markup:
    """Name, description, state, facts and warnings."""
    found = environment(records.folder)
    description = component(setting(records.config, "description"))
    facts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in _facts(records, found).items() if value]
    return tag(
        "header",
        tag("p", "polyfed run report", class_="kicker"),
        tag("div", tag("h1", title(records)), status(records), class_="headline"),
        tag("p", description, class_="lead") if description else None,
        tag("dl", facts, class_="facts"),
        [tag("p", tag("strong", "Warning: "), warning, class_="warning") for warning in records.warnings],
        _versions(found),
    )


def status(records: RunRecords) -> Markup:
    """Whether the run is complete; one that is not may have been stopped or be at work."""
    done, planned = complete_rounds(records), planned_rounds(records)
    if planned is None:
        return tag("span", f"{done} rounds", class_="pill odd")
    if done >= planned:
        return tag("span", "complete", class_="pill good")
    hint = "Killed or interrupted, or still at work when this page was written; polyfed resume continues it."
    return tag("span", f"stopped after round {done} of {planned}", class_="pill bad", title=hint)


def cards(records: RunRecords) -> Markup:
    """The figures at the top; nothing for an empty run."""
    shown = [
        tag(
            "div",
            tag("p", card.label, class_="label"),
            tag("p", card.value, class_="value"),
            tag("p", card.more, class_="more") if card.more else None,
            class_="card",
        )
        for card in (*_quality(records), *_effort(records))
    ]
    return tag("div", shown, class_="cards") if shown else Markup()


def _facts(records: RunRecords, found: Mapping[str, Any]) -> dict[str, str]:
    done, planned = complete_rounds(records), planned_rounds(records)
    seed = setting(records.config, "run", "seed")
    seconds = sum(records.seconds.values())
    return {
        "method": component(setting(records.config, "algorithm")),
        "seed": "" if seed is None else str(seed),
        "rounds": f"{done} of {planned}" if planned is not None else str(done),
        "duration": duration(seconds) if seconds else "",
        "device": str(found.get("device", "")),
        "run folder": records.name,
    }


def _versions(found: Mapping[str, Any]) -> Markup:
    versions = found.get("versions")
    shown = {key: found.get(key) for key in ("python", "platform", "threads", "git")}
    rows = [(name, str(value)) for name, value in shown.items() if value is not None]
    rows += [(str(name), str(value)) for name, value in versions.items()] if isinstance(versions, Mapping) else []
    columns = [Column("what", numeric=False), Column("version or state", numeric=False)]
    return folded("Versions and environment", data_table(columns, rows, caption="Environment")) if rows else Markup()


def _quality(records: RunRecords) -> Iterator[Card]:
    """The server's main metric and recalls at 1, or the means of the groups where the server has no model."""
    kind = "test" if records.last(SERVER) else "validation"
    metrics = records.last(SERVER, kind)
    main = main_metric(records, [SERVER], kind)
    for name in [main, *(name for name in metrics if name.endswith("_r@1"))] if main in metrics else []:
        best, chance = records.best(SERVER, name, kind), chance_of(name, metrics)
        more = [f"best {figure(best[1])} in round {best[0]}"] if best else []
        more += [f"chance {figure(chance)}"] if math.isfinite(chance) else []
        yield Card(f"server {_label(name)}, {kind}", f"{figure(metrics[name])} %", " · ".join(more))
    for group, members in records.groups.items():
        yield from _group_card(records, group, members)


def _label(name: str) -> str:
    return name.replace("_r@", " R@").replace("_to_", " to ")


def _group_card(records: RunRecords, group: str, members: tuple[str, ...]) -> Iterator[Card]:
    spread = client_spread(records, group, name := main_metric(records, members))
    last = [records.last(client) for client in members]
    chances = [chance for metrics in last if math.isfinite(chance := chance_of(name, metrics))]
    if spread.values:
        more = f"worst {figure(spread.worst)} ({spread.worst_client}) · disparity {figure(spread.disparity)}"
        more += f" over {len(spread.values)} clients"
        more += f" · chance {figure(fmean(chances))}" if chances else ""
        yield Card(f"{group} clients, mean {_label(name)}", f"{figure(spread.mean)} %", more)


def _effort(records: RunRecords) -> Iterator[Card]:
    if records.transfers:
        up, down = records.total_bytes("up"), records.total_bytes("down")
        yield Card("bytes sent", size(up + down), f"up {size(up)} · down {size(down)}")
    if records.seconds:
        times = list(records.seconds.values())
        spread = f"{duration(min(times))} to {duration(max(times))}" if len(times) > 1 else ""
        yield Card("time a round", duration(fmean(times)), spread)
    if records.clients:
        groups = " · ".join(f"{len(members):,} {group}" for group, members in records.groups.items())
        yield Card("clients", f"{len(records.clients):,}", groups)
        excluded = records.excluded()
        participants = len({event.participant for event in excluded})
        more = f"of {participants:,} client{'s' if participants > 1 else ''}" if excluded else "nobody was left out"
        yield Card("exclusions", f"{len(excluded):,}", more)
