"""One advice that follows from the figures of a run: a table of conditions, the first of which that holds speaks."""

from __future__ import annotations

import math
from collections.abc import Callable

from polyfed.reporting.headline import Headline, headline
from polyfed.reporting.statistics import finite_mean
from polyfed.reporting.tables import count, format_number
from polyfed.runs.records import SERVER, RunRecords

_NORMAL = 1.96  # 95 % of a normal distribution lie within so many deviations


def advice(records: RunRecords) -> str:
    """What to change first, empty where nothing is to be said."""
    best = headline(records)
    return next(filter(None, (condition(records, best) for condition in CONDITIONS)), "") if best else ""


def _few_items(_: RunRecords, best: Headline) -> str:
    """A value above chance, by less than its items can tell."""
    distance = (best.value - best.chance) / 100
    if not best.trials > 0 or best.is_above_chance or not distance > 0:
        return ""
    share = best.value / 100
    needed = math.ceil((_NORMAL / distance) ** 2 * share * (1 - share))
    return (
        f"{count(round(best.trials))} test items cannot tell {format_number(best.value)} % from chance, "
        f"about {count(max(needed, round(best.trials) + 1))} could: give the test more data."
    )


def _at_chance(records: RunRecords, best: Headline) -> str:
    """No better than guessing, though there are items enough."""
    if not best.value <= best.chance:
        return ""
    return (
        f"nothing was learnt in {records.rounds} rounds: try a pretrained encoder (hf), another learning rate "
        "(training.optimizer.lr), or more rounds."
    )


def _still_rising(records: RunRecords, best: Headline) -> str:
    """The last two evaluations each were the best until then, by validation where there is some."""
    participants = [SERVER] if best.participant == SERVER else list(records.clients)
    kind = "validation" if records.metric_names(participants[0], "validation") else "test"
    of_all = [records.series(name, best.metric, kind) for name in participants]
    rounds = sorted(set.intersection(*map(set, filter(None, of_all)))) if any(of_all) else []
    values = [finite_mean(series[number] for series in of_all if series) for number in rounds]
    if len(values) < 4 or not max(values[:-2]) < values[-2] < values[-1]:
        return ""
    rising, twice = f"{format_number(values[-2])}, then {format_number(values[-1])}", 2 * records.rounds
    return f"{kind} still rises ({rising}): --rounds {twice} may give more."


def _poor_teacher(records: RunRecords, _: Headline) -> str:
    """The ensemble that a server learns from ranks held-out samples worse than the server does."""
    metrics = records.last(SERVER, "train")
    if not metrics.get("teacher.gallery", 0):
        return ""
    for name, own in metrics.items():
        ensemble = metrics.get(name.replace("student.", "teacher.", 1), math.nan)
        if name.startswith("student.") and ensemble < own:
            figures = f"{name.partition('.')[2]} {format_number(ensemble)} against {format_number(own)}"
            return (
                f"the clients' ensemble ranks below the server ({figures}): train clients longer "
                "(algorithm.local_epochs), align them (algorithm.teacher), or give distillation less weight."
            )
    return ""


CONDITIONS: tuple[Callable[[RunRecords, Headline], str], ...] = (_few_items, _at_chance, _still_rising, _poor_teacher)
"""What may be said of a run and its headline, the most urgent first."""
