"""Prompts: learnt vectors among the inputs of a frozen network's first layer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import BackboneTower, require_tokenizer
from polyfed.data.tokenizers import PretrainedTokenizer
from polyfed.data.view import DataContext, InputSpec
from polyfed.models.adapters.adapter import Adapter, start_folder, start_tensors
from polyfed.models.trunks import NetworkTrunk, PromptPositions, layers_path

TENSOR = "prompt_embeddings"
"""Name of prompts in a folder of ``peft``."""


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

    def attach(
        self, trunk: NetworkTrunk, tower: BackboneTower, spec: InputSpec, folder: Path, context: DataContext
    ) -> None:
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
        _hold(words, self._first_values(words, folder, context), _in_place_of_fillers, at)
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
        _hold(body.embeddings, torch.empty(self.length, width).uniform_(-limit, limit), _between, 1)
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
        repeated = ids * math.ceil(self.length / len(ids))
        return words.weight[torch.tensor(repeated[: self.length])].detach().clone()


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


def _hold(part: Any, values: Tensor, insert: Any, at: int) -> None:
    part.prompts, part.prompts_at = nn.Parameter(values), at
    # a hook changes neither the names of frozen tensors nor the weights that other code reads of the part
    part.register_forward_hook(insert)


def _in_place_of_fillers(words: Any, inputs: Any, embedded: Float[Tensor, "b l e"]) -> Float[Tensor, "b l e"]:
    at, prompts = words.prompts_at, words.prompts.to(embedded.dtype).expand(len(embedded), -1, -1)
    return torch.cat([embedded[:, :at], prompts, embedded[:, at + prompts.shape[1] :]], 1)


def _between(embeddings: Any, inputs: Any, embedded: Float[Tensor, "b l e"]) -> Float[Tensor, "b m e"]:
    prompts = embeddings.prompts.to(embedded.dtype).expand(len(embedded), -1, -1)
    return torch.cat([embedded[:, : embeddings.prompts_at], prompts, embedded[:, embeddings.prompts_at :]], 1)


def plain_ids(config: Any, trunk: NetworkTrunk, count: int = 1) -> list[int]:
    """Token ids without a meaning of their own: neither padding nor the end of a text (CLIP's highest id)."""
    special = {config.pad_token_id, config.eos_token_id, config.bos_token_id}
    special |= {trunk.padding.pad} if trunk.padding is not None else set()
    # from the middle: some networks have special ids of their own at the ends
    numbers = range(config.vocab_size // 2, config.vocab_size)
    return list(islice((number for number in numbers if number not in special), count))
