"""Trackers: TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import yaml
from pydantic import Field

from polyfed.runs.sink import Record, Sink, SinkRun, SinkWriter, round_points


class TensorBoard(Sink):
    """Event files in ``tensorboard/`` of the run folder: ``tensorboard --logdir RUN/tensorboard`` shows them.

    Rounds are steps. A resumed run hides what an interrupted round had written before.
    """

    short_name: ClassVar[str] = "tensorboard"
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
        return _BoardWriter(board, self.per_client)


@dataclass(frozen=True)
class _BoardWriter(SinkWriter):
    board: Any
    per_client: bool

    def write(self, records: Sequence[Record]) -> None:
        for name, value in round_points(records, per_client=self.per_client).items():
            self.board.add_scalar(name, value, records[0]["round"])
        self.board.flush()  # the reader of a long run must not wait for a full queue

    def close(self, failed: bool) -> None:
        self.board.close()


def _verbatim(text: str) -> str:
    """A block of code in Markdown, as text is rendered as Markdown."""
    return "\n".join(f"    {line}" for line in text.splitlines())


# metrics and configuration are all that leaves: no code, git state, console output, packages, host or usage of it
_PRIVATE = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "save_code": False,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class WandB(Sink):
    """Weights & Biases, by default offline: ``wandb sync RUN/wandb/offline-run-*`` uploads the run when you want.

    Rounds are the steps, and the x axis, as ``round``. Each process that worked on an offline run leaves one such
    folder, all with one run id; ``wandb sync`` joins them in the order of their start. Online needs ``wandb login`` or
    its API key.
    """

    short_name: ClassVar[str] = "wandb"
    pip_extra: ClassVar[str] = "wandb"

    project: str = Field(default="polyfed", min_length=1, description="project that the run appears in")
    entity: str | None = Field(default=None, description="user or team; None: the default of your account")
    mode: Literal["offline", "online"] = Field(default="offline", description="online sends each round as it ends")

    @property
    def packages(self) -> tuple[str, ...]:
        return ("wandb",)

    def require(self) -> None:
        """Check that wandb is there; its error reports are off unless the environment enables them."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when wandb is imported
        super().require()

    def open(self, run: SinkRun) -> SinkWriter:
        """Start the run, or resume the one with this id."""
        wandb: Any = importlib.import_module("wandb")
        opened = wandb.init(
            project=self.project,
            entity=self.entity,
            name=run.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.folder.resolve()),
            config=dict(run.config),
            reinit="create_new",  # several runs of one process do not end each other
            settings=wandb.Settings(mode=self.mode, **_known(wandb.Settings)),
        )
        opened.define_metric("round")
        opened.define_metric("*", step_metric="round")
        return _WandBWriter(opened, self.per_client)


@dataclass(frozen=True)
class _WandBWriter(SinkWriter):
    run: Any
    per_client: bool

    def write(self, records: Sequence[Record]) -> None:
        number = records[0]["round"]
        # its own step too, which a process that resumes the run would count from 0; a step given waits unless committed
        self.run.log({"round": number, **round_points(records, per_client=self.per_client)}, step=number, commit=True)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


def _known(settings: Any) -> dict[str, Any]:
    return {name: value for name, value in _PRIVATE.items() if name in settings.model_fields or name[:2] != "x_"}
