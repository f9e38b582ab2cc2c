"""FedLab: its standalone pipeline with the serial SGD trainer and the synchronous server."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import ClassVar

import torch
from problem import Problem
from torch.utils.data import DataLoader, TensorDataset


class Nothing(ModuleType):
    """FedLab imports torchvision for data sets that are not used here; no build of it fits every torch."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> object:
        """Any name."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for name in ("", ".transforms", ".transforms.functional", ".datasets", ".datasets.utils", ".models", ".utils"):
    sys.modules[f"torchvision{name}"] = Nothing(f"torchvision{name}")

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer  # noqa: E402
from fedlab.contrib.algorithm.basic_server import SyncServerHandler  # noqa: E402
from fedlab.core.standalone import StandalonePipeline  # noqa: E402

problem = Problem.read()


class Clients:
    """Data as FedLab asks for them."""

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader:
        """All of a client's samples."""
        tensors = TensorDataset(torch.from_numpy(problem.x[client]), torch.from_numpy(problem.y[client]))
        return DataLoader(tensors, batch_size=batch_size)


class Pipeline(StandalonePipeline):
    """The pipeline that tells the clock."""

    def evaluate(self) -> None:
        """A round has ended."""
        problem.clock.lap()


trainer = SGDSerialClientTrainer(problem.network(), problem.clients)
trainer.setup_dataset(Clients())
trainer.setup_optim(problem.epochs, problem.x.shape[1], problem.rate)
trainer.optimizer = torch.optim.SGD(trainer._model.parameters(), lr=problem.rate, fused=True)
handler = SyncServerHandler(problem.network(), problem.rounds, 1.0)
Pipeline(handler, trainer).main()
problem.finish([value.detach().numpy() for value in handler._model.state_dict().values()], "fedlab")
