"""Which server models a run folder has, and after which rounds they were saved; torch is not needed to tell."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from polyfed.core.untrusted import file_json

KEPT = "round-"
"""How names of models begin that are kept of a round."""


def untrained_best(run: Path) -> str:
    """A sentence if the model that validation chose is the one before any training, and later ones were judged too."""
    rounds = [_round_of(run / "models" / kind / "config.json") for kind in ("best", "last")]
    if rounds[0] != 0 or not rounds[1]:  # of a run of round 0 alone there is nothing to warn of
        return ""
    return (
        "the best model by validation is that of round 0, before any training: no later round was better; "
        f"the model after round {rounds[1]} is called 'last'"
    )


def saved_models(run: Path) -> dict[str, int | None]:
    kept = sorted((run / "models").glob(f"{KEPT}*/config.json"), key=lambda file: _round_of(file) or 0)
    files = [run / "models" / kind / "config.json" for kind in ("best", "last")] + kept
    return {file.parent.name: _round_of(file) for file in files if file.is_file()}


def chosen_model(saved: Mapping[str, int | None], which: str | None) -> str | None:
    """The saved model that is called so, or is of that round; without a name the first. None: there is none."""
    if which is None:
        return next(iter(saved), None)
    return next((name for name, number in saved.items() if which in (name, str(number))), None)


def _round_of(config: Path) -> int | None:
    """Round of a saved model; None if there is none, or its description cannot be read."""
    try:
        return int(file_json(config.read_text())["round"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
