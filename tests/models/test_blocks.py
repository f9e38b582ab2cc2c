"""Transformer parts by plain computation; gated layers: shut gates change nothing, merging changes no output."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from encoder_cases import CONTEXT, PICTURES, TEXTS, TOKENS
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import quiet
from polyfed.data.view import DataContext, InputSpec
from polyfed.models.blocks import (
    ROLES,
    Attention,
    DropPath,
    PostBlock,
    TransformerBlock,
    gated,
    linears,
    stack,
    undecayed,
)
from polyfed.models.encoders.blocks import Blocks, BlocksModule
from polyfed.models.heads import LinearHead

FEATURES = InputSpec((7, 5))
INPUTS = {
    "images": (PICTURES, torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))),
    "texts": (TEXTS, TOKENS),
    "features": (FEATURES, torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(1))),
}


def nano(spec: InputSpec = PICTURES, dim: int = 96, context: DataContext = CONTEXT, **settings) -> BlocksModule:
    return Blocks(**{"patch": 8, **settings}).build(dim, spec, context)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def words(number: int, length: int = 40) -> InputSpec:
    return InputSpec((length,), tuple(map(str, range(number))))


def roles(module: nn.Module, role: str | None = None) -> list[tuple[str | None, int]]:
    role = getattr(module, "role", role)
    own = [(role, p.numel()) for p in module.parameters(recurse=False)]
    return own + [pair for child in module.children() for pair in roles(child, role)]


def small(spec: InputSpec, **settings) -> BlocksModule:
    with torch.device("meta"):
        return Blocks(size="small", **settings).build(384, spec, CONTEXT)


def test_a_block_has_the_published_size():  # methods.md 1.1, as in the next two
    with torch.device("meta"):
        block = stack(384, 1, 6)[0]
    sizes = {"norm1": 768, "attention": 591_360, "norm2": 768, "mlp": 1_181_568, "drop_path": 0}
    assert {name: count(part) for name, part in block.named_children()} == sizes
    assert (count(block.attention.qkv), count(block.attention.proj)) == (443_520, 147_840)
    assert (count(block.mlp.fc1), count(block.mlp.fc2)) == (591_360, 590_208)
    assert count(block) == 1_774_464


def test_models_of_fedcola_have_their_published_sizes():
    pictures = InputSpec((3, 224, 224))
    with torch.device("meta"):
        heads = LinearHead(384, 100), LinearHead(384, 4)
    assert count(small(pictures)) + count(heads[0]) == 21_704_164
    assert count(small(words(30_522))) + count(heads[1]) == 33_033_220
    for vocabulary, expected in ((7_732, 45_945_216), (30_522, 54_696_576)):
        pair = (small(spec, final_norm=False) for spec in (pictures, words(vocabulary)))
        assert sum(map(count, pair)) + 768 == expected


def test_every_parameter_has_a_role():
    with torch.device("meta"):
        module = Blocks(size="small").build(100, InputSpec((3, 224, 224)), CONTEXT)
    sizes = dict.fromkeys({"embedding", "attention", "mlp", "norm", "final_norm", "projection"}, 0)
    for role, size in roles(module):
        sizes[role] += size
    assert sizes == {
        "embedding": 295_296 + 384 + 75_648,
        "attention": 12 * 591_360,
        "mlp": 12 * 1_181_568,
        "norm": 12 * 1_536,
        "final_norm": 768,
        "projection": 384 * 100 + 100,
    }


def test_attention_equals_a_loop():
    attention, x = Attention(6, 2).requires_grad_(False), torch.randn(2, 5, 6)
    mask = torch.tensor([[True] * 5, [True, True, False, True, False]])
    expected = torch.zeros(2, 5, 6)
    for b in range(2):
        q, k, v = (F.linear(x[b], w, c) for w, c in zip(*(p.chunk(3) for p in attention.qkv.parameters()), strict=True))
        for head in (slice(0, 3), slice(3, 6)):
            for i in range(5):
                score = {j: math.exp(float(q[i, head] @ k[j, head]) / math.sqrt(3)) for j in range(5) if mask[b, j]}
                total = sum(score.values())
                expected[b, i, head] = sum(score[j] / total * v[j, head] for j in score)
    torch.testing.assert_close(attention(x, mask), attention.proj(expected), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(attention(x)[0], attention(x, mask)[0], atol=1e-6, rtol=1e-5)


def test_a_block_is_written_as_in_the_paper():
    block, x = TransformerBlock(6, 2, 12).eval(), torch.randn(2, 5, 6)
    middle = x + block.attention(F.layer_norm(x, (6,), eps=1e-6))
    hidden = F.linear(F.layer_norm(middle, (6,), eps=1e-6), block.mlp.fc1.weight, block.mlp.fc1.bias)
    gelu = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    torch.testing.assert_close(block(x), middle + block.mlp.fc2(gelu))


def test_a_post_norm_block_is_written_as_in_bert():
    block, x = PostBlock(6, 2, 12), torch.randn(2, 5, 6)
    middle = F.layer_norm(x + block.attention(x), (6,), eps=1e-12)
    torch.testing.assert_close(block(x), F.layer_norm(middle + block.mlp(middle), (6,), eps=1e-12))


@torch.no_grad()
def test_the_first_position_attends_as_the_mean_of_its_heads():
    attention, x, mask = Attention(6, 2), torch.randn(1, 4, 6), torch.tensor([[True, True, False, True]])
    expected = torch.zeros(4)
    q, k, _ = attention.qkv(x[0]).chunk(3, dim=1)
    for head in (slice(0, 3), slice(3, 6)):
        score = [math.exp(float(q[0, head] @ k[j, head]) / math.sqrt(3)) * bool(mask[0, j]) for j in range(4)]
        expected += torch.tensor(score) / sum(score) / 2
    torch.testing.assert_close(attention.leading(x, mask)[0], expected)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="heads 4 does not divide width 6"):
        Attention(6, 4)


def test_stochastic_depth_drops_whole_samples_and_keeps_the_expectation():
    drop, x = DropPath(0.25), torch.ones(20_000, 2, 3)
    out = drop(x)
    assert out.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(out, out[:, :1, :1].expand_as(out))
    assert out.mean().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("rate", "training"), [(0.9, False), (0.0, True)])
def test_stochastic_depth_draws_nothing_where_it_does_nothing(rate, training):
    x, before = torch.randn(4, 2, 3), torch.get_rng_state()
    assert DropPath(rate).train(training)(x) is x
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", INPUTS)
def test_no_value_is_fetched_from_the_device_and_empty_batches_work(name):
    spec, x = INPUTS[name]
    assert nano(spec)(x[:0]).shape == (0, 96)
    # on the meta device values are absent: whatever would sync on a GPU raises here
    with torch.device("meta"):
        assert nano(spec)(x.to("meta")).shape == (3, 96)


@pytest.mark.parametrize("name", INPUTS)
def test_autocast_to_bf16_runs(name):
    spec, x = INPUTS[name]
    model = nano(spec, dim=10, drop_path=0)
    with torch.autocast("cpu", torch.bfloat16):
        embedding = model(x)
    embedding.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(embedding.float(), model(x), atol=0.02, rtol=0.05)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_padding_does_not_matter_unless_it_is_let_in(pooling):
    model = nano(TEXTS, pooling=pooling).eval()
    alone = torch.cat([model(row[: int((row != 0).sum())].unsqueeze(0)) for row in TOKENS])
    for padded in (TOKENS, F.pad(TOKENS, (0, 5))):
        torch.testing.assert_close(model(padded), alone, atol=1e-5, rtol=1e-4)
    model.mask_padding = False
    assert not torch.allclose(model(TOKENS), alone, atol=1e-4)


def test_positions_without_features_are_padding():
    model, (_, x) = nano(FEATURES).eval(), INPUTS["features"]
    x = x.clone()
    x[:, 4:] = 0
    torch.testing.assert_close(model(x), model(x[:, :4]), atol=1e-5, rtol=1e-4)
    mean = nano(FEATURES, pooling="mean").eval()
    torch.testing.assert_close(mean(x), mean(x[:, :4]), atol=1e-5, rtol=1e-4)
    assert mean(torch.zeros(2, 7, 5)).isfinite().all()


def test_words_are_embedded_as_in_bert():
    embedding = nano(TEXTS).embedding
    with torch.no_grad():
        assert embedding.words.weight.std() == pytest.approx(0.02, rel=0.1)
        assert not embedding.words.weight[0].any()
        total = embedding.words.weight[TOKENS] + embedding.positions.weight[:6] + embedding.types.weight[0]
        tokens, mask = embedding(TOKENS)
    torch.testing.assert_close(tokens, F.layer_norm(total, (96,), eps=1e-12))
    assert torch.equal(mask, TOKENS != 0)


def test_patches_are_in_the_order_of_the_tokens():
    embedding = nano(InputSpec((3, 16, 32))).embedding
    x = torch.randn(2, 3, 16, 32)
    assert (embedding.patch, embedding.grid) == (8, (2, 4))
    patches = embedding.patches(x)
    assert patches.shape == (2, 8, 192)
    torch.testing.assert_close(patches[:, 5], x[:, :, 8:16, 8:16].permute(0, 2, 3, 1).flatten(1))
    kernel = embedding.conv.weight.permute(0, 2, 3, 1).flatten(1)
    tokens = F.linear(patches, kernel, embedding.conv.bias) + embedding.positions[:, 1:]
    torch.testing.assert_close(embedding(x)[0][:, 1:], tokens, atol=1e-5, rtol=1e-4)


def test_a_part_of_the_tokens_can_be_encoded():
    model = nano().eval()
    tokens, _ = model.embedding(INPUTS["images"][1])
    kept = [0, 3, 9]
    mask = torch.zeros(3, 17, dtype=torch.bool)
    mask[:, kept] = True
    part = model.encode(tokens[:, kept])
    torch.testing.assert_close(part, model.encode(tokens, mask)[:, kept], atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("weights"))


def saved(folder: Path, **changes) -> Path:
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    config = ViTConfig(**{**sizes, "image_size": 32, "patch_size": 8, **changes})
    torch.manual_seed(3)
    model = ViTModel(config, add_pooling_layer=False)
    for parameter in model.parameters():  # biases and norms too must differ
        nn.init.normal_(parameter, std=0.3)
    with quiet():
        model.save_pretrained(folder / "vit")
    return folder


def original(folder: Path, name: str = "vit"):
    from transformers import ViTModel

    with quiet():
        return ViTModel.from_pretrained(folder / name, add_pooling_layer=False).eval()


def pretrained(folder: Path, spec: InputSpec = PICTURES, dim: int = 16, **settings) -> BlocksModule:
    return Blocks(**{"weights": "vit", **settings}).build(dim, spec, DataContext(folder, weights=folder)).eval()


@torch.no_grad()
def test_a_pretrained_vit_equals_the_original(folder):
    model, x = pretrained(folder), INPUTS["images"][1]
    states = original(folder)(x).last_hidden_state
    torch.testing.assert_close(model(x), states[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.encode(*model.embedding(x)), states, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pretrained(folder, pooling="mean")(x), states[:, 1:].mean(1), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_images_of_another_size_get_interpolated_positions(folder):
    model, x = pretrained(folder, InputSpec((3, 48, 64))), torch.randn(2, 3, 48, 64)
    assert model.embedding.grid == (6, 8)
    states = original(folder)(x, interpolate_pos_encoding=True).last_hidden_state
    torch.testing.assert_close(model(x), states[:, 0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_first_blocks_can_be_taken_alone(folder):
    model, x = pretrained(folder, depth=2), INPUTS["images"][1]
    states = original(folder)(x, output_hidden_states=True).hidden_states
    assert len(model.blocks) == 2
    tokens = model.embedding(x)[0]
    torch.testing.assert_close(tokens, states[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model.blocks[1](model.blocks[0](tokens)), states[2], atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="depth 4, but weights 'vit' have 3 blocks"):
        pretrained(folder, depth=4)


@pytest.mark.parametrize(
    ("spec", "settings"), [(TEXTS, {}), (FEATURES, {}), (PICTURES, {"pretrained_embedding": False})]
)
def test_blocks_and_norm_alone_can_be_pretrained(folder, spec, settings):
    full, model = pretrained(folder), pretrained(folder, spec, patch=16, **settings)
    for part in ("blocks", "norm"):
        for one, other in zip(getattr(full, part).parameters(), getattr(model, part).parameters(), strict=True):
            assert torch.equal(one, other)
    assert count(model.embedding) != count(full.embedding)
    assert not list(pretrained(folder, spec, patch=16, final_norm=False, **settings).norm.parameters())


def test_weights_that_do_not_fit_are_refused(folder, tmp_path):
    relu, bare = saved(tmp_path / "relu", hidden_act="relu"), saved(tmp_path / "bare", qkv_bias=False)
    for place, settings, message in (
        (folder, {"spec": InputSpec((1, 32, 32))}, "weights 'vit' take 3 channels, its view gives 1"),
        (folder, {"spec": InputSpec((3, 36, 36))}, "patch 8 does not divide images of 36x36"),
        (folder, {"weights": "none"}, "encoder blocks, weights: no folder 'none'"),
        (relu, {}, "has GELU, weights 'vit' have relu"),
        (bare, {}, r"lack 3 weights of encoder 'blocks', such as 'blocks\.0\.attention"),
    ):
        with pytest.raises(ConfigError, match=message):
            pretrained(place, **settings)


# ---- gated linear layers


WIDTH = 8


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return stack(WIDTH, 2, 2, 4, 0.0)


def passed(module: nn.Module, x: Tensor) -> Tensor:
    for block in module.children():
        x = block(x, None)
    return x


def others(module: nn.Module, part: str = "blocks") -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn_like(layer.weight) for name, layer in linears(module, ROLES[part]).items()}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("part", "count"), [("blocks", 8), ("attention", 4), ("mlp", 4)])
def test_one_gate_for_each_linear_layer_of_the_part(part: str, count: int) -> None:
    module = blocks()
    with gated(module, others(module, part)) as gates:
        assert len(gates) == count
        assert all(gate.gate.shape == (1,) for gate in gates.values())


def test_shut_gates_give_the_plain_model_bit_for_bit_and_no_gradient_to_what_is_behind(x: Tensor) -> None:
    module = blocks()
    plain = passed(module, x)
    with gated(module, others(module)) as gates:
        out = passed(module, x)
        assert torch.equal(out, plain)
        out.square().sum().backward()
        for gate in gates.values():
            assert gate.out.grad is not None
            assert not gate.out.grad.any()
            assert gate.gate.grad is not None
            assert gate.gate.grad.any()


def test_gradients_are_those_of_the_formula() -> None:
    layer = nn.Sequential(nn.Linear(4, 3))
    layer.role = "mlp"  # type: ignore[assignment]
    out, x = torch.randn(3, 4), torch.randn(5, 4)
    with gated(layer, {"0": out}) as gates:
        gate = gates["0"]
        with torch.no_grad():
            gate.gate.fill_(0.3)
        effective = (layer[0].parametrizations.weight.original + 0.3 * out).detach().requires_grad_()  # type: ignore
        layer(x).pow(3).sum().backward()
        (x @ effective.T + layer[0].bias.detach()).pow(3).sum().backward()
        assert effective.grad is not None
        assert torch.allclose(gate.gate.grad, (effective.grad * out).sum(), rtol=1e-4)
        assert torch.allclose(gate.out.grad, 0.3 * effective.grad, rtol=1e-4)
        assert torch.allclose(layer[0].parametrizations.weight.original.grad, effective.grad, rtol=1e-4)  # type: ignore


def test_merging_changes_no_output_and_leaves_a_plain_model(x: Tensor) -> None:
    module = blocks()
    names = [name for name, _ in module.named_parameters()]
    with gated(module, others(module)) as gates:
        for k, gate in enumerate(gates.values()):
            nn.init.constant_(gate.gate, 0.1 * (k - 3))
        before = passed(module, x)
    assert torch.allclose(passed(module, x), before, atol=1e-5)
    assert [name for name, _ in module.named_parameters()] == names  # names and their order, on which sums depend
    assert all(type(layer) is nn.Linear for layer in linears(module, ROLES["blocks"]).values())


def test_after_an_error_the_layers_are_plain_again() -> None:
    module = blocks()
    with pytest.raises(RuntimeError, match="boom"), gated(module, others(module)):
        raise RuntimeError("boom")
    assert not any("parametrizations" in name for name, _ in module.named_parameters())


def test_frozen_weights_have_neither_gradient_nor_optimiser_state(x: Tensor) -> None:
    module = blocks()
    with gated(module, others(module), trainable=False) as gates:
        optimizer = torch.optim.AdamW([value for value in module.parameters() if value.requires_grad])
        passed(module, x).sum().backward()
        optimizer.step()
        for gate in gates.values():
            assert gate.out.grad is None
            assert gate.out not in optimizer.state
            assert gate.gate in optimizer.state


def test_weight_decay_spares_gates_and_what_is_behind_them() -> None:
    module = blocks()
    assert undecayed(module) == []
    with gated(module, others(module)) as gates:
        spared = {id(value) for value in undecayed(module)}
        assert spared == {id(value) for gate in gates.values() for value in (gate.out, gate.gate)}


def test_bf16_autocast(x: Tensor) -> None:
    module = blocks()
    with gated(module, others(module)) as gates, torch.autocast("cpu", torch.bfloat16):
        passed(module, x).sum().backward()
        assert all(torch.isfinite(gate.gate.grad).all() for gate in gates.values() if gate.gate.grad is not None)
