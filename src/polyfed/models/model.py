"""The model of a participant: one encoder for each modality, and the heads of its tasks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from pydantic import Field, SerializeAsAny, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from polyfed.core.errors import ConfigError
from polyfed.core.settings import Settings
from polyfed.data.view import DataContext
from polyfed.models.adapters.adapter import Adapter
from polyfed.models.aligner import Aligned, AlignerSettings, Detail
from polyfed.models.encoder import Encoder
from polyfed.models.heads import NamesHead
from polyfed.models.towers import Positioned, Positions, positioned

_Value = TypeVar("_Value")


class ModelSettings(Settings):
    """Architecture of a participant's model."""

    dim: int = Field(default=256, ge=1, description="width d of the representations; equal for all who exchange them")
    encoders: dict[str, SerializeAsAny[Encoder]] = Field(description="modality -> encoder")
    final_norm: bool = Field(default=False, description="one layer norm of all embeddings, as FedCola's paired models")
    aligner: AlignerSettings | None = Field(default=None, description="align module (FedAID) in place of projections")

    @model_validator(mode="after")
    def _aligner_fits(self) -> Self:
        if self.aligner is not None:
            self.aligner.require_modalities(self.encoders)
            if self.final_norm:
                raise ValueError("final_norm and aligner both end the encoders; choose one")
            for modality, encoder in self.encoders.items():
                for key in encoder.settings_of_projection():
                    raise ValueError(f"encoders.{modality}.{key} has no effect with aligner; remove it")
        return self

    @property
    def adapters(self) -> list[Adapter]:
        """Adapters of the pretrained encoders."""
        own = [getattr(encoder, "adapter", None) for encoder in self.encoders.values()]
        return [adapter for adapter in own if isinstance(adapter, Adapter)]

    @property
    def is_foreign(self) -> bool:
        """True if it contains code from outside polyfed, whose modules are seen once they are built."""
        return any("." in part.component_name() for part in (*self.encoders.values(), *self.adapters))

    @property
    def architecture(self) -> str:
        """A name for this architecture: equal for equal settings, readable, and safe to show to the server."""
        # without the aligner where there is none: names of architectures are older than aligners
        settings = self.model_dump(mode="json", exclude={"aligner"} if self.aligner is None else None)
        # 32 bits: two settings of one federation will hardly collide
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        parts = "+".join(f"{modality}-{encoder.component_name()}" for modality, encoder in self.encoders.items())
        return f"{parts}-d{self.dim}-{digest}"

    def architecture_in(self, context: DataContext) -> str:
        """``architecture``, followed by digests of the frozen values that its models have here, if any."""
        return "-".join([self.architecture, *self.frozen_in(context).values()])

    def frozen_in(self, context: DataContext) -> dict[str, str]:
        """Modality -> digest of its encoder's frozen values here, for encoders that have any."""
        frozen = {name: encoder.frozen(name, context) for name, encoder in self.encoders.items()}
        return {name: digest for name, digest in frozen.items() if digest}

    def build(self, heads: Mapping[str, nn.Module], context: DataContext) -> Model:
        """Build encoders from these settings and join them with ``heads``."""
        encoders = {
            modality: encoder.build(self.dim, encoder.view.spec(modality, context), context)
            for modality, encoder in self.encoders.items()
        }
        for part in (part for head in heads.values() for part in head.modules()):
            if isinstance(part, NamesHead):
                part.read(self.encoders, context)
        if self.aligner is not None:
            encoders = {name: self.aligner.around(encoder, name, self.dim) for name, encoder in encoders.items()}
        norm = nn.LayerNorm(self.dim, eps=1e-6) if self.final_norm else None
        return Model(encoders, heads, self.dim, final_norm=norm, frozen=self.frozen_in(context))


def require_weights(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Check weights from outside; ``load_state_dict`` itself converts dtypes and accepts any value.

    Raises:
        RuntimeError: a tensor has another dtype than the model's own, or a value that is not finite.
    """
    for name, value in weights.items():
        if name in own and value.dtype != own[name].dtype:
            raise RuntimeError(f"'{name}' is {value.dtype}, and {own[name].dtype} in the model")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise RuntimeError(f"'{name}' has values that are not finite")


def trained_in(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in Layout.of(module).parameters.items() if value.requires_grad}


class Embedder(Protocol):
    """Model as tasks use it; most also have ``positions`` and ``detail``, see ``Model``."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        ...

    def embed(self, modality: str, x: Tensor) -> Float[Tensor, "b d"]:
        """Embedding before normalisation."""
        ...

    def represent(self, modality: str, x: Tensor) -> Float[Tensor, "b d"]:
        """Embedding of unit norm."""
        ...


class Model(nn.Module):
    """Encoders by modality and heads by name; nothing compares their names.

    Parameters are called ``encoders.<modality>.*``, ``heads.<name>.*``, ``final_norm.*`` (one norm for all
    modalities, if there is one) and ``extras.<name>.*`` (modules that a method trains and exchanges in addition).

    Attributes:
        frozen: modality -> digest of the frozen values in its encoder or view.
    """

    def __init__(
        self,
        encoders: Mapping[str, nn.Module],
        heads: Mapping[str, nn.Module],
        dim: int,
        *,
        final_norm: nn.Module | None = None,
        frozen: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.frozen = dict(frozen)
        self.encoders = nn.ModuleDict(encoders)
        self.final_norm = final_norm
        self.heads = nn.ModuleDict(heads)
        self.extras = nn.ModuleDict()  # filled by the method, see Algorithm.add_modules
        self.dim = dim

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names of the modalities that this model encodes."""
        return tuple(self.encoders)

    def trained(self) -> dict[str, nn.Parameter]:
        """Parameters that an optimiser changes, by name."""
        return trained_in(self)

    def exchanged(self, *, live: bool = False) -> dict[str, Tensor]:
        """Tensors that are kept and that cross between server and clients, in the order in which they are sent.

        They are parameters and running statistics without frozen values (``models.frozen``), and share memory with the
        model; with ``live`` they are its own objects.
        """
        tensors = Layout.of(self).tensors
        return {**tensors} if live else {name: value.detach() for name, value in tensors.items()}

    def load(self, tensors: Mapping[str, Tensor], *, partly: bool = False) -> None:
        """Take over exchanged tensors: all of the model's, or with ``partly`` those of the given ones that it has.

        Raises:
            RuntimeError: names or shapes are not the model's.
        """
        own = Layout.of(self).tensors
        given = {name: value for name, value in tensors.items() if name in own or not partly}
        into = [own[name] for name in given if name in own]
        names_fit = bool(into) and (partly or given.keys() == own.keys())
        if names_fit and [value.shape for value in into] == [value.shape for value in given.values()]:
            # the same as load_state_dict, without its walk through all modules
            with torch.set_grad_enabled(False):
                torch._foreach_copy_(into, [*given.values()])
        else:
            self.load_state_dict(given, strict=not partly)  # raises, and names the tensors that do not fit

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules; those of a small model have it already, and to set it takes long."""
        if {self.training, *[part.training for part in Layout.of(self).inner]} != {mode}:
            super().train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, or set them to zero."""
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        for value in Layout.of(self).parameters.values():
            value.grad = None

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        # not by ``parameters()``, which prepares a walk through all modules
        return next(iter(Layout.of(self).parameters.values())).device

    def embed(self, modality: str, x: Tensor) -> Float[Tensor, "b d"]:
        """Embedding before normalisation, the input of a classifier head."""
        embedding: Tensor = self.encoders[modality](x)
        return embedding if self.final_norm is None else self.final_norm(embedding)

    def tower(self, modality: str) -> nn.Module:
        """Module that ``embed`` applies for a modality."""
        encoder = self.encoders[modality]
        return encoder if self.final_norm is None else nn.Sequential(encoder, self.final_norm)

    def represent(self, modality: str, x: Tensor) -> Float[Tensor, "b d"]:
        """Representation: the embedding with unit L2 norm (in fp32 also under autocast)."""
        return F.normalize(self.embed(modality, x).float(), dim=-1)

    def detail(self, modality: str, x: Tensor) -> Detail:
        """Embedding and features by position, in one pass where there is an align module, else in two.

        Raises:
            ConfigError: the encoder gives no features by position.
        """
        encoder = self.encoders[modality]
        if isinstance(encoder, Aligned):
            self.require_detail(modality)
            return encoder.detail(x)
        return Detail(self.embed(modality, x), *self.positions(modality, x))

    def positions(self, modality: str, x: Tensor) -> Positions:
        """Features by position, and their mask.

        Raises:
            ConfigError: the encoder gives none.
        """
        # a clear error, where the encoder itself would fail deep inside
        self.require_detail(modality)
        return cast("Positioned", self.encoders[modality]).positions(x)

    def require_detail(self, modality: str) -> None:
        """Raise ConfigError if the encoder gives no features by position; see ``detail``."""
        encoder = self.encoders[modality]
        if isinstance(encoder, Aligned):
            encoder.aligner.require_local()
        elif not positioned(encoder):
            raise ConfigError(
                f"the task needs features by position, which the encoder of '{modality}' ({type(encoder).__name__}) "
                "does not give; choose resnet, vit, blocks, bert, gru, bag or hf, or set model.aligner with local"
            )


class Layout:
    """Tensors and modules of a module: finding them takes as long as a small client's step.

    Attributes:
        tensors: the entries of its ``state_dict``, by name.
        parameters: its parameters, by name.
        inner: the modules in it, without itself.
        optimizers: ids of some parameters -> settings and an unused optimiser of these parameters; see ``Trainer``.
    """

    _known: ClassVar[WeakKeyDictionary[nn.Module, Layout]] = WeakKeyDictionary()

    def __init__(self, module: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = dict(module.state_dict(keep_vars=True))
        self.parameters = dict(module.named_parameters())
        self.inner = [part for part in module.modules() if part is not module]
        self.optimizers: dict[tuple[int, ...], tuple[object, Optimizer]] = {}
        self.held = self._held(module)
        if not {*map(id, self.tensors.values())} <= {*self.held}:
            raise TypeError(f"the state of a {type(module).__name__} has entries other than its parameters and buffers")

    def _held(self, module: nn.Module) -> list[int]:
        groups = [(part._modules, part._parameters, part._buffers) for part in (module, *self.inner)]
        # by ids, as tensors have no equality of their own
        return [*map(id, [group[name] for part in groups for group in part for name in group])]

    @classmethod
    def of(cls, module: nn.Module) -> Layout:
        """The last layout, unless tensors or modules were added, removed or replaced since."""
        known = cls._known.get(module)
        if known is None or known._held(module) != known.held:
            known = cls._known[module] = cls(module)
        return known


class LastValues(Generic[_Value]):
    """A function's values of the last input of each modality."""

    def __init__(self, compute: Callable[[str, Tensor], _Value]) -> None:
        self.compute = compute
        # inputs are compared by identity: two losses of a batch share the tensor
        self.last: dict[str, tuple[Tensor, _Value]] = {}

    def __call__(self, modality: str, x: Tensor) -> _Value:
        cached = self.last.get(modality)
        if cached is None or cached[0] is not x:
            cached = self.last[modality] = (x, self.compute(modality, x))
        return cached[1]


class CachedEmbedder:
    """A model for the losses of one batch, which embeds each input only once; made for the batch, then dropped.

    ``embed``, ``positions`` and ``detail`` compute the embedding, features by position, or both.
    """

    def __init__(
        self,
        embed: Callable[[str, Tensor], Tensor],
        positions: Callable[[str, Tensor], Positions],
        detail: Callable[[str, Tensor], Detail],
    ) -> None:
        self._embeddings, self._positions, self._details = LastValues(embed), LastValues(positions), LastValues(detail)

    def embed(self, modality: str, x: Tensor) -> Float[Tensor, "b d"]:
        """Embedding before normalisation, remembered for the last ``x`` of each modality."""
        return self._embeddings(modality, x)

    def represent(self, modality: str, x: Tensor) -> Float[Tensor, "b d"]:
        """Embedding of unit norm (in fp32 also under autocast)."""
        return F.normalize(self.embed(modality, x).float(), dim=-1)

    def positions(self, modality: str, x: Tensor) -> Positions:
        """Features by position, remembered likewise."""
        return self._positions(modality, x)

    def detail(self, modality: str, x: Tensor) -> Detail:
        """Embedding and features by position, remembered likewise."""
        made = self._details(modality, x)
        self._embeddings.last[modality] = (x, made.embedding)
        self._positions.last[modality] = (x, (made.positions, made.mask))
        return made


class CachedModel(CachedEmbedder):
    """A whole model that embeds each input only once."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.embed, model.positions, model.detail)
        self.model = model
        self._last: dict[nn.Module | None, tuple[object, Any]] = {}

    def once(self, head: nn.Module | None, batch: object, make: Callable[[], _Value]) -> _Value:
        """Value made for a head and a batch, remembered for the head's last batch: all losses share one draw."""
        last = self._last.get(head)
        if last is None or last[0] is not batch:
            last = self._last[head] = (batch, make())
        made: _Value = last[1]
        return made

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.model.device
