"""Methods of prompts and of attention behind CLIP: a round of each by hand, privacy, refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import polyfed
from by_hand import all_trained, assert_mean, copies
from naive import averaged, global_models
from polyfed.aggregation.averagings.tensors import ByName, ByType
from polyfed.core.errors import ConfigError
from polyfed.privacy.private_training import PerSampleGradients
from polyfed.privacy.settings import SampleProtection
from polyfed.runs.experiment import Experiment
from polyfed.runs.session import Session
from sessions import first_cohort, prepared, woken
from small_federations import NAMED, named, plain_sgd, pretrained_folder


def session_of(folder: Path, **algorithm: Any) -> Session:
    return prepared(plain_sgd(named(**algorithm), batch_size=8), folder)


@pytest.mark.parametrize("method", NAMED)
def test_what_is_trained_is_averaged_over_clients_of_all_classes(method: str, tmp_path: Path) -> None:
    session = session_of(tmp_path, name=method)
    server = session.server
    start = copies(server.weights)
    assert len(start) == 2  # types, as the classes differ
    trained = all_trained(session, start)
    session.experiment.algorithm.round(server, first_cohort(session))
    for type_name, new in server.weights.items():
        assert all({"promptfl": "prompts", "fedclip": "project.0"}[method] in name for name in new)
        assert_mean(new, trained, {info.id: info.samples for info in server.clients})
        assert any(not torch.equal(value, start[type_name][name]) for name, value in new.items())


def test_by_name_is_a_mean_over_all_who_have_the_tensor() -> None:
    one, two, other = torch.ones(2), torch.full((2,), 4.0), torch.ones(3)
    old = {"a": {"x": torch.zeros(2), "y": torch.zeros(1)}, "b": {"x": torch.zeros(2)}, "c": {"x": torch.zeros(3)}}
    updates = [("a", {"x": one, "y": torch.ones(1)}, 2)]
    updates += [("b", {"x": two}, 1), ("c", {"x": other}, 5), ("b", {"x": one}, 0)]
    new = averaged(ByName(), global_models(old), updates)
    assert (new["a"]["x"].tolist(), new["b"]["x"].tolist()) == ([2.0, 2.0], [2.0, 2.0])
    assert (new["a"]["y"].tolist(), new["c"]["x"].tolist()) == ([1.0], [1.0] * 3)
    assert averaged(ByName(), global_models(old), [])["a"]["x"] is old["a"]["x"]
    with pytest.raises(ConfigError, match="sequential goes through clients of one type"):
        ByName(mean="sequential")


def test_prompts_of_two_networks_are_not_averaged(tmp_path: Path) -> None:
    config = named(name="promptfl")
    few = copy.deepcopy(config["clients"]["few"])
    for encoder in few["model"]["encoders"].values():
        encoder["weights"] = "clip"  # of the same sizes
    config["clients"]["few"] = few
    with pytest.raises(ConfigError, match=r"prompts' of clients few cannot be averaged with .* many-0, many-1: "):
        prepared(config, tmp_path)


def test_types_that_a_rule_averages_with_each_other_are_not_reported_as_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = session_of(tmp_path, name="promptfl").server
    monkeypatch.setattr("polyfed.federation.server.differently_named", lambda types: [list(types)])
    server.share_weights(ByName())
    assert not caplog.records
    server.share_weights(ByType())
    assert "are not averaged" in caplog.text


@pytest.mark.parametrize("method", NAMED)
def test_clipped_gradients_are_those_of_single_samples(method: str, tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    client = woken(session_of(tmp_path, name=method), "many-0")
    client.model.train()
    index, expected = torch.tensor([2, 0, 5]), dict[str, Tensor]()
    for one in index.tolist():
        client.model.zero_grad()
        client.task_loss(client.train.batch(torch.tensor([one]))).backward()
        own = {name: value.grad.clone() for name, value in client.model.trained().items() if value.grad is not None}
        norm = float(torch.stack([value.square().sum() for value in own.values()]).sum().sqrt())
        for name, value in own.items():
            expected[name] = expected.get(name, 0) + value * min(1.0, 0.01 / norm)
    protection = SampleProtection(noise_multiplier=1.0, clip=0.01)
    gradients = PerSampleGradients(client, client.trainer(), client.train, protection)
    names = {id(value): name for name, value in client.model.named_parameters()}
    for value, total in gradients.clipped_sums(index, torch.Generator().manual_seed(0)):
        torch.testing.assert_close(total, expected[names[id(value)]], atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("method", ["promptfl", pytest.param("fedclip", marks=pytest.mark.slow)])
def test_masked_sums_are_the_sums_of_clients_of_all_classes(method: str, tmp_path: Path) -> None:
    config = plain_sgd(named(name=method), batch_size=8)
    for group, count in (("many", 4), ("few", 3)):
        config["clients"][group] |= {"count": count}
    models = []
    for how in (None, "pairwise_masks"):
        session = prepared(config | {"aggregation": {"secure": how}}, tmp_path / str(how))
        session.experiment.algorithm.round(session.server, first_cohort(session))
        models.append(session.server.weights)
    many, few = models[0].values()
    assert all(torch.equal(value, few[name]) for name, value in many.items())  # the mean of both types
    torch.testing.assert_close(models[1], models[0], rtol=0, atol=1e-5)


def test_an_untrained_model_is_zero_shot_clip_and_its_twin(tmp_path: Path) -> None:
    import transformers

    config = named(adapters={"text": {"name": "prompts", "length": 2}})
    config["server"]["task"]["names"] = {"template": "a picture of a {}"}
    for group in config["clients"].values():
        group["task"]["names"] = config["server"]["task"]["names"]
    twin = Experiment.load(config | {"twin": {"kind": "zero-shot"}})
    assert twin.server is not None
    assert twin.server.model.encoders["text"].adapter is None
    run = polyfed.run(twin, tmp_path / "run", quiet=True)
    clip: Any = transformers.CLIPModel.from_pretrained(pretrained_folder() / "reader").eval()
    samples, saved = run.federation.server_samples("test"), run.server_model("last")
    ids = F.pad(saved.head.inputs, (0, 1))
    with torch.no_grad():
        pictures = samples.batch(torch.arange(len(samples))).inputs["image"]
        x = clip.visual_projection(clip.vision_model(pixel_values=pictures).pooler_output)
        t = clip.text_projection(clip.text_model(input_ids=ids).pooler_output)
    logits = F.normalize(x, dim=-1) @ F.normalize(t, dim=-1).T / 0.01
    loss = F.cross_entropy(logits, samples.targets["label"].long())
    assert run.metrics()["loss"] == pytest.approx(float(loss), rel=1e-4)
    assert "a picture of a plain circle" in saved.head.texts


def test_a_learnt_classifier_has_no_zero_shot_twin() -> None:
    config = named()
    for participant in (config["server"], *config["clients"].values()):
        participant["task"] = {key: value for key, value in participant["task"].items() if key != "names"}
        participant["model"]["encoders"].pop("text", None)
        participant["model"]["encoders"]["image"]["adapter"] = "attention"
    with pytest.raises(ConfigError, match=r"classifier of server\.task is new; classify by names"):
        Experiment.load(config | {"algorithm": "fedclip", "twin": {"kind": "zero-shot"}})
