"""Trackers: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import Field

from polyfed.core.untrusted import file_json
from polyfed.runs.sink import Record, Sink, SinkRun, SinkWriter, flat_settings, round_points


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
    """As a block of code in Markdown, which is what text is shown as."""
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

    Rounds are the x axis, as ``round``. Each process that worked on an offline run leaves one such folder, all with
    one run id; ``wandb sync`` joins them in the order of their start. Online needs ``wandb login`` or its API key.
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
        """Check that wandb is there; its error reports are off unless the environment says otherwise."""
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
        self.run.log({"round": records[0]["round"], **round_points(records, per_client=self.per_client)})

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


def _known(settings: Any) -> dict[str, Any]:
    return {name: value for name, value in _PRIVATE.items() if name in settings.model_fields or name[:2] != "x_"}


_T = TypeVar("_T")
_MOST_METRICS, _MOST_PARAMS = 1000, 100  # of one request
_MOST_TEXT = 500  # characters of a parameter's value that every backend takes
_UNFIT = re.compile(r"[^\w\-. :/]", re.ASCII)


class MLflow(Sink):
    """MLflow, by default in ``mlflow.db`` of the run folder: ``mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db``.

    Rounds are steps, the configuration becomes parameters. Which MLflow run it is stands in ``mlflow.json``, so a
    resumed run goes on in it. Names are spelt without what MLflow does not allow (``r@1`` is ``r1``).
    """

    short_name: ClassVar[str] = "mlflow"
    pip_extra: ClassVar[str] = "mlflow"

    tracking_uri: str | None = Field(
        default=None, min_length=1, description="server or database; None: a file in the run folder"
    )
    experiment: str = Field(default="polyfed", min_length=1, description="experiment that the run appears in")

    @property
    def packages(self) -> tuple[str, ...]:
        return ("mlflow",) if self.tracking_uri else ("mlflow", "sqlalchemy", "alembic")

    def require(self) -> None:
        """Check that MLflow is there; its usage reports are off unless the environment says otherwise."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        super().require()

    def open(self, run: SinkRun) -> SinkWriter:
        """Create the MLflow run, or go on with the one that ``mlflow.json`` names."""
        logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)  # else it logs each table it creates
        mlflow: Any = importlib.import_module("mlflow")
        uri = self.tracking_uri or f"sqlite:///{(run.folder / 'mlflow.db').resolve()}"
        client = mlflow.MlflowClient(tracking_uri=uri)
        note = run.folder / "mlflow.json"
        if note.is_file():
            identity = str(file_json(note.read_text(encoding="utf-8"))["run_id"])
            client.update_run(identity, status="RUNNING")
        else:
            identity = self._created(client, run)
            note.write_text(json.dumps({"tracking_uri": self.tracking_uri, "run_id": identity}) + "\n", "utf-8")
        return _MLflowWriter(client, identity, self.per_client)

    def _created(self, client: Any, run: SinkRun) -> str:
        """Id of a new MLflow run with the configuration as its parameters."""
        entities: Any = importlib.import_module("mlflow.entities")
        existing = client.get_experiment_by_name(self.experiment)
        # a server has a place for bundles; the default of a local file would be below the working directory
        place = {} if self.tracking_uri else {"artifact_location": (run.folder / "mlflow").resolve().as_uri()}
        experiment = existing.experiment_id if existing else client.create_experiment(self.experiment, **place)
        tags = {"polyfed.run": run.run_id}
        identity = str(client.create_run(str(experiment), run_name=run.name, tags=tags).info.run_id)
        for batch in _batches(flat_settings(run.config).items(), _MOST_PARAMS):
            client.log_batch(identity, params=[entities.Param(fit(name), str(v)[:_MOST_TEXT]) for name, v in batch])
        return identity


@dataclass(frozen=True)
class _MLflowWriter(SinkWriter):
    client: Any
    identity: str
    per_client: bool

    def write(self, records: Sequence[Record]) -> None:
        metric = importlib.import_module("mlflow.entities").Metric
        points = round_points(records, per_client=self.per_client)
        now, step = int(time.time() * 1000), records[0]["round"]
        for batch in _batches(points.items(), _MOST_METRICS):
            self.client.log_batch(self.identity, metrics=[metric(fit(n), v, now, step) for n, v in batch])

    def close(self, failed: bool) -> None:
        self.client.set_terminated(self.identity, "FAILED" if failed else "FINISHED")


def fit(name: str) -> str:
    """A name as MLflow allows it: at most 250 characters, ``@`` left out, others it does not take as ``_``."""
    return _UNFIT.sub("_", name.replace("@", ""))[:250]


def _batches(items: Iterable[_T], most: int) -> Iterator[list[_T]]:
    left = iter(items)
    while batch := list(islice(left, most)):
        yield batch
