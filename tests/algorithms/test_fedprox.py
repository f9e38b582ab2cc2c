"""FedProx: two rounds by hand, and the pull towards the received model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from by_hand import assert_mean, copies, plain_training
from polyfed.algorithms.fedprox import FedProx
from polyfed.data.samples import Batch
from polyfed.models.model import Model
from sessions import first_cohort, prepared
from small_federations import Config, plain_sgd, transformers


@pytest.fixture(params=["tiny", pytest.param("transformers", marks=pytest.mark.slow)])
def config(request: pytest.FixtureRequest, tiny: Config) -> Config:
    config = tiny if request.param == "tiny" else transformers()
    config["algorithm"] = {"name": "fedprox", "local_epochs": 1, "mu": 5.0}
    return config


def proximal(start: dict[str, Tensor], norm: str, mu: float) -> Callable[[Model, Batch], Tensor]:
    """mu / 2 x the sum over tensors of the norm of w - W, squared or not, to be differentiated by autograd."""

    def extra(model: Model, batch: Batch) -> Tensor:
        drifts = [value - start[name] for name, value in model.named_parameters()]
        return mu / 2 * sum((d.square().sum() if norm == "squared" else d.norm() for d in drifts), torch.zeros(()))

    return extra


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "mu"), [("squared", 20.0), ("plain", 2.0)])
def test_two_rounds_equal_a_plain_loop(
    config: Config, tmp_path: Path, norm: str, mu: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config["algorithm"] |= {"norm": norm, "mu": mu, "local_epochs": 2}
    # the norm of a drift near zero enlarges last bits, in which processors and convolutions of oneDNN differ
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    session = prepared(plain_sgd(config, batch_size=40), tmp_path)
    server = session.server
    for _ in range(2):  # of the same draws: clients keep nothing
        start = copies(server.weights)
        session.experiment.algorithm.round(server, first_cohort(session))
        for type_name, members in server.types.items():
            samples, plain = {info.id: info.samples for info in members.clients}, proximal(start[type_name], norm, 0.0)
            for extra, same in ((proximal(start[type_name], norm, mu), True), (plain, False)):
                trained = {
                    client: plain_training(session, client, start[type_name], epochs=2, extra=extra)
                    for client in samples
                }
                with nullcontext() if same else pytest.raises(AssertionError):  # the term matters
                    assert_mean(server.weights[type_name], trained, samples, 1e-4 if norm == "squared" else 2e-3)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3, 1e3])
def test_the_pull_is_finite_and_that_of_the_norm(scale: float) -> None:
    drift = scale * torch.tensor([3.0, -4.0])
    assert torch.equal(FedProx().pull([drift])[0], drift)
    (pull,) = FedProx(norm="plain").pull([drift])
    assert torch.isfinite(pull).all()
    assert float(pull.norm()) == pytest.approx(0.0 if scale < 1e-20 else 0.5)
