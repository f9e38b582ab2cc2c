"""Prompts: learnt vectors among the inputs of a frozen network's first layer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data.backbone_inputs import require_tokenizer
from polyfed.data.backbones import BackboneTower
from polyfed.data.tokenizers import PretrainedTokenizer
from polyfed.data.view import DataContext
from polyfed.models.adapter import NetworkAdapter
from polyfed.models.adapters.layers import start_folder, start_tensors
from polyfed.models.layers import layers_path
from polyfed.models.trunks import NetworkTrunk, PromptPlaces

TENSOR = "prompt_embeddings"
"""What ``peft`` calls prompts in a folder."""


class Prompts(NetworkAdapter):
    """Learnt vectors P [length, e] among the embedded tokens of a text, or patches of a picture.

    Texts: behind the first token, as CoOp (Zhou et al., IJCV 2022, Equation 3), or in front of all, as ``peft``'s
    prompt tuning (Lester et al., EMNLP 2021). They have positions as tokens do, and count towards the longest text.
    Pictures: behind the class token, without positions (VPT-shallow; Jia et al., ECCV 2022, Equations 4 and 5).
    What the network gives at their own positions is left out, also of means.
    """

    short_name: ClassVar[str] = "prompts"

    length: int = Field(default=16, ge=1, le=512, description="number of vectors")
    place: Literal["behind", "front"] = Field(
        default="behind", description="behind the first token (CoOp, VPT), or in front of a whole text (peft)"
    )
    start_text: str | None = Field(
        default=None,
        min_length=1,
        description="words whose tokens they start as, repeated or cut to length; null: random numbers",
    )
    start: str | None = Field(
        default=None, min_length=1, description="peft folder to start from, absolute or below data.weights_dir"
    )

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        if self.start is not None and self.start_text is not None:
            raise ValueError("start and start_text both say what prompts start as; leave one out")
        return self

    @property
    def positions(self) -> int:
        return self.length

    def attach(self, trunk: NetworkTrunk, tower: BackboneTower, folder: Path, context: DataContext) -> None:
        body: Any = trunk.backbone.body
        layers_path(body)  # refuses convolutional networks
        if trunk.backbone.reads != "input_ids":
            self._attach_to_pictures(trunk, body)
            return
        self._require_pooling(trunk, body)
        words: nn.Embedding = body.get_input_embeddings()
        at = int(self.place == "behind")
        _hold(words, self._first_values(words, folder, context), _in_place_of_fillers, at)
        trunk.prompt(PromptPlaces(at, self.length, _filler(body.config, trunk)))

    def _attach_to_pictures(self, trunk: NetworkTrunk, body: Any) -> None:
        for key in ("start", "start_text"):
            if getattr(self, key) is not None:
                raise ConfigError(f"adapter.{key}: prompts of pictures start from random numbers; leave it out")
        if self.place == "front":
            raise ConfigError(
                "adapter.place is front, but prompts of pictures stand behind the class token; use behind"
            )
        width, config = body.config.hidden_size, body.config
        # VPT's range; the patches' embedding is drawn alike
        limit = math.sqrt(6 / (getattr(config, "num_channels", 3) * _area(config.patch_size) + width))
        _hold(body.embeddings, torch.empty(self.length, width).uniform_(-limit, limit), _between, 1)
        trunk.prompt(PromptPlaces(1, self.length, None))

    def _require_pooling(self, trunk: NetworkTrunk, body: nn.Module) -> None:
        if self.place == "front" and getattr(body, "pooler", None) is not None:
            raise ConfigError(
                "adapter.place is front, and the network's own pooler looks at the first position, which would be a "
                "prompt's; set pooling to cls or mean, or adapter.place to behind"
            )

    def _first_values(self, words: nn.Embedding, folder: Path, context: DataContext) -> Float[Tensor, "p e"]:
        shape = (self.length, words.embedding_dim)
        if self.start is not None:
            return _read(start_folder(self.start, context), shape)
        if self.start_text is None:
            return torch.randn(shape) * 0.02  # CoOp's
        require_tokenizer(folder)
        vocabulary = PretrainedTokenizer(path=str(folder)).ready("", context)
        ids = [one for one in vocabulary.encode([self.start_text], 512)[0] if one not in vocabulary.fixed]
        if not ids:
            raise ConfigError(f"adapter.start_text: '{self.start_text}' has no token; give words, or leave it out")
        repeated = ids * math.ceil(self.length / len(ids))
        return words.weight[torch.tensor(repeated[: self.length])].detach().clone()


def prompts_of(trunk: NetworkTrunk) -> nn.Parameter:
    """The prompts [p, e] of a network that has some."""
    return next(value for name, value in trunk.named_parameters() if name.endswith(".prompts"))


def has_prompts(names: Any) -> bool:
    """Whether prompts are among tensors of these names."""
    return any(name.endswith(".prompts") for name in names)


def _hold(part: nn.Module, values: Tensor, insert: Any, at: int) -> None:
    part.prompts, part.prompts_at = nn.Parameter(values), at  # type: ignore[assignment]
    # a hook leaves the names of frozen tensors as they are, and what asks the part for its own weights as it is
    part.register_forward_hook(insert)


def _in_place_of_fillers(words: Any, inputs: Any, embedded: Float[Tensor, "b l e"]) -> Float[Tensor, "b l e"]:
    prompts = words.prompts.to(embedded.dtype).expand(len(embedded), -1, -1)
    return torch.cat([embedded[:, : words.prompts_at], prompts, embedded[:, words.prompts_at + prompts.shape[1] :]], 1)


def _between(embeddings: Any, inputs: Any, embedded: Float[Tensor, "b l e"]) -> Float[Tensor, "b m e"]:
    prompts = embeddings.prompts.to(embedded.dtype).expand(len(embedded), -1, -1)
    return torch.cat([embedded[:, : embeddings.prompts_at], prompts, embedded[:, embeddings.prompts_at :]], 1)


def _filler(config: Any, trunk: NetworkTrunk) -> int:
    """A token id that means nothing to what looks at ids: neither padding nor an end of a text, CLIP's the highest."""
    special = {config.pad_token_id, config.eos_token_id, config.bos_token_id}
    special |= {trunk.padding.pad} if trunk.padding is not None else set()
    # from the middle: some networks have special ids of their own at the ends
    return next(number for number in range(config.vocab_size // 2, config.vocab_size) if number not in special)


def _area(patch: Any) -> int:
    return math.prod(patch) if isinstance(patch, list | tuple) else patch * patch


def _read(folder: Path, shape: tuple[int, int]) -> Tensor:
    given = start_tensors(folder).get(TENSOR)
    if given is None or tuple(given.shape) != shape:
        there = "none" if given is None else str(list(given.shape))
        raise ConfigError(f"adapter.start: prompts in '{folder}' are {there}, the settings say {list(shape)}")
    return given
