"""ResNet, ViT and MobileNetV2 encoders."""

import os
from pathlib import Path

import pytest
import torch
from encoder_cases import CONTEXT, PICTURES

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import quiet
from polyfed.data.view import DataContext, InputSpec
from polyfed.models.encoder import Encoder
from polyfed.models.encoders.mobilenet import MobileNet
from polyfed.models.encoders.resnet import ResNet
from polyfed.models.encoders.vit import ViT

TINY_VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def parameters(encoder: Encoder, spec: InputSpec, dim: int = 256) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in encoder.build(dim, spec, CONTEXT).parameters())


def save(model_class, config, folder: Path) -> None:
    with quiet():
        model_class(config).save_pretrained(folder)


def test_paper_sizes_have_the_published_parameter_counts():
    large = InputSpec((3, 224, 224))
    # methods.md 3.2: FedAFD server image encoder, ResNet-101 + fc 2048->256 + PIE
    assert parameters(ResNet(size="101", pie=True), large) == 45_647_936
    # torchvision's resnet18 without fc (11,176,512) + 512->256
    assert parameters(ResNet(size="18"), large) == 11_176_512 + 131_328
    assert parameters(ResNet(size="34"), large) == 21_284_672 + 131_328
    assert parameters(ResNet(size="50"), large) == 23_508_032 + 524_544
    # methods.md 1.1: ViT-S/16 is patches 295,296 + CLS 384 + positions 75,648 + blocks 21,293,568 + norm 768
    assert parameters(ViT(size="small"), large) == 21_665_664 + 384 * 256 + 256
    assert parameters(ViT(size="base"), large) == 85_798_656 + 768 * 256 + 256
    # MobileNetV2 without its classifier
    assert parameters(MobileNet(), large) == 2_223_872 + 1280 * 256 + 256


@pytest.mark.parametrize(
    ("side", "stem", "map_side"),
    [(32, "auto", 4), (64, "auto", 4), (96, "auto", 6), (224, "auto", 7), (64, "small", 8), (64, "large", 2)],
)
def test_stem_keeps_a_map_of_useful_size(side, stem, map_side):
    model = ResNet(stem=stem).build(8, InputSpec((3, side, side)), CONTEXT)
    assert model.trunk(torch.randn(1, 3, side, side)).local.shape == (1, map_side**2, 192)


@pytest.mark.parametrize("kind", [ResNet, MobileNet])
def test_group_norms_take_the_place_of_batch_norms_and_look_at_each_sample_alone(kind):
    torch.manual_seed(0)
    spec, x = InputSpec((3, 64, 64)), torch.randn(3, 3, 64, 64)
    batch, group = kind().build(8, spec, CONTEXT), kind(norm="group").build(8, spec, CONTEXT)
    batch_norms = [m for m in batch.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    group_norms = [m for m in group.modules() if isinstance(m, torch.nn.GroupNorm)]
    assert len(batch_norms) == len(group_norms) > 10
    assert not [m for m in group.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert [name for name, _ in batch.named_parameters()] == [name for name, _ in group.named_parameters()]
    for norm in group_norms:  # the largest number of groups up to 32 that divides 32 and the channels
        assert norm.num_groups == max(g for g in range(1, 33) if 32 % g == 0 and norm.num_channels % g == 0)
    torch.testing.assert_close(group.train()(x)[:1], group(x[:1]), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(batch.train()(x)[:1], batch(x[:1]), atol=1e-2)


@pytest.mark.parametrize("kind", [ResNet, MobileNet])
def test_pretrained_weights_keep_the_batch_norms_they_were_trained_with(kind):
    with pytest.raises(ConfigError, match="norm: group: the weights hub/model were trained with batch norms"):
        kind(norm="group", weights="hub/model")


def test_resnet_tower_is_the_mean_of_the_map_projected():
    model = ResNet().build(8, PICTURES, CONTEXT).eval()
    x = torch.randn(2, 3, 32, 32)
    local = model.trunk(x).local
    torch.testing.assert_close(model(x), model.project(local.mean(1)))


def test_one_channel_is_enough():
    assert ResNet().build(8, InputSpec((1, 32, 32)), CONTEXT)(torch.randn(2, 1, 32, 32)).shape == (2, 8)


def test_vit_pools_cls_or_patches():
    x = torch.randn(2, 3, 32, 32)
    model = ViT().build(8, PICTURES, CONTEXT).eval()
    tokens = model.trunk.model(x).last_hidden_state
    torch.testing.assert_close(model(x), model.project(tokens[:, 0]))
    model.trunk.pooling = "mean"
    torch.testing.assert_close(model(x), model.project(tokens[:, 1:].mean(1)))


def test_pretrained_vit_gets_interpolated_positions(tmp_path):
    from transformers import ViTConfig, ViTModel

    save(ViTModel, ViTConfig(**TINY_VIT, image_size=32, patch_size=8), tmp_path / "vit")
    context = DataContext(tmp_path, weights=tmp_path)
    x = torch.randn(2, 3, 48, 48)
    model = ViT(weights="vit").build(8, InputSpec((3, 48, 48)), context).eval()
    with quiet():
        original = ViTModel.from_pretrained(tmp_path / "vit").eval()
    expected = original(x, interpolate_pos_encoding=True).last_hidden_state[:, 0]
    torch.testing.assert_close(model.trunk(x).pooled, expected, atol=1e-5, rtol=1e-4)
    assert model.trunk.model.embeddings.position_embeddings.requires_grad


def test_pretrained_resnet_keeps_its_stem_unless_told_otherwise(tmp_path):
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    save(ResNetModel, config, tmp_path / "resnet")
    context = DataContext(tmp_path, weights=tmp_path)
    x = torch.randn(2, 3, 32, 32)
    with quiet():
        original = ResNetModel.from_pretrained(tmp_path / "resnet").eval()
    model = ResNet(weights="resnet").build(8, PICTURES, context).eval()
    torch.testing.assert_close(model.trunk(x).pooled, original(x).pooler_output.flatten(1))
    small = ResNet(weights="resnet", stem="small").build(8, PICTURES, context)
    assert small.trunk(x).local.shape == (2, 16 * 16, 16)
    with pytest.raises(ConfigError, match="take 3 channels, its view gives 1"):
        ResNet(weights="resnet").build(8, InputSpec((1, 32, 32)), context)


def test_weights_of_another_architecture_are_refused(tmp_path):
    from transformers import ViTConfig, ViTModel

    save(ViTModel, ViTConfig(**TINY_VIT, image_size=32, patch_size=8), tmp_path / "vit")
    context = DataContext(tmp_path, weights=tmp_path)
    with pytest.raises(ConfigError, match="holds a 'vit', this encoder needs a 'resnet'"):
        ResNet(weights="vit").build(8, PICTURES, context)
    with pytest.raises(ConfigError, match=r"encoder resnet, weights: no folder 'nowhere'.*POLYFED_WEIGHTS"):
        ResNet(weights="nowhere").build(8, PICTURES, context)


def test_mobilenet_statistics_follow_the_batches_slowly():
    model = MobileNet(multiplier=0.25).build(8, PICTURES, CONTEXT)
    assert {m.momentum for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)} == {0.1}


def test_real_deit_tiny_loads_at_its_own_and_another_size():
    folder = os.environ.get("POLYFED_WEIGHTS")
    if folder is None:
        pytest.skip("POLYFED_WEIGHTS is not set")
    context = DataContext(Path("unused"), weights=Path(folder))
    for side in (224, 96):
        model = ViT(weights="deit-tiny-patch16-224").build(8, InputSpec((3, side, side)), context).eval()
        with torch.inference_mode():
            assert model(torch.randn(1, 3, side, side)).isfinite().all()
