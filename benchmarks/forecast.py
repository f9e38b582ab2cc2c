"""A dry run's forecast beside the run itself: seconds of the rounds, and of the dry run.

python benchmarks/forecast.py [--rounds N] [PRESET ...]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import harness

import polyfed
from polyfed.lab.analysis.forecast import Forecast
from polyfed.runs.experiment import Experiment

PRESETS = ("scenes-demo", "segmentation-scenes", "four-modalities")
"""Generated data: nothing is needed but polyfed."""


def compare(preset: str, rounds: int) -> None:
    """Print the ratio of the forecast to the run; both begin with data decoded and encoded, in the cache."""
    # the forecast is without evaluation
    quiet = (f"run.rounds={rounds}", f"run.eval_every={rounds}", "run.evaluate_clients=false", "run.plots=false")
    experiment = Experiment.load(preset, quiet)
    Forecast.of(experiment)
    began = time.monotonic()
    forecast = Forecast.of(experiment)
    dry = time.monotonic() - began
    with tempfile.TemporaryDirectory() as folder:
        finished = polyfed.run(experiment, Path(folder) / "run", quiet=True)
        seconds = sum(finished.to_pandas("rounds")["seconds"].dropna())
    harness.report(
        preset, ratio=forecast.total_seconds / seconds, against="run", dry_run=dry, run=seconds, rounds=rounds
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="*", default=PRESETS)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    for name in options.presets:
        compare(name, options.rounds)
