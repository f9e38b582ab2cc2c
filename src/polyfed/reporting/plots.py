"""All plots of a run, as PNG files in ``plots/`` of its folder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from polyfed.reporting.curve_plots import draw_clients, draw_server
from polyfed.reporting.figures import save
from polyfed.reporting.partition_plots import draw_partition
from polyfed.reporting.traffic_plots import draw_traffic
from polyfed.reporting.weight_plots import draw_weights
from polyfed.runs.records import RunRecords

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

    Drawing = Callable[[RunRecords], Figure | None]


def draw_all(records: RunRecords) -> list[Path]:
    """Draw what a run recorded; returns the files, none for what it did not record."""
    drawn = ((name, drawing(records)) for name, drawing in _drawings(records))
    return [save(figure, records.folder / "plots" / f"{name}.png") for name, figure in drawn if figure is not None]


def _drawings(records: RunRecords) -> Iterator[tuple[str, Drawing]]:
    yield "server", draw_server
    yield "clients", draw_clients
    yield "partition", draw_partition
    yield "traffic", draw_traffic
    for name, rounds in records.arrays().items():
        yield name, partial(draw_weights, name=name, rounds=rounds)
