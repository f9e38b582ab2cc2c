# ruff: noqa: E402 - skipped where packages are missing
"""DP-SGD: gradients of single samples against a loop, noise, batches, accounting, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

dp_accounting = pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
pytest.importorskip("opacus", reason="opacus is not installed")

import polyfed
from grids import mostly_slow
from misbehaving import contents, cut_short
from polyfed import Experiment
from polyfed.core.errors import ConfigError
from polyfed.core.randomness import isolated
from polyfed.federation.client import Protection
from polyfed.federation.participant import Participant
from polyfed.privacy.accounting import PrivacyCost
from polyfed.privacy.private_training import PerSampleGradients, PrivateTraining, training_cost
from polyfed.privacy.settings import SampleProtection
from polyfed.runs.opened import Run
from sessions import prepared, woken
from small_federations import Config, federation_for, one_classification, plain, topics, training
from tiny_networks import save

KEY = b"k" * 32
NOISY = {"samples": {"noise_multiplier": 1.0}, "metrics": "clear"}


def federation(**settings: Any) -> Config:
    """Two clients of 60 samples each that classify topics by DP-SGD, in batches of 20."""
    config = topics(name="fedavg")
    config["algorithm"]["local_epochs"] = 2
    config["data"]["sources"]["texts"] |= {"train": 120, "test": 60}
    config["clients"]["text"]["training"] = plain(0.5, 20)
    config["privacy"] = {"samples": {"noise_multiplier": 1.2, "clip": 0.5}, "metrics": "clear"} | settings
    config["run"] |= {"rounds": 2, "evaluate_clients": 1}
    return config


@pytest.fixture
def client(tmp_path: Path) -> Participant:
    return woken(prepared(federation(), tmp_path / "run"), "text-0")


def pictures(tiny: Config, encoder: Config, folder: Path) -> Participant:
    """A client of images with this encoder, without dropout."""
    del tiny["clients"]["paired"], tiny["server"]
    image = tiny["clients"]["image"]
    image["model"]["encoders"]["image"] = {**encoder, "view": {"name": "pixels", "size": 32}}
    if "weights" in encoder:
        tiny["data"]["weights_dir"] = str(save(encoder["weights"], folder / "weights").parent)
    tiny["privacy"] = NOISY
    return woken(prepared(tiny, folder / "images"), "image")


def gradients(client: Participant, samples: Any, index: int) -> dict[str, Tensor]:
    """Gradients of one sample alone, by autograd."""
    client.model.zero_grad(set_to_none=True)
    client.task_loss(samples.batch(torch.tensor([index]), None)).backward()
    trained = client.model.trained().items()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained}


def batches_of(patch: pytest.MonkeyPatch, client: Any, steps: int, seen: Callable[..., Any]) -> list[list[Any]]:
    """Observations of each batch that is drawn by two equal secrets and another; gradients are not computed."""
    drawn: list[Any] = []

    def spying(self: PerSampleGradients, index: Tensor, stream: torch.Generator) -> Any:
        drawn.append(seen(index, stream))
        return iter(())

    patch.setattr(PerSampleGradients, "clipped_sums", spying)
    patch.setattr(client.trainer(), "apply", lambda: None)
    for key in (KEY, KEY, b"o" * 32):
        training = PrivateTraining(SampleProtection(noise_multiplier=1.0), key, PrivacyCost(1.0, 1 / 3, steps))
        with isolated(0, "test"):
            training.fit(client, client.train, 1, steps)
    return [drawn[start : start + steps] for start in range(0, 3 * steps, steps)]


@pytest.mark.parametrize(
    "encoder",
    [
        None,
        {"name": "resnet", "norm": "group", "widths": [8], "depths": [1]},
        {"name": "hf", "weights": "vit", "adapter": "lora"},
        {"name": "hf", "weights": "mobilenet"},  # its batch norms stand still
    ],
)
def test_sums_are_of_gradients_of_single_samples_each_clipped_over_all_parameters(
    client: Any, encoder: Config | None, tiny: Config, tmp_path: Path
) -> None:
    if encoder is not None:
        client = pictures(tiny, encoder, tmp_path)
    # text: without its dropout; images: in training mode, where batch norms would mix samples
    client.model.train(encoder is not None)
    require_sums_by_sample(client)


def test_masks_are_learnt_image_by_image(tiny: Config, tmp_path: Path) -> None:
    tiny["clients"]["image"]["task"] = {"name": "segmentation", "dice_over": "picture", "widths": [4]}
    client = pictures(tiny, {"name": "resnet", "norm": "group", "widths": [8], "depths": [1]}, tmp_path)
    client.model.train(True)
    require_sums_by_sample(client)


LACKING = [{"imputation": "drop"}, {"imputation": "placeholder"}, {"modality": "image"}]


@pytest.mark.parametrize("more", mostly_slow(LACKING, LACKING[1]))
def test_samples_are_differentiated_with_those_that_lack_the_same(more: Config, tiny: Config, tmp_path: Path) -> None:
    del tiny["clients"]["image"], tiny["server"]
    tiny["data"]["sources"]["scenes"]["targets"] = {"label": "label"}
    task = {"name": "classification", "target": "label"} | more
    tiny["clients"]["paired"] |= {"task": task, "missing": {"rates": {"image": 0.3, "text": 0.4}}}
    tiny["clients"]["paired"]["model"]["encoders"]["image"]["norm"] = "group"
    tiny["privacy"] = NOISY
    client = woken(prepared(tiny, tmp_path / "run"), "paired-0")
    client.model.train(False)
    require_sums_by_sample(client)


MASKED = [("bert", {}), ("bert", {"last": 1}), ("mpnet", {}), ("modernbert", {}), ("clip", {"tower": "text"})]


@pytest.mark.parametrize(("weights", "more"), mostly_slow(MASKED, *MASKED[3:]))
def test_masks_of_pretrained_networks_do_not_look_at_a_whole_batch(weights: str, more: Config, tmp_path: Path) -> None:
    config, text = federation(), {"name": "hf", "weights": weights, "tower": more.pop("tower", "whole")}
    config["data"]["weights_dir"] = str(save(weights, tmp_path / "weights").parent)
    text |= {"adapter": {"name": "lora", "rank": 2, **more}, "view": {"length": 12}}
    config["clients"]["text"]["model"] = {"dim": 6, "encoders": {"text": text}}
    client = woken(prepared(config, tmp_path / "run"), "text-0")
    client.model.eval()
    require_sums_by_sample(client)


def require_sums_by_sample(client: Any) -> None:
    chosen = torch.tensor([3, 0, 7, 11])
    expected: dict[str, Tensor] = {}
    norms = []
    for index in chosen.tolist():
        own = gradients(client, client.train, index)
        norms.append(sum(float(value.square().sum()) for value in own.values()) ** 0.5)
        for name, value in own.items():
            expected[name] = expected.get(name, 0) + value * min(1.0, 0.4 / norms[-1])
    assert max(norms) > 0.4  # clipping acts
    client.model.zero_grad(set_to_none=True)
    one = PerSampleGradients(client, client.trainer(), client.train, SampleProtection(noise_multiplier=1.0, clip=0.4))
    names = {id(parameter): name for name, parameter in client.model.named_parameters()}
    seen = {names[id(p)]: total.clone() for p, total in one.clipped_sums(chosen, torch.Generator().manual_seed(0))}
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)
    empty = dict(one.clipped_sums(chosen[:0], torch.Generator()))
    assert all(float(total.abs().sum()) == 0 for total in empty.values())
    one.forget()
    kept = [(getattr(p, "grad_sample", None), p.summed_grad) for p in client.model.trained().values()]
    assert {*kept} == {(None, None)}


def test_noise_is_normal_at_the_multiplier_times_the_clip(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[Tensor] = []
    applied: list[Tensor] = []
    honest = PerSampleGradients.clipped_sums

    def spying(self: PerSampleGradients, index: Tensor, stream: torch.Generator) -> Any:
        made = list(honest(self, index, stream))
        sums.extend(total.clone() for _, total in made)
        return iter(made)

    monkeypatch.setattr(PerSampleGradients, "clipped_sums", spying)
    trainer = client.trainer()
    monkeypatch.setattr(trainer, "apply", lambda: applied.extend(p.grad.clone() for p in client.model.parameters()))
    protection = SampleProtection(noise_multiplier=3.0, clip=0.2)
    PrivateTraining(protection, KEY, training_cost(protection, 60, 20, 1, 1)).fit(client, client.train, 1, 1)
    # 20 samples are expected in a batch of which each sums to 0.2 at most
    noise = torch.cat([(20 * mean - total).flatten() for mean, total in zip(applied, sums, strict=True)])
    assert kstest(noise.double().numpy() / 0.6, "norm").pvalue > 0.01


def test_batches_are_poisson_samples_of_the_secret(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, other = batches_of(monkeypatch, client, 300, lambda index, stream: index)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    sizes = torch.tensor([len(index) for index in first]).double()
    assert float(sizes.mean()) == pytest.approx(20, abs=4 * (60 * 2 / 9 / 300) ** 0.5)
    assert float(sizes.var()) == pytest.approx(60 * 2 / 9, rel=0.35)  # a fixed size would have none


def test_augmentation_and_dropout_are_drawn_from_the_secret(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draws of a sample may shift those of its batch, so they are secret."""
    seeds = batches_of(monkeypatch, client, 4, lambda index, stream: (stream.initial_seed(), torch.initial_seed()))
    first, again, other = seeds
    assert first == again
    assert len({*first, *other}) == 8


@pytest.mark.parametrize(
    ("samples", "batch", "epochs", "steps", "expected"),
    [
        (60, 20, 2, None, (1 / 3, 6)),
        (61, 20, 1, None, (20 / 61, 4)),
        (60, 20, 1, 5, (1 / 3, 5)),
        (8, 20, 3, None, (1, 3)),
    ],
)
def test_what_a_round_of_training_costs(samples: int, batch: int, epochs: int, steps: Any, expected: Any) -> None:
    cost = training_cost(SampleProtection(noise_multiplier=1.5), samples, batch, epochs, steps)
    assert (cost.rate, cost.steps) == pytest.approx(expected)
    assert cost.noise == 1.5


def finished(config: Config, folder: Path) -> Run:
    return polyfed.run(Experiment.parse(config), folder, quiet=True)


@pytest.mark.slow
def test_epsilon_of_a_run_is_the_accountants(tmp_path: Path) -> None:
    run = finished(federation(), tmp_path / "run")
    accountant = dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.PoissonSampledDpEvent(1 / 3, dp_accounting.GaussianDpEvent(1.2))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, 2 * 2 * 3))  # rounds x epochs x steps
    expected = accountant.get_epsilon(1e-5)
    assert run.records.last("text-0", "privacy")["epsilon"] == pytest.approx(expected, rel=1e-3)
    other = finished(federation(neighbours="add_remove"), tmp_path / "other")
    moments = dp_accounting.rdp.RdpAccountant()
    moments.compose(dp_accounting.SelfComposedDpEvent(event, 12))
    looser = moments.get_epsilon(1e-5)  # a bound of the same size
    assert looser / 1.3 < other.records.last("text-0", "privacy")["epsilon"] < looser < expected
    assert "of which one lacks a sample" in other.records.warnings[0]
    assert "of which one has another sample in place of one" in run.records.warnings[0]


def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    undisturbed_run = finished(federation(secret=str(secret)), tmp_path / "whole")
    cut = cut_short(federation(secret=str(secret)), tmp_path / "cut")
    assert contents(polyfed.resume(cut, quiet=True)) == contents(undisturbed_run)
    assert contents(finished(federation(), tmp_path / "other")) != contents(undisturbed_run)


@pytest.mark.slow
def test_clipped_gradients_learn(tmp_path: Path) -> None:
    config = federation(samples={"noise_multiplier": 0.01, "clip": 1.0})
    config["data"]["sources"]["texts"]["train"] = 600
    config["clients"]["text"]["training"] = training("adam", 0.02, 32)
    config["run"]["rounds"] = 6
    assert finished(config, tmp_path / "run").records.last("text-0")["accuracy"] > 40  # chance is 17 %


@pytest.mark.parametrize("method", ["fedet", "fedmkd"])
def test_methods_whose_replies_are_made_of_the_model_run(tmp_path: Path, method: str) -> None:
    config = one_classification(federation_for(method))
    config["clients"] = {"text": config["clients"]["text"] | {"count": 2}}
    config["privacy"] = {"samples": {"noise_multiplier": 2.0}, "metrics": "clear"}
    config["run"]["rounds"] = 1
    assert finished(config, tmp_path / "run").records.last("server", "privacy")["epsilon"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": {"name": "fedprox"}}, "algorithm 'fedprox': its clients may learn of private data"),
        ({"privacy": NOISY | {"reply": {"weights": 1.0}}}, "give one of reply"),
        ({"privacy": NOISY | {"budget": {"epsilon": 1.0}}}, "epsilon is 1, but 2 replies of 'text-0' cost epsilon"),
    ],
)
def test_what_dp_sgd_does_not_cover_is_refused(tmp_path: Path, change: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        finished(federation() | change, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_losses_and_layers_that_mix_samples_are_refused_by_name(tiny: Config, tmp_path: Path) -> None:
    tiny["privacy"] = NOISY
    with pytest.raises(ConfigError, match="loss of paired-1's task 'retrieval' compares samples of a batch"):
        finished(tiny, tmp_path / "run")
    del tiny["clients"]["paired"]
    with pytest.raises(ConfigError, match=r"'encoders\.image\..*' of image's model is a batch norm, which"):
        finished(tiny, tmp_path / "run")


def test_a_method_cannot_train_in_another_way_or_longer_than_is_accounted_for(client: Any) -> None:
    protection = SampleProtection(noise_multiplier=1.0)
    client.protection = Protection(PrivateTraining(protection, KEY, training_cost(protection, 60, 20, 1, None)))
    with pytest.raises(ConfigError, match="the method trains by itself"):
        client.task_loss(client.train.batch(torch.arange(4), None))
    with pytest.raises(ConfigError, match="the method adds to it"):
        client.fit(client.train, epochs=1, regulariser=lambda model, batch: torch.zeros(()))
    with pytest.raises(ConfigError, match=r"accounts for 3 steps .* asks for 6"):
        client.fit(client.train, epochs=2)
    other = replace(client.train.subset(torch.arange(30)))
    with pytest.raises(ConfigError, match="or for other samples"):
        client.fit(other, epochs=1)
