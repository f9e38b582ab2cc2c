"""The table of docs/results.md on attackers among ten clients of FedAvg, with and without norm clipping.

    python benchmarks/attackers/attackers.py --out runs/attackers [--seeds 3] [--rows ROW ...]

Generated texts, and for one row generated pictures and a network with batch normalisation. Runs that are complete are
not run again.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from polyfed import Experiment, run
from polyfed.runs.records import RunRecords
from runs import spread

PRESET = str(Path(__file__).with_suffix(".yaml"))
OFF = "aggregation.clip=null"
PICTURES = (
    "data.sources.items={name: scenes, train: 1200, validation: 100, test: 300, size: 32, difficulty: 0.0, "
    "columns: {image: image}}",
    "clients.client.task=classification",
    "clients.client.model={dim: 32, encoders: {image: {name: resnet, widths: [16, 32], depths: [1, 1], block: basic, "
    "view: {name: pixels, size: 32}}}}",
    "clients.client.partition={name: iid}",
)


@dataclass(frozen=True)
class Row:
    """Who attacks, and how."""

    shown: str
    attackers: int = 0
    falsehood: str = "none"
    claim: bool = False
    pictures: bool = False

    @property
    def overrides(self) -> list[str]:
        """Settings of its runs."""
        names = ", ".join(f"client-{k}" for k in range(self.attackers))
        claim = "true" if self.claim else "false"
        engine = f"{{name: attacks.Attackers, attackers: [{names}], falsehood: {self.falsehood}, claim: {claim}}}"
        return [f"run.engine={engine}", *(PICTURES if self.pictures else ())]


ROWS = {
    "honest": Row("nobody"),
    "nine": Row("nobody; one sends nothing", 1, "silent"),
    "eight": Row("nobody; two send nothing", 2, "silent"),
    "negative": Row("two send -3 times the weights", 2, "negative"),
    "huge": Row("two send norms of 0.9e6", 2, "huge"),
    "noise": Row("two send noise of the weights' norms", 2, "noise"),
    "negative_claim": Row("one sends -3 times the weights and joined with 10^12 samples", 1, "negative", True),
    "claim": Row("one joined with 10^12 samples and trains honestly", 1, "none", True),
    "turned": Row("two turn their updates round", 2, "turned"),
    "turned_far": Row("two turn their updates round, 3.5 times as long", 2, "turned_far"),
    "turned_claim": Row("one turns its update round and joined with 10^12 samples", 1, "turned", True),
    "pictures": Row("pictures, batch normalisation: nobody", pictures=True),
    "pictures_huge": Row("pictures, batch normalisation: two send norms of 0.9e6", 2, "huge", pictures=True),
}


def folder_of(out: Path, name: str, seed: int, *, bounded: bool) -> Path:
    """Of a run, which is made if it is not there."""
    folder = out / f"{name}-{'bounded' if bounded else 'free'}-{seed}"
    if not (folder / "report.md").exists():
        shutil.rmtree(folder, ignore_errors=True)
        overrides = [*ROWS[name].overrides, f"run.seed={seed}", *([] if bounded else [OFF])]
        run(Experiment.load(PRESET, overrides), folder)
        shutil.rmtree(folder / "checkpoints")
    return folder


def accuracies(folders: list[Path]) -> str:
    """Of the global models, on the test split; any client is asked for it."""
    judged = [RunRecords.load(folder).last("client-0").get("accuracy") for folder in folders]
    measured = [value for value in judged if value is not None]
    ruined = len(judged) - len(measured)
    lost = f"not finite in {ruined} of {len(judged)} runs" if ruined else ""
    return "; ".join(filter(None, [spread(measured) if measured else "", lost]))


def told(folders: list[Path], attackers: int) -> str:
    """How often attackers and honest clients were refused, shortened or capped, over all seeds."""
    names = {f"client-{k}" for k in range(attackers)}
    counts: dict[tuple[str, bool], int] = {}
    for folder in folders:
        for event in RunRecords.load(folder).events:
            key = event.incident, event.participant in names
            counts[key] = counts.get(key, 0) + 1
    words = {"client_excluded": "excluded", "update_shortened": "shortened", "weight_capped": "capped"}
    parts = [
        f"{'attackers' if guilty else 'honest'} {words[event]} {count} x"
        for (event, guilty), count in sorted(counts.items())
        if event in words
    ]
    return ", ".join(parts) or "-"


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| who attacks | accuracy without bounds | with bounds | without: events | with: events |\n" + "|---" * 5 + "|"
    )
    for name in options.rows:
        groups = [
            [folder_of(options.out, name, seed, bounded=bounded) for seed in range(options.seeds)]
            for bounded in (False, True)
        ]
        cells = [accuracies(group) for group in groups]
        events = [told(group, ROWS[name].attackers) for group in groups]
        print("| " + " | ".join([ROWS[name].shown, *cells, *events]) + " |", flush=True)


if __name__ == "__main__":
    main()
