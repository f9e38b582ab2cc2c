"""``polyfed analyse``: who contributes what, and what a trained model looks like inside; parses, calls, prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.analyse_cost import analyse_cost
from polyfed.cli.analyse_leakage import analyse_leakage
from polyfed.cli.analyse_retraining import analyse_across, analyse_distortion, analyse_retrain
from polyfed.cli.analysis_options import (
    LastOrBest,
    MapMethod,
    OutOfExperiment,
    OutOfRun,
    analysis_folder,
    show_analysis,
)
from polyfed.cli.options import (
    EXPERIMENT,
    AllowCode,
    ExperimentOptions,
    PlaceOptions,
    RunArgument,
    RunArguments,
    command_group,
    names_in,
    numbers_in,
)
from polyfed.core.errors import ConfigError
from polyfed.runs.opened import open_run


def analyse_gap(
    subject: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="folder of a run, or a YAML file with encoders")],
    *,
    between: Annotated[str, typer.Option(metavar="A,B", help="two sources")],
    against: Annotated[str | None, typer.Option(metavar="C,D,...", help="more sources to compare A with")] = None,
    split: Annotated[str, typer.Option(help="split of all of them")] = "train",
    normalise: Annotated[bool, typer.Option("--normalise", help="scale embeddings to unit norm first")] = False,
    samples: Annotated[
        int | None, typer.Option(min=1, help="at most so many of each, at random", show_default="all")
    ] = None,
    which: LastOrBest = "last",
    out: OutOfRun = None,
    places: PlaceOptions,
) -> None:
    """Measure the gap between data sets: the distance of their mean embeddings, summed over modalities."""
    from polyfed.lab.analysis.domain_gap import domain_gaps, gap_table
    from polyfed.lab.analysis.encoders import encoders_of, load_encoders
    from polyfed.lab.analysis.results import ready_folder

    pair = names_in("--between", between)
    if len(pair) != 2:
        raise ConfigError(f"--between {between}: needs two sources, as in --between A,B; name more with --against")
    others = [pair[1], *(names_in("--against", against) if against else [])]
    is_run = subject.is_dir()
    if is_run:
        encoders = encoders_of(places.server_model(subject, which), normalise=False)
    else:
        encoders = load_encoders(
            subject, data_dir=places.data_dir, weights_dir=places.weights_dir, device=places.device
        )
    folder = ready_folder(out or (subject / "analysis" if is_run else subject.parent))
    gaps = domain_gaps(encoders, pair[0], others, split=split, normalise=normalise, most=samples)
    show_analysis(folder, "gap", gaps.to_json(), None, [gap_table(gaps)])


def analyse_landscape(
    run: RunArgument,
    *,
    samples: Annotated[int, typer.Option(help="samples that the loss is of")] = 256,
    grid: Annotated[int, typer.Option(help="points along each direction, odd")] = 21,
    extent: Annotated[float, typer.Option(help="farthest move, in units of the weights' L2 norm")] = 0.5,
    steps: Annotated[int, typer.Option(help="Hessian-vector products at most")] = 40,
    which: LastOrBest = "last",
    out: OutOfRun = None,
    places: PlaceOptions,
) -> None:
    """Draw the server's loss around its final weights, along the top two eigenvectors of the Hessian."""
    import safetensors.torch

    from polyfed.core.files import write_atomically
    from polyfed.lab.analysis.landscape import draw_landscape, landscape_table, run_landscape

    server = places.server_model(run, which)
    folder = analysis_folder(out, run)
    surface = run_landscape(server, samples=samples, grid=grid, extent=extent, steps=steps)
    tensors = {"values": surface.values, "axis": surface.axis, "eigenvalues": surface.pairs.values}
    write_atomically(folder / "landscape.safetensors", safetensors.torch.save(tensors))
    show_analysis(folder, "landscape", surface.to_json(), draw_landscape(surface), [landscape_table(surface)])


def analyse_centres(
    runs: RunArguments,
    *,
    data: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="sources", show_default="all of the first run")
    ] = None,
    by: Annotated[str, typer.Option(help="data: a centre for each data set; class: for each class of it")] = "data",
    split: Annotated[str, typer.Option(help="split of all of them")] = "test",
    samples: Annotated[int, typer.Option(min=1, help="at most so many of each, at random")] = 1000,
    which: LastOrBest = "last",
    out: OutOfRun = None,
    places: PlaceOptions,
) -> None:
    """Measure how far apart a server model keeps data sets or classes, and draw them; several runs side by side."""
    from polyfed.lab.analysis.centres import centres_table, draw_centres, run_centres

    servers = [places.server_model(run, which) for run in runs]
    names = names_in("--data", data) if data is not None else list(servers[0].run.conditions.data.sources)
    folder = analysis_folder(out, runs[0])
    by_run = [run_centres(server, names, by=by, split=split, most=samples) for server in servers]
    content = {"by": by, "runs": [centres.to_json() for centres in by_run]}
    show_analysis(folder, "centres", content, draw_centres(by_run), [centres_table(centres) for centres in by_run])


def analyse_drift(
    run: RunArgument,
    *,
    samples: Annotated[int, typer.Option(min=4, help="public samples at most, at random")] = 250,
    method: MapMethod = "tsne",
    which: LastOrBest = "last",
    out: OutOfRun = None,
    places: PlaceOptions,
) -> None:
    """Measure how differently clients and server represent the same public samples, and draw these on a map."""
    from polyfed.lab.analysis.drift import draw_drift, drift_tables, run_drift

    clients = places.open(run).kept_clients()
    folder = analysis_folder(out, run)
    drift = run_drift(clients, which=which, samples=samples, method=method)
    show_analysis(folder, "drift", drift.to_json(), draw_drift(drift), drift_tables(drift))


def analyse_features(
    run: RunArgument,
    *,
    client: Annotated[
        str | None, typer.Option(help="a client that classifies", show_default="the first that classifies")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="test samples at most, at random")] = 1000,
    method: MapMethod = "tsne",
    out: OutOfRun = None,
    places: PlaceOptions,
) -> None:
    """Compare a client's own features, those of the server's encoders, and both fused (FedAFD), by class."""
    from polyfed.lab.analysis.fused_features import draw_features, features_table, run_features

    clients = places.open(run).kept_clients()
    folder = analysis_folder(out, run)
    features = run_features(clients, client, samples=samples, method=method)
    show_analysis(folder, "features", features.to_json(), draw_features(features), [features_table(features)])


def analyse_weights(
    run: RunArgument,
    number: Annotated[int | None, typer.Option("--round", help="which round", show_default="last")] = None,
    samples: Annotated[int, typer.Option(min=1, help="samples in the picture, at random")] = 7,
    at: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="these samples instead, of the recorded ones, from 0")
    ] = None,
    out: OutOfRun = None,
    allow_code: AllowCode = False,
) -> None:
    """Draw the weights of clients in the aggregation, by public sample, and compare kinds of clients."""
    from polyfed.lab.analysis.round_weights import draw_round_weights, run_weights, weights_tables

    chosen = None if at is None else numbers_in("--at", at)
    weights = run_weights(open_run(run, allow_code=allow_code), number=number, samples=samples, at=chosen)
    folder = analysis_folder(out, run)
    show_analysis(folder, "weights", weights.to_json(), draw_round_weights(weights), weights_tables(weights))


def analyse_traffic(runs: RunArguments, out: OutOfRun = None) -> None:
    """Compare the bytes of runs: in all, and of a client in a round, by direction and kind."""
    from polyfed.lab.analysis.traffic import draw_traffic_of_runs, run_traffic, traffic_tables

    by_run = [run_traffic(open_run(run)) for run in runs]
    folder = analysis_folder(out, runs[0])
    content = {"runs": [traffic.to_json() for traffic in by_run]}
    show_analysis(folder, "traffic", content, draw_traffic_of_runs(by_run), traffic_tables(by_run))


def analyse_partition(
    source: Annotated[str, typer.Argument(metavar="PRESET|FILE|RUN", help=f"{EXPERIMENT}, or folder of a run")],
    settings: ExperimentOptions,
    out: OutOfExperiment = None,
) -> None:
    """Count what every client holds, by class and column, and draw it; nothing is trained."""
    from polyfed.lab.analysis.partitions import planned, recorded, without_items
    from polyfed.lab.analysis.results import ready_folder
    from polyfed.reporting.partition_tables import partition_tables
    from polyfed.reporting.plots import draw_partition

    if Path(source).is_dir():
        if settings.overrides:
            wrong = settings.overrides[0]
            raise ConfigError(f"--set {wrong}: '{source}' is a run that is over; give its config.yaml instead")
        records, folder = recorded(open_run(source)), out or Path(source) / "analysis"
    else:
        experiment = settings.load(source)
        records, folder = planned(experiment), out or Path("runs") / f"{experiment.name}-partition"
    content = {client: without_items(holding) for client, holding in records.holdings.items()}
    tables = partition_tables(records.holdings)
    show_analysis(ready_folder(folder), "partition", content, draw_partition(records), tables)


analyse_app = command_group(
    "analyse_",
    (
        analyse_gap,
        analyse_landscape,
        analyse_centres,
        analyse_drift,
        analyse_features,
        analyse_weights,
        analyse_traffic,
        analyse_cost,
        analyse_partition,
        analyse_retrain,
        analyse_distortion,
        analyse_across,
        analyse_leakage,
    ),
    "Say who contributes what, and what a model is like inside.",
)
