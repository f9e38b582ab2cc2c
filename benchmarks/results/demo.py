"""The demo beside its server alone, several seeds each: whether what ``make demo`` shows once holds.

    python benchmarks/results/demo.py --out runs/demo [--jobs 2]

The server alone is tuned on the validation split for the first seed, as ``polyfed run scenes-demo --twin server-only``
does; the others have what was chosen there. ``make demo`` runs it once, at the rate and passes in the Makefile, which
were chosen in the same way on another seed. Runs that are complete are not run again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml
from knowledge import METRIC, Content, planned

from polyfed.reporting.compare import compare, comparison_table
from polyfed.reporting.paired import paired_differences, paired_table
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import open_run
from runs import Planned, arguments

PRESET = "scenes-demo"


def rows() -> dict[str, Content]:
    """The demo's server alone, and the demo as it is but for plots."""
    content: Content = yaml.safe_load(Experiment.load(PRESET).to_yaml())
    content["run"] |= {"plots": False}
    alone = {"kind": "server-only", "rates": [1, 2, 4], "passes": [1, 2]}  # goes on where the best is at an end
    return {"server-only twin": {**content, "twin": alone}, "federation": content}


def main() -> None:
    """Run what is missing and print the tables."""
    options = arguments(__doc__, seeds=5, has_data=False).parse_args()
    plan = planned(options.out, rows(), "demo", range(options.seeds))

    def execute(row: list[Planned]) -> None:
        for run in row:  # of the twin the first is tuned, and the others follow it
            run.execute(options.out)

    with ThreadPoolExecutor(options.jobs) as pool:
        for future in [pool.submit(execute, row) for row in plan]:
            future.result()
    compared = compare([open_run(Path(options.out) / run.name).records for row in plan for run in row], METRIC)
    print(comparison_table(compared).markdown())
    print(paired_table(paired_differences(compared, METRIC), compared).markdown())


if __name__ == "__main__":
    main()
