"""Prompts: those of texts are as good as words, or peft's; those of images are VPT's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import quiet
from polyfed.data.view import DataContext, InputSpec
from polyfed.data.views.tokens import Tokens
from polyfed.models.adapters.adapter import prompts_of
from polyfed.models.encoders.hf import HF
from polyfed.models.frozen import frozen_tensors
from polyfed.models.trunks import start_at_last
from tiny_networks import LAYERS, ROOM, SIZES, WIDTH, WORDS, save
from tiny_networks import PICTURES as TINY_PICTURES

PICTURES = InputSpec((3, 32, 32))
TEXTS = InputSpec((8,), tuple(WORDS), pad=0)
IDS = torch.tensor([[2, 7, 8, 29], [2, 9, 29, 0]])
ADDED = [4, 5]  # w1 w2
BEITS = {
    "relative": {"use_relative_position_bias": True, "use_mean_pooling": False},
    "shared": {"use_shared_relative_position_bias": True, "use_mean_pooling": False},
    "mean": {"use_mean_pooling": True},
}
READERS = ["bert", "roberta", "modernbert", "distilbert", "mpnet", "clip", "siglip"]


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> DataContext:
    folder = tmp_path_factory.mktemp("weights")
    for name in (*READERS, "vit", "deit", "dinov2", "mobilenet", "beit"):
        save(name, folder)
    for name, settings in BEITS.items():
        save(name, folder, hf.BeitModel(hf.BeitConfig(**SIZES, **TINY_PICTURES, **settings)).eval())
    return DataContext(folder / "cache", folder)


def encoder(weights: str, tower: str = "", **adapter: Any) -> HF:
    towers = {"tower": tower or "text"} if weights in ("clip", "siglip") else {}
    given: Any = {"weights": weights, "view": "native", **towers}
    return HF(**given | ({"adapter": {"name": "prompts", "length": 2} | adapter} if adapter is not None else {}))


def trunk(weights: str, spec: InputSpec, context: DataContext, tower: str = "", **adapter: Any) -> Any:
    built: Any = encoder(weights, tower, **adapter).build(5, spec, context)
    return built.trunk.eval()


def spec_of(weights: str) -> InputSpec:
    return InputSpec(TEXTS.shape, TEXTS.vocabulary, pad=29 if weights == "clip" else 0)


@pytest.mark.parametrize(("place", "begins"), [("behind", True), ("behind", False), ("front", True)])
@pytest.mark.parametrize("weights", READERS)
def test_prompts_that_are_words_are_those_words(weights: str, place: str, begins: bool, context: DataContext) -> None:
    """Padding, the end of a text, positions and pooling are those of the longer text."""
    spec, at = replace(spec_of(weights), begins=begins), int(place == "behind" and begins)
    ids = IDS.where(IDS != 0, spec.pad)
    longer = torch.cat([ids[:, :at], torch.tensor([ADDED, ADDED]), ids[:, at:]], 1)
    prompted = trunk(weights, spec, context, start_text="w1 w2", place=place)
    towers = {"tower": "text"} if weights in ("clip", "siglip") else {}
    plain: Any = HF(weights=weights, view="native", trainable="all", **towers).build(5, spec, context)  # type: ignore[arg-type]
    with torch.no_grad():
        actual, expected = prompted(ids), plain.trunk.eval()(longer)
    kept = [position for position in range(expected.local.shape[1]) if not at <= position < at + 2]
    length = min(len(kept), actual.local.shape[1])
    torch.testing.assert_close(actual.local[:, :length], expected.local[:, kept[:length]], atol=1e-5, rtol=1e-5)
    if at or towers:  # else the first position of the longer text is a prompt's
        torch.testing.assert_close(actual.pooled, expected.pooled, atol=1e-5, rtol=1e-5)
    else:
        torch.testing.assert_close(actual.pooled, actual.local[:, 0])


def test_prompts_in_front_are_those_of_peft(context: DataContext, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    with quiet():
        body = hf.BertModel.from_pretrained(context.weights / "bert", add_pooling_layer=False)
        config = peft.PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=2)
        theirs = peft.get_peft_model(body, config).eval()
    theirs.save_pretrained(tmp_path)
    given: Any = {"weights": "bert", "view": "native", "pooling": "cls"}
    adapter = {"name": "prompts", "length": 2, "place": "front", "start": str(tmp_path)}
    ours: Any = HF(**given, adapter=adapter).build(5, TEXTS, context)
    with torch.no_grad():
        expected = theirs(input_ids=IDS, attention_mask=(IDS != 0).long()).last_hidden_state[:, 2:]
        actual = ours.trunk.eval()(IDS)
    torch.testing.assert_close(actual.local, expected * (IDS != 0).unsqueeze(-1), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(actual.pooled, expected[:, 0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("weights", ["vit", "deit", "dinov2", "clip", "siglip"])
def test_prompts_of_images_stand_behind_the_class_token(weights: str, context: DataContext) -> None:
    x = torch.randn(2, 3, 32, 32)
    prompted = trunk(weights, PICTURES, context, tower="vision", length=3)
    values = prompts_of(prompted.module)
    torch.nn.init.normal_(values)
    with quiet(), torch.no_grad():
        body: Any = hf.AutoModel.from_pretrained(context.weights / weights).eval()
        body = getattr(body, "vision_model", body)
        states = body.embeddings(x)
        states = torch.cat([states[:, :1], values.expand(2, -1, -1), states[:, 1:]], 1)
        states = body.pre_layrnorm(states) if hasattr(body, "pre_layrnorm") else states
        start_at_last(body, LAYERS)
        output = body(pixel_values=states)
        actual = prompted(x)
    hidden = output.last_hidden_state
    pooled = output.pooler_output if weights in ("clip", "siglip") else hidden[:, 0]
    torch.testing.assert_close(actual.pooled, pooled, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(actual.local, torch.cat([hidden[:, :1], hidden[:, 4:]], 1), atol=1e-5, rtol=1e-5)


def test_prompts_alone_are_trained_and_exchanged_and_the_rest_is_shared(context: DataContext) -> None:
    first, second = (encoder("bert", length=3).build(5, TEXTS, context) for _ in range(2))
    names = {name for name in first.state_dict() if "project" not in name}
    assert [name.rpartition(".")[2] for name in names] == ["prompts"]
    assert {name for name, value in first.named_parameters() if value.requires_grad} == set(first.state_dict())
    held, others = frozen_tensors(first), frozen_tensors(second)
    assert all(value.data_ptr() == others[name].data_ptr() for name, value in held.items())
    before = {name: value.clone() for name, value in held.items()}
    optimizer = torch.optim.SGD([value for value in first.parameters() if value.requires_grad], lr=1.0)
    first.train()(IDS).square().sum().backward()
    start = first.state_dict()[next(iter(names))].clone()
    optimizer.step()
    assert not torch.equal(first.state_dict()[next(iter(names))], start)
    assert all(torch.equal(value, before[name]) for name, value in frozen_tensors(first).items())


@pytest.mark.parametrize(
    ("weights", "adapter", "message"),
    [
        ("mobilenet", {}, "is not a transformer"),
        ("relative", {}, r"adapter prompts: attention of network 'BeitModel' has a bias .* choose adapter lora or"),
        ("shared", {}, r"adapter prompts: attention of network 'BeitModel' has a bias"),
        ("mean", {"tower": "pooled"}, r"prompts: the pooler .* 'BeitModel' averages all positions, .* cls or mean"),
        ("vit", {"place": "front"}, r"adapter\.place is front, but prompts of images"),
        ("vit", {"start_text": "a photo"}, r"adapter\.start_text: prompts of images"),
        ("bert", {"place": "front", "tower": "pooled"}, "pooler reads the first position"),
        ("bert", {"length": 5}, rf"room for {ROOM} tokens a text, 5 of them prompts \(adapter\.length\), .* gives 13"),
        ("bert", {"start": "nowhere"}, r"adapter\.start: no folder 'nowhere'"),
    ],
)
def test_what_has_no_room_for_prompts_is_refused(
    weights: str, adapter: dict[str, Any], message: str, context: DataContext
) -> None:
    given: Any = {"weights": weights, "view": "native", "pooling": adapter.pop("tower", "auto")}
    given["adapter"] = {"name": "prompts", "length": 2} | adapter
    with pytest.raises(ConfigError, match=message):
        HF(**given).build(5, TEXTS if weights == "bert" else PICTURES, context)


@pytest.mark.parametrize(("pooling", "weights"), [("cls", "mean"), ("mean", "mean"), ("cls", "beit")])
def test_a_network_with_positions_of_patches_alone_takes_prompts(
    pooling: str, weights: str, context: DataContext
) -> None:
    given: Any = {"weights": weights, "view": "native", "pooling": pooling}
    built: Any = HF(**given, adapter={"name": "prompts", "length": 2}).build(5, PICTURES, context)
    actual = built.trunk.eval()(torch.randn(2, 3, 32, 32))
    torch.testing.assert_close(actual.pooled, actual.local[:, 0] if pooling == "cls" else actual.local.mean(1))


@pytest.mark.parametrize(("weights", "begins"), [("bert", True), ("clip", True), ("siglip", False)])
def test_a_view_knows_if_texts_begin_with_a_mark(weights: str, begins: bool, context: DataContext) -> None:
    assert encoder(weights).view.spec("text", context).begins == begins
    words: Any = Tokens(tokenizer={"name": "hashing", "size": 50})  # type: ignore[arg-type]
    assert not words.spec("text", context).begins


def test_a_folder_of_other_prompts_is_refused(context: DataContext, tmp_path: Path) -> None:
    save_file({"prompt_embeddings": torch.zeros(4, WIDTH)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=rf"are \[4, {WIDTH}\], the settings \[2, {WIDTH}\]"):
        trunk("bert", TEXTS, context, start=str(tmp_path))


def test_only_one_start_is_taken_and_texts_leave_room(context: DataContext) -> None:
    with pytest.raises(ConfigError, match="start and start_text both set"):
        encoder("bert", start="a", start_text="b")
    given: Any = {"weights": "bert", "adapter": {"name": "prompts", "length": 10}}
    assert HF(**given).view.length == 54  # type: ignore[attr-defined]
