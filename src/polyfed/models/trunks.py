"""Trunks of pretrained networks: the network itself with what it takes for padding, or its features from a cache."""

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
from polyfed.models.convolutional import laid_out
from polyfed.models.layers import start_at_last
from polyfed.models.pooling import masked_mean
from polyfed.models.towers import LocalFeatures

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


class PromptPlaces(NamedTuple):
    """Where learnt vectors stand among the positions of a network.

    Attributes:
        at: of the first.
        length: their number.
        filler: token id that keeps their places; None: the network makes room itself.
    """

    at: int
    length: int
    filler: int | None

    def among(self, x: Tensor, value: float) -> Tensor:
        """Columns of a value among those of x [b, l]."""
        filling = x.new_full((len(x), self.length), value)
        return torch.cat([x[:, : self.at], filling, x[:, self.at :]], dim=1)

    def left_out(self, hidden: Float[Tensor, "b m c"]) -> Float[Tensor, "b l c"]:
        return torch.cat([hidden[:, : self.at], hidden[:, self.at + self.length :]], dim=1)


class NetworkTrunk(nn.Module):
    """A pretrained network on pictures [b, c, h, w], token ids [b, l], or states of its first layers [b, l, e].

    Args:
        backbone: the network; a pooler that its pooling does not ask for is taken away.
        padding: of token ids; None: there are none.
        coarse: compute in bfloat16.
    """

    def __init__(self, backbone: Backbone, padding: Padding | None, coarse: bool) -> None:
        super().__init__()
        self.backbone, self.padding, self.coarse = backbone, padding, coarse
        self.prompts: PromptPlaces | None = None
        pooler = getattr(backbone.body, "pooler", None)
        is_asked = backbone.pool in ("pooled", "projected")
        if not is_asked and pooler is not None and any(True for _ in pooler.parameters()):
            backbone.body.register_module("pooler", None)  # it would learn nothing, and many checkpoints lack it

    def prompt(self, places: PromptPlaces) -> None:
        """Have room for vectors that a part of the network puts among the embedded input."""
        self.prompts = places
        if self.padding is not None:
            self.padding.leave_room(places.length)

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
        """What the network gives, at the positions of its input alone."""
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
    """Which of token ids [b, l] are padding, as a network was trained to take it.

    Args:
        pad: id of the padding token.
        room: positions of the network; None: any number.
        ends: the first padding token ends the text, as where both are one token (CLIP).
        full: texts are padded to ``room``, and all of it is read (SigLIP).
    """

    def __init__(self, pad: int, room: int | None, *, ends: bool, full: bool) -> None:
        self.pad, self.room, self.ends, self.full = pad, room, ends, full

    @classmethod
    def for_texts(cls, spec: InputSpec, backbone: Backbone) -> Padding | None:
        if not spec.vocabulary:
            return None
        config: Any = backbone.body.config
        # configurations of CLIP that are older than a repair say 2, and mean the highest id
        end = len(spec.vocabulary) - 1 if config.eos_token_id == 2 else config.eos_token_id
        ends = str(config.model_type).startswith("clip") and spec.pad == end
        return cls(spec.pad, getattr(config, "max_position_embeddings", None), ends=ends, full=reads_padding(config))

    def leave_room(self, positions: int) -> None:
        """Fill texts up to so many positions less."""
        self.room = None if self.room is None else self.room - positions

    def of(self, ids: Tensor) -> tuple[Tensor, Bool[Tensor, "b l"] | None]:
        """Ids as the network takes them, and which are valid; None: all are read."""
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

    whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    # in place of the usual ones: networks look attention up by the same names, and not all of them take new ones
    usual = {kind: ALL_MASK_ATTENTION_FUNCTIONS[kind] for kind in ("sdpa", "eager")}
    try:
        for kind, mask in usual.items():
            AttentionMaskInterface.register(kind, lambda *args, mask=mask, **named: mask(*args, **named | whole))
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for kind, mask in usual.items():
            AttentionMaskInterface.register(kind, mask)


def goes_on(backbone: Backbone, last: int, x: Tensor) -> Backbone:
    """The network from the states of its last so many layers on.

    Args:
        backbone: the whole network; it is changed.
        last: number of layers.
        x: an input, on which the two are compared.

    Raises:
        ConfigError: the network does not go on from states, as one that looks at token ids again.
    """
    with torch.no_grad():
        whole = backbone.output(x, output_hidden_states=True)
        start_at_last(backbone.body, last)
        try:
            rest = backbone.output(whole.hidden_states[-1 - last]).last_hidden_state
            same = torch.allclose(rest, whole.last_hidden_state, atol=1e-4)
        except (IndexError, RuntimeError, TypeError, ValueError):
            same = False
    if not same:
        raise ConfigError(f"encoder 'hf': network '{type(backbone.body).__name__}' {NO_STATES}")
    return backbone


def _filled(x: Float[Tensor, "b l c"]) -> Bool[Tensor, "b l"]:
    return (x != 0).any(-1)
