"""Pretrained networks of any family: frozen, with adapters, or trained from some layer on; of sounds too."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from item_tables import column_of, noise, struct_of
from polyfed import Experiment, run
from polyfed.core.errors import ConfigError
from polyfed.data.backbones import quiet
from polyfed.data.sounds import wav, waveform
from polyfed.data.source import Column
from polyfed.data.view import DataContext, InputSpec
from polyfed.data.views.features import Features
from polyfed.data.views.mel import Mel
from polyfed.models.encoders.hf import HF
from polyfed.models.frozen import frozen_tensors
from polyfed.models.model import Model, ModelSettings
from polyfed.models.trunks import by_sample
from tiny_networks import LAYERS, ROOM, WIDTH, WORDS, network, save

PICTURES, FLAT = InputSpec((3, 32, 32)), InputSpec((WIDTH,))
TEXTS = InputSpec((6,), tuple(WORDS), pad=0)
BODY, LIVE = "encoders.image.trunk.module.backbone.body.", "encoders.image.trunk.backbone.body."
LORA = {"name": "lora", "rank": 2}


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> DataContext:
    folder = tmp_path_factory.mktemp("weights")
    for name in ("vit", "bert", "mpnet", "mobilenet", "resnet", "clip", "siglip"):
        save(name, folder)
    return DataContext(folder / "cache", folder)


def encoder(weights: str, view: Any = "native", **settings: Any) -> HF:
    return HF(**{"weights": weights, "view": view, **settings})


def model_of(context: DataContext, weights: str = "vit", **settings: Any) -> Model:
    return ModelSettings(dim=5, encoders={"image": encoder(weights, **settings)}).build({}, context)


def trunk_of(model: Model) -> Any:
    return model.encoders["image"].trunk


def pictures(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 32, 32)


def original(name: str, context: DataContext) -> Any:
    with quiet():
        return hf.AutoModel.from_pretrained(context.weights / name).eval()


def cloned(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in values.items()}


def require_equal(values: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        assert torch.equal(value, expected[name]), name


def places(values: Mapping[str, Tensor]) -> dict[str, int]:
    """Where the values lie in memory."""
    return {name: value.data_ptr() for name, value in values.items()}


# ---- what it computes


@pytest.mark.parametrize("standardise", [False, True])
def test_the_embedding_is_a_projection_of_the_pooled_output(context: DataContext, standardise: bool) -> None:
    x = pictures()
    states = original("vit", context)(x).last_hidden_state
    for pooling, pooled in (("auto", states[:, 0]), ("mean", states.mean(1))):
        made: Any = encoder("vit", pooling=pooling, standardise=standardise).build(5, PICTURES, context).eval()
        given = F.layer_norm(pooled, (WIDTH,)) if standardise else pooled
        torch.testing.assert_close(made(x), F.linear(given, made.project[-1].weight, made.project[-1].bias))


def test_images_of_another_size_get_interpolated_positions(context: DataContext) -> None:
    x = torch.randn(2, 3, 48, 48)
    made: Any = encoder("vit").build(5, InputSpec((3, 48, 48)), context)
    expected = original("vit", context)(x, interpolate_pos_encoding=True).last_hidden_state[:, 0]
    torch.testing.assert_close(made.trunk(x).pooled, expected)


@pytest.mark.parametrize("weights", ["resnet", "mobilenet"])
def test_channels_last_change_nothing_and_single_samples_can_be_mapped(context: DataContext, weights: str) -> None:
    x = pictures()
    made: Any = encoder(weights, trainable="all").build(5, PICTURES, context).eval()
    kernels = [value for value in made.parameters() if value.dim() == 4 and not value.is_contiguous()]
    assert any(value.is_contiguous(memory_format=torch.channels_last) for value in kernels)
    expected = original(weights, context)(x).pooler_output.flatten(1)
    torch.testing.assert_close(made.trunk(x).pooled, expected, atol=1e-4, rtol=1e-4)
    each = torch.func.vmap(lambda picture: made.trunk(picture.unsqueeze(0)).pooled[0])(x)
    torch.testing.assert_close(each, expected, atol=1e-4, rtol=1e-4)


def test_mobilenet_forgets_as_tensorflow_meant_it(context: DataContext) -> None:
    made = encoder("mobilenet", trainable="all").build(5, PICTURES, context)
    momenta = [part.momentum for part in made.modules() if isinstance(part, nn.BatchNorm2d)]
    assert momenta == pytest.approx([0.003] * len(momenta))
    assert momenta


def test_padding_does_not_matter_and_empty_texts_work(context: DataContext) -> None:
    made: Any = encoder("bert", pooling="mean").build(5, TEXTS, context).eval()
    short, long = torch.tensor([[4, 7, 3]]), torch.tensor([[4, 7, 3, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(made(short)[0], made(long)[0])
    assert made(long).isfinite().all()
    assert made.trunk(long).mask.tolist() == [[True] * 3 + [False] * 3, [False] * 6]


def column(values: list[Any]) -> Column:
    return column_of(values, hashlib.sha256(repr(values).encode()).hexdigest())


def png(seed: int) -> dict[str, Any]:
    return struct_of(noise(seed, 40, 32), f"{seed}.png")


@pytest.mark.parametrize("pooling", ["auto", "mean"])
@pytest.mark.parametrize("pie", [False, True])
@pytest.mark.parametrize("weights", ["vit", "bert", "resnet"])
def test_cached_features_give_what_the_network_gives(
    context: DataContext, weights: str, pie: bool, pooling: str
) -> None:
    values = column(["w1 w2", "w3 w4 w5 w6", "w7"] if weights == "bert" else [png(seed) for seed in range(3)])
    length = {"length": ROOM} if weights == "bert" else {}
    cached, live = (encoder(weights, view, pie=pie, pooling=pooling) for view in (length, {"name": "native", **length}))
    assert cached.view.component_name() == "features"
    first, second = (one.build(5, one.view.spec("m", context), context).eval() for one in (cached, live))
    second.load_state_dict(first.state_dict())
    rows = torch.arange(3)
    pairs = ((first, cached), (second, live))
    actual, expected = (made(one.view.open(values, "m", context)(rows)) for made, one in pairs)
    torch.testing.assert_close(actual, expected, atol=1e-2, rtol=1e-2)  # the cache has half precision
    assert (actual - actual[:1]).abs()[1:].max() > 5e-2


@pytest.mark.parametrize("view", ["features", "native"])
@pytest.mark.parametrize("tower", ["vision", "text"])
@pytest.mark.parametrize("weights", ["clip", "siglip"])
def test_its_own_projection_leads_to_the_space_of_both_towers(
    context: DataContext, weights: str, tower: str, view: str
) -> None:
    made = encoder(weights, {"name": view, "length": ROOM}, tower=tower, projection="own")
    model = ModelSettings(dim=6 if weights == "clip" else WIDTH, encoders={"m": made}).build({}, context).eval()
    assert not model.exchanged()
    full = original(weights, context)
    texts = ["w1 w2", "w3 w4 w5 w6 w7", "", "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11"]
    values = column([png(seed) for seed in range(4)] if tower == "vision" else texts)
    inputs = made.view.open(values, "m", context)
    if tower == "vision":
        native = encoder(weights, tower=tower).view.open(values, "m", context)
        expected = full.get_image_features(pixel_values=native(torch.arange(4)))
    else:
        own = hf.AutoTokenizer.from_pretrained(context.weights / weights)
        padding = "longest" if weights == "clip" else "max_length"
        given = own(texts, padding=padding, truncation=True, max_length=ROOM, return_tensors="pt")
        mask = {"attention_mask": given["attention_mask"]} if weights == "clip" else {}
        expected = full.get_text_features(input_ids=given["input_ids"], **mask)
    expected = F.normalize(expected.pooler_output, dim=-1)
    for rows in (torch.arange(4), torch.tensor([0]), torch.tensor([2, 0])):  # batches of other lengths
        torch.testing.assert_close(model.represent("m", inputs(rows)), expected[rows], atol=2e-3, rtol=2e-3)


def test_coarse_arithmetic_and_checkpoints_change_little(context: DataContext) -> None:
    x = pictures()
    plain, coarse, spared = (
        encoder("vit", trainable="all", **more).build(5, PICTURES, context).train()
        for more in ({}, {"precision": "bf16"}, {"checkpointing": True})
    )
    for other, close in ((coarse, 5e-2), (spared, 1e-6)):
        other.load_state_dict(plain.state_dict())
        torch.testing.assert_close(other(x), plain(x), atol=close, rtol=close)
    assert not torch.equal(coarse(x), plain(x))
    for made in (plain, spared):
        made(x).square().sum().backward()
    for one, other in zip(plain.parameters(), spared.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


# ---- what of it is trained


def factors(kinds: tuple[str, ...], layers: tuple[int, ...], parts: tuple[str, ...]) -> set[str]:
    return {f"layers.{layer}.{part}.{end}" for layer in layers for part in parts for end in kinds}


ALL = set(network("vit").state_dict())
LAST = {name for name in ALL if name.startswith((f"layers.{LAYERS - 1}.", "layernorm."))}
ATTENTION = ("attention.q_proj", "attention.v_proj")
TWO = ("lora_A.default.weight", "lora_B.default.weight")
CASES: dict[str, tuple[dict[str, Any], str, set[str]]] = {
    "none": ({}, BODY, set()),
    "last": ({"trainable": 1}, BODY, LAST),
    "all": ({"trainable": "all"}, LIVE, ALL),
    "lora": ({"adapter": LORA}, BODY, factors(TWO, (0, 1, 2), ATTENTION)),
    "lora, last": ({"adapter": LORA | {"last": 1}}, BODY, factors(TWO, (2,), ATTENTION)),
    "attention": ({"adapter": "attention"}, BODY, set()),
}
DEFAULT_VIEWS = {"none": "features", "last": "states", "lora, last": "states", "attention": "features"}


@pytest.mark.parametrize("case", CASES)
def test_what_is_trained_is_exchanged_and_nothing_else_changes(context: DataContext, case: str) -> None:
    settings, prefix, expected = CASES[case]
    model, other = (model_of(context, **settings) for _ in range(2))
    behind = case == "attention"
    project = {f"project.{3 if behind else 2}.{part}" for part in ("weight", "bias")}
    project |= {f"project.0.{layer}.{part}" for layer in ("first", "second") for part in ("weight", "bias") if behind}
    names = {prefix + name for name in expected} | {f"encoders.image.{name}" for name in project}
    assert set(model.exchanged()) == set(model.trained()) == names
    assert encoder("vit", None, **settings).view.component_name() == DEFAULT_VIEWS.get(case, "native")

    before, others, start = (cloned(own) for own in (frozen_tensors(model), other.exchanged(), model.exchanged()))
    x = pictures()
    output = trunk_of(other.eval())(x).pooled
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(2):  # of factors one half is zero at first, so that the other half has no gradient
        model.train().embed("image", x).square().sum().backward()
        optimizer.step()
    assert all(value.grad is not None for value in model.trained().values())
    assert not [name for name, value in model.named_parameters() if not value.requires_grad and value.grad is not None]
    assert all(not torch.equal(value, start[name]) for name, value in model.exchanged().items())
    require_equal(frozen_tensors(model), before)
    require_equal(other.exchanged(), others)
    for untouched in (other, model_of(context, **settings)):  # the second is made anew of the shared network
        torch.testing.assert_close(trunk_of(untouched.eval())(x).pooled, output)


def test_running_statistics_are_exchanged_with_what_is_trained(context: DataContext) -> None:
    model = model_of(context, "mobilenet", trainable="all")
    statistics = {name for name, _ in model.named_buffers()}
    assert len(statistics) > 30
    assert set(model.exchanged()) == set(model.trained()) | statistics
    alike = model_of(context, "mobilenet", trainable="all")
    before = cloned(model.exchanged())
    model.train().embed("image", pictures(4))
    assert any(not torch.equal(model.exchanged()[name], before[name]) for name in statistics)
    for other in (alike, model_of(context, "mobilenet", trainable="all")):
        assert all(torch.equal(other.exchanged()[name], before[name]) for name in statistics)
    still = model_of(context, "mobilenet").train()
    before = cloned(frozen_tensors(still))
    still.embed("image", pictures(4))
    require_equal(frozen_tensors(still), before)


@pytest.mark.parametrize("case", ["none", "last", "lora"])
def test_what_is_frozen_is_held_once(context: DataContext, case: str) -> None:
    settings, _, expected = CASES[case]
    models = [model_of(context, **settings), model_of(context, **settings)]
    models.append(copy.deepcopy(models[0]))
    pointers = [places(frozen_tensors(model)) for model in models]
    assert pointers[0] == pointers[1] == pointers[2]
    assert len(pointers[0]) == len(ALL - expected)  # factors are none of the network's own
    own = [{*places(model.exchanged()).values()} for model in models]
    assert not own[0] & own[1]
    assert not own[0] & own[2]
    moved = [model.to(torch.float64) for model in models]
    again = [places(frozen_tensors(model)) for model in moved]
    assert again[0] == again[1] == again[2] != pointers[0]
    assert {value.dtype for value in moved[0].state_dict().values()} == {torch.float64}
    assert places(frozen_tensors(moved[0].to(torch.float32))) == pointers[0]


@pytest.mark.parametrize("case", ["last", "lora"])
def test_states_copies_and_moves_keep_the_values(context: DataContext, case: str) -> None:
    settings, _, _ = CASES[case]
    model, other = (model_of(context, **settings).eval() for _ in range(2))
    with torch.no_grad():
        for value in model.trained().values():
            value.normal_(0, 0.3)
    x = pictures()
    expected = model.embed("image", x)
    assert not torch.allclose(other.embed("image", x), expected)
    assert other.load_state_dict(model.state_dict(), strict=True) == ([], [])
    copied = copy.deepcopy(model)
    for alike in (other, copied):
        assert torch.equal(alike.embed("image", x), expected)
        assert set(alike.trained()) == set(model.trained())
    assert trunk_of(copied.train()).module is not trunk_of(model).module
    torch.testing.assert_close(model.to(torch.float64).embed("image", x.double()).float(), expected)
    incomplete = model.state_dict()
    incomplete.popitem()
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(incomplete, strict=True)


def test_dropout_acts_in_layers_that_are_trained_alone(context: DataContext) -> None:
    ids = torch.tensor([[2, 5, 6, 29]])
    for settings, varies in (({}, False), ({"trainable": 1}, True), ({"trainable": "all"}, True)):
        made: Any = encoder("bert", **settings).build(5, TEXTS, context).train()
        first, second = (made.trunk(ids).local for _ in range(2))
        assert torch.equal(first, second) != varies
    body = encoder("bert", trainable=1).build(5, TEXTS, context).train().trunk.module.backbone.body
    modes = [layer.training for layer in body.encoder.layer]
    assert (modes, body.embeddings.training) == ([False] * (LAYERS - 1) + [True], False)


@pytest.mark.parametrize("weights", ["bert", "mpnet", "clip", "vit"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_samples_go_through_a_network_one_by_one(context: DataContext, weights: str, attention: str) -> None:
    towers = {"tower": "text"} if weights == "clip" else {}
    spec = PICTURES if weights == "vit" else TEXTS
    made: Any = encoder(weights, trainable="all", **towers).build(5, spec, context).eval()
    body = made.trunk.backbone.body
    if attention != "sdpa" or weights != "mpnet":  # which knows eager attention alone
        body.set_attn_implementation(attention)
    x = pictures() if weights == "vit" else torch.tensor([[2, 7, 8, 29, 0, 0], [2, 9, 3, 4, 5, 29]])
    end = body.config._attn_implementation
    with torch.no_grad(), by_sample(made):
        actual = torch.func.vmap(lambda one: made(one.unsqueeze(0)).squeeze(0))(x)
    torch.testing.assert_close(actual, made(x), atol=1e-5, rtol=1e-5)
    assert body.config._attn_implementation == end
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask


def test_the_name_of_an_architecture_depends_on_frozen_weights(context: DataContext) -> None:
    names = [
        ModelSettings(dim=5, encoders={"image": one}).architecture_in(context)
        for one in (encoder("vit"), encoder("mobilenet"), encoder("vit", adapter=LORA), encoder("vit", trainable="all"))
    ]
    digests = [name.rpartition("-")[2] for name in names]
    assert digests[0] == digests[2] != digests[1]
    assert ["x" in digest for digest in digests] == [True, True, True, False]
    assert len(set(names)) == 4


# ---- what is refused


@pytest.mark.parametrize(
    ("weights", "settings", "spec", "message"),
    [
        ("nowhere", {"view": "pixels"}, PICTURES, "encoder hf, weights: no folder 'nowhere'"),
        ("vit", {}, InputSpec((1, 32, 32)), "take 3 channels, its view gives 1"),
        ("vit", {"view": "tokens"}, TEXTS, "needs images"),
        ("bert", {"view": "pixels"}, PICTURES, "needs token ids"),
        ("bert", {}, InputSpec((13,), TEXTS.vocabulary), "room for 12 tokens a text, its view gives 13"),
        ("bert", {}, InputSpec((6,), tuple(map(str, range(31)))), "room for 30 words in the vocabulary"),
        ("vit", {"pooling": "pooled"}, PICTURES, "no pooler"),
        ("mobilenet", {"pooling": "cls"}, PICTURES, "needs a backbone with a CLS token"),
        ("mobilenet", {"trainable": 1}, PICTURES, "is not a transformer with one list of layers"),
        ("vit", {"trainable": 4}, PICTURES, "the network has 3 layers, not 4"),
        ("vit", {"tower": "text"}, TEXTS, "no tower 'text'"),
        ("clip", {}, PICTURES, "several towers; set tower to one of: vision, text"),
        ("vit", {"projection": "own"}, PICTURES, "does not share a space with another tower"),
        ("clip", {"projection": "own", "tower": "vision"}, PICTURES, "projects to 6, model.dim is 5; set it to 6"),
    ],
)
def test_what_does_not_fit_is_refused(
    context: DataContext, weights: str, settings: dict[str, Any], spec: InputSpec, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        encoder(weights, **settings).build(5, spec, context)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": ""}, "weights are missing; name a folder below data.weights_dir, or owner/name on the hub"),
        ({"trainable": "adapters"}, "trainable is adapters, adapter is None; adapters need one"),
        ({"trainable": "all", "adapter": LORA}, "trainable is all, adapter is lora; .* nothing else takes one"),
        ({"trainable": 0}, "trainable is 0; give none, all, adapters, or 1 or more last layers"),
        ({"trainable": True}, "trainable"),
        ({"checkpointing": True}, "checkpointing has no effect where no layer is trained"),
        ({"projection": "own", "pie": True}, "pie has no effect with projection own"),
        ({"projection": "own", "dropout": 0.1}, "dropout has no effect with projection own"),
        ({"view": {"name": "native", "backbone": "b"}}, "view.backbone is 'b', that of the encoder 'vit'; leave"),
        ({"view": {"name": "native", "tower": "text"}}, "view.tower is 'text', that of the encoder 'whole'; leave"),
        ({"view": {"backbone": "b"}}, "view.backbone is 'b', that of the encoder 'vit'; leave view.backbone out"),
        ({"view": {"pool": "mean"}}, "view.pool is mean, the encoder asks for auto; leave view.pool out"),
        ({"view": "features", "trainable": "all"}, "view.name is features, but layers of the network are trained"),
        ({"view": "features", "trainable": 1}, "view.name is features, but layers of the network are trained"),
        ({"view": {"name": "states", "before_last": 2}, "trainable": 1}, "view.name is states, but layers"),
        ({"view": {"pool": "tokens"}, "pooling": "pooled"}, "the view gives positions, of which pooled cannot be had"),
        ({"view": {"pool": "tokens", "positions": 4}}, "the view gives positions, of which auto cannot be had"),
        ({"adapter": {"name": "lora", "rank": 0, "last": 2}, "view": {"batch_size": 8}}, "adapter.*rank"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HF(**{"weights": "vit", **settings})


@pytest.mark.parametrize("setting", [{"standardise": False}, {"projection": "own"}, {"adapter": "attention"}])
def test_settings_of_the_projection_are_refused_with_an_align_module(setting: dict[str, Any]) -> None:
    content = {"dim": 5, "aligner": {}, "encoders": {"image": {"name": "hf", "weights": "vit"} | setting}}
    with pytest.raises(ConfigError, match=rf"encoders\.image\.{next(iter(setting))} has no effect with aligner"):
        ModelSettings(**content)


def test_an_align_module_takes_cls_once(context: DataContext) -> None:
    content: Any = {"dim": 5, "aligner": {"head": "linear"}}
    content["encoders"] = {"image": {"name": "hf", "weights": "vit", "trainable": 1, "view": "native"}}
    model = ModelSettings(**content).build({}, context)
    features = trunk_of(model)(pictures())
    assert features.led
    torch.testing.assert_close(features.local[:, 0], features.pooled)
    model.embed("image", pictures()).sum().backward()
    assert all(value.grad is not None for value in model.trained().values())


# ---- in runs


@pytest.mark.parametrize("settings", [{"view": "native"}, {"trainable": 1}, {"adapter": LORA}])
def test_a_run_exchanges_what_is_trained_and_its_model_opens(
    tiny: dict[str, Any], context: DataContext, tmp_path: Path, settings: dict[str, Any]
) -> None:
    for participant in (tiny["server"], *tiny["clients"].values()):
        participant["model"]["encoders"]["image"] = {"name": "hf", "weights": "vit", **settings}
    tiny["data"]["weights_dir"] = str(context.weights)
    tiny["run"]["rounds"] = 1
    finished = run(Experiment.load(tiny), tmp_path / "run")
    exchanged = {name for weights in finished.global_weights.values() for name in weights if ".image." in name}
    alike = model_of(context, **{"view": "native", **settings})
    assert exchanged == set(alike.exchanged())
    model = finished.server_model().model
    actual = {name: value for name, value in model.exchanged().items() if name in exchanged}
    assert any(not torch.equal(value, alike.exchanged()[name]) for name, value in actual.items())
    frozen, expected = frozen_tensors(model), frozen_tensors(alike)
    kept = {name for name in frozen if ".image." in name}
    assert kept == (set() if "trainable" in settings else set(expected))  # states come without the layers before
    assert all(torch.equal(frozen[name], expected[name]) for name in kept)


# ---- a network of sounds (AST): from its features, its states and itself


SOUNDS = [wav(np.random.default_rng(seed).normal(size=4000) / 4, 16000) for seed in range(3)]
COLUMN = Column(pa.chunked_array([pa.array(SOUNDS)]), "sounds", "sounds", nested=False)


@pytest.fixture(scope="module")
def of_sounds(tmp_path_factory: pytest.TempPathFactory) -> DataContext:
    folder = tmp_path_factory.mktemp("weights")
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    patches = {"patch_size": 8, "frequency_stride": 8, "time_stride": 8}
    with quiet():
        config = transformers.ASTConfig(**size, **patches, max_length=40, num_mel_bins=16)
        transformers.ASTModel(config).save_pretrained(folder / "ast")
        transformers.ASTFeatureExtractor(num_mel_bins=16, max_length=40).save_pretrained(folder / "ast")
    return DataContext(tmp_path_factory.mktemp("cache"), weights=folder)


@pytest.mark.parametrize(
    ("settings", "view"),
    [
        ({}, "features"),
        ({"trainable": 1}, "states"),
        ({"trainable": "all"}, "native"),
        ({"adapter": {"name": "lora", "rank": 2}}, "native"),
    ],
)
def test_it_gives_what_transformers_gives(of_sounds: DataContext, settings: dict[str, Any], view: str) -> None:
    folder = of_sounds.weights / "ast" if of_sounds.weights else Path()
    waves = [waveform(sound, 16000) for sound in SOUNDS]
    extractor = transformers.ASTFeatureExtractor.from_pretrained(folder)
    with quiet(), torch.no_grad():
        network = transformers.ASTModel.from_pretrained(folder).eval()
        states = network(extractor(waves, sampling_rate=16000, return_tensors="pt")["input_values"]).last_hidden_state
    encoder = HF.model_validate({"weights": "ast", **settings})
    assert encoder.view.component_name() == view
    made: Any = encoder.build(5, encoder.view.spec("audio", of_sounds), of_sounds).eval()
    given = made(encoder.view.open(COLUMN, "audio", of_sounds)(torch.arange(3)))
    last = made.project[-1]
    expected = F.linear(F.layer_norm(states[:, 0], (16,)), last.weight, last.bias)
    torch.testing.assert_close(given, expected, atol=3e-3, rtol=1e-2)


def test_sounds_that_do_not_fit_are_refused(of_sounds: DataContext) -> None:
    encoder = HF.model_validate({"weights": "ast", "view": Mel(frames=20, bands=16, layout="positions")})
    with pytest.raises(ConfigError, match="does not take what its view gives"):
        encoder.build(5, encoder.view.spec("audio", of_sounds), of_sounds)
    with pytest.raises(ConfigError, match="positions is 4, but those of sounds are not averaged"):
        Features(backbone="ast", pool="tokens", positions=4).spec("audio", of_sounds)
