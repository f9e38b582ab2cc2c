"""Evaluation of saved models: on the data of their run, or on any folder of Parquet files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
import torch

from polyfed.core.device import cpu_threads
from polyfed.core.errors import DataError, nearest
from polyfed.data.assembly import assemble
from polyfed.data.samples import Samples
from polyfed.data.source import ColumnNames, Source, called
from polyfed.data.sources.stored import Parquet
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run, ServerModel, as_run


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a saved model on a split of a data set.

    Attributes:
        model: ``best`` or ``last``.
        round: Round after which the model was saved.
        data, split: Data of the measurement.
        items, samples: Their size.
        metrics: Metrics of the model's task, and the sizes that they depend on (galleries).
    """

    model: str
    round: int
    data: str
    split: str
    items: int
    samples: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Target:
    """Data to evaluate on.

    Attributes:
        data: A source of the run's configuration, or a folder of Parquet files (also below the data folder).
        split: Its split.
        columns: Modality -> column of a Parquet folder, where it differs from those of the run's sources.
        targets: Target name -> column of a Parquet folder, likewise.
    """

    data: str
    split: str = "test"
    columns: Mapping[str, str] = field(default_factory=dict)
    targets: Mapping[str, str] = field(default_factory=dict)


def evaluate_model(run: Run | Path | str, target: Target | str, *, which: str | None = None) -> Evaluation:
    """Measure a saved model on any data set; on the run's own test split, the run's own figures.

    Args:
        run: An open run, or its folder.
        target: Data to evaluate on.
        which: ``best`` or ``last``; by default ``best`` if there is one.

    Raises:
        RunError: it is not a run folder, or has no model.
        DataError, ConfigError: the data set is missing, or lacks what the model or its task needs.
    """
    target = Target(target) if isinstance(target, str) else target
    server = as_run(run).server_model(which)
    model, run_settings = server.model, server.run.conditions.run
    half = run_settings.precision != "float32"  # as in training: metrics of a run are those of its precision
    with cpu_threads(run_settings.threads):
        samples = _samples(server, target)
        server.warn_if_untrained()
        with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=half):
            batch = run_settings.evaluation_batch
            metrics = server.task.evaluate(model, server.head, samples, batch_size=batch)
    items = len({*samples.items.tolist()})
    return Evaluation(server.which, server.round, target.data, target.split, items, len(samples), metrics)


def _samples(server: ServerModel, target: Target) -> Samples:
    conditions = server.run.conditions
    source = _source(conditions, target, tuple(server.views))
    split = source.open(target.split, name=target.data, data_dir=conditions.data.data_folder)
    samples = assemble(split, server.views, server.context, lazy=server.task.target_views)
    for name in server.task.class_targets:
        learnt, there = server.classes.get(name), samples.classes.get(name)
        if learnt and there and learnt != tuple(there):
            first = next((a, b) for a, b in zip([*learnt, None], [*there, None], strict=False) if a != b)
            raise DataError(
                f"classes of '{name}' in '{target.data}' differ from those that the model learnt (first difference: "
                f"learnt {first[0]!r}, found {first[1]!r}); renumber the labels, or evaluate on another data set"
            )
    return samples


def _source(conditions: Experiment, target: Target, modalities: Sequence[str]) -> Source:
    known = conditions.data.sources
    if target.data in known:
        source = known[target.data]
        columns, targets = {**source.columns, **target.columns}, {**source.targets, **target.targets}
        return source.model_copy(update={"columns": columns, "targets": targets})
    path = _parquet_folder(conditions, target)
    bare = Parquet(path=str(path))
    bare.open(target.split, name=target.data, data_dir=None)  # raises, naming existing splits, if it is missing
    there = pq.read_schema(min(path.glob(f"{target.split}[-.]*parquet"))).names
    columns = {name: _column(conditions, target, name, there) for name in modalities}
    named = _server_source(conditions) or conditions.data.sources.values()
    known_targets = {name: column for own in named for name, column in own.targets.items()}
    targets = {name: column for name, column in known_targets.items() if column in there} | dict(target.targets)
    return bare.model_copy(update={"columns": columns, "targets": targets})


def _parquet_folder(conditions: Experiment, target: Target) -> Path:
    below = conditions.data.data_folder
    for folder in (Path(target.data).expanduser(), *([below / target.data] if below is not None else [])):
        if folder.is_dir():
            return folder.resolve()
    looked = f"nor one below the data folder '{below}'" if below else "and no data folder is set (--data-dir)"
    hint = nearest(target.data, conditions.data.sources)
    raise DataError(f"--data '{target.data}' is neither a source of the run nor a folder, {looked}; {hint}")


def _column(conditions: Experiment, target: Target, modality: str, there: Sequence[str]) -> ColumnNames:
    """The user's column, else that of a source of the run (the server's first), else the modality's name."""
    sources = [*_server_source(conditions), *conditions.data.sources.values()]
    known = [source.columns[modality] for source in sources if modality in source.columns]
    given = target.columns.get(modality)
    wanted = dict.fromkeys([given] if given else [*known, modality])
    for column in wanted:
        if ({column} if isinstance(column, str) else {*column}) <= {*there}:
            return column
    names = " or ".join(repr(called(column)) for column in wanted)
    raise DataError(
        f"data '{target.data}' has no column {names} for '{modality}'; give it with "
        f"--column {modality}=NAME, where NAME is one of: {', '.join(there)}"
    )


def _server_source(conditions: Experiment) -> list[Source]:
    return [conditions.data.sources[conditions.server.source]] if conditions.server else []
