"""``polyfed analyse``: who contributes what, and what a trained model looks like inside; parses, calls, prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.analyse_partition import partition
from polyfed.cli.analyse_retraining import across, distortion, retrain
from polyfed.cli.analysing import (
    Folder,
    Overrides,
    Place,
    Places,
    Projection,
    RunArgument,
    Seeds,
    Source,
    Which,
    analysed,
    continuable,
    server_model,
    show_analysis,
)
from polyfed.cli.options import DataDir, Device, WeightsDir, names_in, numbers_in
from polyfed.core.errors import ConfigError
from polyfed.runs.opened import open_run

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Analyse federations: who contributes what, what more data brings, and what a model looks like inside.",
)


def shapley(
    source: Source,
    players: Annotated[
        str, typer.Option(metavar="GROUP,GROUP,...", help="groups whose contribution is asked for", show_default=False)
    ],
    seeds: Seeds = "0",
    overrides: Overrides = None,
    out: Folder = None,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
) -> None:
    """Divide what client types gain the server among them: every coalition is run. Continues where it was stopped."""
    from polyfed.analysis.shapley import contributions, draw_shapley, shapley_tables

    experiment, numbers = analysed(source, overrides, data_dir, weights_dir), numbers_in("--seeds", seeds)
    folder = out or Path("runs") / f"{experiment.name}-shapley"
    with continuable():
        contributed = contributions(experiment, names_in("--players", players), numbers, folder, typer.echo)
    show_analysis(folder, "shapley", contributed.to_json(), draw_shapley(contributed), shapley_tables(contributed))


def scaling(
    source: Source,
    groups: Annotated[
        str,
        typer.Option(
            metavar="GROUP,GROUP,...",
            help="groups in the order in which they join; those that join at once with a plus: a+b,c",
            show_default=False,
        ),
    ],
    seeds: Seeds = "0",
    overrides: Overrides = None,
    out: Folder = None,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
) -> None:
    """Run an experiment with none, one, two, ... of some groups. Continues where it was stopped."""
    from polyfed.analysis.scaling import draw_scaling, run_scaling, scaling_table

    experiment, numbers = analysed(source, overrides, data_dir, weights_dir), numbers_in("--seeds", seeds)
    folder = out or Path("runs") / f"{experiment.name}-scaling"
    steps = [names_in("--groups", step, "+") for step in names_in("--groups", groups)]
    with continuable():
        scaled = run_scaling(experiment, steps, numbers, folder, typer.echo)
    show_analysis(folder, "scaling", scaled.to_json(), draw_scaling(scaled), [scaling_table(scaled)])


def gap(
    subject: Annotated[
        Path,
        typer.Argument(metavar="RUN|FILE", help="folder of a run, or a YAML file with encoders", show_default=False),
    ],
    between: Annotated[str, typer.Option(metavar="A,B", help="two sources", show_default=False)],
    against: Annotated[
        str | None, typer.Option(metavar="C,D,...", help="more sources to compare A with", show_default=False)
    ] = None,
    split: Annotated[str, typer.Option(help="split of all of them")] = "train",
    normalise: Annotated[bool, typer.Option("--normalise", help="scale embeddings to unit norm first")] = False,
    samples: Annotated[
        int | None, typer.Option(min=1, help="at most so many of each, at random", show_default="all")
    ] = None,
    which: Which = "last",
    out: Place = None,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
    device: Device = None,
) -> None:
    """Measure the gap between data sets: the distance of their mean embeddings, summed over modalities."""
    from polyfed.analysis.domain_gap import domain_gaps, gap_table
    from polyfed.analysis.encoders import encoders_of, load_encoders
    from polyfed.analysis.results import ready_folder

    pair = names_in("--between", between)
    if len(pair) != 2:
        raise ConfigError(f"--between {between}: needs two sources, as in --between A,B; name more with --against")
    others = [pair[1], *(names_in("--against", against) if against else [])]
    is_run, places = subject.is_dir(), Places(data_dir=data_dir, weights_dir=weights_dir, device=device)
    if is_run:
        encoders = encoders_of(server_model(subject, which, places), normalise=False)
    else:
        encoders = load_encoders(subject, **places)
    folder = ready_folder(out or (subject / "analysis" if is_run else subject.parent))
    gaps = domain_gaps(encoders, pair[0], others, split=split, normalise=normalise, most=samples)
    show_analysis(folder, "gap", gaps.to_json(), None, [gap_table(gaps)])


def landscape(
    run: RunArgument,
    samples: Annotated[int, typer.Option(help="samples that the loss is of")] = 256,
    grid: Annotated[int, typer.Option(help="points along each direction, odd")] = 21,
    extent: Annotated[float, typer.Option(help="farthest move, in units of the weights' L2 norm")] = 0.5,
    steps: Annotated[int, typer.Option(help="Hessian-vector products at most")] = 40,
    which: Which = "last",
    out: Place = None,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
    device: Device = None,
) -> None:
    """Draw the server's loss around its final weights, along the top two eigenvectors of the Hessian."""
    import safetensors.torch

    from polyfed.analysis.landscape import draw_landscape, landscape_table, run_landscape
    from polyfed.analysis.results import ready_folder
    from polyfed.core.files import write_atomically

    server = server_model(run, which, Places(data_dir=data_dir, weights_dir=weights_dir, device=device))
    folder = ready_folder(out or run / "analysis")
    surface = run_landscape(server, samples=samples, grid=grid, extent=extent, steps=steps)
    tensors = {"values": surface.values, "axis": surface.axis, "eigenvalues": surface.pairs.values}
    write_atomically(folder / "landscape.safetensors", safetensors.torch.save(tensors))
    show_analysis(folder, "landscape", surface.to_json(), draw_landscape(surface), [landscape_table(surface)])


def centres(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs", show_default=False)],
    data: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="sources", show_default="all of the first run")
    ] = None,
    by: Annotated[str, typer.Option(help="data: a centre for each data set; class: for each class of it")] = "data",
    split: Annotated[str, typer.Option(help="split of all of them")] = "test",
    samples: Annotated[int, typer.Option(min=1, help="at most so many of each, at random")] = 1000,
    which: Which = "last",
    out: Place = None,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
    device: Device = None,
) -> None:
    """Measure how far apart a server model keeps data sets or classes, and draw them; several runs side by side."""
    from polyfed.analysis.centres import centres_table, draw_centres, run_centres
    from polyfed.analysis.results import ready_folder

    places = Places(data_dir=data_dir, weights_dir=weights_dir, device=device)
    servers = [server_model(run, which, places) for run in runs]
    names = names_in("--data", data) if data is not None else list(servers[0].run.conditions.data.sources)
    folder = ready_folder(out or runs[0] / "analysis")
    by_run = [run_centres(each, names, by=by, split=split, most=samples) for each in servers]
    content = {"by": by, "runs": [each.to_json() for each in by_run]}
    show_analysis(folder, "centres", content, draw_centres(by_run), [centres_table(each) for each in by_run])


def drift(
    run: RunArgument,
    samples: Annotated[int, typer.Option(min=4, help="public samples at most, at random")] = 250,
    method: Projection = "tsne",
    which: Which = "last",
    out: Place = None,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
    device: Device = None,
) -> None:
    """Measure how differently clients and server represent the same public samples, and draw these on a map."""
    from polyfed.analysis.drift import draw_drift, drift_tables, run_drift
    from polyfed.analysis.results import ready_folder

    clients = open_run(run, data_dir=data_dir, weights_dir=weights_dir, device=device).kept_clients()
    folder = ready_folder(out or run / "analysis")
    drift_by_modality = run_drift(clients, which=which, samples=samples, method=method)
    show_analysis(
        folder, "drift", drift_by_modality.to_json(), draw_drift(drift_by_modality), drift_tables(drift_by_modality)
    )


def features(
    run: RunArgument,
    client: Annotated[
        str | None, typer.Option(help="a client that classifies", show_default="the first that classifies")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="test samples at most, at random")] = 1000,
    method: Projection = "tsne",
    out: Place = None,
    data_dir: DataDir = None,
    weights_dir: WeightsDir = None,
    device: Device = None,
) -> None:
    """Compare a client's own features, those of the server's encoders, and both fused (FedAFD), by class."""
    from polyfed.analysis.fused_features import draw_features, features_table, run_features
    from polyfed.analysis.results import ready_folder

    clients = open_run(run, data_dir=data_dir, weights_dir=weights_dir, device=device).kept_clients()
    folder = ready_folder(out or run / "analysis")
    compared = run_features(clients, client, samples=samples, method=method)
    show_analysis(folder, "features", compared.to_json(), draw_features(compared), [features_table(compared)])


def weights(
    run: RunArgument,
    number: Annotated[int | None, typer.Option("--round", help="which round", show_default="last")] = None,
    samples: Annotated[int, typer.Option(min=1, help="samples in the picture, at random")] = 7,
    at: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="these samples instead, of the recorded ones, from 0", show_default=False),
    ] = None,
    out: Place = None,
) -> None:
    """Draw the weights of clients in the aggregation, by public sample, and compare kinds of clients."""
    from polyfed.analysis.results import ready_folder
    from polyfed.analysis.round_weights import draw_round_weights, run_weights, weights_tables

    chosen = None if at is None else numbers_in("--at", at)
    recorded_weights = run_weights(open_run(run), number=number, samples=samples, at=chosen)
    folder = ready_folder(out or run / "analysis")
    show_analysis(
        folder,
        "weights",
        recorded_weights.to_json(),
        draw_round_weights(recorded_weights),
        weights_tables(recorded_weights),
    )


def traffic(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs", show_default=False)],
    out: Place = None,
) -> None:
    """Compare the bytes of runs: in all, and of a client in a round, by direction and kind."""
    from polyfed.analysis.results import ready_folder
    from polyfed.analysis.traffic import draw_traffic_of_runs, run_traffic, traffic_tables

    by_run = [run_traffic(open_run(run)) for run in runs]
    folder = ready_folder(out or runs[0] / "analysis")
    show_analysis(
        folder,
        "traffic",
        {"runs": [each.to_json() for each in by_run]},
        draw_traffic_of_runs(by_run),
        traffic_tables(by_run),
    )


for command in (
    shapley,
    scaling,
    gap,
    landscape,
    centres,
    drift,
    features,
    weights,
    traffic,
    partition,
    retrain,
    distortion,
    across,
):
    app.command()(command)
