"""``polyfed analyse retrain``, ``distortion`` and ``across``: parses, calls, prints. Adds to ``commands.app``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyfed.cli.analysing import Place, RunArgument, Which, show_analysis
from polyfed.cli.options import DataDir, Device, WeightsDir, names_in
from polyfed.core.errors import ConfigError
from polyfed.runs.records import SERVER

if TYPE_CHECKING:
    from polyfed.analysis.simulated import Simulated

STEPS = 500  # FedAID's

Lr = Annotated[
    float | None, typer.Option("--lr", help="constant learning rate", show_default="the clients', by their schedule")
]
Seed = Annotated[int | None, typer.Option(min=0, help="of batches and dropout", show_default="the run's")]


def retrain(
    run: RunArgument,
    of: Annotated[
        str,
        typer.Option("--of", help="server, a client that keeps a model, each of those, or a group's global model"),
    ] = "server",
    layers: Annotated[str, typer.Option(help="what is trained: all, shallow or deep layers")] = "all",
    depth: Annotated[
        str | None,
        typer.Option(
            metavar="K|NAME=K,...", help="number of shallow layers; by modality if named", show_default="half of them"
        ),
    ] = None,
    on: Annotated[str, typer.Option("--on", help="data: of a client, of each in turn, or the union of all")] = "each",
    steps: Annotated[int, typer.Option(min=0, help="optimiser steps")] = STEPS,
    lr: Lr = None,
    seed: Seed = None,
    which: Which = "last",
    out: Place = None,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
    device: Device = None,
) -> None:
    """Re-train some layers of a model on clients' data, and see what becomes of it at every client. Simulations."""
    from polyfed.analysis.retraining import (
        RETRAINING_HEADER,
        Plan,
        draw_retraining,
        retraining_rows,
        retraining_tables,
        run_retraining,
    )

    opened, folder = _opened(run, which, out, data_dir, weights_dir, device)
    plan = Plan(layers, None if depth is None else _depth(depth), steps=steps, lr=lr, seed=seed)
    retrained = run_retraining(opened, of, on, plan)
    changed = {"depth": depth, "steps": None if steps == STEPS else steps, "lr": lr, "seed": seed}
    name, drawing = _named(f"retrain-{of}-{layers}-{on}", which, **changed), draw_retraining(retrained)
    _csv(folder, name, RETRAINING_HEADER, retraining_rows(retrained))
    show_analysis(folder, name, retrained.to_json(), drawing, retraining_tables(retrained))


def distortion(
    run: RunArgument,
    of: Annotated[str, typer.Option("--of", help="server, or a group's global model")] = "server",
    steps: Annotated[
        int | None, typer.Option(min=0, help="optimiser steps", show_default="a round's local training")
    ] = None,
    lr: Lr = None,
    seed: Seed = None,
    which: Which = "last",
    out: Place = None,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
    device: Device = None,
) -> None:
    """Measure how clients' local training takes paired representations of a model apart. Simulations."""
    from polyfed.analysis.distortion import (
        DISTORTION_HEADER,
        distortion_rows,
        distortion_tables,
        draw_distortion,
        run_distortion,
    )

    opened, folder = _opened(run, which, out, data_dir, weights_dir, device)
    distorted = run_distortion(opened, of, steps=steps, lr=lr, seed=seed)
    stem = "distortion" if of == SERVER else f"distortion-{of}"
    name, drawing = _named(stem, which, steps=steps, lr=lr, seed=seed), draw_distortion(distorted)
    _csv(folder, name, DISTORTION_HEADER, distortion_rows(distorted))
    show_analysis(folder, name, distorted.to_json(), drawing, distortion_tables(distorted))


def across(
    run: RunArgument,
    which: Which = "last",
    out: Place = None,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
    device: Device = None,
) -> None:
    """Judge global and kept models on every client's test samples: average, worst client, disparity. Simulations."""
    from polyfed.analysis.across import ACROSS_HEADER, across_rows, across_tables, draw_across, run_across

    opened, folder = _opened(run, which, out, data_dir, weights_dir, device)
    judged = run_across(opened)
    name, drawing = _named("across", which), draw_across(judged)
    _csv(folder, name, ACROSS_HEADER, across_rows(judged))
    show_analysis(folder, name, judged.to_json(), drawing, across_tables(judged))


def _opened(
    run: Path, which: str, out: Path | None, data_dir: Path | None, weights_dir: Path | None, device: str | None
) -> tuple[Simulated, Path]:
    """The run, and the folder of results."""
    from polyfed.analysis.results import ready_folder
    from polyfed.analysis.simulated import Simulated
    from polyfed.runs.opened import open_run

    opened = Simulated(open_run(run, data_dir=data_dir, weights_dir=weights_dir, device=device), which)
    return opened, ready_folder(out or run / "analysis")


def _named(stem: str, which: str, **changed: object) -> str:
    """Name of the files: with all that differs from the defaults, so that other settings have other files."""
    parts = [f"{key}{value}" for key, value in changed.items() if value is not None]
    return "-".join([stem, *([] if which == "last" else [which]), *parts])


def _csv(folder: Path, name: str, header: tuple[str, ...], rows: Any) -> None:
    from polyfed.analysis.results import write_csv

    typer.echo(f"written: {write_csv(folder / f'{name}.csv', header, rows)}")


def _depth(text: str) -> int | dict[str, int]:
    """``4``, or ``a=2,b=4``."""
    if text.isdecimal():
        return int(text)
    pairs = [entry.partition("=") for entry in names_in("--depth", text)]
    wrong = ["".join(pair) for pair in pairs if not (pair[0] and pair[2].isdecimal())]
    if wrong:
        raise ConfigError(f"--depth {text}: '{wrong[0]}' says not how many layers; give such as 4, or image=2,text=4")
    return {name: int(number) for name, _, number in pairs}
