"""Evaluation of saved models: on the data of their run, or on any folder of Parquet files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
import torch

from polyfed.core.device import cpu_threads, resolve_device
from polyfed.core.errors import DataError, nearest
from polyfed.data.assembly import assemble
from polyfed.data.samples import Samples
from polyfed.data.source import Source
from polyfed.data.sources.parquet import Parquet
from polyfed.data.view import DataContext
from polyfed.models.model import Model
from polyfed.runs.saved import (
    Conditions,
    SavedModel,
    load_model,
    model_folder,
    moved,
    run_conditions,
    warn_of_untrained,
)


@dataclass(frozen=True)
class Evaluation:
    """Metrics of a saved model on a split of a data set.

    Attributes:
        model: ``best`` or ``last``.
        round: after which the model was saved.
        data, split: what it was measured on.
        items, samples: size of that.
        metrics: of the server's task, each with what it depends on (gallery sizes).
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
    """What to evaluate on.

    Attributes:
        data: a source of the run's configuration, or a folder of Parquet files (also below the data folder).
        split: split of it.
        columns: modality -> column of a Parquet folder, where it differs from those of the run's sources.
        targets: target name -> column of a Parquet folder, likewise.
    """

    data: str
    split: str = "test"
    columns: Mapping[str, str] = field(default_factory=dict)
    targets: Mapping[str, str] = field(default_factory=dict)


def evaluate_model(
    run: Path | str,
    target: Target | str,
    *,
    which: str | None = None,
    data_dir: Path | None = None,
    weights_dir: Path | None = None,
    device: str | None = None,
) -> Evaluation:
    """Measure a saved server model on any data set; on the run's own test split, the run's own figures.

    Args:
        run: run folder.
        target: what to evaluate on.
        which: ``best`` or ``last``; by default ``best`` if there is one.
        data_dir: folder of data sets; by default the run's, else POLYFED_DATA.
        weights_dir: folder of pretrained weights; by default the run's, else POLYFED_WEIGHTS.
        device: by default the run's.

    Raises:
        RunError: no run folder or no model in it.
        DataError, ConfigError: the data set is not there or lacks what the model or its task needs.
    """
    target = Target(target) if isinstance(target, str) else target
    folder = model_folder(Path(run), which)
    saved, experiment = load_model(folder), moved(run_conditions(Path(run)), data_dir, weights_dir)
    context = saved.context(experiment.data.cache_folder, experiment.data.weights_folder)
    place = resolve_device(device or experiment.run.device)
    with cpu_threads(experiment.run.threads):
        samples = _samples(saved, experiment, target, context)
        warn_of_untrained(folder)
        metrics = _measure(saved, saved.build(context).to(place), samples, experiment)
    return Evaluation(
        folder.name,
        int(saved.config["round"]),
        target.data,
        target.split,
        items=len(set(samples.items.tolist())),
        samples=len(samples),
        metrics=metrics,
    )


def _measure(saved: SavedModel, model: Model, samples: Samples, experiment: Conditions) -> dict[str, float]:
    head = dict(model.heads.items()).get(str(saved.config["head"]))
    half = experiment.run.precision != "float32"
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=half):
        return saved.task.evaluate(model, head, samples, batch_size=experiment.run.evaluation_batch)


def _samples(saved: SavedModel, experiment: Conditions, target: Target, context: DataContext) -> Samples:
    views = {modality: encoder.view for modality, encoder in saved.settings.encoders.items()}
    source = _source(experiment, target, tuple(views))
    split = source.open(target.split, name=target.data, data_dir=experiment.data.data_folder)
    samples = assemble(split, views, context)
    _require_same_classes(saved, samples, target)
    return samples


def _source(experiment: Conditions, target: Target, modalities: Sequence[str]) -> Source:
    known = experiment.data.sources
    if target.data in known:
        source = known[target.data]
        update = {
            "columns": {**source.columns, **target.columns},
            "targets": {**source.targets, **target.targets},
        }
        return source.model_copy(update=update)
    path = _parquet_folder(experiment, target)
    bare = Parquet(path=str(path))
    bare.open(target.split, name=target.data, data_dir=None)  # complains if there is no such split
    there = pq.read_schema(min(path.glob(f"{target.split}[-.]*parquet"))).names
    columns = {name: _column(experiment, target, name, there) for name in modalities}
    return bare.model_copy(update={"columns": columns, "targets": _target_columns(experiment, target, there)})


def _parquet_folder(experiment: Conditions, target: Target) -> Path:
    below = experiment.data.data_folder
    places = [Path(target.data).expanduser(), *([below / target.data] if below is not None else [])]
    for place in places:
        if place.is_dir():
            return place.resolve()
    looked = f"nor one below the data folder '{below}'" if below else "and no data folder is set (--data-dir)"
    hint = nearest(target.data, experiment.data.sources)
    raise DataError(f"--data '{target.data}' is neither a source of the run nor a folder, {looked}; {hint}")


def _column(experiment: Conditions, target: Target, modality: str, there: Sequence[str]) -> str:
    """What the user says, else what a source of the run calls it (the server's first), else its own name."""
    sources = [*_server_source(experiment), *experiment.data.sources.values()]
    known = [source.columns[modality] for source in sources if modality in source.columns]
    given = target.columns.get(modality)
    wanted = dict.fromkeys([given] if given else [*known, modality])
    for column in wanted:
        if column in there:
            return column
    raise DataError(
        f"data '{target.data}' has no column {' or '.join(map(repr, wanted))} for '{modality}'; give it with "
        f"--column {modality}=NAME, where NAME is one of: {', '.join(there)}"
    )


def _target_columns(experiment: Conditions, target: Target, there: Sequence[str]) -> dict[str, str]:
    known = {name: column for source in _server_source(experiment) for name, column in source.targets.items()}
    return {name: column for name, column in known.items() if column in there} | dict(target.targets)


def _server_source(experiment: Conditions) -> list[Source]:
    return [experiment.data.sources[experiment.server.source]] if experiment.server else []


def _require_same_classes(saved: SavedModel, samples: Samples, target: Target) -> None:
    """Labels mean what the model learnt; a task without ``target`` uses none."""
    name = getattr(saved.task, "target", "")
    learnt, found = (saved.config["samples"] or {}).get("classes", {}).get(name), samples.classes.get(name)
    if learnt and found and tuple(learnt) != tuple(found):
        first = next((a, b) for a, b in zip([*learnt, None], [*found, None], strict=False) if a != b)
        raise DataError(
            f"classes of '{name}' in '{target.data}' are not those that the model learnt (first difference: "
            f"learnt {first[0]!r}, found {first[1]!r}); renumber the labels, or evaluate on another data set"
        )
