"""What crossed between server and clients, by method: bytes a client, a direction, a kind and a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any

from polyfed.core.errors import RunError
from polyfed.lab.analysis.drawing import patches
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.reporting.figures import COLOURS, figure_grid, legend_below, styled, whole_rounds
from polyfed.reporting.tables import MIB, TextTable, mib
from polyfed.runs.records import RunRecords

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAYS = ("down", "up")
_BESIDE = ("evaluate:", "setup:")  # steps outside the method's rounds, as the ledger names them


@dataclass(frozen=True)
class Traffic:
    """Bytes of a run. What evaluation of the clients and preparation moved counts apart: another method, or another
    ``run.evaluate_clients``, would move less of it.

    Attributes:
        run: its name.
        method: its algorithm.
        by_round: direction -> round -> bytes of the method.
        by_kind: kind of bundle -> direction -> bytes of the method.
        by_client: client -> direction -> bytes of the method.
        turns: client -> rounds in which it took part.
        beside: bytes of evaluation and preparation.
    """

    run: str
    method: str
    by_round: Mapping[str, Mapping[int, int]]
    by_kind: Mapping[str, Mapping[str, int]]
    by_client: Mapping[str, Mapping[str, int]]
    turns: Mapping[str, int]
    beside: int

    @classmethod
    def of(cls, records: RunRecords) -> Traffic:
        """From the ledger.

        Raises:
            RunError: nothing crossed yet.
        """
        import pandas as pd

        ledger = pd.DataFrame(records.transfers, columns=["round", "client", "direction", "step", "kind", "bytes"])
        ledger = ledger[~ledger["step"].astype(str).str.startswith(_BESIDE)].replace({"kind": {"": "(none)"}})
        if ledger.empty:
            raise RunError(f"nothing has crossed in '{records.folder}' yet; finish the run with polyfed resume")

        def totals(of: str) -> dict[Any, dict[str, int]]:
            """Bytes by direction, those of which most crossed first."""
            table = ledger.pivot_table("bytes", of, "direction", "sum", fill_value=0, sort=False)
            by: Any = table.reindex(columns=list(WAYS), fill_value=0).astype(int).to_dict("index")
            return dict(sorted(by.items(), key=lambda item: -sum(item[1].values())))

        rounds: Any = sorted(totals("round").items())
        return cls(
            run=records.name,
            method=str(records.section("algorithm").get("name", "")),
            by_round={way: {number: moved[way] for number, moved in rounds} for way in WAYS},
            by_kind=totals("kind"),
            by_client=totals("client"),
            turns={str(client): int(turns) for client, turns in ledger.groupby("client")["round"].nunique().items()},
            beside=records.total_bytes() - int(ledger["bytes"].sum()),
        )

    @property
    def label(self) -> str:
        return f"{self.run} ({self.method})" if self.method not in ("", self.run) else self.run

    @property
    def rounds(self) -> int:
        return len(self.by_round[WAYS[0]])

    def total(self, direction: str) -> int:
        return sum(self.by_round[direction].values())

    def a_round(self, direction: str, kind: str | None = None) -> float:
        """Bytes of one client in one round in which it took part, mean; of one kind of bundle, or of all."""
        moved = self.total(direction) if kind is None else self.by_kind[kind][direction]
        return moved / sum(self.turns.values())

    def cumulative(self) -> dict[int, int]:
        rounds = self.by_round[WAYS[0]]
        sums = accumulate(sum(self.by_round[way][number] for way in WAYS) for number in rounds)
        return dict(zip(rounds, sums, strict=True))

    def to_json(self) -> dict[str, Any]:
        """All figures, in bytes."""
        return {
            "run": self.run,
            "method": self.method,
            "rounds": self.rounds,
            "total": {way: self.total(way) for way in WAYS},
            "a_client_and_round": {way: self.a_round(way) for way in WAYS},
            "by_kind": self.by_kind,
            "by_client": {client: {**by, "rounds": self.turns[client]} for client, by in self.by_client.items()},
            "by_round": self.by_round,
            "cumulative": self.cumulative(),
            "evaluation": self.beside,
        }


def traffic_of_runs(runs: Sequence[Traffic]) -> AnalysisResult:
    """Runs side by side: totals, then what a client sends and receives in a round, by kind."""
    totals, kinds = [], []
    for run in runs:
        moved = [run.total(way) for way in WAYS]
        sizes = map(mib, (*moved, sum(moved), run.beside))
        totals.append((run.label, str(run.rounds), str(len(run.by_client)), *sizes))
        kinds += [(f"{run.label}: {kind}", *(f"{run.a_round(way, kind):,.0f}" for way in WAYS)) for kind in run.by_kind]
    columns = ("run (method)", "rounds", "clients", "MiB down", "MiB up", "MiB in all", "evaluation MiB")
    note = "Evaluation of clients and preparation are not in the other columns."
    tables = [
        TextTable("Bytes of each run", columns, totals, (note,)),
        TextTable("A client in a round in which it took part", ("run: kind", "bytes down", "bytes up"), kinds),
    ]
    return AnalysisResult({"runs": [run.to_json() for run in runs]}, tables, partial(_draw, runs))


@styled
def _draw(runs: Sequence[Traffic]) -> Figure:
    """Left the bytes so far, right those of a client in a round, by direction and kind."""
    drawing, (left, right) = figure_grid(1, 2, width=6.0, height=max(3.6, 1.6 + 0.5 * len(runs)), title="Bytes")
    for row, run in enumerate(runs):
        sums = run.cumulative()
        # one round is a point, which a line would not show; more runs than colours are told apart by dashes
        style, marker = "-" if row < len(COLOURS) else "--", "o" if len(sums) == 1 else ""
        sent = [total / MIB for total in sums.values()]
        left.plot(list(sums), sent, style, color=COLOURS[row % len(COLOURS)], marker=marker, label=run.label)
    left.set(title="sent so far, both directions", xlabel="round", ylabel="MiB")
    left.set_ylim(bottom=0)
    whole_rounds(left)
    legend_below(left, columns=2)
    _draw_kinds(right, runs)
    return drawing


def _draw_kinds(axes: Axes, runs: Sequence[Traffic]) -> None:
    kinds = list(dict.fromkeys(kind for run in runs for kind in run.by_kind))
    bars = list(product(runs, WAYS))
    places = [row + shift for row in range(len(runs)) for shift in (-0.2, 0.2)]
    for (run, way), place in zip(bars, places, strict=True):
        start = 0.0
        for kind in run.by_kind:
            width, colour = run.a_round(way, kind) / MIB, COLOURS[kinds.index(kind) % len(COLOURS)]
            axes.barh(place, width, left=start, height=0.36, color=colour)
            start += width
    axes.set_yticks(places, [f"{run.label}: {way}" for run, way in bars])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set(title="a client and round, by kind", xlabel="MiB")
    legend_below(axes, columns=3, handles=patches(kinds))
