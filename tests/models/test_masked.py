"""Masked autoencoding: what is hidden, and how well it is rebuilt, against plain loops."""

import math

import pytest
import torch
from encoder_cases import CONTEXT, TEXTS
from torch import nn

from polyfed.data.view import InputSpec
from polyfed.models import masked
from polyfed.models.encoders.blocks import Blocks


def stream(seed=1):
    return torch.Generator().manual_seed(seed)


def encoder_of(size=16, patch=4, **settings):
    return Blocks(depth=1, patch=patch, drop_path=0.0, **settings).build(96, InputSpec((3, size, size)), CONTEXT)


def parameters(module):
    return sum(value.numel() for value in module.parameters())


# ---- masks


@pytest.mark.parametrize(
    ("patches", "ratio", "hidden"), [(196, 0.75, 147), (16, 0.6, 10), (4, 0.75, 3), (2, 0.75, 1), (4, 0.01, 1)]
)
def test_exactly_the_ratio_is_hidden(patches, ratio, hidden):
    assert masked.hidden_count(patches, ratio) == hidden
    masking = masked.random_masking(5, patches, ratio, stream())
    assert masking.hidden.sum(1).tolist() == [hidden] * 5
    assert masking.visible.shape == (5, patches - hidden)


def test_visible_and_hidden_patches_make_up_the_image():
    masking = masked.random_masking(6, 9, 0.75, stream())
    for seen, restore, hidden in zip(*(part.tolist() for part in masking), strict=True):
        assert sorted(seen) == [k for k in range(9) if not hidden[k]]
        assert sorted(restore) == list(range(9))
        assert [restore[k] for k in seen] == list(range(len(seen)))


def test_each_image_has_a_mask_of_its_own_and_the_stream_decides():
    first, second = (masked.random_masking(8, 16, 0.5, stream()) for _ in range(2))
    assert len({tuple(row) for row in first.hidden.tolist()}) > 1
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    counts = masked.random_masking(4000, 8, 0.75, stream()).hidden.float().mean(0)
    assert torch.allclose(counts, torch.full((8,), 0.75), atol=0.03)


# ---- encoder


def test_only_visible_patches_pass_the_blocks():
    encoder = encoder_of()
    x = torch.randn(3, 3, 16, 16)
    masking = masked.random_masking(3, 16, 0.75, stream())
    encoded = masked.encode_visible(encoder, x, masking)
    assert encoded.shape == (3, 5, 96)
    tiles = x.reshape(3, 3, 4, 4, 4, 4)  # rows and columns of patches at dimensions 2 and 4
    other = torch.where(masking.hidden.view(3, 1, 4, 1, 4, 1), torch.randn_like(tiles), tiles).reshape_as(x)
    assert not torch.equal(other, x)
    assert torch.allclose(masked.encode_visible(encoder, other, masking), encoded, atol=1e-6)


def test_with_nothing_hidden_it_is_the_encoder():
    encoder = encoder_of()
    x = torch.randn(2, 3, 16, 16)
    everything = masked.random_masking(2, 16, 0.5, stream())._replace(visible=torch.arange(16).expand(2, -1))
    assert torch.allclose(masked.encode_visible(encoder, x, everything)[:, 0], encoder(x), atol=1e-6)


def test_which_encoders_can():
    assert masked.maskable(encoder_of())
    assert not masked.maskable(encoder_of(16, 16))  # one patch
    assert not masked.maskable(Blocks(depth=1).build(96, TEXTS, CONTEXT))
    assert not masked.maskable(nn.Linear(2, 2))


# ---- decoder


def test_the_decoder_of_the_papers_size():
    """He et al.'s for ViT-B/16: 768 to 512, mask token, 8 blocks of 512, norm, 512 to 16 x 16 x 3 pixels."""
    with torch.device("meta"):
        encoder = Blocks(size="base", depth=1, patch=16).build(768, InputSpec((3, 224, 224)), CONTEXT)
        decoder = masked.PatchDecoder(encoder, 512, 8, 16)
    attention = 512 * 1536 + 1536 + 512 * 512 + 512
    block = attention + (512 * 2048 + 2048 + 2048 * 512 + 512) + 2 * 2 * 512
    assert block == 3_152_384
    total = (768 * 512 + 512) + 512 + 8 * block + 2 * 512 + (512 * 768 + 768)
    assert parameters(decoder) == total == 26_008_320
    assert "positions" not in decoder.state_dict()
    assert decoder.positions.shape == (196, 512)


def test_the_decoder_restores_the_order():
    """Without blocks, each visible patch comes out of its own place, and every other place holds the mask token."""
    decoder = masked.PatchDecoder(encoder_of(), 32, 1, 2)
    decoder.blocks = nn.ModuleList()
    decoder.norm = nn.Identity()
    masking = masked.random_masking(4, 16, 0.75, stream())
    encoded = torch.randn(4, 5, 96)
    actual = decoder(encoded, masking.restore)
    assert actual.shape == (4, 16, 48)
    for b in range(4):
        for place in range(16):
            seen = masking.visible[b].tolist()
            token = decoder.embed(encoded[b, 1 + seen.index(place)]) if place in seen else decoder.mask[0, 0]
            assert torch.allclose(actual[b, place], decoder.pixels(token + decoder.positions[place]), atol=1e-6)


def test_positions_are_sines_and_cosines_of_row_and_column():
    actual = masked.sine_cosine((2, 3), 8)
    for row in range(2):
        for column in range(3):
            rates = [1.0, 10000**-0.5]
            one = [f(side * rate) for side in (row, column) for f in (math.sin, math.cos) for rate in rates]
            assert actual[row * 3 + column].tolist() == pytest.approx(one, abs=1e-6)
    with pytest.raises(ValueError, match="width 6 is not a multiple of 4"):
        masked.sine_cosine((2, 2), 6)


# ---- loss


@pytest.mark.parametrize("normalise", [True, False])
def test_the_loss_equals_loops_over_hidden_patches(normalise):
    patches, predicted = torch.randn(3, 6, 5), torch.randn(3, 6, 5)
    hidden = masked.random_masking(3, 6, 0.5, stream()).hidden
    errors = []
    for b in range(3):
        for n in range(6):
            if not hidden[b, n]:
                continue
            true = patches[b, n].tolist()
            mean = sum(true) / 5
            deviation = math.sqrt(sum((v - mean) ** 2 for v in true) / 4 + 1e-6)
            wanted = [(v - mean) / deviation for v in true] if normalise else true
            errors += [(p - w) ** 2 for p, w in zip(predicted[b, n].tolist(), wanted, strict=True)]
    actual = masked.reconstruction_loss(predicted, patches, hidden, normalise=normalise)
    assert float(actual) == pytest.approx(sum(errors) / len(errors), rel=1e-5)


def test_a_patch_of_one_colour_has_a_finite_loss():
    loss = masked.reconstruction_loss(torch.ones(1, 2, 3), torch.ones(1, 2, 3), torch.ones(1, 2).bool(), normalise=True)
    assert float(loss) == 1.0  # the normalised patch is 0


def loss_of(encoder, decoder, x, masks):
    patches = masked.patches_of(encoder, x)
    masking = masked.random_masking(len(x), patches.shape[1], 0.5, masks)
    predicted = decoder(masked.encode_visible(encoder, x, masking), masking.restore)
    return masked.reconstruction_loss(predicted, patches, masking.hidden, normalise=False)


def test_encoder_and_decoder_receive_gradients():
    encoder = encoder_of()
    decoder = masked.PatchDecoder(encoder, 32, 1, 2)
    loss_of(encoder, decoder, torch.randn(2, 3, 16, 16), stream()).backward()
    for name, value in (*encoder.named_parameters(), *decoder.named_parameters()):
        assert value.grad is not None, name
        assert value.grad.abs().sum() > 0, name
