"""``polyfed downstream``: what the encoders of a run are good for; parses, calls, prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from polyfed.cli.analyse import show_result
from polyfed.cli.console import interruptible
from polyfed.cli.options import BestOrLast, PlaceOptions, names_in
from polyfed.core.errors import ConfigError

_SEED = 42
_LONGEST = 80  # characters of task names in the name of a file; file systems take 255 in all


def downstream_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")],
    *,
    suite: Annotated[str, typer.Option(help="medical, scenes, or a YAML file")] = "",
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="these tasks of the suite", show_default="all")
    ] = None,
    which: BestOrLast = None,
    client: Annotated[str | None, typer.Option(help="test this client's model instead of the server's")] = None,
    seed: Annotated[int, typer.Option(min=0, help="of all draws")] = _SEED,
    draws: Annotated[
        int | None, typer.Option(min=1, help="draws of every task", show_default="as the suite says")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder; by default RUN/downstream")] = None,
    places: PlaceOptions,
) -> None:
    """Put a run's frozen encoders to other tasks.

    Few-shot classification, segmentation, retrieval.
    """
    from polyfed.core.device import cpu_threads
    from polyfed.lab.analysis.analysis import ready_folder
    from polyfed.lab.downstream.suite import Suite, opened_model, run_suite, suites

    if not suite:
        raise ConfigError(f"--suite is missing; give {', '.join(suites())}, or a YAML file")
    names = None if tasks is None else list(dict.fromkeys(names_in("--tasks", tasks)))
    chosen = Suite.load(suite).chosen(names)
    opened = opened_model(places.open(run), which, client)
    folder = ready_folder(out or run.joinpath("downstream", client or ""))  # a client's apart from the server's
    with cpu_threads(opened.threads), interruptible("nothing was written"):
        findings = run_suite(
            opened.subject, chosen, opened.data, name=Path(suite).stem, seed=seed, draws=draws, tell=typer.echo
        )
    stem = _stem(Path(suite).stem, which, seed, draws, names)
    show_result(findings, folder, stem)


def _stem(suite: str, which: str | None, seed: int, draws: int | None, tasks: Sequence[str] | None) -> str:
    """Name of the files without ending: the suite, and what is asked for beyond the defaults."""
    asked = {
        "model": which,
        "seed": None if seed == _SEED else seed,
        "draws": draws,
        "tasks": None if tasks is None else _shortened(tasks),
    }
    parts = [suite, *(f"{option}-{value}" for option, value in asked.items() if value is not None)]
    return re.sub(r"[^\w.+-]+", "_", "-".join(parts))


def _shortened(tasks: Sequence[str]) -> str:
    """Names of tasks, or where these are too long for the name of a file, their number and a digest."""
    from polyfed.data.arrow import fingerprint_of

    joined = "+".join(tasks)
    return joined if len(joined) <= _LONGEST else f"{len(tasks)}-{fingerprint_of(*tasks)}"
