"""What clients of a run kept: their models after the last step that the server accepted of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.analysis.opened import Where
from polyfed.core.device import resolve_device
from polyfed.core.errors import ConfigError, DataError, RunError, nearest
from polyfed.data.samples import Samples
from polyfed.federation.membership import Member
from polyfed.federation.population import Population
from polyfed.federation.state import StateStore, unflatten
from polyfed.models.model import Model
from polyfed.runs.experiment import Experiment
from polyfed.runs.folder import Checkpoint, RunFolder
from polyfed.runs.saved import moved, run_experiment, run_federation
from polyfed.wire.messages import StateVersion


@dataclass(frozen=True)
class KeptClients:
    """Clients of a run that keep a model between rounds, and everybody's data.

    Attributes:
        folder: of the run.
        experiment: its configuration.
        federation: data and models.
        labels: client id -> the step (round, phase) that its kept state is of, in client order.
        device: where models are put.
    """

    folder: Path
    experiment: Experiment
    federation: Population
    labels: Mapping[str, StateVersion]
    device: torch.device

    @classmethod
    def of(cls, run: Path, where: Where | None = None) -> KeptClients:
        """Those that had taken part by the last complete round.

        Raises:
            RunError: no run folder, or nobody has taken part yet.
            ConfigError: its clients keep no model, or live elsewhere; the device or a folder is not there.
        """
        where = where or Where()
        folder = RunFolder.existing(run)
        experiment = moved(run_experiment(run), where.data_dir, where.weights_dir)
        _require_kept(experiment, run)
        device = resolve_device(where.device or experiment.run.device)
        accepted = _accepted(folder)
        federation = run_federation(run, experiment)
        labels = {name: accepted[name] for name in federation.members if name in accepted}
        return cls(run, experiment, federation, labels, device)

    @property
    def name(self) -> str:
        """Name of the run: that of its folder."""
        return self.folder.resolve().name

    def member(self, client: str) -> Member:
        """A client that took part.

        Raises:
            ConfigError: there is none of that name, or it never took part.
        """
        if client not in self.labels:
            raise ConfigError(f"no client '{client}' took part in '{self.folder}'; {nearest(client, self.labels)}")
        return self.federation.members[client]

    def kept(self, client: str) -> dict[str, dict[str, Tensor]]:
        """Key -> named tensors that a client keeps.

        Raises:
            RunError: its state is missing or damaged.
        """
        return unflatten(StateStore(self.folder / "checkpoints" / "clients", 0).load(client, self.labels[client]))

    def model(self, client: str, kept: Mapping[str, Mapping[str, Tensor]] | None = None) -> Model:
        """A client's kept model, in evaluation mode, on the device; from ``kept`` if that is read already.

        Raises:
            RunError: its state is missing, damaged, or not of this model.
        """
        model = self.federation.client_model(self.member(client))
        try:
            model.load_state_dict(dict((kept or self.kept(client))["model"]))
        except (KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise RunError(f"the kept state of client '{client}' does not fit its model ({reason})") from error
        return model.to(self.device).eval()


@torch.no_grad()
def represented(
    model: Model, modality: str, samples: Samples, index: Int64[Tensor, " n"], batch: int, whose: str
) -> Float[Tensor, "n d"]:
    """Representations (unit norm) of some samples in one modality, on the CPU.

    Raises:
        DataError: one is not finite.
    """
    load, rows = samples.inputs[modality], samples.rows[modality][index]
    parts = [model.represent(modality, load(part).to(model.device)).float().cpu() for part in torch.split(rows, batch)]
    found = torch.cat(parts)
    if not bool(found.isfinite().all()):
        raise DataError(f"representations of '{modality}' by {whose} hold NaN or infinity: its model has diverged")
    return found


def one_of_each_item(items: Int64[Tensor, " n"]) -> Int64[Tensor, " k"]:
    """Positions of the first sample of every item: siblings share a picture and would count it several times."""
    values, inverse = torch.unique(items, return_inverse=True)
    first = torch.full((len(values),), len(items))
    return first.scatter_reduce(0, inverse, torch.arange(len(items)), "amin").sort().values


def _require_kept(experiment: Experiment, run: Path) -> None:
    algorithm = experiment.algorithm
    if "model" not in algorithm.keeps:
        raise ConfigError(
            f"clients of '{algorithm.component_name()}' keep no model in '{run}': each round they start from weights "
            "that the server sends; give a run of a method whose clients keep one, such as creamfl, fedafd or local"
        )
    if not experiment.clients:
        raise ConfigError(f"the clients of '{run}' live at other sites, and so do their models; give a simulated run")


def _accepted(folder: RunFolder) -> Mapping[str, StateVersion]:
    """StateVersion of the last accepted step of each client, by the newest readable checkpoint."""
    newest = next((found for found in folder.checkpoints() if isinstance(found, Checkpoint)), None)
    accepted: Mapping[str, Sequence[int]] = newest.facts["accepted"] if newest else {}
    if not accepted:
        raise RunError(f"no client of run '{folder.path}' has taken part in a complete round yet (polyfed resume)")
    return {client: (label[0], label[1]) for client, label in accepted.items()}
