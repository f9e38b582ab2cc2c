"""The layers of a transformer of ``transformers``: where they stand, what each linear layer is, and all from one on."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polyfed.core.errors import ConfigError

_PARTS = {
    **dict.fromkeys(("q", "query", "q_proj", "q_lin"), "query"),
    **dict.fromkeys(("k", "key", "k_proj", "k_lin"), "key"),
    **dict.fromkeys(("v", "value", "v_proj", "v_lin"), "value"),
    **dict.fromkeys(("qkv", "Wqkv", "qkv_proj", "in_proj"), "fused"),
}
_BEFORE = ("pre_layrnorm", "embeddings_project")  # between embeddings and layers
_BESIDE = ("relative_attention_bias", "rel_embeddings")  # what all layers use


def layers_path(body: nn.Module) -> str:
    """Name of the list of a network's layers.

    Raises:
        ConfigError: it has none, as convolutional networks, or several.
    """
    lists = [name for name, part in body.named_modules() if isinstance(part, nn.ModuleList)]
    if len(lists) != 1 or not hasattr(body, "embeddings"):
        raise ConfigError(
            f"network '{type(body).__name__}' is no transformer of embeddings and one list of layers; train all or "
            "none of it"
        )
    return str(lists[0])


def linear_roles(body: nn.Module, last: int | None = None) -> dict[str, str]:
    """Linear layers of the last so many blocks (None: of all): full name -> query, key, value, fused, output or mlp.

    Raises:
        ConfigError: see ``layers_path``.
    """
    path, layers = layers_path(body), _layers(body)
    first = 0 if last is None else _first(layers, last)
    return {
        f"{path}.{number}.{name}": _role(name)
        for number, layer in enumerate(layers)
        if number >= first
        for name, part in layer.named_modules()
        if isinstance(part, nn.Linear)
    }


def _role(name: str) -> str:
    *parents, own = name.split(".")
    if own in _PARTS:
        return _PARTS[own]
    return "output" if any("att" in parent for parent in parents) else "mlp"


def _layers(body: nn.Module) -> nn.ModuleList:
    layers = body.get_submodule(layers_path(body))
    assert isinstance(layers, nn.ModuleList)
    return layers


def _first(layers: nn.ModuleList, last: int) -> int:
    if last > len(layers):
        raise ConfigError(f"the network has {len(layers)} layers, not {last}; train at most all of them")
    return len(layers) - last


def before(body: nn.Module, last: int) -> list[nn.Module]:
    """All that works on an input before the last so many layers do, and what they share with the others.

    Raises:
        ConfigError: there are fewer layers; see ``layers_path`` too.
    """
    layers = _layers(body)
    names = ("embeddings", *_BEFORE)
    parts = [part for name in names if (part := getattr(body, name, None)) is not None]
    parts += [part for name, part in body.named_modules() if name.endswith(_BESIDE)]
    return [*parts, *layers[: _first(layers, last)]]


def start_at_last(body: nn.Module, last: int) -> None:
    """Have a network take the states that its last so many layers work on, [b, l, c], in place of its input.

    Names of what stays are as they were.

    Raises:
        ConfigError: there are fewer layers; see ``layers_path`` too.
    """
    layers = _layers(body)
    first = _first(layers, last)
    body.embeddings = _Entry(body.embeddings)
    for name in _BEFORE:
        if hasattr(body, name):
            setattr(body, name, nn.Identity())
    for number in range(first):
        layers[number] = _Passed(layers[number])


class _Entry(nn.Module):
    """Stands where embeddings were: what the network was called with are the states already."""

    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        # asked for its type of numbers alone
        like = nn.Module()
        like.register_buffer("weight", next(embeddings.parameters()).new_empty(0), persistent=False)
        self.patch_embeddings = nn.Module()
        self.patch_embeddings.projection = like

    def forward(self, *inputs: Tensor | None, **named: Any) -> Tensor:
        given: tuple[Tensor | None, ...] = (named.get("pixel_values"), named.get("input_ids"), *inputs)
        return next(value for value in given if value is not None)


class _Passed(nn.Module):
    """Stands where a layer was that has done its work."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, states: Tensor, *others: Any, **named: Any) -> Tensor:
        return states
