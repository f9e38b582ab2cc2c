"""Any pretrained encoder of ``transformers``: frozen, with adapters, or trained from some layer on."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from pydantic import Field, SerializeAsAny, StrictInt, model_validator
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data import backbones
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.features import Features, Native, States
from polyfed.models.adapters.adapter import Adapter, FeatureAdapter, LoRA
from polyfed.models.encoder import Encoder, check_channels, image_shape, token_length
from polyfed.models.frozen import Frozen
from polyfed.models.towers import EncoderTower
from polyfed.models.trunks import NO_STATES, CachedTrunk, NetworkTrunk, Padding, before, goes_on, start_at_last

_OWN_VIEWS = ("native", "features", "states")
# MobileNets come with TensorFlow's 0.997, which PyTorch reads the other way round
_FORGETS = 0.9


class HF(Encoder):
    """A pretrained network with its own pooling, projected to d.

    Frozen layers are neither trained, exchanged nor saved with clients, and a process holds them once. The states
    before the first trained layer are computed once and cached, unless ``view`` is set otherwise.
    """

    projecting = ("pie", "dropout", "projection", "standardise")

    view: SerializeAsAny[View] = Field(
        default=cast("View", None),  # never: it follows from the other settings
        description="null: cached features or states, else inputs by its own processor; keys without a name change it",
    )
    weights: str = Field(min_length=1, description="folder below data.weights_dir, or hub name owner/name")
    tower: backbones.Tower = Field(default="whole", description="vision or text, of networks with both (CLIP)")
    trainable: Literal["none", "all", "adapters"] | StrictInt = Field(
        default="none", description="none, all, adapters, or the number of last layers that are trained"
    )
    adapter: SerializeAsAny[Adapter] | None = Field(default=None, description="trainable adapter")
    pooling: Literal["auto", "cls", "mean", "pooled"] = Field(
        default="auto",
        description="cls, mean (of all positions) or pooled (its own pooler); auto: pooled for a tower of several, "
        "else cls for transformers, mean for convolutional networks",
    )
    projection: Literal["new", "own"] = Field(default="new", description="new linear layer, or the network's (CLIP)")
    standardise: bool = Field(default=True, description="layer norm without parameters before a new projection")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of the pooled vector dropped in training")
    pie: bool = Field(default=False, description="attention over the positions (PVSE)")
    precision: Literal["fp32", "bf16"] = Field(default="fp32", description="arithmetic of the network")
    checkpointing: bool = Field(default=False, description="compute again in the backward pass what is not kept")

    @model_validator(mode="before")
    @classmethod
    def _own_view(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        if not data.get("weights"):
            raise ValueError("weights are missing; name a folder below data.weights_dir, or owner/name on the hub")
        data = dict(data)
        if data.get("adapter") is not None:
            data.setdefault("trainable", "adapters")
            if _adapter_of(data) is None:  # so that the adapter is refused, and not a view that follows from it
                return {**data, "view": {"name": "native", "backbone": data["weights"]}}
        data["view"] = _completed(data.get("view"), data)
        return data

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for problem in (*self._contradictions(), *self._view_problems()):
            raise ValueError(problem)
        return self

    def _contradictions(self) -> Iterator[str]:
        """Settings that contradict each other, or have no effect."""
        if (self.trainable == "adapters") != (self.adapter is not None):
            adapter = self.adapter and self.adapter.component_name()
            yield f"trainable is {self.trainable}, adapter is {adapter}; adapters need one, and nothing else takes one"
        if isinstance(self.trainable, int) and self.trainable < 1:
            yield f"trainable is {self.trainable}; give none, all, adapters, or 1 or more last layers"
        for key in ("pie", "dropout") if self.projection == "own" else ():
            if getattr(self, key):
                yield f"{key} has no effect with projection own; leave one out"
        if self.checkpointing and self._is_still:
            yield "checkpointing has no effect where no layer is trained; leave it out"

    def _view_problems(self) -> Iterator[str]:
        """Settings of the view that do not fit the others."""
        view = self.view
        for key, own in (("backbone", self.weights), ("tower", self.tower)):
            if (given := getattr(view, key, own)) != own:
                yield f"view.{key} is '{given}', that of the encoder '{own}'; leave view.{key} out"
        if not isinstance(view, Features):
            return
        if not self._is_still and (view.left is None or view.left != self._last):
            yield f"view.name is {view.component_name()}, but layers of the network are trained; leave view.name out"
        if view.left is not None:
            return
        if view.pool not in ("tokens", self._pool):
            yield f"view.pool is {view.pool}, the encoder asks for {self._pool}; leave view.pool out"
        # auto and cls take the first of the positions, which must not be an average
        possible = ("mean", "auto", "cls") if view.positions is None else ("mean",)
        wanted = backbones.pool_of(self._pool, self.tower)
        if view.pool == "tokens" and wanted not in possible:
            yield f"the view gives positions, of which {wanted} cannot be had; set pooling to mean"

    @property
    def _pool(self) -> backbones.Pool:
        return "projected" if self.projection == "own" else self.pooling

    @property
    def _last(self) -> int | None:
        """Number of last layers that are trained; None: all, or none."""
        if isinstance(self.adapter, LoRA):
            return self.adapter.last
        return self.trainable if isinstance(self.trainable, int) else None

    @property
    def _is_still(self) -> bool:
        """True if no layer of the network is trained."""
        return self.trainable == "none" or isinstance(self.adapter, FeatureAdapter)

    @property
    def _is_cached(self) -> bool:
        """True if the network is outside the model, whose view gives its output."""
        return isinstance(self.view, Features) and self.view.left is None

    def settings_of_projection(self) -> tuple[str, ...]:
        own = super().settings_of_projection()
        return (*own, "adapter") if isinstance(self.adapter, FeatureAdapter) else own

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps the view's output (images [b, c, h, w], token ids [b, l], spectrograms, features) to [b, dim].

        Raises:
            ConfigError: the weights cannot be had, do not fit the view, or lack the layers to be trained.
        """
        width, local = (spec.shape[-1],) * 2 if self._is_cached else self._widths(spec, context)
        if self.projection == "own" and width != dim:
            raise ConfigError(f"hf: '{self.weights}' projects to {width}, model.dim is {dim}; set it to {width}")
        trunk = self._cached_trunk(spec, context) if self._is_cached else self._network(spec, context)
        parts = [self.adapter.behind(width)] if isinstance(self.adapter, FeatureAdapter) else list[nn.Module]()
        if self.projection == "new":
            parts += [nn.LayerNorm(width, elementwise_affine=False)] if self.standardise else []
            parts += [nn.Dropout(self.dropout), nn.Linear(width, dim)]
        return EncoderTower(trunk, width, dim, pie=local if self.pie else None, project=nn.Sequential(*parts))

    def frozen(self, modality: str, context: DataContext) -> str:
        if self.trainable == "all":
            return ""
        folder = self._folder(context)
        if (key := f"size of {backbones.digest(folder)} {self._pool} {self.tower}") not in context.fitted:
            values = backbones.outline(folder, self._pool, self.tower).parameters()
            context.fitted[key] = sum(value.numel() for value in values)
        return f"{context.fitted[key]}x{backbones.digest(folder)[:8]}"

    def _folder(self, context: DataContext) -> Path:
        return backbones.locate(self.weights, context.weights, key="encoder hf, weights", hub=context.hub)

    def _cached_trunk(self, spec: InputSpec, context: DataContext) -> CachedTrunk:
        """Trunk on cached features; of transformers the first position stands for all, unless pooling is mean."""
        if len(spec.shape) == 1 or self.pooling == "mean":
            return CachedTrunk(leads=False)
        folder = self._folder(context)
        output = backbones.outline(folder, "tokens", self.tower).output(self._example(folder, "meta"))
        return CachedTrunk(leads=output.last_hidden_state.dim() == 3)

    def _example(self, folder: Path, device: str) -> Tensor:
        """Input of the whole network: an image, or a text of a few tokens."""
        assert isinstance(self.view, Features)
        shape = self.view.prepare(folder).shape
        if len(shape) == 1:
            return torch.arange(1, 1 + min(4, *shape), device=device).unsqueeze(0)
        return torch.linspace(-1, 1, steps=torch.Size(shape).numel(), device=device).view(1, *shape)

    # ---- networks that are not cached to their end

    def _network(self, spec: InputSpec, context: DataContext) -> nn.Module:
        # a copy of ``Frozen`` shares its tensors, which a copy of the module itself would not
        trunk = cast("NetworkTrunk", copy.deepcopy(self._base(spec, context)).module)
        body = trunk.backbone.body
        if self.adapter is not None:
            self.adapter.attach(trunk, self.tower, spec, self._folder(context), context)
        # parts that stay in evaluation mode
        still: list[nn.Module] = [trunk] if self._is_still else [] if self._last is None else before(body, self._last)
        trained = self._trained(trunk, still)
        for name, value in trunk.state_dict(keep_vars=True).items():
            if name in trained:  # to itself, where copies share the others
                value.data = value.data.clone(memory_format=torch.preserve_format)
        if self.checkpointing:
            cast("Any", body).gradient_checkpointing_enable({"use_reentrant": False})
        if self.trainable == "all":
            return trunk.requires_grad_()
        shared = context.fitted.setdefault(f"tensors of {self._key(spec, context)} {self.adapter}", {})
        return Frozen(trunk, self.frozen("", context), trained=trained, still=still, shared=cast("Any", shared))

    def _trained(self, trunk: NetworkTrunk, still: list[nn.Module]) -> set[str]:
        """Names of the tensors that are trained, or only exchanged."""
        if self.adapter is not None:
            trained = {name for name, value in trunk.named_parameters() if value.requires_grad}
            return trained | {name for name in trunk.state_dict() if name.endswith(".offset")}
        held = {id(value) for part in still for value in part.state_dict(keep_vars=True).values()}
        return {name for name, value in trunk.state_dict(keep_vars=True).items() if id(value) not in held}

    def _base(self, spec: InputSpec, context: DataContext) -> Frozen:
        """The network with its weights, from which all models of this process are made."""
        if (key := self._key(spec, context)) not in context.fitted:
            folder = self._folder(context)
            backbone = backbones.frozen_backbone(folder, self._pool, self.tower)
            backbones.channels_last(backbone)
            for part in backbone.modules():
                if isinstance(part, nn.BatchNorm2d) and part.momentum is not None and part.momentum > _FORGETS:
                    part.momentum = 1 - part.momentum
            if isinstance(self.view, States):
                backbone = goes_on(backbone, self.view.before_last, self._example(folder, "cpu"))
            trunk = NetworkTrunk(backbone, Padding.for_texts(spec, backbone), self.precision == "bf16")
            context.fitted[key] = Frozen(trunk, self.frozen("", context))
        return cast("Frozen", context.fitted[key])

    def _key(self, spec: InputSpec, context: DataContext) -> str:
        network = (backbones.digest(self._folder(context)), self._pool, self.tower, self._last)
        pad = spec.pad if spec.vocabulary else None
        return f"network {network} {self.precision} {self.checkpointing} {spec.shape} {pad}"

    def _widths(self, spec: InputSpec, context: DataContext) -> tuple[int, int]:
        """Widths of the network's vectors and positions, computed once for all models of this process.

        Raises:
            ConfigError: the network does not take the view's output.
        """
        prompts = 0 if self.adapter is None else self.adapter.positions
        key = f"widths of {self._key(spec, context)} {self.view.component_name()} {len(spec.vocabulary)} {prompts}"
        if key not in context.fitted:
            context.fitted[key] = self._outlined(spec, self._folder(context))
        return cast("tuple[int, int]", context.fitted[key])

    def _outlined(self, spec: InputSpec, folder: Path) -> tuple[int, int]:
        backbone = backbones.outline(folder, self._pool, self.tower)
        if isinstance(self.view, States):
            start_at_last(backbone.body, self.view.before_last)
        else:
            self._require_fitting(backbone, spec, folder)
        blank = torch.zeros(1, *spec.shape, dtype=torch.int64 if spec.vocabulary else torch.float32, device="meta")
        try:
            output = backbone.output(blank)
            return backbone.features(output, None).shape[1], backbones.pooled(output, "tokens").shape[2]
        except (IndexError, ValueError, RuntimeError, TypeError) as error:
            reason = f"does not take what its view gives: {str(error).splitlines()[0]}"
            raise ConfigError(
                f"encoder 'hf': '{self.weights}' {NO_STATES if isinstance(self.view, States) else reason}"
            ) from error

    def _require_fitting(self, backbone: backbones.Backbone, spec: InputSpec, folder: Path) -> None:
        """Raise ConfigError if the view's images or texts do not fit the network."""
        config: Any = backbone.body.config
        if backbone.reads == "pixel_values":
            needed = getattr(config, "num_channels", spec.shape[0])
            check_channels(image_shape(spec, "hf")[0], needed, "hf", self.weights)
            return
        if backbone.reads != "input_ids":  # inputs of other types are tried out
            return
        prompts = 0 if self.adapter is None else self.adapter.positions
        what = f"tokens a text, {prompts} of them prompts (adapter.length)" if prompts else "tokens a text"
        for given, room, unit in (
            (token_length(spec, "hf") + prompts, backbones.most_tokens(folder), what),
            (len(spec.vocabulary), config.vocab_size, "words in the vocabulary"),
        ):
            if room is not None and given > room:
                raise ConfigError(
                    f"encoder 'hf': '{self.weights}' has room for {room} {unit}, its view gives {given}; shorten the "
                    "view's length, or give it the tokenizer of these weights"
                )


def network_of(tower: nn.Module) -> NetworkTrunk:
    """Trunk with the network of an encoder that does not work on its cached output."""
    trunk = tower.get_submodule("trunk")
    inner = trunk.module if isinstance(trunk, Frozen) else trunk
    assert isinstance(inner, NetworkTrunk)
    return inner


def body_of(tower: nn.Module) -> nn.Module:
    """The network of ``transformers`` itself; see ``network_of``."""
    return network_of(tower).backbone.body


def _completed(view: Any, data: Mapping[str, Any]) -> Any:
    """The view as given, completed by the other settings."""
    view = {"name": view} if isinstance(view, str) else view
    if view is not None and not isinstance(view, Mapping):
        return view
    usual, given = _default_view(data), dict(view or {})
    if given.get("name", usual["name"]) == usual["name"]:
        return usual | given
    return {key: usual[key] for key in ("backbone", "tower") if given["name"] in _OWN_VIEWS} | given


def _default_view(data: Mapping[str, Any]) -> dict[str, Any]:
    """The view that lets most of the network be computed once."""
    view = {"backbone": data["weights"], "tower": data.get("tower", "whole")}
    cached = view | {"precision": data.get("precision", "fp32")}
    if data.get("trainable", "none") == "none" or isinstance(_adapter_of(data), FeatureAdapter):
        own: Any = "projected" if data.get("projection") == "own" else data.get("pooling", "auto")
        if data.get("pie") and backbones.pool_of(own, view["tower"]) == "pooled":
            return view | {"name": "native"}  # a pooler needs the network itself, pie its positions
        return cached | {"name": "features", "pool": "tokens" if data.get("pie") else own}
    trainable = data.get("trainable")
    last = trainable if isinstance(trainable, int) else getattr(_adapter_of(data), "last", None)
    # texts of CLIP and SigLIP are pooled at positions that depend on their ids
    if not last or view["tower"] == "text":
        # shorter, so that texts and prompts together have the usual length
        adapter, usual = _adapter_of(data), Native.model_fields["length"].default
        prompts = 0 if adapter is None else adapter.positions
        return view | {"name": "native"} | ({"length": max(2, usual - prompts)} if prompts else {})
    return cached | {"name": "states", "before_last": last}


def _adapter_of(data: Mapping[str, Any]) -> Adapter | None:
    """The adapter in settings that are not validated yet; None if absent or invalid."""
    try:
        return None if data.get("adapter") is None else Adapter.model_validate(data["adapter"])
    except (ValueError, ConfigError):
        return None
