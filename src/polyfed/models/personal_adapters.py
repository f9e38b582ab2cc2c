"""Several low-rank adapters in each layer: one that is exchanged, and others that stay with their participant.

They are ``peft``'s named adapters; outputs of those in use add up. What crosses is ``SHARED`` alone.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.core.randomness import generator
from polyfed.models.adapters.layers import adapted_layers
from polyfed.models.frozen import frozen_parts

SHARED, PERSONAL, RECEIVED = "default", "personal", "received"
"""Names of adapters: the exchanged one, which ``peft`` calls default; a client's own; a frozen copy of the first."""


def add_adapters(model: nn.Module, *names: str) -> None:
    """Put further adapters beside those of a model's layers, of their rank, scaling and dropout.

    They are neither exchanged nor saved with the model, and not in use.

    Args:
        model: of a participant, whose encoders may have low-rank adapters.
        names: of the new adapters, such as ``PERSONAL``.

    Raises:
        ConfigError: no encoder has low-rank adapters, or one has adapters whose outputs do not add up.
    """
    from peft import inject_adapter_in_model

    adapted = [part for part in frozen_parts(model).values() if adapted_layers(part.module)]
    if not adapted:
        raise ConfigError(
            "the method puts a second adapter beside each low-rank one, and no encoder of this model has any; give "
            "encoders 'hf' an adapter 'lora', or choose another method"
        )
    for part in adapted:
        body: Any = next(module for module in part.module.modules() if hasattr(module, "peft_config"))
        config = body.peft_config[SHARED]
        _require_sums(config)
        before = {name for name, _ in part.module.named_parameters()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
            for name in names:
                inject_adapter_in_model(copy.deepcopy(config), body, name)
        part.keep_apart({name for name, _ in part.module.named_parameters()} - before)
    use_adapters(model, {SHARED: 1.0})


def _require_sums(config: Any) -> None:
    from peft import LoraConfig

    if not isinstance(config, LoraConfig) or config.use_dora:
        kind = "lora with dora" if isinstance(config, LoraConfig) else config.peft_type.value.lower()
        raise ConfigError(
            f"the method adds the outputs of two adapters, and those of adapter '{kind}' do not add up; choose "
            "adapter 'lora' with dora: false"
        )


def use_adapters(model: nn.Module, weights: Mapping[str, float | Tensor]) -> None:
    """Have a model's layers work with some of their adapters: W + s sum_a weight_a B_a A_a.

    All adapters but ``RECEIVED`` have gradients where they are in use.

    Args:
        model: of a participant.
        weights: name of an adapter -> factor of its output; a number, or [b, 1, 1] of each sample of a batch.
    """
    for layer in adapted_layers(model).values():
        layer.set_adapter(list(weights))
        for name, value in layer.named_parameters():
            if not name.startswith("base_layer."):
                # peft takes gradients from those that are not in use, but an optimiser may be theirs
                value.requires_grad_(f".{RECEIVED}." not in name)
        for name, weight in weights.items():
            layer.set_scale(name, weight)


@contextmanager
def training_only(model: nn.Module, adapter: str) -> Iterator[None]:
    """Nothing but an adapter is trained within the block."""
    rest = [value for name, value in model.named_parameters() if value.requires_grad and not _is_of(name, adapter)]
    for value in rest:
        value.requires_grad_(False)
    try:
        yield
    finally:
        for value in rest:
            value.requires_grad_(True)


def adapter_tensors(model: nn.Module, adapter: str) -> dict[str, Tensor]:
    """Factors A [r, in] and B [out, r] of an adapter by their names in the model; they share its memory."""
    return {name: value.detach() for name, value in model.named_parameters() if _is_of(name, adapter)}


def load_adapter(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Take over what ``adapter_tensors`` gave."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in tensors.items():
            own[name].copy_(value)


def copy_adapter(model: nn.Module, source: str, target: str) -> None:
    """Have one adapter be as another is now."""
    tensors = adapter_tensors(model, source)
    load_adapter(model, {name.replace(f".{source}.", f".{target}."): value for name, value in tensors.items()})


def renew_adapter(model: nn.Module, adapter: str, *key: int | str) -> None:
    """New factors of an adapter: A uniform as ``peft`` has it, from the key and the layer's name, B zero."""
    for name, value in adapter_tensors(model, adapter).items():
        if ".lora_B." in name:
            value.zero_()
        else:
            draw = torch.rand(value.shape, generator=generator("factors", *key, name))
            value.copy_((2 * draw - 1) * value.shape[1] ** -0.5)


def _is_of(name: str, adapter: str) -> bool:
    return ".lora_" in name and f".{adapter}." in name
