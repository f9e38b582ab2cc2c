"""Questions to finished runs: what ``polyfed analyse`` and columns of studies ask, with all options.

Each is a function of a run, or of several ``runs`` that are shown side by side. To list them and their options takes
no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from polyfed.core.errors import ConfigError, nearest
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.runs.opened import Run

if TYPE_CHECKING:
    from polyfed.runs.opened import ServerModel

_FILE_NAME = re.compile(r"[\w.,=-]{0,120}", re.ASCII)
Which = Annotated[str, Field(description="the server's final model (last), its best, or that of a round")]
MapMethod = Annotated[str, Field(description="of the map: tsne or pca")]
LearningRate = Annotated[
    float | None, Field(gt=0, le=100, description="constant learning rate; by default the clients', scheduled")
]
Seed = Annotated[int | None, Field(ge=0, description="of batches and dropout; by default the run's")]


def landscape(
    run: Run,
    *,
    samples: Annotated[int, Field(description="samples that the loss is of")] = 256,
    grid: Annotated[int, Field(description="points along each direction, odd")] = 21,
    extent: Annotated[float, Field(description="farthest move, in units of the weights' L2 norm")] = 0.5,
    steps: Annotated[int, Field(description="Hessian-vector products at most")] = 40,
    model: Which = "last",
) -> AnalysisResult:
    """Draw the server's loss around its final weights, along the top two eigenvectors of the Hessian."""
    from polyfed.lab.analysis.landscape import run_landscape

    return run_landscape(_server(run, model), samples=samples, grid=grid, extent=extent, steps=steps)


def centres(
    runs: Sequence[Run],
    *,
    data: Annotated[list[str] | None, Field(description="sources; by default all of the first run")] = None,
    by: Annotated[str, Field(description="data: a centre for each data set; class: for each class of it")] = "data",
    split: Annotated[str, Field(description="split of all of them")] = "test",
    samples: Annotated[int, Field(ge=1, description="at most so many of each, at random")] = 1000,
    model: Which = "last",
) -> AnalysisResult:
    """Measure how far apart a server model keeps data sets or classes, and draw them; several runs side by side."""
    from polyfed.lab.analysis.centres import centres_of_runs, run_centres

    servers = [_server(run, model) for run in runs]
    names = list(servers[0].run.conditions.data.sources) if data is None else data
    return centres_of_runs(by, [run_centres(server, names, by=by, split=split, most=samples) for server in servers])


def drift(
    run: Run,
    *,
    samples: Annotated[int, Field(ge=4, description="public samples at most, at random")] = 250,
    method: MapMethod = "tsne",
    model: Which = "last",
) -> AnalysisResult:
    """Measure how differently clients and server represent the same public samples, and draw these on a map."""
    from polyfed.lab.analysis.drift import run_drift

    return run_drift(run, which=model, samples=samples, method=method)


def features(
    run: Run,
    *,
    client: Annotated[str | None, Field(description="a client that classifies; by default the first")] = None,
    samples: Annotated[int, Field(ge=1, description="test samples at most, at random")] = 1000,
    method: MapMethod = "tsne",
) -> AnalysisResult:
    """Compare a client's own features, those of the server's encoders, and both fused (FedAFD), by class."""
    from polyfed.lab.analysis.fused_features import run_features

    return run_features(run, client, samples=samples, method=method)


def weights(
    run: Run,
    *,
    number: Annotated[int | None, Field(title="round", description="which round; by default the last")] = None,
    samples: Annotated[int, Field(ge=1, description="samples in the picture, at random")] = 7,
    at: Annotated[list[int] | None, Field(description="these samples instead, of the recorded ones, from 0")] = None,
) -> AnalysisResult:
    """Draw the weights of clients in the aggregation, by public sample, and compare kinds of clients."""
    from polyfed.lab.analysis.round_weights import run_weights

    return run_weights(run, number=number, samples=samples, at=at)


def retrain(
    run: Run,
    *,
    of: Annotated[str, Field(description="server, a client that keeps a model, each of those, or a group")] = "server",
    layers: Annotated[str, Field(description="what is trained: all, shallow or deep layers")] = "all",
    depth: Annotated[
        str | int | None,
        Field(description="number of shallow layers, K or NAME=K,...; by default half"),
    ] = None,
    on: Annotated[str, Field(description="data: of a client, of each in turn, or the union of all")] = "each",
    steps: Annotated[int, Field(ge=0, description="optimiser steps")] = 500,
    lr: LearningRate = None,
    seed: Seed = None,
    model: Which = "last",
) -> AnalysisResult:
    """Re-train some layers of a model on clients' data, and see what becomes of it at every client. Simulations."""
    from polyfed.lab.analysis.depth import depth_in
    from polyfed.lab.analysis.retraining import Plan, run_retraining
    from polyfed.lab.analysis.simulated import Simulated

    plan = Plan(layers, None if depth is None else depth_in(str(depth)), steps=steps, lr=lr, seed=seed)
    return run_retraining(Simulated(run, model), of, on, plan)


def distortion(
    run: Run,
    *,
    of: Annotated[str, Field(description="server, or a group's global model")] = "server",
    steps: Annotated[int | None, Field(ge=0, description="optimiser steps; by default a round's")] = None,
    lr: LearningRate = None,
    seed: Seed = None,
    model: Which = "last",
) -> AnalysisResult:
    """Measure how clients' local training takes paired representations of a model apart. Simulations."""
    from polyfed.lab.analysis.distortion import run_distortion
    from polyfed.lab.analysis.simulated import Simulated

    return run_distortion(Simulated(run, model), of, steps=steps, lr=lr, seed=seed)


def leakage(
    run: Run,
    *,
    attacks: Annotated[list[str] | None, Field(description="membership, canaries; by default both")] = None,
    clients: Annotated[int, Field(ge=1, description="attacked at most, of each architecture in turn")] = 3,
    samples: Annotated[int, Field(ge=10, description="members at most, and as many others")] = 200,
    shadows: Annotated[int, Field(ge=0, description="shadow trainings a client, even; 0: none")] = 8,
    passes: Annotated[int, Field(ge=1, description="over public samples, of a surrogate")] = 60,
    canaries: Annotated[int, Field(ge=10, description="samples of a client that get a random label")] = 20,
    seed: Annotated[int, Field(ge=0, description="of all that attacks draw")] = 0,
    model: Which = "last",
) -> AnalysisResult:
    """Attack what clients sent in the last round, and the models: whose samples does it tell? Simulations."""
    from polyfed.lab.analysis.leakage.attacks import AttackPlan
    from polyfed.lab.analysis.leakage.report import run_leakage
    from polyfed.lab.analysis.simulated import Simulated

    plan = AttackPlan(clients=clients, samples=samples, shadows=shadows, passes=passes, canaries=canaries, seed=seed)
    chosen = plan if attacks is None else replace(plan, attacks=tuple(attacks))
    return run_leakage(Simulated(run, model), chosen)


def _server(run: Run, model: str) -> ServerModel:
    server = run.server_model(model)
    server.warn_if_untrained()
    return server


@dataclass(frozen=True)
class Question:
    """A question to runs.

    Attributes:
        ask: answers it.
        is_reported: whether the run's own reports show the answer, so that its files have one name.
    """

    ask: Callable[..., AnalysisResult]
    is_reported: bool = False

    @property
    def name(self) -> str:
        return self.ask.__name__

    @property
    def takes_several(self) -> bool:
        return "runs" in signature(self.ask).parameters

    @property
    def options(self) -> dict[str, Parameter]:
        every = signature(self.ask, eval_str=True).parameters
        return {name: option for name, option in every.items() if option.kind is Parameter.KEYWORD_ONLY}

    def require(self, options: Mapping[str, Any]) -> None:
        """Raise ConfigError if there is no such option, or its value cannot be."""
        known = self.options
        for name, value in options.items():
            if name not in known:
                raise ConfigError(f"analysis '{self.name}' has no '{name}'; {nearest(name, known)}")
            try:
                TypeAdapter(known[name].annotation).validate_python(value)
            except ValidationError as error:
                raise ConfigError(f"{name}: {error.errors()[0]['msg']} (got {value!r})") from error

    def of(self, runs: Sequence[Run], options: Mapping[str, Any]) -> AnalysisResult:
        """The answer about one run, or about several where the question takes them.

        Raises:
            PolyfedError: an option cannot be, or a run has not what the question is about.
        """
        self.require(options)
        return self.ask(runs if self.takes_several else runs[0], **options)

    def stem(self, options: Mapping[str, Any]) -> str:
        """Name of its files: with all options that differ from the defaults, so that others have other files.

        Options that are long, or have characters that file names may not have, stand there as a digest.
        """
        known = {} if self.is_reported else self.options
        changed = {name: value for name, value in options.items() if name in known and value != known[name].default}
        texts = (
            f"{name}{','.join(map(str, value)) if isinstance(value, list) else value}"
            for name, value in changed.items()
        )
        given = "-".join(texts)
        if not _FILE_NAME.fullmatch(given):
            given = sha256(given.encode()).hexdigest()[:12]
        return f"{self.name}-{given}" if given else self.name


_ASKED = (landscape, centres, drift, features, weights, retrain, distortion, leakage)
QUESTIONS = {ask.__name__: Question(ask, is_reported=ask is leakage) for ask in _ASKED}
