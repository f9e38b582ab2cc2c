"""Methods of prompts and of attention behind CLIP: a round of each by hand, personal attention, privacy, refusals."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import polyfed
from by_hand import assert_mean, copies, model_of, plain_training
from polyfed.aggregation.averagings.by_name import ByName
from polyfed.aggregation.averagings.by_type import ByType
from polyfed.core.errors import ConfigError
from polyfed.models.adapters.prompts import GeneratedPrompts
from polyfed.privacy.private_training import PerSampleGradients
from polyfed.privacy.settings import SampleProtection
from polyfed.runs.experiment import Experiment
from polyfed.runs.protection import require_private
from polyfed.runs.session import Session
from sessions import first_cohort, prepared, woken
from small_federations import NAMED, Config, named, pixels, plain_sgd, pretrained_folder

PART = {"promptfl": "prompts", "pfedprompt": "prompts", "fedtpg": "prompts.", "fedclip": "project.0"}


def session_of(folder: Path, **algorithm: Any) -> Session:
    return prepared(plain_sgd(named(**algorithm), batch_size=8), folder)


@pytest.mark.parametrize("method", [name for name in NAMED if name != "pfedprompt"])
def test_what_is_trained_is_averaged_over_clients_of_all_classes(method: str, tmp_path: Path) -> None:
    session = session_of(tmp_path, name=method)
    server = session.server
    start = copies(server.weights)
    assert len(start) == 2  # types, as the classes differ
    trained = {info.id: plain_training(session, info.id, start[server.type_of(info)]) for info in server.clients}
    session.experiment.algorithm.round(server, first_cohort(session))
    for kind, new in server.weights.items():
        assert all(PART[method] in name for name in new)
        assert_mean(new, trained, {info.id: info.samples for info in server.clients})
        assert any(not torch.equal(value, start[kind][name]) for name, value in new.items())


def test_by_name_is_a_mean_over_all_who_have_the_tensor() -> None:
    one, two, other = torch.ones(2), torch.full((2,), 4.0), torch.ones(3)
    old = {"a": {"x": torch.zeros(2), "y": torch.zeros(1)}, "b": {"x": torch.zeros(2)}, "c": {"x": torch.zeros(3)}}
    updates = [
        ("a", {"x": one, "y": torch.ones(1)}, 2),
        ("b", {"x": two}, 1),
        ("c", {"x": other}, 5),
        ("b", {"x": one}, 0),
    ]
    new = ByName().average(old, {}, iter(updates), {})
    assert (new["a"]["x"].tolist(), new["b"]["x"].tolist()) == ([2.0, 2.0], [2.0, 2.0])
    assert (new["a"]["y"].tolist(), new["c"]["x"].tolist()) == ([1.0], [1.0] * 3)
    assert ByName().average(old, {}, iter([]), {})["a"]["x"] is old["a"]["x"]
    with pytest.raises(ConfigError, match="sequential goes through clients of one type"):
        ByName(mean="sequential")


def test_prompts_of_two_networks_are_not_averaged(tmp_path: Path) -> None:
    config = named(name="promptfl")
    few = copy.deepcopy(config["clients"]["few"])
    for encoder in few["model"]["encoders"].values():
        encoder["weights"] = "clip"  # of the same sizes
    config["clients"]["few"] = few
    with pytest.raises(
        ConfigError, match=r"prompts' of clients few cannot be averaged with .* of clients many-0, many-1: "
    ):
        prepared(config, tmp_path)


def test_types_that_a_rule_averages_with_each_other_are_not_said_to_be_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = session_of(tmp_path, name="promptfl").server
    monkeypatch.setattr("polyfed.federation.server.differently_named", lambda types: [list(types)])
    server.share_weights(ByName())
    assert not caplog.records
    server.share_weights(ByType())
    assert "are not averaged" in caplog.text


def test_a_generator_attends_over_what_the_frozen_network_makes_of_the_names(tmp_path: Path) -> None:
    import transformers

    session = session_of(tmp_path, name="fedtpg")
    model = model_of(session, "few", session.server.weights_for(session.server.clients[2]))
    generator: Any = next(part for part in model.modules() if isinstance(part, GeneratedPrompts))
    (head,) = model.heads.values()
    clip: Any = transformers.CLIPModel.from_pretrained(pretrained_folder() / "reader").eval()
    with torch.no_grad():
        ids = F.pad(head.inputs, (0, 1))  # type: ignore[arg-type]  # a text ends where it is padded
        found = clip.text_projection(clip.text_model(input_ids=ids).pooler_output)
        torch.testing.assert_close(generator.told, F.normalize(found, dim=-1))
        told = generator.norm_told(generator.told)
        layers = zip(
            generator.attention.in_proj_weight.chunk(3), generator.attention.in_proj_bias.chunk(3), strict=True
        )
        inputs = (generator.norm(generator.queries), told, told)
        q, k, v = (F.linear(x, *layer) for x, layer in zip(inputs, layers, strict=True))
        attended = torch.empty_like(generator.queries)
        for part in torch.arange(8).split(4):  # two heads of four features
            for row in range(2):
                scores = torch.stack([q[row, part] @ key[part] for key in k]) / math.sqrt(4)
                attended[row, part] = sum(w * value[part] for w, value in zip(scores.softmax(0), v, strict=True))
        attended = generator.attention.out_proj(attended)
        expected = attended + generator.mlp[2](torch.relu(generator.mlp[0](generator.norm_attended(attended))))
        torch.testing.assert_close(generator(), expected)


def test_the_attention_of_a_client_adds_what_its_own_samples_say(tmp_path: Path) -> None:
    session = session_of(tmp_path, name="pfedprompt", alpha=2.0, beta=3.0)
    algorithm: Any = session.experiment.algorithm
    client = woken(session, "few")
    weights = session.server.weights_for(client.info)
    client.load_weights(weights)
    train, test = (client.represent(samples)["image"] for samples in (client.train, client.test))  # type: ignore[arg-type]
    head: Any = client.head
    texts = head.against(client.model).vectors.detach()
    labels = client.train.targets["topic"]
    scores = torch.zeros(len(test), head.classes)
    for place, x in enumerate(test):
        for number in range(head.classes):
            near = [math.exp(-3.0 * (1 - float(x @ f))) for f, y in zip(train, labels, strict=True) if y == number]
            scores[place, number] = float(x @ texts[number]) / 0.1 + 2.0 * sum(near)
    own_head = algorithm.own_head(client)
    torch.testing.assert_close(own_head(test), scores, atol=1e-4, rtol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(own_head(test), scores, atol=1e-4, rtol=1e-4)
    found = algorithm.assess_global(client, weights).payload.scalars
    truth = client.test.targets["topic"].long()  # type: ignore[union-attr]
    assert found["loss"] == pytest.approx(float(F.cross_entropy(scores, truth)), rel=1e-4)
    assert found["loss"] != pytest.approx(client.evaluate(client.test)["loss"], rel=1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [name for name in NAMED if name != "pfedprompt"])
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


def test_noise_in_training_is_refused_where_metrics_tell_of_training_samples() -> None:
    pytest.importorskip("opacus")
    privacy = {"samples": {"noise_multiplier": 1.0, "clip": 1.0}, "metrics": "clear"}
    require_private(Experiment.parse(named(name="promptfl") | {"privacy": privacy}))
    with pytest.raises(ConfigError, match=r"privacy\.samples: clients of 'pfedprompt' may learn of private data"):
        require_private(Experiment.parse(named(name="pfedprompt") | {"privacy": privacy}))


@pytest.mark.parametrize("method", NAMED)
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
    for kind, tensors in models[0].items():
        for name, value in tensors.items():
            torch.testing.assert_close(models[1][kind][name], value, rtol=0, atol=1e-5)


def test_an_untrained_model_is_zero_shot_clip_and_its_twin(tmp_path: Path) -> None:
    import transformers

    config = named(adapters={"text": {"name": "prompts", "length": 2}})
    config["server"]["task"]["names"] = {"template": "a picture of a {}"}
    for group in config["clients"].values():
        group["task"]["names"] = config["server"]["task"]["names"]
    twin = Experiment.load(config | {"twin": {"kind": "zero-shot"}})
    assert twin.server is not None
    assert twin.server.model.encoders["text"].adapter is None  # type: ignore[attr-defined]
    run = polyfed.run(twin, tmp_path / "run", quiet=True)
    clip: Any = transformers.CLIPModel.from_pretrained(pretrained_folder() / "reader").eval()
    samples, saved = run.federation.server_samples("test"), run.server_model("last")
    ids = F.pad(saved.head.inputs, (0, 1))  # type: ignore[union-attr, arg-type]
    with torch.no_grad():
        pictures = samples.batch(torch.arange(len(samples))).inputs["image"]
        x = clip.visual_projection(clip.vision_model(pixel_values=pictures).pooler_output)
        t = clip.text_projection(clip.text_model(input_ids=ids).pooler_output)
    logits = F.normalize(x, dim=-1) @ F.normalize(t, dim=-1).T / 0.01
    loss = F.cross_entropy(logits, samples.targets["label"].long())
    assert run.metrics()["loss"] == pytest.approx(float(loss), rel=1e-4)
    assert "a picture of a plain circle" in saved.head.texts  # type: ignore[union-attr]


def test_a_learnt_classifier_has_no_zero_shot_twin() -> None:
    config = named()
    for participant in (config["server"], *config["clients"].values()):
        participant["task"] = {key: value for key, value in participant["task"].items() if key != "names"}
        participant["model"]["encoders"].pop("text", None)
        participant["model"]["encoders"]["image"]["adapter"] = "attention"
    with pytest.raises(ConfigError, match=r"classifier of server\.task is new; classify by names"):
        Experiment.load(config | {"algorithm": "fedclip", "twin": {"kind": "zero-shot"}})


PLAIN: Config = {"image": {"name": "lora"}}


@pytest.mark.parametrize(
    ("method", "adapters", "message"),
    [
        ("promptfl", PLAIN, "trains adapters 'prompts', and a model of clients.many has none"),
        ("fedclip", PLAIN, "trains adapters 'attention', and a model of clients.many has none"),
        ("fedtpg", {"text": {"name": "prompts", "length": 2}}, "trains adapters 'prompt_generator', and a"),
        (
            "fedtpg",
            {"text": {"name": "prompt_generator", "heads": 3}},
            r"adapter\.heads is 3, and does not divide .* 8",
        ),
        ("fedtpg", {"image": {"name": "prompt_generator"}}, "prompts of texts; give it to the encoder of texts"),
    ],
)
def test_models_without_what_is_averaged_are_refused(
    method: str, adapters: Config, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(named(adapters=adapters, name=method), tmp_path)


@pytest.mark.parametrize("method", ["pfedprompt", "fedtpg"])
def test_methods_of_names_need_a_task_with_names(method: str, tmp_path: Path) -> None:
    config = named(name=method)
    config["data"]["sources"]["pictures"]["columns"]["text"] = "captions"
    for participant in (config["server"], config["clients"]["many"]):
        participant["task"] = {"name": "classification", "target": "label", "modality": "image"}
        participant["model"]["encoders"]["image"]["view"] = pixels()
    config["clients"].pop("few")
    with pytest.raises(ConfigError, match=r"set task\.names of a\s+classification"):
        prepared(config, tmp_path)
