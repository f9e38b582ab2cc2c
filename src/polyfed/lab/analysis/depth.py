"""Which layer of its encoder each parameter of a model belongs to, told by structure (FedAID, Appendix A)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from polyfed.core.errors import ConfigError, nearest
from polyfed.models.model import Model

PARTS = ("all", "shallow", "deep")

_INNER = "trunk"  # what towers and aligned encoders call the part that extracts features


@dataclass(frozen=True)
class Depths:
    """Where a model's tensors are.

    Attributes:
        layer: name in the state dict -> 0 before the first layer (embedding, stem), then 1, 2, ... for the layers, and
            one more for all behind them: norms, projection, aligner, heads.
        counts: modality -> number of layers of its encoder.
    """

    layer: Mapping[str, int]
    counts: Mapping[str, int]

    def shallow(self, depth: int | Mapping[str, int] | None = None) -> frozenset[str]:
        """Names of the embeddings and the first layers.

        Args:
            depth: how many layers are shallow, for all modalities or by modality; None, or a modality that is not
                named: half of them, at least one.

        Raises:
            ConfigError: an encoder has fewer layers, or there is no such modality.
        """
        wanted = dict.fromkeys(self.counts, depth) if isinstance(depth, int) else dict(depth or {})
        for name in wanted.keys() - self.counts.keys():
            raise ConfigError(f"--depth names '{name}', which the model does not encode; {nearest(name, self.counts)}")
        names: set[str] = set()
        for modality, count in self.counts.items():
            limit = wanted.get(modality, max(1, count // 2))
            if not 0 <= limit <= count:
                raise ConfigError(
                    f"--depth {limit}: the encoder of '{modality}' has {count} layers; give so many or fewer"
                )
            own = [name for name in self.layer if name.startswith(f"encoders.{modality}.")]
            names.update(name for name in own if self.layer[name] <= limit)
        return frozenset(names)


def depth_of(model: Model) -> Depths:
    """The layer of every tensor of a model.

    An encoder's layers are the first module list in its trunk whose members are of one class: the blocks of a
    transformer, the stages of a ResNet, the inverted residuals of a MobileNet. What its trunk registers before them is
    layer 0. Heads, what a method adds and a norm for all modalities are behind the layers of all encoders.

    Raises:
        ConfigError: an encoder has no layers.
    """
    layer: dict[str, int] = {}
    counts: dict[str, int] = {}
    for modality, encoder in model.encoders.items():
        trunk, name, count = _stack(modality, encoder)
        counts[modality], reached = count, False
        for key in encoder.state_dict():  # in the order of registration
            if key.startswith(f"{name}."):
                reached, number = True, 1 + int(key.removeprefix(f"{name}.").partition(".")[0])
            else:
                number = 0 if key.startswith(trunk) and not reached else count + 1
            layer[f"encoders.{modality}.{key}"] = number
    behind = max(counts.values(), default=0) + 1
    return Depths({name: layer.get(name, behind) for name in model.exchanged()}, counts)


def chosen_tensors(model: Model, part: str, depth: int | Mapping[str, int] | None = None) -> frozenset[str]:
    """Names of the tensors in a part of the model: ``all``, those of the ``shallow`` layers, or the others (``deep``).

    Raises:
        ConfigError: no such part, a depth with all layers, or as ``depth_of`` and ``Depths.shallow``.
    """
    if part not in PARTS:
        raise ConfigError(f"--layers {part}; {nearest(part, PARTS)}")
    every = frozenset(model.exchanged())
    if part == "all":
        if depth is not None:
            raise ConfigError("--depth has no effect with --layers all; remove it, or choose shallow or deep")
        return every
    shallow = depth_of(model).shallow(depth)
    return shallow if part == "shallow" else every - shallow


def depth_in(text: str) -> int | dict[str, int]:
    """A number of shallow layers, ``4``, or by modality, ``image=2,text=4``.

    Raises:
        ConfigError: it is neither.
    """
    if text.isdecimal():
        return int(text)
    pairs = [entry.strip().partition("=") for entry in text.split(",")]
    if wrong := ["".join(pair) for pair in pairs if not (pair[0] and pair[2].isdecimal())]:
        raise ConfigError(f"--depth {text}: '{wrong[0]}' says not how many layers; give such as 4, or image=2,text=4")
    return {name: int(number) for name, _, number in pairs}


def _stack(modality: str, encoder: nn.Module) -> tuple[str, str, int]:
    """Prefix of the innermost trunk within the encoder, name of its list of layers, and their number."""
    prefix, inner = "", encoder
    # an aligned encoder has a trunk that has one itself
    while isinstance(trunk := getattr(inner, _INNER, None), nn.Module):
        prefix, inner = f"{prefix}{_INNER}.", trunk
    for name, module in inner.named_modules():
        if isinstance(module, nn.ModuleList) and len({type(member) for member in module}) == 1:
            return prefix, f"{prefix}{name}", len(module)
    raise ConfigError(
        f"the encoder of '{modality}' ({type(encoder).__name__}) has no layers to tell shallow from deep; take "
        "--layers all, or an encoder with layers: blocks, vit, bert, transformer, resnet or mobilenet"
    )
