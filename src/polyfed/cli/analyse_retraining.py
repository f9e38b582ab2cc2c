"""``polyfed analyse retrain``, ``distortion`` and ``across``: how models change when clients train them further."""

from __future__ import annotations

from typing import Annotated

import typer

from polyfed.cli.analysis_options import LastOrBest, OutOfRun, analysis_folder, show_analysis
from polyfed.cli.options import PlaceOptions, RunArgument, names_in
from polyfed.core.errors import ConfigError
from polyfed.runs.records import SERVER

_STEPS = 500  # FedAID's

LearningRate = Annotated[
    float | None, typer.Option("--lr", help="constant learning rate", show_default="the clients', by their schedule")
]
Seed = Annotated[int | None, typer.Option(min=0, help="of batches and dropout", show_default="the run's")]


def analyse_retrain(
    run: RunArgument,
    *,
    of: Annotated[
        str, typer.Option("--of", help="server, a client that keeps a model, each of those, or a group's global model")
    ] = "server",
    layers: Annotated[str, typer.Option(help="what is trained: all, shallow or deep layers")] = "all",
    depth: Annotated[
        str | None,
        typer.Option(
            metavar="K|NAME=K,...", help="number of shallow layers; by modality if named", show_default="half of them"
        ),
    ] = None,
    on: Annotated[str, typer.Option("--on", help="data: of a client, of each in turn, or the union of all")] = "each",
    steps: Annotated[int, typer.Option(min=0, help="optimiser steps")] = _STEPS,
    lr: LearningRate = None,
    seed: Seed = None,
    which: LastOrBest = "last",
    out: OutOfRun = None,
    places: PlaceOptions,
) -> None:
    """Re-train some layers of a model on clients' data, and see what becomes of it at every client. Simulations."""
    from polyfed.lab.analysis.results import csv_text
    from polyfed.lab.analysis.retraining import (
        RETRAINING_HEADER,
        Plan,
        draw_retraining,
        retraining_rows,
        retraining_tables,
        run_retraining,
    )
    from polyfed.lab.analysis.simulated import Simulated

    simulated, folder = Simulated(places.open(run), which), analysis_folder(out, run)
    plan = Plan(layers, None if depth is None else _depth(depth), steps=steps, lr=lr, seed=seed)
    retrained = run_retraining(simulated, of, on, plan)
    changed = {"depth": depth, "steps": None if steps == _STEPS else steps, "lr": lr, "seed": seed}
    name, drawing = _file_name(f"retrain-{of}-{layers}-{on}", which, **changed), draw_retraining(retrained)
    csv = csv_text(RETRAINING_HEADER, retraining_rows(retrained))
    show_analysis(folder, name, retrained.to_json(), drawing, retraining_tables(retrained), csv)


def analyse_distortion(
    run: RunArgument,
    *,
    of: Annotated[str, typer.Option("--of", help="server, or a group's global model")] = "server",
    steps: Annotated[
        int | None, typer.Option(min=0, help="optimiser steps", show_default="a round's local training")
    ] = None,
    lr: LearningRate = None,
    seed: Seed = None,
    which: LastOrBest = "last",
    out: OutOfRun = None,
    places: PlaceOptions,
) -> None:
    """Measure how clients' local training takes paired representations of a model apart. Simulations."""
    from polyfed.lab.analysis.distortion import (
        DISTORTION_HEADER,
        distortion_rows,
        distortion_tables,
        draw_distortion,
        run_distortion,
    )
    from polyfed.lab.analysis.results import csv_text
    from polyfed.lab.analysis.simulated import Simulated

    simulated, folder = Simulated(places.open(run), which), analysis_folder(out, run)
    distorted = run_distortion(simulated, of, steps=steps, lr=lr, seed=seed)
    stem = "distortion" if of == SERVER else f"distortion-{of}"
    name, drawing = _file_name(stem, which, steps=steps, lr=lr, seed=seed), draw_distortion(distorted)
    csv = csv_text(DISTORTION_HEADER, distortion_rows(distorted))
    show_analysis(folder, name, distorted.to_json(), drawing, distortion_tables(distorted), csv)


def analyse_across(run: RunArgument, *, which: LastOrBest = "last", out: OutOfRun = None, places: PlaceOptions) -> None:
    """Judge global and kept models on every client's test samples: average, worst client, disparity. Simulations."""
    from polyfed.lab.analysis.across import ACROSS_HEADER, across_rows, across_tables, draw_across, run_across
    from polyfed.lab.analysis.results import csv_text
    from polyfed.lab.analysis.simulated import Simulated

    simulated, folder = Simulated(places.open(run), which), analysis_folder(out, run)
    judged = run_across(simulated)
    name, drawing = _file_name("across", which), draw_across(judged)
    csv = csv_text(ACROSS_HEADER, across_rows(judged))
    show_analysis(folder, name, judged.to_json(), drawing, across_tables(judged), csv)


def _file_name(stem: str, which: str, **changed: object) -> str:
    """Name of the files: with all that differs from the defaults, so that other settings have other files."""
    parts = [f"{key}{value}" for key, value in changed.items() if value is not None]
    return "-".join([stem, *([] if which == "last" else [which]), *parts])


def _depth(text: str) -> int | dict[str, int]:
    """``4``, or ``a=2,b=4``."""
    if text.isdecimal():
        return int(text)
    pairs = [entry.partition("=") for entry in names_in("--depth", text)]
    wrong = ["".join(pair) for pair in pairs if not (pair[0] and pair[2].isdecimal())]
    if wrong:
        raise ConfigError(f"--depth {text}: '{wrong[0]}' says not how many layers; give such as 4, or image=2,text=4")
    return {name: int(number) for name, _, number in pairs}
