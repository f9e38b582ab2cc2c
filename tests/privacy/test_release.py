"""Replies as they leave: clipping against plain loops, noise by its distribution, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from polyfed.core.errors import PayloadError
from polyfed.privacy.release import noisy, released, require_updates, rows_within
from polyfed.privacy.settings import ReplyProtection
from polyfed.wire.payload import Logits, Payload, Representations, TensorBundle, Weights

KEY = b"k" * 32
TINY = 1e-9  # noise that leaves no mark, so that clipping can be seen


def protection(**settings: Any) -> ReplyProtection:
    return ReplyProtection(**{"noise_multiplier": TINY, **settings})


def reply(name: str, bundle: TensorBundle, received: Payload | None = None, samples: int = 40, **settings: Any) -> Any:
    return released(Payload({name: bundle}), received or Payload(), protection(**settings), KEY, samples).fields[name]


def rows(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- weights


@pytest.mark.parametrize("scale", [0.01, 10.0])
def test_the_update_is_clipped_as_one_vector(scale: float) -> None:
    start = {"a": rows(3, 4), "b": rows(5, seed=1)}
    trained = {name: value + rows(*value.shape, seed=2, scale=scale) for name, value in start.items()}
    made = reply("weights", Weights(trained), Payload({"weights": Weights(start)}), weights=1.5)
    total = 0.0
    for name in start:
        for new, old in zip(trained[name].flatten().tolist(), start[name].flatten().tolist(), strict=True):
            total += (new - old) ** 2
    factor = min(1.0, 1.5 / total**0.5)
    for name in start:
        assert torch.allclose(made[name], start[name] + factor * (trained[name] - start[name]), atol=1e-6)


def test_noise_on_an_update_is_normal_and_as_strong_as_set() -> None:
    start = Weights({"a": torch.zeros(200, 100), "b": torch.zeros(300)})
    made = reply("weights", start, Payload({"weights": start}), weights=0.5, noise_multiplier=3.0)
    assert kstest(torch.cat([made["a"].flatten(), made["b"]]).double().numpy() / 1.5, "norm").pvalue > 0.01
    assert abs(float(torch.corrcoef(torch.stack([made["a"].flatten()[:300], made["b"]]))[0, 1])) < 0.2


def test_counters_go_back_as_they_came_and_variances_stay_positive() -> None:
    start = Weights({"n": torch.tensor(7), "bn.running_var": torch.full((500,), 0.01)})
    trained = Weights({"n": torch.tensor(9), "bn.running_var": torch.full((500,), 0.02)})
    made = reply("weights", trained, Payload({"weights": start}), weights=1.0, noise_multiplier=1.0)
    assert int(made["n"]) == 7
    assert float(made["bn.running_var"].min()) == 0.0


@pytest.mark.parametrize(
    "weights", [{"b": torch.ones(2)}, {}, {"a": torch.ones(3)}, {"a": torch.ones(2), "b": torch.ones(2)}]
)
def test_weights_are_those_that_were_sent(weights: dict[str, Tensor]) -> None:
    received = Payload({"weights": Weights({"a": torch.ones(2)})})
    with pytest.raises(PayloadError, match="the reply's 'weights' are not the weights that were sent to the client"):
        require_updates(Payload({"weights": Weights(weights)}), received)


# ---- rows


@pytest.mark.parametrize("kind", [Representations, Logits])
def test_each_row_is_clipped(kind: type[TensorBundle]) -> None:
    values = torch.cat([rows(6, 4, scale=5.0), 0.01 * rows(6, 4, seed=1), torch.zeros(1, 4)])
    made = reply("knowledge", kind({"x": values}), representations=0.7, logits=0.7)
    for row, own in zip(made["x"], values, strict=True):
        norm = sum(float(entry) ** 2 for entry in own) ** 0.5
        assert torch.allclose(row, own * min(1.0, 0.7 / norm) if norm else own, atol=1e-6)
    assert (rows_within(values, 0.7).norm(dim=1) <= 0.7).all()


def test_noise_on_rows_grows_with_the_root_of_their_number() -> None:
    bundle = Representations({"image": torch.zeros(300, 8), "text": torch.zeros(100, 8)}, order="p")
    made = reply("representations", bundle, representations=0.5, noise_multiplier=2.0)
    assert made.order == "p"
    # 2 x 0.5 x sqrt(400)
    assert kstest(torch.cat([made["image"].flatten(), made["text"].flatten()]).numpy() / 20.0, "norm").pvalue > 0.01


def test_votes_are_one_class_each_and_with_little_noise_the_right_one() -> None:
    scores = rows(50, 6, scale=3.0)
    made = reply("knowledge", Logits({"y": scores}), logits=4.0, votes=True)["y"]
    for row, own in zip(made.tolist(), scores.tolist(), strict=True):
        assert row == [4.0 if k == own.index(max(own)) else 0.0 for k in range(6)]


def test_votes_win_as_often_as_noise_lets_them() -> None:
    scores = torch.zeros(20_000, 2)
    scores[:, 1] = 1.0
    made = reply("knowledge", Logits({"y": scores}), logits=1.0, votes=True, noise_multiplier=1 / 20_000**0.5)["y"]
    # noise of deviation 1 on (0, 1): the second wins with probability Phi(1 / sqrt(2)) = 0.7602
    assert float(made[:, 1].mean()) == pytest.approx(0.7602, abs=0.01)


# ---- what is not covered


def test_what_is_not_covered_does_not_leave() -> None:
    with pytest.raises(PayloadError, match=r"'logits' in the reply \(scores\) has no clipping norm"):
        reply("logits", Logits({"y": torch.ones(2, 2)}), representations=1.0)


@pytest.mark.parametrize("fields", [{"loss": 0.3}, {"num_examples": 40, "steps": 3}])
def test_no_number_leaves_but_that_of_samples(fields: dict[str, Any]) -> None:
    with pytest.raises(PayloadError, match="in the reply is a number that differential privacy does not cover"):
        released(Payload(fields), Payload(), protection(weights=1.0), KEY, 40)


@pytest.mark.parametrize("claimed", [39, 40, 40.0])
def test_the_number_of_samples_is_the_one_that_the_client_joined_with(claimed: float) -> None:
    made = released(Payload({"num_examples": claimed}), Payload(), protection(weights=1.0), KEY, 40)
    assert made.fields == {"num_examples": 40}


def test_released_values_lie_on_a_grid_that_hides_low_bits() -> None:
    made = noisy(rows(1000).double(), 2.0, KEY) / (2.0 / 4096)
    assert torch.equal(made, made.round())
