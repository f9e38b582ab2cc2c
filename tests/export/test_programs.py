from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import RunError
from polyfed.data.view import DataContext, InputSpec
from polyfed.export.programs import example_input, write_program
from polyfed.models.encoder import Encoder
from polyfed.models.encoders.from_config import Bert, FeatureProjection, ViT
from polyfed.models.encoders.resnet import ResNet
from polyfed.models.encoders.words import GRU, Bag

TOKENS = InputSpec((6,), tuple(f"word {number}" for number in range(30)), pad=0)
PIXELS = InputSpec((3, 16, 16))


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


class Networks:
    """Networks that cannot be exported, each for a reason of its own."""

    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, : int(x.abs().sum()) % 3 + 1]

    class Chance(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, training=True)

    class OneBatchSize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(3, -1)

    class Forgetful(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float("nan")


@pytest.mark.parametrize(
    ("encoder", "spec", "shape"),
    [
        (Bag(width=4), TOKENS, ("batch", "length")),
        slow(GRU(width=4, readout="last"), TOKENS, ("batch", 6)),
        slow(Bert(size="tiny", pooling="mean"), TOKENS, ("batch", "length")),
        slow(ResNet(widths=(4, 4), depths=(1, 1), block="basic", pie=True), PIXELS, ("batch", 3, 16, 16)),
        slow(ViT(size="nano", pie=True), PIXELS, ("batch", 3, 16, 16)),
        (FeatureProjection(hidden=4), InputSpec((5,)), ("batch", 5)),
        slow(FeatureProjection(pie=True), InputSpec((4, 5)), ("batch", 4, 5)),
    ],
    ids=lambda value: value.component_name() if isinstance(value, Encoder) else "",
)
def test_encoders_are_exported(encoder: Encoder, spec: InputSpec, shape: tuple[str | int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = encoder.build(8, spec, DataContext(tmp_path)).eval()
    program = write_program(module, [module], spec, tmp_path / "x.pt2", "it")
    assert program.shape == shape
    loaded = torch.export.load(program.path).module()
    x = example_input(spec, rows=9, seed=5)
    with torch.no_grad():
        assert torch.allclose(loaded(x), module(x), atol=1e-5)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Networks.Branching(), "thing cannot be exported, torch.export reports: .*forward pass whose shapes"),
        (Networks.OneBatchSize(), "thing cannot be exported, torch.export reports: "),
        (Networks.Chance(), r"differs from the model by \d.*depend neither on padding nor on chance"),
        (Networks.Forgetful(), "differs from the model by nan"),
    ],
)
def test_networks_that_cannot_be_exported_are_named(
    network: nn.Module, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError, match=message) as caught:
        write_program(network, [network], InputSpec((4,)), tmp_path / "x.pt2", "thing")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""  # torch prints graphs


@pytest.mark.parametrize("length", [None, 1, 4])
def test_example_tokens_fall_in_length_and_are_never_empty(length: int | None) -> None:
    x = example_input(InputSpec((6,), ("a", "b"), pad=9), rows=5, length=length)
    used = (x != 9).sum(1)
    assert x.shape == (5, length or 6)
    assert used[0] == x.shape[1]
    assert used.min() >= 1
    assert torch.equal(used, used.sort(descending=True).values)
    assert torch.equal(x == 9, torch.arange(x.shape[1]) >= used[:, None])


def test_example_values_are_normal() -> None:
    assert example_input(InputSpec((2, 3)), rows=4).shape == (4, 2, 3)
