"""``polyfed downstream``: downstream tests of a run's encoders; parses, calls, prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.analyse import show_result
from polyfed.cli.console import interruptible
from polyfed.cli.options import BestOrLast, PlaceOptions
from polyfed.core.errors import ConfigError

_SEED = 42


def downstream_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")],
    *,
    suite: Annotated[str, typer.Option(help="scenes, or a YAML file")] = "",
    which: BestOrLast = None,
    client: Annotated[str | None, typer.Option(help="test this client's model instead of the server's")] = None,
    seed: Annotated[int, typer.Option(min=0, help="of all draws")] = _SEED,
    out: Annotated[Path | None, typer.Option(help="folder; by default RUN/downstream")] = None,
    places: PlaceOptions,
) -> None:
    """Test a run's frozen encoders on other tasks: few-shot classification, retrieval, or probes of your own."""
    from polyfed.core.device import cpu_threads
    from polyfed.lab.analysis.analysis import ready_folder
    from polyfed.lab.downstream.suite import Suite, opened_model, run_suite, suites

    if not suite:
        raise ConfigError(f"--suite is missing; give {', '.join(suites())}, or a YAML file")
    chosen = Suite.load(suite)
    opened = opened_model(places.open(run), which, client)
    folder = ready_folder(out or run.joinpath("downstream", client or ""))  # a client's apart from the server's
    with cpu_threads(opened.threads), interruptible("nothing was written"):
        findings = run_suite(opened.subject, chosen, opened.data, name=Path(suite).stem, seed=seed, on_task=typer.echo)
    show_result(findings, folder, _stem(Path(suite).stem, which, seed))


def _stem(suite: str, which: str | None, seed: int) -> str:
    """Stem of the files: the suite, and options that differ from the defaults."""
    asked = {"model": which, "seed": None if seed == _SEED else seed}
    parts = [suite, *(f"{option}-{value}" for option, value in asked.items() if value is not None)]
    return re.sub(r"[^\w.+-]+", "_", "-".join(parts))
