"""An experiment in ten lines, as a notebook and a log show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from polyfed.core.settings import Settings

if TYPE_CHECKING:
    from polyfed.models.encoder import Encoder
    from polyfed.runs.experiment import Experiment

_GROUPS = 5  # lines for groups of clients


def summary(experiment: Experiment) -> str:
    """What is trained by whom, how and how long, in at most ten lines."""
    run, server, public = experiment.run, experiment.server, experiment.public
    groups = [
        f"  {name}: {group.count} clients, {group.source}, {_name(group.task)}, {_encoders(group.models[0].encoders)}"
        for name, group in experiment.clients.items()
    ]
    more = [f"  ... {len(groups)} groups in all"] if len(groups) > _GROUPS else []
    return "\n".join(
        [
            f"Experiment '{experiment.name}': {_name(experiment.algorithm)}, {run.rounds} rounds, seed {run.seed}",
            f"  public set: {f'{public.items} items of {public.source}' if public else 'none'}",
            f"  server: {f'{_name(server.task)}, {_encoders(server.model.encoders)}' if server else 'no model'}",
            *groups[: _GROUPS - len(more)],
            *more,
            f"  privacy: {'on' if experiment.privacy else 'off'}; engine {_name(run.engine)}, device {run.device}",
            "  all settings: print(experiment.to_yaml())",
        ]
    )


def _encoders(encoders: Mapping[str, Encoder]) -> str:
    return " + ".join(f"{modality} by {_name(encoder)}" for modality, encoder in encoders.items())


def _name(component: Settings) -> str:
    return component.component_name()
