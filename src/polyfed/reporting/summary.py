"""Summary of a run: metrics against chance and twins, costs, and next steps."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from polyfed.core.distributions import share_interval
from polyfed.core.errors import ConfigError, RunError
from polyfed.core.untrusted import file_json
from polyfed.reporting.metrics import Recall, chance_of, common_chance, find_recalls, main_metric, scale_of, teaching
from polyfed.reporting.statistics import finite_mean
from polyfed.reporting.tables import Cell, TextTable, byte_size, count, duration, format_number, mib, span_of
from polyfed.runs.config_files import start_of
from polyfed.runs.events import Metrics
from polyfed.runs.folder import chosen_model, saved_models
from polyfed.runs.opened import open_run
from polyfed.runs.records import SERVER, RunRecords, mapping_in
from polyfed.runs.twins import untouched_server

if TYPE_CHECKING:
    from rich.console import RenderableType

SHARES = ("accuracy", "dice")  # in percent, of items or of pixels
MAIN = (*SHARES, "r1_sum")
_NORMAL = 1.96  # deviations within which 95 % of a normal distribution lie
_MOST_ROWS = 8  # of the table
_MOST_NAMED = 6  # sites in a sentence, separately for those that gain, lose, or neither
_MOST_ITEMS = 1_000_000  # test items; a figure within the interval of chance over so many is at chance
_TWINS = {SERVER: "server_only", "clients": "local"}
_IN_WORDS = {
    "mean R@1": "puts the right match first in {} of searches",
    "accuracy": "is right in {} of cases",
    "dice": "finds outlines that overlap the true ones by {}",
}
_SHARED = {
    "server_only": ("data", "public", "server"),
    "local": ("data", "public", "clients"),
}  # sections that a run shares with its twin


class Completion(NamedTuple):
    """Completion of a run: a few words, the mood (``good``, ``bad`` or ``odd``), and an explanation."""

    shown: str
    mood: str
    hint: str = ""


@dataclass(frozen=True)
class Headline:
    """The main metric of a run.

    Attributes:
        participant: ``server`` or ``clients``.
        metric: Name of the metric.
        value: Value of the run's model, or the mean over clients with the metric.
        chance: Value of guessing, NaN if unknown.
        meaning: The metric and whose it is, as the subject of a sentence.
        trials: Test items, never their captions, that the value is a share of, NaN if unknown; for a mean over
            clients the number of items with the same deviation.
        kept: Interval over test items from the evaluation; None without one.
        scale: Maximum of the value, for a sum of recalls as many times 100 as it sums; NaN if unknown.
    """

    participant: str
    metric: str
    value: float
    chance: float
    meaning: str
    trials: float = math.nan
    kept: tuple[float, float] | None = None
    scale: float = 100.0

    @property
    def unit(self) -> str:
        return " %" if self.scale == 100 else f" of {count(self.scale)}" if self.scale > 100 else ""

    @property
    def share(self) -> Headline:
        """The same in percent of its maximum: of a sum of recalls their mean."""
        if not self.scale > 100:
            return self
        unit, name = 100 / self.scale, self.metric.replace("r1_sum", "mean R@1")
        kept = self.kept and (unit * self.kept[0], unit * self.kept[1])
        value, chance = unit * self.value, unit * self.chance
        return replace(self, metric=name, value=value, chance=chance, kept=kept, scale=100.0)

    @property
    def in_words(self) -> str:
        """Predicate of a sentence, such as ``reaches 81.0 % (accuracy)``."""
        words = next((words for name, words in _IN_WORDS.items() if self.metric.endswith(name)), "")
        return (words or f"reaches {{}} ({_label(self.metric)})").replace("{}", self.amount)

    @property
    def amount(self) -> str:
        return f"{format_number(self.value, 1)}{self.unit}"

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval over test items: the evaluation's, else that of independent trials; None without trials."""
        # Dice counts the pixels of all images together, so images are not its trials
        is_share = not self.metric.endswith("dice") and 0 <= self.value <= self.scale
        is_share &= 0 < self.trials < _MOST_ITEMS**2
        if self.kept or not is_share:
            return self.kept
        unit = self.scale / 100
        low, high = share_interval(self.value / unit, self.trials)
        return unit * low, unit * high

    def gain_interval(self, other: Headline) -> tuple[float, float] | None:
        """95 % interval of the gain over another, from both intervals (Zou and Donner 2008): wider than if paired."""
        if self.interval is None or other.interval is None:
            return None
        (low, high), (least, most), gain = self.interval, other.interval, self.value - other.value
        down = math.hypot(self.value - low, most - other.value)
        return gain - down, gain + math.hypot(high - self.value, other.value - least)

    @property
    def is_above_chance(self) -> bool:
        """True if the interval, or the value without one, is above chance."""
        return (self.interval[0] if self.interval else self.value) > self.chance


class PairedResult(NamedTuple):
    """A metric of a site, the server or the clients, in percent where it has a maximum.

    Attributes:
        whose: Name of the site, the server or the group of clients.
        known: Value in the federation; without one, the value alone.
        alone: Value after training alone.
        federated: Value in the federation.
    """

    whose: str
    known: Headline
    alone: Headline | None
    federated: Headline | None

    @classmethod
    def of(cls, whose: str, alone: Headline | None, federated: Headline | None) -> list[PairedResult]:
        """List of the one result; empty without any value."""
        known = federated or alone
        pair = [each.share if each and known and each.metric == known.metric else None for each in (alone, federated)]
        return [cls(whose, known.share, *pair)] if known else []

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the gain."""
        return self.federated.gain_interval(self.alone) if self.alone and self.federated else None

    @property
    def difference(self) -> float:
        """Gain in points; NaN if one of the two is missing."""
        return self.federated.value - self.alone.value if self.alone and self.federated else math.nan

    @property
    def gain(self) -> str:
        """Gain in points with its interval, as far as known."""
        interval = " ({:.1f} to {:.1f})".format(*self.interval) if self.interval else ""
        return "-" if math.isnan(self.difference) else f"{self.difference:+.1f}{interval}"

    @property
    def outcome(self) -> str:
        low, high = self.interval or (-math.inf, math.inf)
        return "a gain" if low > 0 else "a loss" if high < 0 else "no clear difference"


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run for the terminal, ``report.md`` and the page.

    Attributes:
        records: Records of the run, finished or not.
    """

    records: RunRecords

    # ---- main metric

    @cached_property
    def headline(self) -> Headline | None:
        """The server's main metric, which selected its model; else the clients'. None without any metric."""
        records, metrics = self.records, self.records.metrics(SERVER)
        if (metric := main_metric(records, [SERVER])) not in metrics:
            return self.clients_headline
        most, items = _maximum(metric, metrics), _items(metric, metrics)
        meaning = f"The server's {_label(metric)}"
        value, kept = metrics[metric], records.interval(SERVER, metric)
        return Headline(SERVER, metric, value, chance_of(metric, metrics), meaning, items, kept, most)

    @cached_property
    def clients_headline(self) -> Headline | None:
        return next(filter(None, (self._headline_of(self.records.clients, metric) for metric in MAIN)), None)

    def _headline_of(self, clients: Sequence[str], metric: str) -> Headline | None:
        """A metric of the last evaluations of one or more clients; None if none has it."""
        if not (measured := self._measured(clients, metric)):
            return None
        several, most = len(measured) > 1, _maximum(metric, measured[0])
        whose = f"the {len(measured)} clients that have it" if several else "the one client that has it"
        meaning = f"The {'mean ' if several else ''}{_label(metric)} of {whose}"
        value, chance = finite_mean(metrics[metric] for metrics in measured), common_chance(metric, measured)
        return Headline("clients", metric, value, chance, meaning, self._common_trials(clients, metric), scale=most)

    def _measured(self, participants: Sequence[str], metric: str) -> list[Metrics]:
        """Last metrics of the participants with a finite value of one."""
        last = map(self.records.last, participants)
        return [metrics for metrics in last if math.isfinite(metrics.get(metric, math.nan))]

    def _common_trials(self, among: Sequence[str], metric: str) -> float:
        """Items of one client whose share deviates as much as the mean of the clients' shares.

        Clients of a source's split that is not dealt out share their test items, which count once.
        """
        tested, holdings = dict[str, list[float]](), self.records.holdings
        for client in among:
            group = self.records.section("clients").get(holdings[client].group if client in holdings else "clients")
            source, split, test = (setting(group, key) for key in ("source", "test_split", "test"))
            if measured := self._measured([client], metric):
                place = f"{source} {split}" if split is not None and test == "all" else client
                tested.setdefault(place, []).append(_items(metric, *measured))
        if not (clients_tested := sum(map(len, tested.values()))):
            return math.nan
        return 1 / sum((len(items) / clients_tested) ** 2 / max(items) for items in tested.values())

    # ---- alone and in the federation

    @cached_property
    def results(self) -> Sequence[PairedResult]:
        """Each named site, else each group of clients, alone and in the federation; then the server."""
        records = self.records
        results = [one for site in records.site_names for one in self.of_clients(site, [site])]
        for group, members in records.groups.items() if not results else ():
            results += self.of_clients(group, members)
        of_server = [each.headline if each else None for each in self._pairs[SERVER]]
        alone, federated = (each if each and each.participant == SERVER else None for each in of_server)
        return results + PairedResult.of(SERVER, alone, federated)

    def of_clients(self, whose: str, clients: Sequence[str]) -> list[PairedResult]:
        """Result of one client, or the mean of several, after their own last evaluations; none if not evaluated."""
        metric = main_metric(self.records, clients)
        measured = len(self._measured(clients, metric))
        pair = (each._headline_of(clients, metric) if each else None for each in self._pairs["clients"])
        return PairedResult.of(f"{whose}, mean of {measured}" if measured > 1 else whose, *pair)

    @cached_property
    def by_site(self) -> bool:
        """True if the results are those of named sites."""
        return any(one.whose in self.records.site_names for one in self.results)

    @property
    def results_table(self) -> TextTable:
        """The results in numbers, without columns that are empty."""
        rows: list[dict[str, Cell]] = [
            {
                "": f"{one.whose}: {_label(one.known.metric)}",
                "alone": one.alone.value if one.alone else None,
                "federation": one.federated.value if one.federated else None,
                "gain (95 %)": one.gain,
                "chance": one.known.chance,
                "tested": format_number(one.known.trials, 0),
            }
            for one in self.results
        ]
        pair = filter(None, self._pairs["clients"])
        rounds = dict.fromkeys(span_of(each.records.last_rounds(self.records.clients)) for each in pair)
        last = f"Clients: after their own last evaluation (round {' and '.join(rounds)})"
        alone, _ = self._pairs[SERVER]
        server = f"Server: {self.records.chosen}"
        server += f"; alone: round {alone.records.chosen.number}" if alone and alone is not self else ""
        has = {"Percent": True, server: self.records.metric_names(SERVER), last: rounds.keys() != {"-"}}
        note = ". ".join(part for part, is_shown in has.items() if is_shown)
        return TextTable.of("Alone and in the federation", rows, (f"{note}.",), drop_empty=True)

    @cached_property
    def _pairs(self) -> Mapping[str, Sequence[RunSummary | None]]:
        """Training alone, and the federation, for the server and for clients: one is this run, the other its finished
        twin or None."""
        pairs = {}
        for whose, alone in _TWINS.items():
            twin = finished_twin(self.records, alone)
            pair = [RunSummary(twin) if twin else None, self]
            pairs[whose] = pair[::-1] if _algorithm(self.records) == alone else pair
        return pairs

    @property
    def is_alone(self) -> bool:
        return _algorithm(self.records) in _TWINS.values()

    # ---- sentences

    @property
    def sentences(self) -> Sequence[str]:
        """Result in sentences: in short, the verdict, and the gain over the untouched encoders."""
        return [*filter(None, [self.in_short, self.verdict, self.gain_over_untouched])]

    @property
    def in_short(self) -> str:
        """One sentence for readers outside the field: the participants, the gain by taking part, and its interval."""
        records, results, number = self.records, self.results, len(self.records.clients)
        names = [*records.site_names][: _MOST_NAMED + 1]
        who = f"{number} client{'s' * (number != 1)}{' and a server' if records.section('server') else ''}"
        who = f"{', '.join(names[:-1])} and {names[-1]}" if 1 < len(names) <= _MOST_NAMED else who
        how = "trained, each alone" if _algorithm(records) == "local" else "trained together without sharing their data"
        opening = f"{who} {how}: " if number else "Without clients, "
        unknown = "; what training together brings is not measured yet" if self.baseline() else ""
        if not results:
            return f"{opening}nothing was measured."
        if self.by_site:
            return f"{opening}{_gains_in_words(results) or f'each has its own result{unknown}'}."
        one = next((each for each in results[::-1] if each.gain != "-"), results[-1])
        known = one.alone if self.is_alone and one.alone else one.known
        group = f" of {one.whose.partition(',')[0]}" * (len(records.groups) > 1)
        others = [f"{one.alone.amount} alone"] if one.alone and known is not one.alone else []
        others += [f"{format_number(known.chance, 1)}{known.unit} by guessing"] if known.chance > 0 else []
        text = f"{opening}{'the server' if one.whose == SERVER else f'a client{group}, on average,'} {known.in_words}"
        text += f", against {' and '.join(others)}" if others else ""
        if one.gain == "-":
            is_poor = known.chance > 0 and not known.is_above_chance
            return f"{text}{', which is not clearly better' * is_poor}{unknown}."
        sure = ", ".join([f"{one.difference:+.1f} points", *_interval_in_words(one.interval), "one run"])
        return f"{text}; training together brings {one.outcome} ({sure})."

    @property
    def verdict(self) -> str:
        """Main metric against chance, with the effort."""
        records, best = self.records, self.headline
        seconds = sum(records.seconds.values())
        took = f"{records.rounds} rounds" + (f" in {duration(seconds)}" if seconds else "")
        if best is None:
            return f"{records.name} is finished ({took}); it has no metrics."
        clauses = [f"{best.meaning} is {format_number(best.value)}{best.unit}", *_interval_in_words(best.interval)]
        chance = f"chance ({format_number(best.chance)}{best.unit})"
        if best.chance > 0 and not best.is_above_chance:
            clauses.append(f"no better than {chance}")
        elif best.chance > 0:
            times = best.value / best.chance
            clauses.append(f"{times:.{1 if times >= 1.1 else 2}f} times {chance}")
        clauses += [str(records.chosen)] if best.participant == SERVER else []
        return ", ".join([*clauses, f"after {took}."])

    @property
    def gain_over_untouched(self) -> str:
        """Gain over the encoders as they came; empty without that twin."""
        best, untouched = self.headline, finished_zero_shot(self.records)
        other = RunSummary(untouched).headline if untouched else None
        if not (untouched and best and other and best.meaning == other.meaning):
            return ""
        gain = [f"{best.value - other.value:+.2f}", *_interval_in_words(best.gain_interval(other), "+.1f")]
        of = f"({format_number(other.value)}, round {untouched.chosen.number})"
        return f"Gain over the untouched encoders {of}: {', '.join(gain)}, one run."

    def baseline(self, folder: Path | None = None) -> tuple[str, str] | None:
        """Missing twin for comparison, in words, and the command that runs it; None if the twin is finished.

        Args:
            folder: Run folder for the command; None for its name where the run was begun.
        """
        records = self.records
        has_server_only = records.config.get("public") and records.section("server").get("validation_split")
        by_site = self.by_site and self._pairs["clients"][0] is None
        whose = SERVER if has_server_only and not by_site else "clients"
        is_alone = self.is_alone or records.section("twin")
        is_out_of_reach = whose != SERVER and not records.section("clients")  # at the sites of a deployment
        if not records.config or is_alone or is_out_of_reach or self.headline is None or all(self._pairs[whose]):
            return None
        words = "each site alone" if by_site else f"its {whose} alone"
        return words, _twin_command(folder or self._named_folder, _TWINS[whose].replace("_", "-"))

    @property
    def _named_folder(self) -> Path:
        """Run folder without the path that only this machine has."""
        folder = self.records.folder.resolve()
        start = start_of(folder)
        return folder.relative_to(start) if start and folder.is_relative_to(start) else Path(folder.name)

    # ---- advice: the first condition that holds decides

    @property
    def advice(self) -> str:
        """The first change to try; empty without advice."""
        if (best := self.headline) is None:
            return ""
        return _few_items(best) or self._at_chance(best) or self._still_rising(best) or self._poor_teacher()

    def _at_chance(self, best: Headline) -> str:
        """Advice if the value equals guessing even for a test of a million items."""
        if best.is_above_chance or not _needed_items(best) > _MOST_ITEMS:
            return ""
        return (
            f"nothing was learnt in {self.records.rounds} rounds: try a pretrained encoder (hf), another learning rate "
            "(training.optimizer.lr), or more rounds."
        )

    def _still_rising(self, best: Headline) -> str:
        """Advice if each of the last two evaluations was the best so far, by validation if it exists."""
        records = self.records
        participants = [SERVER] if best.participant == SERVER else list(records.clients)
        split = "validation" if records.metric_names(participants[0], "validation") else "test"
        measured = [series for name in participants if (series := records.series(name, best.metric, split))]
        rounds = sorted(set.intersection(*map(set, measured))) if measured else []
        values = [finite_mean(series[number] for series in measured) for number in rounds]
        if len(values) < 4 or not max(values[:-2]) < values[-2] < values[-1]:
            return ""
        rising = f"{format_number(values[-2])}, then {format_number(values[-1])}"
        return f"{split} still rises ({rising}): --rounds {2 * records.rounds} may give more."

    def _poor_teacher(self) -> str:
        """Advice if the clients' ensemble ranks held-out samples worse than the server that learns from it."""
        metrics = self.records.last(SERVER, "train")
        for metric, ensemble, server in teaching(metrics) if metrics.get("teacher.gallery", 0) else ():
            if ensemble < server:
                values = f"{metric} {format_number(ensemble)} against {format_number(server)}"
                return (
                    f"the clients' ensemble ranks below the server ({values}): train clients longer "
                    "(algorithm.local_epochs), align them (algorithm.teacher), or give distillation less weight."
                )
        return ""

    # ---- for a terminal

    def __rich__(self) -> RenderableType:
        """At most 30 lines of 80 columns."""
        from rich.console import Group
        from rich.text import Text

        from polyfed.reporting.terminal import FittedTable

        parts: list[RenderableType] = [Text(f"warning: {warning}", style="yellow") for warning in self.records.warnings]
        first, *others = self.sentences
        parts += [Text(first, style="bold"), *map(Text, others)]
        if advice := self.advice:
            parts.append(Text(f"Advice: {advice}"))
        shown = [f"Page: {self.records.folder / 'report.html'}", "Next:"]
        shown += [f"  {command}" for _, command in self.next_steps(self.records.folder)]
        # a line that was broken would be copied as two commands; ``print`` takes crop=False for it
        return Group(*parts, FittedTable(self.table), *(Text(line, no_wrap=True, overflow="ignore") for line in shown))

    @property
    def table(self) -> TextTable:
        """The main table in a few lines, with the effort."""
        records, table = self.records, self.results_table
        if len(table.rows) > _MOST_ROWS:
            last = ("... more in the report", *[""] * (len(table.columns) - 1))
            table = replace(table, rows=[*table.rows[: _MOST_ROWS - 1], last])
        seconds = sum(records.seconds.values())
        note = f"{mib(records.total_bytes())} MiB sent, {len(records.clients)} clients"
        note += (f", {duration(seconds)}" if seconds else "") + f"; {records.replies_in_words}"
        return replace(table, title="", notes=(*table.notes, note))

    def next_steps(self, folder: Path | None = None) -> Sequence[tuple[str, str]]:
        """Purposes and commands of next steps, for the folder where the run was begun.

        Args:
            folder: See ``baseline``.
        """
        records, folder = self.records, folder or self._named_folder
        run, seed = shlex.quote(str(folder)), records.number("seed") or 0
        steps = [missing] if (missing := self.baseline(folder)) else []
        if pairs := [pair for pair in self._pairs.values() if all(pair)]:
            names = [each.records.name for each in pairs[-self.by_site] if each]
            beside = [folder if name == records.name else folder.parent / name for name in names]
            steps.append(("both in one table", shlex.join(["polyfed", "compare", *map(str, beside)])))
            more = ",".join(str(seed + number) for number in range(1, 5))
            # sites of a deployment, whose clients are not among the settings, refuse other seeds
            for each in beside if records.section("clients") or not records.clients else ():
                command = ["polyfed", "run", str(each / "config.yaml"), "--seeds", more]
                steps.append((f"more seeds of {each.name}, as one proves nothing", shlex.join(command)))
        if not records.section("twin") and _untouched_server(records) and finished_zero_shot(records) is None:
            steps.append(("the untouched encoders", _twin_command(folder, "zero-shot")))
        if chosen_model(saved_models(records.folder), None) is not None:
            data, server = (records.section(name) for name in ("data", "server"))
            judged = shlex.quote(str(server.get("source") or next(iter(data.get("sources") or [""]))))
            allow = " --allow-code" * ("." in str(records.section("algorithm").get("name")))  # a class of the user's
            steps.append(("the model on any data", f"polyfed evaluate {run} --data {judged}{allow}"))
            steps.append(("the model without polyfed", f"polyfed export {run}{allow}"))
        return steps

    # ---- head of the page

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """Versions, device and state of the code; empty if the run has no such file.

        Raises:
            RunError: The file is damaged.
        """
        return mapping_in(self.records.folder / "environment.json", file_json)

    @property
    def title(self) -> str:
        return component_name(setting(self.records.config, "name")) or self.records.name

    @property
    def description(self) -> str:
        return component_name(setting(self.records.config, "description"))

    @property
    def rounds(self) -> tuple[int, int | None]:
        """Rounds done, and planned."""
        planned = setting(self.records.config, "run", "rounds")
        # the setting may be of any type: a page is written for an edited or damaged configuration too
        return max(self.records.seconds, default=self.records.rounds), planned if isinstance(planned, int) else None

    @property
    def status(self) -> Completion:
        done, planned = self.rounds
        if planned is None:
            return Completion(f"{done} rounds", "odd")
        if done >= planned:
            return Completion("complete", "good")
        hint = "Killed or interrupted, or still at work when this page was written; polyfed resume continues it."
        return Completion(f"stopped after round {done} of {planned}", "bad", hint)

    @property
    def facts(self) -> dict[str, str]:
        records, (done, planned) = self.records, self.rounds
        seed = setting(records.config, "run", "seed")
        up, down = map(records.total_bytes, ("up", "down"))
        times = list(records.seconds.values())
        groups = ", ".join(f"{len(members):,} {group}" for group, members in records.groups.items())
        facts = {
            "method": component_name(setting(records.config, "algorithm")),
            "seed": "" if seed is None else str(seed),
            "rounds": f"{done} of {planned}" if planned is not None else str(done),
            "duration": f"{duration(sum(times))} ({duration(fmean(times))} per round)" if times else "",
            "clients": f"{len(records.clients):,} ({groups})" if groups else "",
            "sent": f"{byte_size(up + down)} (up {byte_size(up)}, down {byte_size(down)})" if up + down else "",
            "replies": records.replies_in_words.removeprefix("replies: "),
            "device": str(self.environment.get("device", "")),
            "run folder": records.name,
        }
        return {name: value for name, value in facts.items() if value}

    @property
    def versions(self) -> TextTable:
        states = {key: self.environment.get(key) for key in ("python", "platform", "threads", "git")}
        versions = self.environment.get("versions")
        known = {name: value for name, value in states.items() if value is not None}
        known |= versions if isinstance(versions, Mapping) else {}
        rows = [{"what": str(name), "version or state": str(value)} for name, value in known.items()]
        return TextTable.of("Environment", rows)


# ---- words


def _few_items(best: Headline) -> str:
    """Advice if a value above chance would be significant with more test items, up to a million."""
    needed = _needed_items(best)
    if not best.trials > 0 or best.is_above_chance or not needed <= _MOST_ITEMS:
        return ""
    return (
        f"{count(round(best.trials))} test items cannot separate {format_number(best.value)}{best.unit} from chance, "
        f"about {count(max(math.ceil(needed), round(best.trials) + 1))} could: test on more data."
    )


def _needed_items(best: Headline) -> float:
    """Test items that separate a value from chance: infinite unless it is above, NaN if it is not a share."""
    if best.value <= best.chance:
        return math.inf
    share, distance = best.value / best.scale, (best.value - best.chance) / best.scale
    return (_NORMAL / distance) ** 2 * share * (1 - share)


def _items(metric: str, metrics: Metrics) -> float:
    """Test items of a metric; for a recall entries of the smaller gallery, such as images with their captions."""
    if (recall := _recall_of(metric, metrics)) is None:
        return metrics.get("items", metrics.get("n", math.nan))
    galleries = [metrics.get(f"{recall.task}gallery_{side}", math.nan) for side in recall.direction.split(" to ")]
    return math.nan if recall.protocol else min(galleries)


def _maximum(metric: str, metrics: Metrics) -> float:
    """Maximum of a metric; NaN for metrics of other tasks, which may not be percentages."""
    is_known = _recall_of(metric, metrics) is not None or metric.endswith(("r1_sum", *SHARES))
    return scale_of(metric, metrics) if is_known else math.nan


def _recall_of(metric: str, metrics: Metrics) -> Recall | None:
    """The recall of that name; for a sum of recalls the widest of its task in the second direction (text to image)."""
    recalls = [one for one in find_recalls(metrics) if one.name == metric or metric == f"{one.task}r1_sum"]
    plain = [recall for recall in recalls if not recall.protocol] or recalls
    return max(reversed(plain), key=lambda one: one.cutoff, default=None)


def _interval_in_words(interval: tuple[float, float] | None, form: str = ".1f") -> list[str]:
    return [] if interval is None else [f"95 % interval {interval[0]:{form}} to {interval[1]:{form}}"]


def _twin_command(folder: Path, twin: str) -> str:
    config, out = (shlex.quote(str(path)) for path in (folder / "config.yaml", f"{folder}-{twin}"))
    return f"polyfed run {config} --twin {twin} --out {out}"


def _gains_in_words(results: Sequence[PairedResult]) -> str:
    """A clause on sites that gain by taking part, that lose, and without a clear difference; empty without a twin."""
    by_outcome: dict[str, list[str]] = {}
    for one in results:
        if one.gain != "-" and one.whose != SERVER:
            by_outcome.setdefault(one.outcome, []).append(f"{one.whose} {one.gain}")
    number = sum(map(len, by_outcome.values()))
    parts = [
        f"{outcome} to {'all' if len(sites) == number else f'{len(sites)} of'} {number} sites: "
        f"{', '.join(sites[:_MOST_NAMED])}{', ...' * (len(sites) > _MOST_NAMED)}"
        for outcome, sites in sorted(by_outcome.items())
    ]
    return f"taking part brings {'; '.join(parts)} (points with 95 % intervals, one run)" if parts else ""


def _label(name: str) -> str:
    return name.replace("r1_sum", "sum of R@1").replace("_r@", " R@").replace("_to_", " to ")


# ---- twins: the same federation without federated learning


def finished_twin(records: RunRecords, algorithm: str) -> RunRecords | None:
    """A finished run in the same folder with the same federation, seed and rounds, and this algorithm; for a run with
    this algorithm one with another."""

    def conditions(each: RunRecords) -> list[Any]:
        run = each.section("run")
        return [*(each.config.get(part) for part in _SHARED[algorithm]), run.get("seed"), run.get("rounds")]

    def is_twin(other: RunRecords) -> bool:
        is_other = (_algorithm(other) == algorithm) != (_algorithm(records) == algorithm)
        return is_other and not _is_zero_shot(other) and conditions(other) == conditions(records)

    return _finished_beside(records, is_twin) if records.config else None


def finished_zero_shot(records: RunRecords) -> RunRecords | None:
    """A finished run in the same folder whose server has the same untouched encoders, task, data and seed."""
    if not (server := _untouched_server(records)):
        return None

    def is_twin(other: RunRecords) -> bool:
        is_same = other.config.get("server") == server and other.config.get("data") == records.config.get("data")
        return _is_zero_shot(other) and is_same and other.number("seed") == records.number("seed")

    return _finished_beside(records, is_twin)


def _finished_beside(records: RunRecords, is_twin: Callable[[RunRecords], bool]) -> RunRecords | None:
    """The first other finished run in the same folder that is a twin."""
    folder = records.folder.resolve()
    for other in sorted(folder.parent.iterdir()):
        if other != folder and (other / "report.html").is_file():
            try:
                twin = open_run(other).records
            except RunError:  # damage of another run must not fail this one
                continue
            if is_twin(twin):
                return twin
    return None


def _untouched_server(records: RunRecords) -> dict[str, Any] | None:
    """Settings of the server of a run's zero-shot twin; None if it is such a twin, or has none."""
    try:
        return None if _is_zero_shot(records) else untouched_server(records.section("server"))
    except ConfigError:
        return None
    except (KeyError, TypeError, AttributeError):  # edited settings must not fail the end of a run
        return None


def _is_zero_shot(records: RunRecords) -> bool:
    return records.section("twin").get("kind") == "zero-shot"


def _algorithm(records: RunRecords) -> str:
    return str(records.section("algorithm").get("name", ""))


# ---- settings of any form, as a configuration may have been edited or damaged


def setting(config: Any, *path: str) -> Any:
    for key in path:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def component_name(value: Any) -> str:
    """Name of a component, given as a name or as a section with one."""
    name = setting(value, "name") if isinstance(value, Mapping) else value
    return name if isinstance(name, str) else ""
