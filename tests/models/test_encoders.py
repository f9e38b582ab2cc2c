"""Every encoder trains, is drawn from the seed, gives positions, splits, refuses other input; then each by itself."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from encoder_cases import CONTEXT, DIM, ENCODERS, OF_TEXTS, PICTURES, TEXTS, TOKENS, built
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetModel

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import SubsamplingConv
from polyfed.data.view import InputSpec
from polyfed.models.aligner import Aligned, AlignerSettings
from polyfed.models.encoder import Encoder
from polyfed.models.encoders.from_config import Bert, FeatureProjection, ViT
from polyfed.models.encoders.resnet import _PRESETS, ResNet
from polyfed.models.encoders.words import GRU, Bag, final_state
from polyfed.models.fusion import GranularityFusion
from polyfed.models.towers import EncoderTower, LocalFeatures, last_valid, masked_mean, positioned

every_encoder = pytest.mark.parametrize("name", ENCODERS)
every_text_encoder = pytest.mark.parametrize("name", OF_TEXTS)


@every_encoder
def test_inputs_become_embeddings_that_can_be_trained(name: str) -> None:
    model, x = built(name)
    embedding = model(x)
    assert embedding.shape == (3, DIM)
    embedding.square().sum().backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in model.parameters())
    assert not torch.allclose(embedding[0], embedding[2])


@every_encoder
def test_weights_come_from_the_global_generator(name: str) -> None:
    states = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        states.append(built(name)[0].state_dict())
    first, second, third = states
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], third[key]) for key in first)


# ---- texts


@every_text_encoder
def test_amount_of_padding_does_not_matter(name: str) -> None:
    model = built(name)[0].eval()
    alone = torch.cat([model(row[: int((row != 0).sum())].unsqueeze(0)) for row in TOKENS])
    for tokens in (TOKENS, nn.functional.pad(TOKENS, (0, 5))):
        torch.testing.assert_close(model(tokens), alone, atol=1e-5, rtol=1e-4)


@every_text_encoder
def test_empty_texts_work(name: str) -> None:
    model, _ = built(name)
    embedding = model(torch.tensor([[0, 0, 0], [4, 5, 0]]))
    embedding.sum().backward()
    assert embedding.isfinite().all()
    assert all(value.grad is None or value.grad.isfinite().all() for value in model.parameters())


@every_text_encoder
def test_no_value_is_fetched_from_the_device(name: str) -> None:
    # on the meta device values are absent: whatever would sync on a GPU raises here
    with torch.device("meta"):
        assert built(name)[0](TOKENS.to("meta")).shape == (3, DIM)


# ---- positions


@every_encoder
def test_positions_can_be_trained_and_fused(name: str) -> None:
    encoder, x = built(name)
    assert positioned(encoder)
    local, mask = encoder.positions(x)
    assert local.shape[::2] == (3, DIM)
    assert mask is None or mask.shape == local.shape[:2]
    GranularityFusion(DIM).embedding(local, torch.randn_like(local), mask).square().sum().backward()
    assert all(value.grad is not None and value.grad.isfinite().all() for value in encoder.project.parameters())


POOLED = ["bert-mean", "bag", "resnet", "vit-mean", "blocks-mean", "blocks-text-mean", "blocks-sequences"]


@pytest.mark.parametrize("name", POOLED)
def test_their_mean_is_the_embedding_of_encoders_that_pool_by_mean(name: str) -> None:
    encoder, x = built(name)
    encoder.eval()
    local, mask = encoder.positions(x)
    mean = local.mean(1) if mask is None else masked_mean(local, mask)
    torch.testing.assert_close(mean, encoder(x), atol=1e-5, rtol=1e-4)


def test_positions_of_blocks_leave_their_own_cls_token_out() -> None:
    encoder, x = built("blocks")
    local, mask = encoder.eval().positions(x)
    assert local.shape[1] == 16
    assert mask is None
    tokens, valid = encoder.embedding(x)
    torch.testing.assert_close(local, encoder.project(encoder.encode(tokens, valid))[:, 1:])


def test_positions_of_sequences_have_a_padding_mask() -> None:
    encoder, x = built("blocks-sequences")
    assert torch.equal(encoder.positions(x)[1], torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 6]).bool())


def test_a_gru_has_read_the_whole_text_at_its_ends() -> None:
    encoder = GRU(width=8).build(DIM, TEXTS, CONTEXT)
    local, mask = encoder.positions(nn.functional.pad(TOKENS, (0, 3)))
    assert mask.shape == local.shape[:2] == (3, 9)
    torch.testing.assert_close(encoder.positions(TOKENS)[0], local[:, :6])
    embedding = encoder(TOKENS)
    torch.testing.assert_close(last_valid(local, mask.sum(1))[:, :5], embedding[:, :5])
    torch.testing.assert_close(local[:, 0, 5:], embedding[:, 5:])


# ---- splits into trunk and align module


def aligned_encoder(name: str) -> tuple[Aligned, Tensor]:
    encoder, x = built(name)
    return AlignerSettings(hidden=7, local=True).around(encoder, "some", DIM), x


@every_encoder
def test_every_encoder_can_be_split(name: str) -> None:
    encoder, x = aligned_encoder(name)
    features = encoder.eval().trunk(x)
    assert features.pooled.shape == (3, encoder.aligner.width)
    assert features.local.shape[-1] == encoder.aligner.width
    torch.testing.assert_close(encoder(x), encoder.aligner(features))
    detail = encoder.detail(x)
    torch.testing.assert_close(detail.embedding, encoder(x))
    count = features.local.shape[1] - features.led  # CLS comes once
    assert detail.positions.shape == (3, count, DIM)
    positions, mask = encoder.positions(x)
    torch.testing.assert_close(positions, detail.positions)
    assert (mask is None) == (detail.mask is None)
    assert encoder.split() == (encoder.trunk, encoder.aligner.width)


@every_encoder
def test_nothing_is_left_that_learns_nothing(name: str) -> None:
    """Replaced parts are gone: every parameter has a gradient from the embedding and the positions."""
    encoder, x = aligned_encoder(name)
    detail = encoder.train().detail(x)
    ((detail.embedding * torch.randn(DIM)).sum() + detail.positions.square().sum()).backward()
    assert [key for key, value in encoder.named_parameters() if value.grad is None] == []


# ---- refusals

WORDS, FLAT = InputSpec((7,), ("a", "b")), InputSpec((9,))
OTHERS = InputSpec((5,)), InputSpec((3, 5), ("a", "b")), InputSpec((2, 3, 8, 8))
NEEDS_TOKENS = r"encoder '{}' needs token ids .* gives shape \[3, 32, 32\]"
NEEDS_IMAGES = r"encoder '{}' needs images .*gives shape \[7\] and a vocabulary"


@pytest.mark.parametrize(
    ("settings", "spec", "message"),
    [
        *((name, PICTURES, NEEDS_TOKENS.format(name)) for name in ("gru", "bag", "bert")),
        *((name, WORDS, NEEDS_IMAGES.format(name)) for name in ("resnet", "vit")),
        ("projection", WORDS, "encoder 'projection' needs features"),
        ({"name": "projection", "pie": True}, FLAT, "pool: tokens"),
        ({"name": "vit", "patch": 7}, PICTURES, "patch 7 does not divide images of 32x32"),
        *(("blocks", spec, "encoder 'blocks' needs images .* its view gives shape") for spec in OTHERS),
        ("blocks", InputSpec((3, 24, 32)), "patch 16 does not divide images of 24x32"),
        ({"name": "bert", "positions": 8}, TEXTS, "room for 8 tokens a text, its view gives 12"),
    ],
)
def test_other_input_is_refused(settings: Any, spec: InputSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Encoder.model_validate(settings).build(8, spec, CONTEXT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "resnet", "widths": (8, 16)}, r"widths \[8, 16\] and depths \[1, 1, 1, 1\] differ"),
        ({"name": "resnet", "widths": (6, 12), "depths": (1, 1), "block": "bottleneck"}, "multiples of 4"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Encoder.model_validate(settings)


def test_an_encoder_without_positions_is_refused() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Embedding(3, 2)

    projection = FeatureProjection().build(DIM, FLAT, CONTEXT)
    assert not positioned(Other())
    assert not positioned(projection)
    with pytest.raises(ConfigError, match=r"encoder of 'image' .* has no features by position .* choose resnet"):
        AlignerSettings().around(projection, "image", DIM)


def test_local_features_of_another_width_are_refused() -> None:
    class Trunk(nn.Module):
        def forward(self, x: Tensor) -> LocalFeatures:
            return LocalFeatures(x.mean(1), x[..., :2])

    with pytest.raises(ValueError, match="width 2 do not fit the projection from 6"):
        EncoderTower(Trunk(), 6, 4).positions(torch.zeros(2, 3, 6))


# ---- GRU, bag, transformer and BERT


def test_gru_readout_last_equals_a_bidirectional_gru_gathered_at_the_last_word():
    model = GRU(width=8, readout="last").build(10, TEXTS, CONTEXT).eval()
    both = torch.nn.GRU(8, 5, batch_first=True, bidirectional=True)
    with torch.no_grad():
        for name, weight in model.forwards.named_parameters():
            getattr(both, name).copy_(weight)
        for name, weight in model.backwards.named_parameters():
            getattr(both, f"{name}_reverse").copy_(weight)
    for row, length in zip(TOKENS, [4, 1, 6], strict=True):
        states, _ = both(model.embedding(row[:length].unsqueeze(0)))
        torch.testing.assert_close(model(row.unsqueeze(0)), states[:, -1])


def test_packed_and_gathered_states_agree():
    gru = torch.nn.GRU(3, 4, batch_first=True)
    x, lengths = torch.randn(3, 6, 3), torch.tensor([4, 1, 6])
    torch.testing.assert_close(final_state(gru, x, lengths), last_valid(gru(x)[0], lengths))


def test_gru_projects_only_where_needed():
    assert isinstance(GRU().build(10, TEXTS, CONTEXT).project, torch.nn.Identity)
    assert isinstance(GRU().build(11, TEXTS, CONTEXT).project, torch.nn.Linear)
    assert isinstance(GRU(project=True).build(10, TEXTS, CONTEXT).project, torch.nn.Linear)


def test_creamfl_text_client_has_its_published_size():
    # creamfl.md 1.3: 4.0 M at d = 256, 4.6 M at d = 512 (GloVe-300, 11,755 words, bidirectional GRU, PIE)
    spec = InputSpec((40,), tuple(f"w{i}" for i in range(11_755)))
    for dim, expected in ((256, 4.0e6), (512, 4.6e6)):
        with torch.device("meta"):
            model = GRU(pie=True).build(dim, spec, CONTEXT)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(expected, rel=0.02)


def test_bag_is_the_projected_mean_of_its_words():
    model = Bag(width=8).build(10, TEXTS, CONTEXT).eval()
    table = model.embedding.weight
    expected = torch.stack([table[[5, 3, 7, 9]].mean(0), table[2], table[1:7].mean(0)])
    torch.testing.assert_close(model(TOKENS), model.project(expected))


@pytest.mark.parametrize("frozen", [False, True])
def test_bag_is_the_same_where_no_gradient_is_kept_also_for_empty_texts(frozen):
    model = Bag(width=8, freeze_embedding=frozen).build(10, TEXTS, CONTEXT).eval()
    tokens = torch.cat([TOKENS, torch.zeros_like(TOKENS[:1])])  # the last has no word
    expected = model(tokens)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected)


def test_bert_base_has_the_published_parameter_counts():
    spec = InputSpec((40,), tuple(f"w{i}" for i in range(30_522)))
    counts = {}
    for pooling in ("pooler", "cls"):
        with torch.device("meta"):
            model = Bert(size="base", pooling=pooling).build(256, spec, CONTEXT)
        counts[pooling] = sum(p.numel() for p in model.parameters())
    # methods.md 3.2: FedAFD counts BERT-base with its pooler, and 768->256
    assert counts == {"pooler": 109_679_104, "cls": 109_679_104 - 590_592}


# ---- ResNet and ViT


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
