"""The image of a run in the README: ``python scripts/progress_picture.py RUN``, of a run of scenes-demo.

It shows the display at the begin of the last round but one, replayed from the run's own events.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from polyfed.reporting.progress import RunState, run_display
from polyfed.runs.events import PROGRESS, follow

OUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "progress.svg"
WIDTH = 100
SHARE = 0.8  # of the events: within the last round but one, while clients train


def main(run: Path) -> None:
    """Write the image."""
    events = [json.loads(line) for line in (run / PROGRESS).read_text().splitlines()]
    events = events[: int(SHARE * len(events))]
    since = time.time() - events[-1]["at"]  # moved to now, as times are shown relative to it
    state = RunState()
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / PROGRESS
        part.write_text("".join(json.dumps(event | {"at": event["at"] + since}) + "\n" for event in events))
        follow(part, state, run, finished=lambda: True)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(run_display(state))
    console.save_svg(str(OUT), title="polyfed run scenes-demo")
    print(f"written: {OUT}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
