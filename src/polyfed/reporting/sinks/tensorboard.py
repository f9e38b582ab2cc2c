"""TensorBoard."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml

from polyfed.runs.sink import Record, Sink, SinkRun, SinkWriter, round_points


class TensorBoard(Sink):
    """Event files in ``tensorboard/`` of the run folder: ``tensorboard --logdir RUN/tensorboard`` shows them.

    Rounds are steps. A resumed run hides what an interrupted round had written before.
    """

    pip_extra: ClassVar[str] = "tensorboard"

    @property
    def packages(self) -> tuple[str, ...]:
        return ("tensorboard", "torch.utils.tensorboard")

    def open(self, run: SinkRun) -> SinkWriter:
        folder = run.folder / "tensorboard"
        purge = run.resumed_from + 1 if folder.exists() else None
        board = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder), purge_step=purge)
        board.add_text("config", _verbatim(yaml.safe_dump(dict(run.config), sort_keys=False)), run.resumed_from)
        board.flush()
        return _Writer(board, self.per_client)


@dataclass(frozen=True)
class _Writer(SinkWriter):
    board: Any
    per_client: bool

    def write(self, records: Sequence[Record]) -> None:
        points = round_points(records, per_client=self.per_client)
        for name, value in points.values.items():
            self.board.add_scalar(name, value, points.round)
        for name, reason in points.events.items():
            self.board.add_text(f"event/{name}", _verbatim(reason), points.round)
        self.board.flush()  # the reader of a long run must not wait for a full queue

    def close(self, failed: bool) -> None:
        self.board.close()


def _verbatim(text: str) -> str:
    """As a block of code in Markdown, which is what text is shown as."""
    return "\n".join(f"    {line}" for line in text.splitlines())
