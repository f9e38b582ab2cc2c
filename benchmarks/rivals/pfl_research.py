"""pfl-research: its FederatedAveraging over a SimulatedBackend in one process."""

from __future__ import annotations

from itertools import cycle

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from problem import Problem
from torch import Tensor, nn
from torch.nn import functional as F

problem = Problem.read()


class Network(nn.Module):
    """The network with the loss that pfl-research asks a model for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = problem.network()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(self.layers(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict:
        """None: nothing is evaluated."""
        return {}


class Lap(TrainingProcessCallback):
    """Callback that laps the clock."""

    def after_central_iteration(self, aggregate_metrics: Metrics, model: object, *, central_iteration: int) -> tuple:
        """A round has ended."""
        problem.clock.lap()
        return False, Metrics()


class Algorithm(FederatedAveraging):
    """FedAvg that evaluates no client, in the first round neither."""

    def get_next_central_contexts(self, *arguments: object) -> tuple:
        """The round's context, without evaluation."""
        contexts, model, metrics = super().get_next_central_contexts(*arguments)
        for context in contexts or ():
            object.__setattr__(context, "do_evaluation", False)
        return contexts, model, metrics


datasets = {
    k: Dataset((torch.from_numpy(problem.x[k]), torch.from_numpy(problem.y[k]))) for k in range(problem.clients)
}
users = cycle(range(problem.clients))
train = FederatedDataset(datasets.__getitem__, lambda: next(users))
network = Network()
model = PyTorchModel(
    network,
    lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, fused=True),
    torch.optim.SGD(network.parameters(), lr=1.0),
)
Algorithm().run(
    NNAlgorithmParams(
        central_num_iterations=problem.rounds,
        evaluation_frequency=problem.rounds,
        train_cohort_size=problem.clients,
        val_cohort_size=0,
    ),
    SimulatedBackend(training_data=train, val_data=train),
    model,
    NNTrainHyperParams(local_batch_size=None, local_num_epochs=problem.epochs, local_learning_rate=problem.rate),
    callbacks=[Lap()],
)
problem.finish([value.numpy() for value in network.layers.state_dict().values()], "pfl")
