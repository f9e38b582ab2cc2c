"""Adapters: a few trained parameters within a frozen pretrained network (LoRA), or behind it on its pooled vector."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError
from polyfed.core.extras import how_to_install
from polyfed.core.settings import Settings
from polyfed.data.backbones import BackboneTower, local_folder, missing_folder
from polyfed.data.view import DataContext, InputSpec
from polyfed.models.trunks import NetworkTrunk, linear_roles


class Adapter(Settings):
    """Trained parameters of a pretrained network in addition to the layer behind it.

    Subclasses live in ``polyfed.models.adapters``. They act within the network, by ``attach``, or behind it.
    """

    home: ClassVar[str] = "polyfed.models.adapters"

    @property
    def positions(self) -> int:
        """Number of positions by which it makes the network's input longer."""
        return 0

    @abstractmethod
    def attach(
        self, trunk: NetworkTrunk, tower: BackboneTower, spec: InputSpec, folder: Path, context: DataContext
    ) -> None:
        """Put trained parameters into the network; values come from torch's global generator, or from a file.

        Args:
            trunk: the network, frozen.
            tower: tower of a network with several.
            spec: input of the network.
            folder: weights of the network.
            context: folders of other files.

        Raises:
            ConfigError: the network has no layers for them, or their first values cannot be had.
        """


class FeatureAdapter(Adapter):
    """An adapter behind the network, on its pooled vector: the network itself is computed once and cached."""

    def attach(
        self, trunk: NetworkTrunk, tower: BackboneTower, spec: InputSpec, folder: Path, context: DataContext
    ) -> None:
        """Leaves the network unchanged."""

    @abstractmethod
    def behind(self, width: int) -> nn.Module:
        """Module that maps pooled vectors [b, width] to vectors of that width."""


class FeatureAttention(FeatureAdapter):
    """FedCLIP's adapter (Lu et al., IEEE Data Engineering Bulletin 2023, section 3): softmax(W2 tanh(W1 v)) * v.

    A weight for each feature, both layers of as many features as v; biases are learnt too.

    >>> FeatureAttention().behind(width=8)(torch.ones(2, 8)).sum(1).round(decimals=3).tolist()
    [1.0, 1.0]
    """

    short_name: ClassVar[str] = "attention"

    def behind(self, width: int) -> nn.Module:
        return AttentionModule(width)


class AttentionModule(nn.Module):
    """softmax(W2 tanh(W1 v)) * v."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        weights: Tensor = self.second(torch.tanh(self.first(x))).softmax(-1)
        return weights * x


_ROLES: dict[str, tuple[str, ...]] = {
    "query_value": ("query", "value", "fused"),
    "attention": ("query", "key", "value", "fused", "output"),
    "linear": ("query", "key", "value", "fused", "output", "mlp"),
}


class LoRA(Adapter):
    """Low-rank adaptation by ``peft`` (Hu et al., ICLR 2022): W + s B A, with B [out, r] zero at first and A [r, in].

    s is alpha / r, or alpha / sqrt(r) (Kalajdzievski, 2023); it must be equal for all whose adapters are averaged.
    """

    short_name: ClassVar[str] = "lora"
    pip_extra: ClassVar[str] = "adapters"

    last: int | None = Field(default=None, ge=1, description="adapt this many last layers, on cached states; null: all")
    start: str | None = Field(
        default=None, min_length=1, description="peft folder to start from, absolute or below data.weights_dir"
    )
    rank: int = Field(default=8, ge=1, description="r")
    scaling: float = Field(default=2.0, gt=0, description="s, alpha over r")
    targets: Literal["query_value", "attention", "linear"] | tuple[str, ...] = Field(
        default="query_value", description="linear layers of queries and values, attention or blocks; or ends of names"
    )
    offset: bool = Field(default=False, description="exchange the offsets of layers that FLoRA and FedEx-LoRA add")

    @model_validator(mode="after")
    def _requires_peft(self) -> Self:
        if find_spec("peft") is None:
            raise ValueError(f"adapter 'lora' needs the package peft, which is not there; {how_to_install('adapters')}")
        return self

    def attach(
        self, trunk: NetworkTrunk, tower: BackboneTower, spec: InputSpec, folder: Path, context: DataContext
    ) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        body = trunk.backbone.body
        targets = targets_of(body, self.targets, self.last)
        for name in targets if self.offset else ():
            body.set_submodule(name, OffsetLinear.of(body.get_submodule(name), self.scaling))
        alpha: Any = self.scaling * self.rank  # peft's annotation is int, its code takes any number
        inject_adapter_in_model(LoraConfig(r=self.rank, lora_alpha=alpha, target_modules=targets), body)
        if self.start is not None:
            _load_start(body, start_folder(self.start, context), tower)


class OffsetLinear(nn.Linear):
    """A frozen linear layer with an offset that methods add for good: W + s offset.

    Attributes:
        offset: [out, in], exchanged and not trained.
    """

    offset: Tensor
    scaling: float

    @classmethod
    def of(cls, layer: Any, scaling: float) -> OffsetLinear:
        """The layer with a zero offset; weight and bias are the same objects."""
        made = cls(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        made.weight, made.bias, made.scaling = layer.weight, layer.bias, scaling
        made.register_buffer("offset", torch.zeros_like(layer.weight))
        return made

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight + self.scaling * self.offset, self.bias)


def adapted_layers(body: nn.Module) -> dict[str, Any]:
    """Layers with adapters of ``peft`` by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: part for name, part in body.named_modules() if isinstance(part, BaseTunerLayer)}


def merged_weights(body: nn.Module) -> dict[str, Tensor]:
    """Adapted layer -> sum of the weights of layer, offset and adapter."""
    merged = {}
    for name, layer in adapted_layers(body).items():
        own = copy.deepcopy(layer)
        own.merge(adapter_names=["default"])
        base = own.get_base_layer()
        added = base.scaling * base.offset if isinstance(base, OffsetLinear) else 0
        merged[name] = (base.weight + added).detach()
    return merged


PEFT_NAMES: dict[BackboneTower, str] = {
    "whole": "base_model.model.",
    "vision": "base_model.model.vision_model.",
    "text": "base_model.model.text_model.",
}
"""Prefix of the names in a folder of ``peft``."""


def start_folder(start: str, context: DataContext) -> Path:
    """The folder of ``peft`` that an adapter starts from, absolute or below the weights folder.

    Raises:
        ConfigError: the folder does not exist.
    """
    folder = local_folder(start, context.weights)
    if folder is None:
        raise missing_folder(start, context.weights, "adapter.start")
    return folder


def start_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder of ``peft``.

    Raises:
        ConfigError: they cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"adapter.start: '{folder}' holds no readable adapter_model.safetensors: {error}") from error


def _load_start(body: nn.Module, folder: Path, tower: BackboneTower) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    given = {name.removeprefix(PEFT_NAMES[tower]): value for name, value in start_tensors(folder).items()}
    own = {name: tuple(value.shape) for name, value in get_peft_model_state_dict(body).items()}
    if wrong := sorted(set(own.items()) ^ {(name, tuple(value.shape)) for name, value in given.items()}):
        name, shape = wrong[0]
        raise ConfigError(
            f"adapter.start: the adapter in '{folder}' differs from the settings, first at '{name}' {list(shape)}; "
            "set its rank and targets"
        )
    set_peft_model_state_dict(body, given)


def targets_of(body: nn.Module, targets: str | Sequence[str], last: int | None) -> list[str]:
    """Full names of the linear layers to be adapted.

    Raises:
        ConfigError: the network has none of them.
    """
    roles = linear_roles(body, last)
    chosen = _ROLES[targets] if isinstance(targets, str) else tuple(targets)
    names = [
        name for name, role in roles.items() if (role in chosen if isinstance(targets, str) else name.endswith(chosen))
    ]
    if not names:
        ends = ", ".join(sorted({name.rpartition(".")[2] for name in roles})) or "none"
        what = targets if isinstance(targets, str) else ", ".join(targets)
        raise ConfigError(f"adapter: the network has no linear layers for '{what}'; those of its blocks end in: {ends}")
    return names
