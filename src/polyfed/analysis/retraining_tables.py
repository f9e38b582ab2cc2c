"""Re-training, distortion and models across clients as tables for a terminal and as CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from polyfed.analysis.across import Across, Judged, Table
from polyfed.analysis.distortion import Distortion
from polyfed.analysis.retraining import Figures, Retrained, Retraining, mean_of
from polyfed.core.errors import RunError
from polyfed.core.files import write_atomically
from polyfed.reporting.tables import TextTable, count, figure
from polyfed.runs.records import SERVER

SHOWN = 2
"""Figures that are shown, such as R@1 and R@5; the files have all."""

Rows = Iterable[Sequence[object]]


def write_csv(path: Path, header: Sequence[str], rows: Rows) -> Path:
    """Write a table, completely or not at all; returns ``path``.

    Raises:
        RunError: it cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([header, *rows])
    try:
        write_atomically(path, text.getvalue().encode())
    except OSError as error:
        raise RunError(f"cannot write '{path}' ({error.strerror or error}); choose another --out") from error
    return path


# ---- re-training


RETRAINING_HEADER = ("of", "round", "layers", "on", "steps", "client", "figure", "before", "after", "change")


def retraining_rows(found: Retraining) -> Rows:
    """For a CSV file: one row for each model, set of samples, client and figure."""
    for row in found.rows:
        head = (row.of, row.round, found.plan.layers, row.on, row.steps)
        for client in found.clients:
            for name in found.figures:
                values = row.before[client][name], row.after[client][name]
                yield (*head, client, name, *values, row.change(client, name))


def retraining_tables(found: Retraining) -> list[TextTable]:
    """One table a figure: each model before, then after it was re-trained on each set."""
    return [_retraining_table(found, name) for name in found.figures[:SHOWN]]


def _retraining_table(found: Retraining, name: str) -> TextTable:
    rows: list[Sequence[str]] = []
    for number, row in enumerate(found.rows):
        if not number or found.rows[number - 1].of != row.of:
            rows.append((f"{row.of}, round {row.round}", *_cells(row.before, name)))
        rows.append((f"{row.of}, on {row.on}, {row.steps} steps", *_changed(row, name)))
    note = f"In brackets: change by re-training {count(found.trained)} parameters ({found.plan.layers} layers)."
    notes = _galleries(found.rows[0].before, name)
    return TextTable(f"{found.run}: {name} at each client", ("model", *found.clients, "average"), rows, (note, *notes))


def _galleries(found: Figures, name: str) -> tuple[str, ...]:
    """How large the galleries are that a recall is of, client by client; nothing for other figures."""
    key = f"gallery{''.join(name.partition('_')[1:])}"
    sizes = {client: each[key] for client, each in found.items() if key in each}
    told = ", ".join(f"{client} {count(size)}" for client, size in sizes.items())
    return (f"Gallery, mean over directions: {told}.",) if told and name.startswith("R@") else ()


def _cells(found: Figures, name: str) -> tuple[str, ...]:
    return (*(figure(each[name]) for each in found.values()), figure(mean_of(found, name)))


def _changed(row: Retrained, name: str) -> tuple[str, ...]:
    after, before = ([*(each[name] for each in side.values()), mean_of(side, name)] for side in (row.after, row.before))
    return tuple(f"{figure(new)} ({new - old:+z.2f})" for new, old in zip(after, before, strict=True))


# ---- distortion


DISTORTION_HEADER = ("trained", "steps", "client", "figure", "before", "after", "change")


def distortion_rows(found: Distortion) -> Rows:
    """For a CSV file: one row for each client that trained, client that judged, and figure; similarity is one."""
    for trained, seen in found.after.items():
        for client in found.clients:
            before, after = (
                {"similarity": side.similarity[client], **side.figures[client]} for side in (found.before, seen)
            )
            for name, value in after.items():
                yield trained, found.steps[trained], client, name, before[name], value, value - before[name]


def distortion_tables(found: Distortion) -> list[TextTable]:
    """The decrease of similarity, then a table a figure."""
    names = list(next(iter(found.before.figures.values())))[:SHOWN]
    return [_decrease_table(found), *(_figure_table(found, name) for name in names)]


def _decrease_table(found: Distortion) -> TextTable:
    rows = [(f"on {a}", *(figure(found.decrease(a, b), 4) for b in found.clients)) for a in found.clients]
    rows.append(("average", *(figure(found.mean_decrease(client), 4) for client in found.clients)))
    note = (
        f"Mean cosine of paired representations of {found.of} (round {found.round}) before minus after local training; "
        "positive: distorted."
    )
    columns = ("re-trained", *(f"test on {client}" for client in found.clients))
    return TextTable(f"{found.run}: distortion by local training", columns, rows, (note,))


def _figure_table(found: Distortion, name: str) -> TextTable:
    rows = [(f"{found.of}, round {found.round}", *_cells(found.before.figures, name))]
    rows += [(f"on {trained}", *_cells(seen.figures, name)) for trained, seen in found.after.items()]
    means = {client: {name: found.mean_figure(client, name)} for client in found.clients}
    rows.append(("average of re-trained", *_cells(means, name)))
    notes = _galleries(found.before.figures, name)
    return TextTable(f"{found.run}: {name} at each client", ("model", *found.clients, "average"), rows, notes)


# ---- across


ACROSS_HEADER = ("model", "round", "kept", "client", "figure", "value")


def across_rows(found: Across) -> Rows:
    """For a CSV file: one row for each model, client and figure."""
    for table in found.tables:
        for model in table.rows:
            for client, values in model.figures.items():
                for name, value in values.items():
                    yield model.name, model.round, model.is_kept, client, name, value


def across_tables(found: Across) -> list[TextTable]:
    """For each set of clients one table a figure."""
    return [_across_table(found, table, name) for table in found.tables for name in table.names[:SHOWN]]


def _across_table(found: Across, table: Table, name: str) -> TextTable:
    columns = ("model", *table.clients, "average", "worst", "disparity")
    rows = [_across_row(model, name) for model in table.rows]
    is_told = found.is_server_untrained and SERVER in (model.name for model in table.models)
    notes = ("The server's model is as it was initialised: the method does not train it.",) if is_told else ()
    galleries = _galleries(table.rows[0].figures, name) if table.rows else ()
    return TextTable(f"{found.run}: {name} at each client", columns, rows, (*notes, *galleries))


def _across_row(model: Judged, name: str) -> tuple[str, ...]:
    values = [*model.values(name), *model.summary(name).values()]
    return model.name, *(figure(value) for value in values)
