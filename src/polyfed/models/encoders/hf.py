"""Any pretrained encoder of ``transformers``: frozen, with adapters, or trained from some layer on."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from jaxtyping import Bool, Float
from pydantic import Field, SerializeAsAny, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import (
    Backbone,
    BackboneTower,
    channels_last,
    digest,
    frozen_backbone,
    locate,
    most_tokens,
    outline,
    pooled,
)
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.features import Features
from polyfed.data.views.native import Native
from polyfed.models.adapters import Adapter, Bottleneck, LayerAdapter
from polyfed.models.encoder import Encoder, check_channels, image_shape, token_length
from polyfed.models.frozen import Frozen
from polyfed.models.layers import before, start_at_last
from polyfed.models.pooling import masked_mean
from polyfed.models.towers import EncoderTower, LocalFeatures

_Pooling = Literal["auto", "cls", "mean", "pooled"]
# MobileNets come with TensorFlow's 0.997, which PyTorch reads the other way round
_FORGETS = 0.9


class HF(Encoder):
    """A pretrained network with its own pooling, projected to d.

    What is frozen is neither trained, exchanged nor saved with clients, and a process holds it once. Up to the first
    layer that is trained, what it gives is computed once and cached, unless ``view`` says otherwise.
    """

    projecting = ("pie", "dropout", "projection", "standardise")

    view: SerializeAsAny[View] = Field(
        description="by default the network's features where all is frozen, the states before the first layer that is "
        "trained, or what its own processor gives; keys of a view without a name are taken over into that"
    )
    weights: str = Field(min_length=1, description="folder below data.weights_dir, or hub name owner/name")
    tower: BackboneTower = Field(default="whole", description="vision or text, of networks with both (CLIP)")
    trainable: Literal["none", "all", "adapters"] | int = Field(
        default="none", description="none, all, adapters, or the number of last layers that are trained"
    )
    adapter: SerializeAsAny[Adapter] | None = Field(default=None, description="what trainable adapters are")
    pooling: _Pooling = Field(
        default="auto",
        description="cls, mean (of all positions) or pooled (its own pooler); auto: pooled for a tower of several, else "
        "cls for transformers, mean for convolutional networks",
    )
    projection: Literal["new", "own"] = Field(
        default="new", description="a new linear layer, or the network's own one into the space of its towers (CLIP)"
    )
    standardise: bool = Field(default=True, description="layer norm without parameters before a new projection")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of the pooled vector dropped in training")
    pie: bool = Field(default=False, description="attention over the positions (PVSE)")
    precision: Literal["fp32", "bf16"] = Field(default="fp32", description="arithmetic of the network")
    checkpointing: bool = Field(default=False, description="compute again in the backward pass what is not kept")

    @model_validator(mode="before")
    @classmethod
    def _own_view(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "weights" not in data:
            return data
        data = dict(data)
        if data.get("adapter") is not None:
            data.setdefault("trainable", "adapters")
        given = data.get("view")
        if given is None or (isinstance(given, Mapping) and "name" not in given):
            data["view"] = _default_view(data) | dict(given or {})
        return data

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.trainable == "adapters") != (self.adapter is not None):
            raise ValueError(
                f"trainable is {self.trainable} and adapter is {self.adapter and self.adapter.component_name()}; give an "
                "adapter with trainable: adapters, and with nothing else"
            )
        if isinstance(self.trainable, int) and self.trainable < 1:
            raise ValueError(f"trainable is {self.trainable}; give none, all, adapters, or 1 or more last layers")
        backbone = getattr(self.view, "backbone", self.weights)
        if backbone != self.weights:
            raise ValueError(f"view.backbone is '{backbone}', weights are '{self.weights}'; leave view.backbone out")
        if isinstance(self.view, Features) and self.view.before_last != self._last and not self._is_still:
            raise ValueError(
                f"view.before_last is {self.view.before_last}, but {self._last or 'all'} last layers are trained; leave "
                "view.name and view.before_last out"
            )
        if self.projection == "own" and self.pie:
            raise ValueError("pie has no effect with projection own; leave one out")
        return self

    @property
    def _last(self) -> int | None:
        """How many last layers train; None: all, or none."""
        if isinstance(self.adapter, LayerAdapter):
            return self.adapter.last
        return self.trainable if isinstance(self.trainable, int) else None

    @property
    def _is_still(self) -> bool:
        """Whether no layer of the network is trained."""
        return self.trainable == "none" or isinstance(self.adapter, Bottleneck)

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps what the view gives, pictures [b, c, h, w], token ids [b, l] or features, to [b, dim].

        Raises:
            ConfigError: the weights cannot be had or do not fit what the view gives, or lack what is to be trained.
        """
        cached = isinstance(self.view, Features) and self.view.before_last is None
        trunk: nn.Module = _Cached() if cached else self._trunk(spec, context)
        width, local = (spec.shape[-1],) * 2 if cached else self._widths(spec, context)
        end: list[nn.Module] = [self.adapter.module(width)] if isinstance(self.adapter, Bottleneck) else []
        if self.projection == "new":
            end += [nn.LayerNorm(width, elementwise_affine=False)] if self.standardise else []
            end += [nn.Dropout(self.dropout), nn.Linear(width, dim)]
        elif width != dim:
            raise ConfigError(
                f"encoder 'hf': '{self.weights}' projects to {width}, model.dim is {dim}; set it to {width}"
            )
        return EncoderTower(trunk, width, dim, pie=local if self.pie else None, project=nn.Sequential(*end))

    def frozen(self, modality: str, context: DataContext) -> str:
        if self.trainable == "all":
            return ""
        folder = self._folder(context)
        key = f"size of {digest(folder)} {self.tower}"
        if key not in context.fitted:
            values = outline(folder, self.pooling, self.tower).parameters()
            context.fitted[key] = sum(value.numel() for value in values)
        return f"{context.fitted[key]}x{digest(folder)[:8]}"

    def _folder(self, context: DataContext) -> Path:
        return locate(self.weights, context.weights, key="encoder hf, weights")

    # ---- networks that are not cached to their end

    def _trunk(self, spec: InputSpec, context: DataContext) -> nn.Module:
        trunk = cast("Frozen", copy.deepcopy(self._base(spec, context))).module
        assert isinstance(trunk, _Trunk)
        body = trunk.backbone.body
        still: list[nn.Module] = []
        if self._is_still:
            still, trained = [trunk], set[str]()
        elif isinstance(self.adapter, LayerAdapter):
            self.adapter.attach(body)
            trained = {name for name, value in trunk.named_parameters() if value.requires_grad}
        else:
            trained = set(trunk.state_dict())
        if self._last is not None:
            still = before(body, self._last)
            held = {id(value) for part in still for value in part.state_dict(keep_vars=True).values()}
            trained -= {name for name, value in trunk.state_dict(keep_vars=True).items() if id(value) in held}
        _own(trunk, trained)
        if self.checkpointing:
            cast("Any", body).gradient_checkpointing_enable({"use_reentrant": False})
        if self.trainable == "all":
            return trunk.requires_grad_()
        shared = context.fitted.setdefault(f"tensors of {self._key(spec, context)} {self.adapter}", {})
        made = Frozen(trunk, self.frozen("", context), trained=trained, still=still, shared=cast("Any", shared))
        return made

    def _base(self, spec: InputSpec, context: DataContext) -> Frozen:
        """The network with its weights, from which all models of this process are made."""
        key = self._key(spec, context)
        if key not in context.fitted:
            backbone = channels_last(frozen_backbone(self._folder(context), self._pool, self.tower))
            assert isinstance(backbone, Backbone)
            for part in backbone.modules():
                if isinstance(part, nn.BatchNorm2d) and part.momentum is not None and part.momentum > _FORGETS:
                    part.momentum = 1 - part.momentum
            if isinstance(self.view, Features) and self.view.before_last is not None:
                start_at_last(backbone.body, self.view.before_last)
            trunk = _Trunk(backbone, _padding(spec, backbone), self.precision == "bf16")
            context.fitted[key] = Frozen(trunk, self.frozen("", context))
        return cast("Frozen", context.fitted[key])

    def _key(self, spec: InputSpec, context: DataContext) -> str:
        held = digest(self._folder(context)), self._pool, self.tower, self._last, self.precision, self.checkpointing
        return f"network {held} {spec.shape} {spec.pad if spec.vocabulary else None}"

    @property
    def _pool(self) -> Any:
        return "projected" if self.projection == "own" else self.pooling

    def _widths(self, spec: InputSpec, context: DataContext) -> tuple[int, int]:
        """Widths of the network's vectors and positions.

        Raises:
            ConfigError: it does not take what the view gives.
        """
        folder = self._folder(context)
        backbone = outline(folder, self._pool, self.tower)
        config: Any = backbone.body.config
        reads_images = backbone.reads == "pixel_values"
        if isinstance(self.view, Features):
            start_at_last(backbone.body, self.view.before_last or 1)
        elif reads_images:
            needed = getattr(config, "num_channels", spec.shape[0])
            check_channels(image_shape(spec, "hf")[0], needed, "hf", self.weights)
        else:
            self._require_room(token_length(spec, "hf"), most_tokens(folder), "tokens a text")
            self._require_room(len(spec.vocabulary), config.vocab_size, "words in the vocabulary")
        dtype = torch.int64 if spec.vocabulary else torch.float32
        blank = torch.zeros(1, *spec.shape, dtype=dtype, device="meta")
        try:
            features = _Trunk(backbone, None, False)(blank)
        except (ValueError, RuntimeError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"encoder 'hf': '{self.weights}' does not take what its view gives: {reason}") from error
        return features.pooled.shape[1], features.local.shape[2]

    def _require_room(self, given: int, room: int | None, what: str) -> None:
        if room is not None and given > room:
            raise ConfigError(
                f"encoder 'hf': '{self.weights}' has room for {room} {what}, its view gives {given}; shorten the view's "
                "length, or give it the tokenizer of these weights"
            )


def _own(module: nn.Module, names: Collection[str]) -> None:
    """Have these tensors to itself, where copies share them."""
    for name, value in module.state_dict(keep_vars=True).items():
        if name in names:
            value.data = value.data.clone(memory_format=torch.preserve_format)


def _default_view(data: Mapping[str, Any]) -> dict[str, Any]:
    """The view that lets most of the network be computed once."""
    view = {"name": "features", "backbone": data["weights"], "tower": data.get("tower", "whole")}
    trainable, adapter = data.get("trainable", "none"), data.get("adapter")
    kind = adapter.get("name") if isinstance(adapter, Mapping) else adapter
    if trainable == "none" or kind == "bottleneck" or isinstance(adapter, Bottleneck):
        own = "projected" if data.get("projection") == "own" else data.get("pooling", "auto")
        return view | {"pool": "tokens" if data.get("pie") else own}
    last = adapter.get("last") if isinstance(adapter, Mapping) else getattr(adapter, "last", None)
    last = trainable if isinstance(trainable, int) else last
    # texts of CLIP and SigLIP are pooled where their ids say
    if last is None or view["tower"] == "text":
        return view | {"name": "native"}
    return view | {"pool": "tokens", "before_last": last}


class _Cached(nn.Module):
    """Features that were computed before: vectors [b, c], or positions [b, l, c], zero where there is padding."""

    def forward(self, x: Float[Tensor, "b ... c"]) -> LocalFeatures:
        if x.dim() == 2:
            return LocalFeatures(x, x.unsqueeze(1))
        mask = _filled(x)
        return LocalFeatures(masked_mean(x, mask), x, mask)


class _Trunk(nn.Module):
    """A network, and which of its input is padding.

    Args:
        backbone: the network.
        padding: of token ids; None: there are none.
        coarse: compute in bfloat16.
    """

    def __init__(self, backbone: Backbone, padding: _Padding | None, coarse: bool) -> None:
        super().__init__()
        self.backbone, self.padding, self.coarse = backbone, padding, coarse
        pooler = getattr(backbone.body, "pooler", None)
        if (
            backbone.pool not in ("pooled", "projected")
            and pooler is not None
            and any(True for _ in pooler.parameters())
        ):
            backbone.body.register_module("pooler", None)  # it would learn nothing, and many checkpoints lack it

    def forward(self, x: Tensor) -> LocalFeatures:
        mask = attended = None
        if self.padding is not None:
            x, mask = self.padding(x)
        elif self.backbone.reads == "input_ids" and not x.is_meta:
            mask = _filled(x)
        if mask is not None:
            attended = mask.clone()
            attended[:, 0] = True  # an empty text is read as one padding token
        with torch.autocast(x.device.type, torch.bfloat16) if self.coarse else nullcontext():
            output = self.backbone.output(x, attended)
            vector = pooled(output, self.backbone.pool, attended)
            if self.backbone.projection is not None:
                vector = self.backbone.projection(vector)
        led = output.last_hidden_state.dim() == 3 and self.backbone.pool in ("auto", "cls")
        return LocalFeatures(vector.float(), pooled(output, "tokens", attended).float(), mask, led)


class _Padding(nn.Module):
    """Which of token ids [b, l] are padding, as a network was trained to take it.

    Args:
        pad: id of the padding token.
        ends: whether the first of them ends the text, as where both are one token (CLIP).
        length: to which texts are padded, without a mask (SigLIP); None: as they come.
    """

    def __init__(self, pad: int, ends: bool, length: int | None) -> None:
        super().__init__()
        self.pad, self.ends, self.length = pad, ends, length

    def forward(self, ids: Tensor) -> tuple[Tensor, Bool[Tensor, "b l"] | None]:
        if self.length is not None:
            return F.pad(ids, (0, self.length - ids.shape[1]), value=self.pad), None
        valid = ids != self.pad
        if self.ends:
            valid = torch.cat([torch.ones_like(valid[:, :1]), valid[:, :-1]], dim=1)
        return ids, valid


def _padding(spec: InputSpec, backbone: Backbone) -> _Padding | None:
    if not spec.vocabulary:
        return None
    config: Any = backbone.body.config
    kind = str(config.model_type)
    length = config.max_position_embeddings if kind.startswith("siglip") else None
    return _Padding(spec.pad, kind.startswith("clip") and spec.pad == len(spec.vocabulary) - 1, length)


def _filled(x: Float[Tensor, "b l c"]) -> Bool[Tensor, "b l"]:
    return (x != 0).any(-1)
