"""Pretrained networks of any family, trained further or frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, MobileNetV2Config, MobileNetV2Model, ViTConfig, ViTModel

from polyfed import Experiment, run
from polyfed.core.errors import ConfigError
from polyfed.data.backbones import quiet
from polyfed.data.view import DataContext, InputSpec
from polyfed.data.views.pixels import Pixels
from polyfed.data.views.tokens import Tokens
from polyfed.models.encoders.pretrained import PretrainedNetwork
from polyfed.models.model import Model, ModelSettings

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
PICTURES = InputSpec((3, 32, 32))
TEXTS = InputSpec((6,), ("<pad>", "<unk>", *(f"w{i}" for i in range(20))), pad=0)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> DataContext:
    """Weights of small networks."""
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    networks = {
        "vit": ViTModel(ViTConfig(**SMALL, image_size=32, patch_size=8), add_pooling_layer=False),
        "bert": BertModel(BertConfig(**SMALL, vocab_size=22, max_position_embeddings=8)),
        "mobilenet": MobileNetV2Model(MobileNetV2Config(depth_multiplier=0.1)),
    }
    with quiet():
        for name, network in networks.items():
            network.save_pretrained(folder / name)
    return DataContext(folder / "cache", folder)


def pretrained(weights: str, **settings: Any) -> PretrainedNetwork:
    return PretrainedNetwork(weights=weights, view=Tokens() if weights == "bert" else Pixels(size=32), **settings)


def model_of(encoder: PretrainedNetwork, context: DataContext) -> Model:
    return ModelSettings(dim=5, encoders={"image": encoder}).build({}, context)


def test_the_embedding_is_a_projection_of_the_pooled_output(context: DataContext) -> None:
    made = pretrained("vit").build(5, PICTURES, context).eval()
    x = torch.randn(2, 3, 32, 32)
    with quiet():
        by_hand = ViTModel.from_pretrained(context.weights / "vit", add_pooling_layer=False).eval()(x)
    torch.testing.assert_close(made(x), made.project(by_hand.last_hidden_state[:, 0]))
    mean = pretrained("vit", pooling="mean").build(5, PICTURES, context).eval()
    torch.testing.assert_close(mean(x), mean.project(by_hand.last_hidden_state.mean(1)))


@pytest.mark.parametrize(("weights", "positions"), [("vit", 17), ("mobilenet", 1)])
def test_networks_of_pictures_have_positions_and_can_be_trained(
    context: DataContext, weights: str, positions: int
) -> None:
    made = pretrained(weights, pie=True).build(5, PICTURES, context)
    local, mask = made.positions(torch.randn(3, 3, 32, 32))
    assert local.shape == (3, positions, 5)
    assert mask is None
    made(torch.randn(3, 3, 32, 32)).sum().backward()
    assert all(value.grad is not None for value in made.trunk.parameters() if value.requires_grad)


def test_padding_does_not_matter_and_an_empty_text_is_no_error(context: DataContext) -> None:
    made = pretrained("bert", pooling="mean").build(5, TEXTS, context).eval()
    short, long = torch.tensor([[4, 7, 2]]), torch.tensor([[4, 7, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    torch.testing.assert_close(made(short)[0], made(long)[0])
    assert made(long).isfinite().all()
    assert made.trunk(long).mask.tolist() == [[True] * 3 + [False] * 3, [False] * 6]


def test_what_is_frozen_is_shared_and_neither_trained_nor_exchanged(context: DataContext) -> None:
    first, second = (model_of(pretrained("vit", freeze=True), context) for _ in range(2))
    assert set(first.exchanged()) == set(first.trained())
    assert {name.split(".")[2] for name in first.exchanged()} == {"project"}
    trunks = [model.encoders["image"].trunk for model in (first, second)]
    assert trunks[0].module is trunks[1].module
    first.train()
    x = torch.randn(2, 3, 32, 32)
    alike = pretrained("vit").build(5, PICTURES, context).eval().trunk
    torch.testing.assert_close(trunks[0](x).pooled, alike(x).pooled)
    first.embed("image", x).sum().backward()
    assert not any(value.requires_grad for value in trunks[0].module.parameters())


def test_the_name_of_an_architecture_tells_frozen_weights(context: DataContext) -> None:
    vit, mobilenet, trained = (
        ModelSettings(dim=5, encoders={"image": one}).architecture_in(context)
        for one in (pretrained("vit", freeze=True), pretrained("mobilenet", freeze=True), pretrained("vit"))
    )
    assert vit.rpartition("-")[2] != mobilenet.rpartition("-")[2]
    assert "x" in vit.rpartition("-")[2]
    assert "x" not in trained.rpartition("-")[2]


@pytest.mark.parametrize(
    ("encoder", "spec", "message"),
    [
        (pretrained("nowhere"), PICTURES, "encoder pretrained, weights: no folder 'nowhere'"),
        (pretrained("vit"), InputSpec((1, 32, 32)), "take 3 channels, its view gives 1"),
        (pretrained("vit"), TEXTS, "needs images"),
        (pretrained("bert"), PICTURES, "needs token ids"),
        (pretrained("bert"), InputSpec((9,), TEXTS.vocabulary), "room for 8 tokens a text, its view gives 9"),
        (pretrained("bert"), InputSpec((6,), tuple("abcdefghijklmnopqrstuvwxyz")), "room for 22 words"),
        (pretrained("vit", pooling="pooled"), PICTURES, "no pooler"),
        (pretrained("mobilenet", pooling="cls"), PICTURES, "needs a backbone with a CLS token"),
        (pretrained("vit", tower="text"), PICTURES, "no tower 'text'"),
    ],
)
def test_what_does_not_fit_is_refused(
    context: DataContext, encoder: PretrainedNetwork, spec: InputSpec, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        encoder.build(5, spec, context)


def test_a_run_with_a_frozen_network_exchanges_and_opens_without_it(
    tiny: dict[str, Any], context: DataContext, tmp_path: Path
) -> None:
    encoder = {"name": "pretrained", "weights": "vit", "freeze": True, "view": {"name": "pixels", "size": 32}}
    for participant in (tiny["server"], *tiny["clients"].values()):
        participant["model"]["encoders"]["image"] = encoder
    tiny["data"]["weights_dir"] = str(context.weights)
    tiny["run"]["rounds"] = 1
    finished = run(Experiment.load(tiny), tmp_path / "run")
    names = {name for weights in finished.global_weights.values() for name in weights}
    assert {name for name in names if ".image." in name} == {
        f"encoders.image.project.{part}" for part in ("weight", "bias")
    }
    trunk = finished.server_model().model.encoders["image"].trunk
    x = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(trunk(x).pooled, pretrained("vit").build(5, PICTURES, context).eval().trunk(x).pooled)
