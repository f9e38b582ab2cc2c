"""Low-rank adapters within a network's layers, by ``peft``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError
from polyfed.core.extras import how_to_install
from polyfed.data.backbones import BackboneTower, local_folder, missing_folder
from polyfed.data.view import DataContext, InputSpec
from polyfed.models.adapters.adapter import Adapter
from polyfed.models.trunks import NetworkTrunk, linear_roles

_ROLES: dict[str, tuple[str, ...]] = {
    "query_value": ("query", "value", "fused"),
    "attention": ("query", "key", "value", "fused", "output"),
    "linear": ("query", "key", "value", "fused", "output", "mlp"),
}


class LoRA(Adapter):
    """Low-rank adaptation (Hu et al., ICLR 2022): W + s B A, with B [out, r] zero at first and A [r, in].

    s is alpha / r, or alpha / sqrt(r) (Kalajdzievski, 2023); it must be equal for all whose adapters are averaged.
    """

    short_name: ClassVar[str] = "lora"
    pip_extra: ClassVar[str] = "adapters"

    last: int | None = Field(
        default=None, ge=1, description="adapt the last so many layers alone, on cached states of the others; null: all"
    )
    start: str | None = Field(
        default=None, min_length=1, description="peft folder to start from, absolute or below data.weights_dir"
    )
    rank: int = Field(default=8, ge=1, description="r")
    scaling: float = Field(default=2.0, gt=0, description="s, alpha over r")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of the input of A dropped in training")
    targets: Literal["query_value", "attention", "linear"] | tuple[str, ...] = Field(
        default="query_value",
        description="linear layers: of queries and values, all of attention, or all of each block; or ends of names",
    )
    offset: bool = Field(default=False, description="exchange too what FLoRA and FedEx-LoRA add to a layer for good")

    @model_validator(mode="after")
    def _can_be_had(self) -> Self:
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
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.scaling * self.rank,  # type: ignore[arg-type]  # peft says int and takes any number
            lora_dropout=self.dropout,
            target_modules=targets,
        )
        inject_adapter_in_model(config, body)
        if self.start is not None:
            _load_start(body, start_folder(self.start, context), tower)


class OffsetLinear(nn.Linear):
    """A frozen linear layer, and what methods have added to it for good: W + s offset.

    Attributes:
        offset: [out, in], exchanged and not trained.
    """

    offset: Tensor
    scaling: float

    @classmethod
    def of(cls, layer: Any, scaling: float) -> OffsetLinear:
        """The layer with a zero offset; its weight and bias are the very same."""
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
    """Adapted layer -> the weight that layer, offset and adapter come to."""
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
"""What names of a folder of ``peft`` begin with."""


def start_folder(start: str, context: DataContext) -> Path:
    """The folder of ``peft`` that an adapter starts from, absolute or below the weights folder.

    Raises:
        ConfigError: there is none.
    """
    folder = local_folder(start, context.weights)
    if folder is None:
        raise missing_folder(start, context.weights, "adapter.start")
    return folder


def start_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder of ``peft``.

    Raises:
        ConfigError: it holds none that can be read.
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
        raise ConfigError(
            f"adapter.start: the adapter in '{folder}' is not as the settings say, first at '{wrong[0][0]}' "
            f"{list(wrong[0][1])}; give its kind, rank and targets"
        )
    set_peft_model_state_dict(body, given)


def targets_of(body: nn.Module, targets: str | Sequence[str], last: int | None) -> list[str]:
    """Full names of the linear layers that are to be adapted.

    Raises:
        ConfigError: there is none.
    """
    roles = linear_roles(body, last)
    if isinstance(targets, str):
        names = [name for name, role in roles.items() if role in _ROLES[targets]]
    else:
        names = [name for name in roles if name.endswith(tuple(targets))]
    if not names:
        raise _no_layers(roles, targets if isinstance(targets, str) else ", ".join(targets))
    return names


def _no_layers(roles: dict[str, str], what: str) -> ConfigError:
    ends = ", ".join(sorted({name.rpartition(".")[2] for name in roles})) or "none"
    return ConfigError(f"adapter: the network has no linear layers for '{what}'; those of its blocks end in: {ends}")
