"""Figures of analyses of finished runs."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, JsonValue, model_validator

from polyfed.core.errors import ConfigError, nearest
from polyfed.lab.analysis.results import ready_folder, write_json
from polyfed.lab.studies.column import ColumnSettings
from polyfed.reporting.figures import save
from polyfed.runs.opened import Run
from polyfed.runs.records import SERVER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Analysed = tuple[Mapping[str, Any], Callable[[], "Figure"]]
"""The JSON of an analysis, and what draws its picture."""


def _drift(run: Run, *, samples: int = 250, method: str = "tsne") -> Analysed:
    from polyfed.lab.analysis.drift import draw_drift, run_drift

    drift = run_drift(run.kept_clients(), samples=samples, method=method)
    return drift.to_json(), lambda: draw_drift(drift)


def _features(run: Run, *, client: str | None = None, samples: int = 1000, method: str = "tsne") -> Analysed:
    from polyfed.lab.analysis.fused_features import draw_features, run_features

    features = run_features(run.kept_clients(), client, samples=samples, method=method)
    return features.to_json(), lambda: draw_features(features)


def _weights(run: Run, *, number: int | None = None, samples: int = 7) -> Analysed:
    from polyfed.lab.analysis.round_weights import draw_round_weights, run_weights

    weights = run_weights(run, number=number, samples=samples)
    return weights.to_json(), lambda: draw_round_weights(weights)


def _traffic(run: Run) -> Analysed:
    from polyfed.lab.analysis.traffic import draw_traffic_of_runs, run_traffic

    traffic = run_traffic(run)
    return traffic.to_json(), lambda: draw_traffic_of_runs([traffic])


def _landscape(run: Run, *, samples: int = 256, grid: int = 21, extent: float = 0.5, steps: int = 40) -> Analysed:
    from polyfed.lab.analysis.landscape import draw_landscape, run_landscape

    surface = run_landscape(run.server_model("last"), samples=samples, grid=grid, extent=extent, steps=steps)
    return surface.to_json(), lambda: draw_landscape(surface)


def _centres(
    run: Run, *, data: list[str] | None = None, by: str = "data", split: str = "test", samples: int = 1000
) -> Analysed:
    from polyfed.lab.analysis.centres import draw_centres, run_centres

    server = run.server_model("last")
    centres = run_centres(server, data or list(server.run.conditions.data.sources), by=by, split=split, most=samples)
    return centres.to_json(), lambda: draw_centres([centres])


def _across(run: Run) -> Analysed:
    from polyfed.lab.analysis.across import draw_across, run_across
    from polyfed.lab.analysis.simulated import Simulated

    judged = run_across(Simulated(run, "last"))
    return judged.to_json(), lambda: draw_across(judged)


def _distortion(run: Run, *, of: str = SERVER, steps: int | None = None, lr: float | None = None) -> Analysed:
    from polyfed.lab.analysis.distortion import draw_distortion, run_distortion
    from polyfed.lab.analysis.simulated import Simulated

    distorted = run_distortion(Simulated(run, "last"), of, steps=steps, lr=lr)
    return distorted.to_json(), lambda: draw_distortion(distorted)


def _retrain(
    run: Run,
    *,
    of: str = SERVER,
    on: str = "each",
    layers: str = "all",
    depth: int | None = None,
    steps: int = 500,
    lr: float | None = None,
) -> Analysed:
    from polyfed.lab.analysis.retraining import Plan, draw_retraining, run_retraining
    from polyfed.lab.analysis.simulated import Simulated

    retrained = run_retraining(Simulated(run, "last"), of, on, Plan(layers, depth, steps=steps, lr=lr))
    return retrained.to_json(), lambda: draw_retraining(retrained)


_ANALYSES: dict[str, Callable[..., Analysed]] = {
    "drift": _drift,
    "features": _features,
    "weights": _weights,
    "traffic": _traffic,
    "landscape": _landscape,
    "centres": _centres,
    "across": _across,
    "distortion": _distortion,
    "retrain": _retrain,
}


class Analysis(ColumnSettings):
    """A figure in the JSON of an analysis (``polyfed analyse``), whose picture is kept in the cell."""

    analysis: str = Field(description="drift, features, weights, traffic, landscape, centres, across, ...")
    figure: str = Field(description="where it stands in the analysis' JSON, such as total.up or runs.0.mean")
    options: dict[str, JsonValue] = Field(default_factory=dict, description="options of the analysis, by name")

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.analysis not in _ANALYSES:
            raise ValueError(f"no analysis '{self.analysis}'; {nearest(self.analysis, _ANALYSES)}")
        taken = list(inspect.signature(_ANALYSES[self.analysis]).parameters)[1:]
        if wrong := [name for name in self.options if name not in taken]:
            raise ValueError(f"options: analysis '{self.analysis}' has no '{wrong[0]}'; {nearest(wrong[0], taken)}")
        return self

    @property
    def needs_models(self) -> bool:
        """See ``ColumnSettings``."""
        return self.analysis not in ("weights", "traffic")

    def measure(self, run: Run) -> float:
        """See ``ColumnSettings``."""
        value = _content(run, self.analysis, json.dumps(self.options, sort_keys=True))
        for key in self.figure.split("."):
            value = _within(value, key, self.figure)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"figure {self.figure}: is no number")
        return float(value)


def _within(value: Any, key: str, figure: str) -> Any:
    known = {str(at): item for at, item in enumerate(value)} if isinstance(value, list | tuple) else value
    if not isinstance(known, dict) or key not in known:
        names = known if isinstance(known, dict) else ()
        raise ConfigError(f"figure {figure}: there is no '{key}'; {nearest(key, map(str, names))}")
    return known[key]


@lru_cache(maxsize=32)  # several figures of one analysis, which may take minutes
def _content(run: Run, analysis: str, options: str) -> Any:
    content, draw = _ANALYSES[analysis](run, **json.loads(options))
    folder = ready_folder(run.folder / "analysis")
    stem = analysis if options == "{}" else f"{analysis}-{hashlib.sha256(options.encode()).hexdigest()[:8]}"
    save(draw(), folder / f"{stem}.png")
    return json.loads(write_json(folder / f"{stem}.json", {**content, "options": options}).read_text())
