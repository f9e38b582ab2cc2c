"""Paired differences between configurations over the seeds that both were run with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyfed.core.errors import ConfigError, nearest
from polyfed.reporting.client_spread import judged_by, selected_round
from polyfed.reporting.compare import Comparison
from polyfed.reporting.statistics import FEWEST_SEEDS, PairedSample
from polyfed.reporting.tables import TextTable, format_number
from polyfed.runs.records import SERVER, RunRecords

_Figures = Mapping[int, Mapping[str, float]]  # seed -> figure -> value


@dataclass(frozen=True)
class PairedDifference(PairedSample):
    """One figure of a configuration minus that of the reference, of the seeds that both have a finite value for.

    Attributes:
        comparison: the configuration.
        reference: what it is compared with.
        figure: what is compared.
    """

    comparison: Comparison
    reference: Comparison
    figure: str

    def to_json(self) -> dict[str, Any]:
        """Figures by name; those that a single seed does not have are null."""
        known = not math.isnan(self.std)
        return {
            "figure": self.figure,
            "against": self.reference.label,
            "seeds": sorted(self.by_seed),
            "mean": self.mean,
            "std": self.std if known else None,
            "interval_95": list(self.interval) if known else None,
            "smallest": self.smallest,
        }


def paired_differences(
    comparisons: Sequence[Comparison], metric: str | None = None, kind: str = "test", against: str | None = None
) -> list[PairedDifference]:
    """Each configuration against a reference, for the server and each group of clients, where they share seeds.

    The server's figure is that of the round which validation selects, if all runs that have it were validated, else the
    final one; a group's is the mean of its clients' last values. Of two runs with one seed the later given counts.

    Args:
        comparisons: configurations, as ``compare`` gives them.
        metric: as there.
        kind: as there.
        against: name of the reference or of one of its runs; None: the first configuration.

    Raises:
        ConfigError: no configuration has this name.
    """
    if not comparisons:
        return []
    reference = _named(comparisons, against)
    selects = _all_validated([run for item in comparisons for run in item.runs], kind)

    def figures(item: Comparison) -> _Figures:
        seeds = [(run, run.number("seed")) for run in item.runs]
        return {seed: _figures_of(run, metric, kind, selects) for run, seed in seeds if seed is not None}

    others = [item for item in comparisons if item is not reference]
    return [
        PairedDifference(differences, item, reference, name)
        for item in others
        for name, differences in _differences(figures(item), figures(reference)).items()
    ]


def shared_figures(run: RunRecords, reference: RunRecords, kind: str = "test") -> dict[str, tuple[float, float]]:
    """What ``paired_differences`` compares of two runs: figure -> value of the run, value of the reference."""
    selects = _all_validated([run, reference], kind)
    own, other = (_figures_of(one, None, kind, selects) for one in (run, reference))
    return {name: (own[name], other[name]) for name in own if name in other}


def _all_validated(runs: Iterable[RunRecords], kind: str) -> bool:
    """Whether all whose servers were judged were validated too, so that validation can select a round."""
    return all(run.metric_names(SERVER, "validation") for run in runs if run.metric_names(SERVER, kind))


def _named(comparisons: Sequence[Comparison], name: str | None) -> Comparison:
    if name is None:
        return comparisons[0]
    named = [item for item in comparisons if any(name in (run.name, str(run.folder)) for run in item.runs)]
    if not named:
        names = [run.name for item in comparisons for run in item.runs]
        raise ConfigError(f"--against {name}: no such run here; {nearest(name, names)}")
    if len(named) > 1:
        raise ConfigError(f"--against {name}: {len(named)} configurations have a run called so; give its folder")
    return named[0]


def _figures_of(run: RunRecords, metric: str | None, kind: str, selects: bool) -> dict[str, float]:
    """What runs are compared by -> value."""
    server, groups = judged_by(run, metric, kind)
    series = run.series(SERVER, server, kind)
    chosen = selected_round(run) if selects else None
    at = max(series, default=0) if chosen is None else chosen
    figures = {f"server {server}, {'selected by validation' if selects else 'final'}": series.get(at, math.nan)}
    figures |= {f"{group} {spread.metric}, final": spread.mean for group, spread in groups.items()}
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _differences(own: _Figures, other: _Figures) -> dict[str, dict[int, float]]:
    differences: dict[str, dict[int, float]] = {}
    for seed in [seed for seed in own if seed in other]:
        for name in [name for name in own[seed] if name in other[seed]]:
            differences.setdefault(name, {})[seed] = own[seed][name] - other[seed][name]
    return differences


def paired_table(differences: Sequence[PairedDifference], comparisons: Sequence[Comparison]) -> TextTable:
    """The differences as a table, one row a configuration and figure."""
    against = differences[0].reference.label if differences else ""
    body = [_row(item) for item in differences]
    return TextTable(
        f"Paired differences against {against}",
        ("run: figure", "seeds", "mean", "std", "95 % interval", "smallest"),
        body,
        tuple(_notes(differences, comparisons)),
    )


def _row(item: PairedDifference) -> tuple[str, ...]:
    low, high = item.interval
    interval = "-" if math.isnan(low) else f"{low:+.2f} to {high:+.2f}"
    ends = f"{item.mean:+.2f}", format_number(item.std), interval, f"{item.smallest:+.2f}"
    return f"{item.comparison.label}: {item.figure}", str(len(item.by_seed)), *ends


def _notes(differences: Sequence[PairedDifference], comparisons: Sequence[Comparison]) -> Iterator[str]:
    yield (
        "Run minus reference with the same seed; interval: Student's t over these differences; smallest: the lowest; "
        "final: after the last round."
    )
    shown = {id(part) for item in differences for part in (item.comparison, item.reference)}
    if apart := [item.label for item in comparisons if id(item) not in shown]:
        yield f"No seed, or no figure, in common with the reference: {', '.join(apart)}."
    fewest = min((len(item.by_seed) for item in differences), default=FEWEST_SEEDS)
    if fewest < 2:
        yield "One common seed has no spread and no interval: at least two are needed."
    if fewest < FEWEST_SEEDS:
        yield f"Differences over fewer than {FEWEST_SEEDS} seeds are no claim."
