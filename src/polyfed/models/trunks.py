"""Pretrained networks: their layers, their padding, and their features from a cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import Backbone, pooled, reads_padding
from polyfed.data.view import InputSpec
from polyfed.models.towers import LocalFeatures, laid_out, masked_mean

_PARTS = {
    **dict.fromkeys(("q", "query", "q_proj", "q_lin"), "query"),
    **dict.fromkeys(("k", "key", "k_proj", "k_lin"), "key"),
    **dict.fromkeys(("v", "value", "v_proj", "v_lin"), "value"),
    **dict.fromkeys(("qkv", "Wqkv", "qkv_proj", "in_proj"), "fused"),
}
_BEFORE = ("pre_layrnorm", "embeddings_project")  # between embeddings and layers
_SHARED = ("relative_attention_bias", "rel_embeddings")  # parts that all layers use


def layers_path(body: nn.Module) -> str:
    """Name of the list of a network's layers.

    Raises:
        ConfigError: it has no such list, as convolutional networks, or several.
    """
    lists = [name for name, part in body.named_modules() if isinstance(part, nn.ModuleList)]
    if len(lists) != 1 or not hasattr(body, "embeddings"):
        name = type(body).__name__
        raise ConfigError(f"network '{name}' is not a transformer with one list of layers; train all or none of it")
    return str(lists[0])


def linear_roles(body: nn.Module, last: int | None = None) -> dict[str, str]:
    """Linear layers of the ``last`` blocks (None: of all): full name -> query, key, value, fused, output or mlp.

    Raises:
        ConfigError: see ``layers_path``.
    """
    path, layers = layers_path(body), _layers(body)
    first = 0 if last is None else _first(layers, last)
    return {
        f"{path}.{number}.{name}": _role(name)
        for number, layer in enumerate(layers[first:], first)
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
    """Parts that work on an input before the ``last`` layers do, and parts that they share with these.

    Raises:
        ConfigError: there are fewer layers; see ``layers_path`` too.
    """
    layers = _layers(body)
    parts = [part for name in ("embeddings", *_BEFORE) if (part := getattr(body, name, None)) is not None]
    parts += [part for name, part in body.named_modules() if name.endswith(_SHARED)]
    return [*parts, *layers[: _first(layers, last)]]


def start_at_last(body: nn.Module, last: int) -> None:
    """Make a network take the input states of its ``last`` layers, [b, l, c], in place of its input.

    Names of the remaining parts do not change.

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
    """Replaces the embeddings: the network's input is the states already."""

    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        # networks read its dtype alone
        like = nn.Module()
        like.register_buffer("weight", next(embeddings.parameters()).new_empty(0), persistent=False)
        self.patch_embeddings = nn.Module()
        self.patch_embeddings.projection = like

    def forward(self, *inputs: Tensor | None, **named: Any) -> Tensor:
        given: tuple[Tensor | None, ...] = (named.get("pixel_values"), named.get("input_ids"), *inputs)
        return next(value for value in given if value is not None)


class _Passed(nn.Module):
    """Replaces a layer whose work is done."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, states: Tensor, *others: Any, **named: Any) -> Tensor:
        return states


NO_STATES = "does not go on from states of its layers, so that these cannot be cached; give the encoder `view: native`"


class CachedTrunk(nn.Module):
    """Features that were computed before: vectors [b, c], or positions [b, l, c], zero where there is padding.

    Args:
        leads: the first position stands for all (CLS); else their mean does.
    """

    def __init__(self, leads: bool) -> None:
        super().__init__()
        self.leads = leads

    def forward(self, x: Float[Tensor, "b ... c"]) -> LocalFeatures:
        if x.dim() == 2:
            return LocalFeatures(x, x.unsqueeze(1))
        mask = _filled(x)
        return LocalFeatures(x[:, 0] if self.leads else masked_mean(x, mask), x, mask, self.leads)


class PromptPositions(NamedTuple):
    """Positions of learnt vectors among those of a network.

    Attributes:
        at: position of the first.
        length: number of vectors.
        filler: token id that keeps their positions; None: the network makes room itself.
    """

    at: int
    length: int
    filler: int | None

    def among(self, x: Tensor, value: float) -> Tensor:
        """Columns of a value among those of x [b, l]."""
        return torch.cat([x[:, : self.at], x.new_full((len(x), self.length), value), x[:, self.at :]], dim=1)

    def left_out(self, hidden: Float[Tensor, "b m c"]) -> Float[Tensor, "b l c"]:
        return torch.cat([hidden[:, : self.at], hidden[:, self.at + self.length :]], dim=1)


class NetworkTrunk(nn.Module):
    """A pretrained network on images [b, c, h, w], token ids [b, l], or states of its first layers [b, l, e].

    Args:
        backbone: the network; a pooler that its pooling does not use is removed.
        padding: padding of token ids; None: the input holds none.
        coarse: compute in bfloat16.
    """

    def __init__(self, backbone: Backbone, padding: Padding | None, coarse: bool) -> None:
        super().__init__()
        self.backbone, self.padding, self.coarse = backbone, padding, coarse
        self.prompts: PromptPositions | None = None
        pooler = getattr(backbone.body, "pooler", None)
        is_used = backbone.pool in ("pooled", "projected")
        if not is_used and pooler is not None and any(True for _ in pooler.parameters()):
            backbone.body.register_module("pooler", None)  # it would learn nothing, and many checkpoints lack it

    def prompt(self, positions: PromptPositions) -> None:
        """Make room for vectors that a part of the network puts among the embedded input."""
        self.prompts = positions
        if self.padding is not None and self.padding.room is not None:
            self.padding.room -= positions.length  # texts are padded to that many fewer

    def forward(self, x: Tensor) -> LocalFeatures:
        x, mask = self._with_mask(x)
        attended = mask
        if mask is not None:
            attended = mask.clone()
            attended[:, 0] = True  # an empty text is read as one padding token
        with torch.autocast(x.device.type, torch.bfloat16) if self.coarse else nullcontext():
            output = self._output(x, attended)
            vector, local = self.backbone.features(output, attended), pooled(output, "tokens", attended)
        if self.coarse:
            vector, local = vector.float(), local.float()
        led = output.last_hidden_state.dim() == 3 and self.backbone.pool in ("auto", "cls")
        return LocalFeatures(vector, local, mask, led)

    def _output(self, x: Tensor, attended: Tensor | None) -> Any:
        """Output of the network, at the positions of its input alone."""
        if self.prompts is None:
            return self.backbone.output(x, attended)
        if self.prompts.filler is not None:
            x = self.prompts.among(x, self.prompts.filler)
            attended = None if attended is None else self.prompts.among(attended, True)
        output = self.backbone.output(x, attended)
        output.last_hidden_state = self.prompts.left_out(output.last_hidden_state)
        return output

    def _with_mask(self, x: Tensor) -> tuple[Tensor, Bool[Tensor, "b l"] | None]:
        if x.dim() == 4:
            return laid_out(x), None
        if self.padding is not None:
            return self.padding.of(x)
        return x, _filled(x) if self.backbone.reads == "input_ids" else None


class Padding:
    """Padding of token ids [b, l] as a network was trained with it.

    Args:
        pad: id of the padding token.
        room: positions of the network; None: any number.
        ends: True if the first padding token ends the text, both being one token (CLIP).
        full: True if texts are padded to ``room``, and all of it is read (SigLIP).
    """

    def __init__(self, pad: int, room: int | None, *, ends: bool, full: bool) -> None:
        self.pad, self.room, self.ends, self.full = pad, room, ends, full

    @classmethod
    def for_texts(cls, spec: InputSpec, backbone: Backbone) -> Padding | None:
        if not spec.vocabulary:
            return None
        config: Any = backbone.body.config
        # configurations of CLIP older than a repair have 2, and mean the highest id
        end = len(spec.vocabulary) - 1 if config.eos_token_id == 2 else config.eos_token_id
        ends = str(config.model_type).startswith("clip") and spec.pad == end
        return cls(spec.pad, getattr(config, "max_position_embeddings", None), ends=ends, full=reads_padding(config))

    def of(self, ids: Tensor) -> tuple[Tensor, Bool[Tensor, "b l"] | None]:
        """Ids as the network takes them, and their mask; None: all are read."""
        length = ids.shape[1]
        if self.full:
            return F.pad(ids, (0, (self.room or length) - length), value=self.pad), None
        if not self.ends:
            return ids, ids != self.pad
        # the end of the longest text counts as padding elsewhere, and so may have been cut off
        ids = F.pad(ids, (0, int(self.room is None or length < self.room)), value=self.pad)
        return ids, F.pad(ids[:, :-1] != self.pad, (1, 0), value=True)


@contextmanager
def by_sample(model: nn.Module) -> Iterator[None]:
    """Lets ``torch.func.vmap`` take the samples of a batch one by one.

    Networks of ``transformers`` otherwise leave a mask out where all of a batch is valid, which no value of one sample
    may decide, and the quick kernels of attention know no ``vmap``.
    """
    if not any(isinstance(part, NetworkTrunk) for part in model.modules()):
        yield
        return
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    unskipped = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    # in place of the usual ones: networks look attention up by the same names, and not all of them take new ones
    masks = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in ("sdpa", "eager")}
    try:
        for name, mask in masks.items():
            AttentionMaskInterface.register(name, lambda *args, mask=mask, **named: mask(*args, **named | unskipped))
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for name, mask in masks.items():
            AttentionMaskInterface.register(name, mask)


def goes_on(backbone: Backbone, last: int, x: Tensor) -> Backbone:
    """The network from the input states of its ``last`` layers on.

    Args:
        backbone: the whole network; it is changed.
        last: number of layers.
        x: input on which the two are compared.

    Raises:
        ConfigError: the network does not go on from states, as one that reads token ids again.
    """
    with torch.no_grad():
        full = backbone.output(x, output_hidden_states=True)
        start_at_last(backbone.body, last)
        try:
            resumed = backbone.output(full.hidden_states[-1 - last]).last_hidden_state
            is_same = torch.allclose(resumed, full.last_hidden_state, atol=1e-4)
        except (IndexError, RuntimeError, TypeError, ValueError):
            is_same = False
    if not is_same:
        raise ConfigError(f"encoder 'hf': network '{type(backbone.body).__name__}' {NO_STATES}")
    return backbone


def _filled(x: Float[Tensor, "b l c"]) -> Bool[Tensor, "b l"]:
    return (x != 0).any(-1)
