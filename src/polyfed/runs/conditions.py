"""Under which conditions a run's model is judged, and settings with data or weights in other folders."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from polyfed.core.settings import Settings, parse_settings
from polyfed.federation.settings import DataSettings, ServerSettings
from polyfed.runs.config_files import resolved_config
from polyfed.runs.experiment import Experiment, RunSettings

_JUDGING = ("device", "threads", "precision", "evaluation_batch")


class Conditions(Settings):
    """Under which conditions a saved model is judged: data and device, not the method, whose code may be elsewhere."""

    name: str = "experiment"
    data: DataSettings
    server: ServerSettings | None = None
    run: RunSettings


E = TypeVar("E", Experiment, Conditions)


def read_conditions(config: Path, data_dir: Path | None = None, weights_dir: Path | None = None) -> Conditions:
    """The part of a run's ``config.yaml`` that judging its model takes; folders as for ``moved``."""
    content = resolved_config(config)
    run = content.get("run", {})
    own = {key: run[key] for key in _JUDGING if key in run} if isinstance(run, dict) else run
    # not the algorithm nor the clients: their classes may live in a package that is not installed here
    kept = {key: content[key] for key in ("name", "data", "server") if key in content}
    return moved(parse_settings(Conditions, kept | {"run": own}), data_dir, weights_dir)


def moved(experiment: E, data_dir: Path | None, weights_dir: Path | None) -> E:
    """The same experiment with its data or weights in other folders; None leaves them where they are."""
    given = {"dir": data_dir, "weights_dir": weights_dir}
    update = {key: folder.resolve() for key, folder in given.items() if folder is not None}
    return experiment.model_copy(update={"data": experiment.data.model_copy(update=update)})
