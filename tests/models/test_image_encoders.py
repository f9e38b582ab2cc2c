"""ResNet and ViT encoders."""

import copy
from functools import partial

import pytest
import torch
from encoder_cases import CONTEXT, PICTURES
from torch import nn
from transformers import ResNetConfig, ResNetModel

from polyfed.data.backbones import SubsamplingConv
from polyfed.data.view import InputSpec
from polyfed.models.encoder import Encoder
from polyfed.models.encoders.from_config import ViT
from polyfed.models.encoders.resnet import _PRESETS, ResNet


def parameters(encoder: Encoder, spec: InputSpec, dim: int = 256) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in encoder.build(dim, spec, CONTEXT).parameters())


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


@pytest.mark.parametrize(
    ("side", "stem", "map_side"),
    [(32, "auto", 4), (64, "auto", 4), (96, "auto", 6), (224, "auto", 7), (64, "small", 8), (64, "large", 2)],
)
def test_stem_keeps_a_map_of_useful_size(side, stem, map_side):
    model = ResNet(stem=stem).build(8, InputSpec((3, side, side)), CONTEXT)
    assert model.trunk(torch.randn(1, 3, side, side)).local.shape == (1, map_side**2, 192)


def test_group_norms_replace_batch_norms_and_normalise_each_sample_alone():
    torch.manual_seed(0)
    spec, x = InputSpec((3, 64, 64)), torch.randn(3, 3, 64, 64)
    batch, group = ResNet().build(8, spec, CONTEXT), ResNet(norm="group").build(8, spec, CONTEXT)
    batch_norms = [m for m in batch.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    group_norms = [m for m in group.modules() if isinstance(m, torch.nn.GroupNorm)]
    assert len(batch_norms) == len(group_norms) > 10
    assert not [m for m in group.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert [name for name, _ in batch.named_parameters()] == [name for name, _ in group.named_parameters()]
    for norm in group_norms:  # the largest number of groups up to 32 that divides 32 and the channels
        assert norm.num_groups == max(g for g in range(1, 33) if 32 % g == 0 and norm.num_channels % g == 0)
    torch.testing.assert_close(group.train()(x)[:1], group(x[:1]), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(batch.train()(x)[:1], batch(x[:1]), atol=1e-2)


@pytest.mark.parametrize("size", ["18", "50"])
def test_resnet_begins_and_computes_as_that_of_transformers(size):
    torch.manual_seed(0)
    own = ResNet(size=size, stem="large").build(8, PICTURES, CONTEXT).trunk
    torch.manual_seed(0)
    widths, depths, block = _PRESETS[size]
    sizes = {"embedding_size": 64, "hidden_sizes": list(widths), "depths": list(depths)}
    theirs = ResNetModel(ResNetConfig(**sizes, layer_type=block))
    state = theirs.state_dict()
    assert list(own.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in own.state_dict().items())
    x = torch.randn(2, 3, 64, 64)
    expected = theirs.eval()(x).last_hidden_state.flatten(2).mT
    torch.testing.assert_close(own.eval()(x).local, expected, atol=1e-3, rtol=1e-3)  # maps are laid out otherwise


def test_one_channel_is_enough():
    assert ResNet().build(8, InputSpec((1, 32, 32)), CONTEXT)(torch.randn(2, 1, 32, 32)).shape == (2, 8)


def test_vit_pools_cls_or_patches():
    x = torch.randn(2, 3, 32, 32)
    model = ViT().build(8, PICTURES, CONTEXT).eval()
    tokens = model.trunk.model(x).last_hidden_state
    torch.testing.assert_close(model(x), model.project(tokens[:, 0]))
    model.trunk.pooling = "mean"
    torch.testing.assert_close(model(x), model.project(tokens[:, 1:].mean(1)))


def test_few_channels_and_odd_batches_give_the_gradients_of_a_plain_convolution():
    encoder = ResNet(widths=(8, 16), depths=(1, 1), block="basic", norm="group")
    model = encoder.build(4, InputSpec((3, 16, 16)), CONTEXT)
    exact = copy.deepcopy(model).double()
    for layer in exact.modules():
        if isinstance(layer, SubsamplingConv):
            layer.forward = partial(nn.Conv2d.forward, layer)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # with more than one, oneDNN's own kernel wrote beyond its memory
    try:
        for batch in (1, 3, 7, 21):
            x = torch.randn(batch, 3, 16, 16)
            for tower, inputs in ((model, x), (exact, x.double())):
                tower.zero_grad()
                tower(inputs).square().sum().backward()
            for (name, ours), (_, plain) in zip(model.named_parameters(), exact.named_parameters(), strict=True):
                assert torch.allclose(ours.grad.double(), plain.grad, rtol=1e-3, atol=1e-4), name
    finally:
        torch.set_num_threads(threads)
    assert sum(isinstance(layer, SubsamplingConv) for layer in model.modules()) == 1
