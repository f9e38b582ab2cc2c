"""``polyfed analyse leakage``: what a run gave away."""

from __future__ import annotations

from typing import Annotated

import typer

from polyfed.cli.analysis_options import LastOrBest, OutOfRun, analysis_folder, show_analysis
from polyfed.cli.options import PlaceOptions, RunArgument, names_in, numbers_in


def analyse_leakage(
    run: RunArgument,
    *,
    attacks: Annotated[
        str, typer.Option(metavar="A,B,...", help="membership, words, pictures, classes, canaries")
    ] = "membership,words,pictures,classes,canaries",
    clients: Annotated[int, typer.Option(min=1, help="attacked at most, of each architecture in turn")] = 3,
    samples: Annotated[int, typer.Option(min=10, help="members at most, and as many others")] = 200,
    shadows: Annotated[int, typer.Option(min=0, help="shadow trainings a client, even; 0: none")] = 8,
    passes: Annotated[int, typer.Option(min=1, help="over public samples, of a surrogate")] = 60,
    batches: Annotated[str, typer.Option(metavar="N,N,...", help="batches whose pictures are reconstructed")] = "1,4",
    trials: Annotated[int, typer.Option(min=1, help="batches of each size and client")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="of a reconstruction")] = 300,
    canaries: Annotated[int, typer.Option(min=10, help="samples of a client that get a random label")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="of all that attacks draw")] = 0,
    which: LastOrBest = "last",
    out: OutOfRun = None,
    places: PlaceOptions,
) -> None:
    """Attack what clients sent in the last round, and the models: what did the run give away? Simulations."""
    from polyfed.lab.analysis.leakage.report import draw_leakage, leakage_tables, run_leakage
    from polyfed.lab.analysis.leakage.situation import AttackPlan
    from polyfed.lab.analysis.simulated import Simulated
    from polyfed.reporting.html.page import write_html_report
    from polyfed.reporting.report import write_report

    plan = AttackPlan(
        tuple(names_in("--attacks", attacks)),
        clients,
        samples,
        shadows,
        passes,
        tuple(numbers_in("--batches", batches)),
        trials,
        steps,
        canaries,
        seed,
    )
    plan.require_range()
    simulated = Simulated(places.open(run), which)
    folder = analysis_folder(out, run)
    leakage = run_leakage(simulated, plan)
    show_analysis(folder, "leakage", leakage.to_json(), draw_leakage(leakage), leakage_tables(leakage))
    if out is None:  # the run's own reports show it from now on
        records = simulated.run.records
        typer.echo(f"written: {write_report(records)}")
        typer.echo(f"written: {write_html_report(records)}")
