"""What the instruments of a run say: whether the clients' ensemble is a teacher that the server can learn from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polyfed.reporting.statistics import finite_mean
from polyfed.reporting.tables import TextTable, format_number
from polyfed.runs.records import SERVER, RunRecords

_KINDS, _HELD_OUT = ("teacher.", "student."), "teacher.gallery"
_NORMS, _DISTANCES = "mean_norm.", "kd_distance_"
_LOOSE = 0.5  # mean norm below which unit vectors of several clients agree on little


def teacher_table(records: RunRecords) -> TextTable:
    """Quality of the ensemble beside the server's own, norms of the raw mean, and distances: first and last round."""
    names = [name for name in records.metric_names(SERVER, "train") if name.startswith((*_KINDS, _NORMS, _DISTANCES))]
    clients = set(records.clients)
    shown = sorted(name for name in names if name.rpartition(".")[2] not in clients and name != _HELD_OUT)
    rows = []
    for name in shown:
        values = list(records.series(SERVER, name, "train").values())
        rows.append((_label(name), format_number(values[0]), format_number(values[-1])))
    return TextTable("What the clients teach the server", ("", "first", "last"), rows, tuple(_sentences(records)))


def _label(name: str) -> str:
    kind, _, detail = name.partition(".")
    metric, _, output = detail.partition(".")
    if name.startswith(_NORMS):
        return f"norm of the clients' mean, {detail}"
    if name.startswith(_DISTANCES):
        return f"distance to the targets {kind.removeprefix(_DISTANCES)} distillation, {detail}"
    if kind == "student":
        return f"server: {metric}"
    return f"ensemble: {metric}" + (f", its {output} beside the server's others" if output else "")


def _sentences(records: RunRecords) -> Iterator[str]:
    series = {name: records.series(SERVER, name, "train") for name in records.metric_names(SERVER, "train")}
    metrics = {name: list(values.values())[-1] for name, values in series.items() if values}
    for name, server in metrics.items():
        ensemble = metrics.get(name.replace("student.", "teacher.", 1))
        if name.startswith("student.") and ensemble is not None:
            yield _ranking(name.partition(".")[2], ensemble, server, metrics[_HELD_OUT])
    yield from _agreement([value for name, value in metrics.items() if name.startswith(_NORMS)])


def _agreement(norms: Sequence[float]) -> Iterator[str]:
    if norms and finite_mean(norms) < _LOOSE:
        yield (
            f"The clients' mean has norm {format_number(finite_mean(norms))}, where 1 would be agreement: their spaces "
            "are not aligned; see algorithm.teacher.alignment and distiller.loss similarity."
        )


def _ranking(metric: str, ensemble: float, server: float, held_out: float) -> str:
    where = f"{held_out:.0f} held-out samples" if held_out else "public pairs that the server trains on itself"
    figures = f"{metric} {format_number(ensemble)} against {format_number(server)} on {where}"
    if ensemble > server:
        return f"The ensemble ranks better than the server ({figures}): there is much to learn."
    if held_out:
        return f"The ensemble ranks worse than the server ({figures}): it teaches nothing."
    return f"The ensemble ranks worse than the server ({figures}); set public.gallery to compare them on others."
