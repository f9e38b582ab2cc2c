"""Adapters: a few trained parameters within a frozen pretrained network (LoRA), among the inputs of its first layer
(prompts), or behind it on its pooled vector."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import islice
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
from polyfed.data.backbones import Tower, local_folder, missing_folder, require_tokenizer
from polyfed.data.tokenizers import PretrainedTokenizer
from polyfed.data.view import DataContext, InputSpec
from polyfed.models.trunks import NetworkTrunk, PromptPositions, layers_path, linear_roles

TENSOR = "prompt_embeddings"
"""Name of prompts in a folder of ``peft``."""


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
    def attach(self, trunk: NetworkTrunk, tower: Tower, spec: InputSpec, folder: Path, context: DataContext) -> None:
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

    def attach(self, trunk: NetworkTrunk, tower: Tower, spec: InputSpec, folder: Path, context: DataContext) -> None:
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

    def attach(self, trunk: NetworkTrunk, tower: Tower, spec: InputSpec, folder: Path, context: DataContext) -> None:
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


PEFT_NAMES: dict[Tower, str] = {
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
    if (folder := local_folder(start, context.weights)) is None:
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


def _load_start(body: nn.Module, folder: Path, tower: Tower) -> None:
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


class Prompts(Adapter):
    """Learnt vectors P [length, e] among the embedded tokens of a text, or patches of an image.

    Texts: behind the token with which all begin, as CoOp (Zhou et al., IJCV 2022, Equation 2), or in front of all, as
    ``peft``'s prompt tuning (Lester et al., EMNLP 2021) and where the tokenizer has no token of a beginning (SigLIP).
    They have positions as tokens do, and count towards the longest text. Images: behind the class token, without
    positions (VPT-shallow; Jia et al., ECCV 2022, Equations 4 and 5). The network's outputs at their own positions are
    left out, also of means; but SigLIP's own pooler of images attends to all positions, and so to theirs.
    """

    short_name: ClassVar[str] = "prompts"

    length: int = Field(default=16, ge=1, le=512, description="number of vectors")
    place: Literal["behind", "front"] = Field(
        default="behind", description="behind the token of the beginning (CoOp, VPT), or in front of all (peft)"
    )
    start_text: str | None = Field(
        default=None, min_length=1, description="words whose tokens they start as, repeated or cut; null: random values"
    )
    start: str | None = Field(
        default=None, min_length=1, description="peft folder to start from, absolute or below data.weights_dir"
    )

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if self.start is not None and self.start_text is not None:
            raise ValueError("start and start_text both set the first prompts; leave one out")
        return self

    @property
    def positions(self) -> int:
        return self.length

    def attach(self, trunk: NetworkTrunk, tower: Tower, spec: InputSpec, folder: Path, context: DataContext) -> None:
        body: Any = trunk.backbone.body
        layers_path(body)  # refuses convolutional networks
        if trunk.backbone.reads != "input_ids":
            self._attach_to_images(trunk, body)
            return
        at = int(self.place == "behind" and spec.begins)
        if at == 0 and getattr(body, "pooler", None) is not None:
            raise ConfigError(
                "adapter.place is front, or the tokenizer has no token of a beginning, and the network's own pooler "
                "reads the first position, a prompt's; set pooling to cls or mean, or adapter.place to behind"
            )
        words: nn.Embedding = body.get_input_embeddings()
        _hold(words, self._first_values(words, folder, context), at, self.length)
        trunk.prompt(PromptPositions(at, self.length, plain_ids(body.config, trunk)[0]))

    def _attach_to_images(self, trunk: NetworkTrunk, body: Any) -> None:
        for key in ("start", "start_text"):
            if getattr(self, key) is not None:
                raise ConfigError(f"adapter.{key}: prompts of images start from random values; leave it out")
        if self.place == "front":
            raise ConfigError("adapter.place is front, but prompts of images come behind the class token; use behind")
        name = type(body).__name__
        if any("relative_position" in key or "rel_pos" in key for key, _ in body.named_parameters()):
            raise ConfigError(
                f"adapter prompts: attention of network '{name}' has a bias for each pair of patches, and none for "
                "prompts; choose adapter lora or attention"
            )
        if trunk.backbone.pool == "pooled" and getattr(body.config, "use_mean_pooling", False):
            raise ConfigError(
                f"adapter prompts: the pooler of network '{name}' averages all positions, prompts included; set "
                "pooling to cls or mean"
            )
        width, config = body.config.hidden_size, body.config
        # VPT's range; the patches' embedding is drawn alike
        sides = config.patch_size if isinstance(config.patch_size, list | tuple) else (config.patch_size,) * 2
        limit = math.sqrt(6 / (getattr(config, "num_channels", 3) * math.prod(sides) + width))
        _hold(body.embeddings, torch.empty(self.length, width).uniform_(-limit, limit), 1, 0)
        trunk.prompt(PromptPositions(1, self.length, None))

    def _first_values(self, words: nn.Embedding, folder: Path, context: DataContext) -> Float[Tensor, "p e"]:
        shape = (self.length, words.embedding_dim)
        if self.start is not None:
            folder = start_folder(self.start, context)
            given = start_tensors(folder).get(TENSOR)
            if given is None or tuple(given.shape) != shape:
                present = "none" if given is None else str(list(given.shape))
                raise ConfigError(f"adapter.start: prompts in '{folder}' are {present}, the settings {list(shape)}")
            return given
        if self.start_text is None:
            return torch.randn(shape) * 0.02  # CoOp's
        require_tokenizer(folder)
        vocabulary = PretrainedTokenizer(path=str(folder)).ready("", context)
        ids = [one for one in vocabulary.encode([self.start_text], 512)[0] if one not in vocabulary.fixed]
        if not ids:
            raise ConfigError(f"adapter.start_text: '{self.start_text}' has no token; give words, or leave it out")
        return words.weight[torch.tensor((ids * math.ceil(self.length / len(ids)))[: self.length])].detach().clone()


def prompts_of(trunk: NetworkTrunk) -> nn.Parameter:
    """The prompts [p, e] of a network."""
    return next(value for name, value in trunk.named_parameters() if name.endswith(".prompts"))


def require_prompts(names: Iterable[str], method: str) -> None:
    """Check that prompts are among a model's tensors.

    Raises:
        ConfigError: there are none.
    """
    if not any(name.endswith(".prompts") for name in names):
        raise ConfigError(
            f"algorithm '{method}' averages prompts, and a client's model has none; give encoders 'hf' an adapter "
            "'prompts', or choose fedavg"
        )


def _hold(part: Any, values: Tensor, at: int, fillers: int) -> None:
    part.prompts, part.prompts_at, part.fillers = nn.Parameter(values), at, fillers
    # a hook changes neither the names of frozen tensors nor the weights that other code reads of the part
    part.register_forward_hook(_inserted)


def _inserted(part: Any, inputs: Any, embedded: Float[Tensor, "b l e"]) -> Float[Tensor, "b m e"]:
    """Embedded tokens or patches with the prompts among them, in place of as many fillers as there are."""
    at, prompts = part.prompts_at, part.prompts.to(embedded.dtype).expand(len(embedded), -1, -1)
    return torch.cat([embedded[:, :at], prompts, embedded[:, at + part.fillers :]], 1)


def plain_ids(config: Any, trunk: NetworkTrunk, count: int = 1) -> list[int]:
    """Token ids without a meaning of their own: neither padding nor the end of a text (CLIP's highest id)."""
    special = {config.pad_token_id, config.eos_token_id, config.bos_token_id}
    special |= {trunk.padding.pad} if trunk.padding is not None else set()
    # from the middle: some networks have special ids of their own at the ends
    numbers = range(config.vocab_size // 2, config.vocab_size)
    return list(islice((number for number in numbers if number not in special), count))
