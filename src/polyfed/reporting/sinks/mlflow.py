"""MLflow."""

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
from typing import Any, ClassVar, TypeVar

from pydantic import Field

from polyfed.core.untrusted import file_json
from polyfed.runs.sink import Record, Sink, SinkRun, SinkWriter, flat_settings, round_points

_T = TypeVar("_T")
_MOST_METRICS, _MOST_PARAMS = 1000, 100  # of one request
_MOST_TEXT = 500  # characters of a parameter's value that every backend takes
_UNFIT = re.compile(r"[^\w\-. :/]", re.ASCII)


class MLflow(Sink):
    """MLflow, by default in ``mlflow.db`` of the run folder: ``mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db``.

    Rounds are steps, the configuration becomes parameters. Which MLflow run it is stands in ``mlflow.json``, so a
    resumed run goes on in it. Names are spelt without what MLflow does not allow (``r@1`` is ``r1``).
    """

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
        logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)  # else it tells of each table it creates
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
        return _Writer(client, identity, self.per_client)

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
class _Writer(SinkWriter):
    client: Any
    identity: str
    per_client: bool

    def write(self, records: Sequence[Record]) -> None:
        metric = importlib.import_module("mlflow.entities").Metric
        points = round_points(records, per_client=self.per_client)
        now = int(time.time() * 1000)
        for batch in _batches(points.values.items(), _MOST_METRICS):
            self.client.log_batch(self.identity, metrics=[metric(fit(n), v, now, points.round) for n, v in batch])
        for name, reason in points.events.items():
            self.client.set_tag(self.identity, fit(f"event.{points.round}.{name}"), reason[:_MOST_TEXT])

    def close(self, failed: bool) -> None:
        self.client.set_terminated(self.identity, "FAILED" if failed else "FINISHED")


def fit(name: str) -> str:
    """A name as MLflow allows it: at most 250 characters, ``@`` left out, others it does not take as ``_``."""
    return _UNFIT.sub("_", name.replace("@", ""))[:250]


def _batches(items: Iterable[_T], most: int) -> Iterator[list[_T]]:
    left = iter(items)
    while batch := list(islice(left, most)):
        yield batch
