"""Word embeddings, random or from files of word vectors (GloVe), trained or frozen, and encoders over them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float
from pydantic import Field, SerializeAsAny
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.core.randomness import isolated
from polyfed.data.arrow import fingerprint_of
from polyfed.data.backbones import digest, local_folder, missing_folder
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.tokens import Tokens
from polyfed.models.encoder import Encoder, token_length
from polyfed.models.frozen import Frozen

_logger = logging.getLogger(__name__)

_RANDOM_RANGE = 0.1
# spread of a word without a vector over that of the vectors; 1 costs about a point of recall on Flickr8k
_UNSEEN_SPREAD = 0.1


class WordEncoder(Encoder):
    """Encoders over a table of word embeddings."""

    view: SerializeAsAny[View] = Tokens()
    width: int = Field(default=300, ge=1, description="width of the word embeddings, unless `vectors` bring theirs")
    vectors: tuple[str, ...] = Field(
        default=(), description="folders of word vectors (words.txt, vectors.safetensors), put side by side"
    )
    freeze_embedding: bool = Field(default=False, description="keep the word embeddings as they start")

    def table(self, spec: InputSpec, context: DataContext) -> WordTable:
        """The embeddings as set.

        Raises:
            ConfigError: the view gives no tokens, or word vectors cannot be had.
        """
        token_length(spec, self.component_name())
        make = frozen_embedding if self.freeze_embedding else embedding_table
        return make(spec, context, width=self.width, vectors=self.vectors)

    def frozen(self, modality: str, context: DataContext) -> str:
        """Number and digest of the word embeddings, where they are frozen."""
        if not self.freeze_embedding:
            return ""
        table = self.table(self.view.spec(modality, context), context)
        assert isinstance(table, FrozenEmbedding)
        return table.digest


class FrozenEmbedding(Frozen):
    """Word embeddings [v, w] that are never trained."""

    def __init__(self, table: Float[Tensor, "v w"], digest: str) -> None:
        super().__init__(nn.Embedding(table.shape[0], table.shape[1], _weight=table), digest)

    @property
    def weight(self) -> Tensor:
        return cast("nn.Embedding", self.module).weight

    @property
    def embedding_dim(self) -> int:
        return self.weight.shape[1]


WordTable = nn.Embedding | FrozenEmbedding


def frozen_embedding(
    spec: InputSpec, context: DataContext, *, width: int, vectors: Sequence[str] = ()
) -> FrozenEmbedding:
    """``embedding_table`` that is not trained; made once, of random values that depend on ``context.seed`` alone.

    Raises:
        ConfigError: as for ``embedding_table``.
    """
    words = fingerprint_of(*spec.vocabulary)
    key = f"frozen words {(*vectors,) or width} {spec.pad} {words}"
    if key not in context.fitted:
        with isolated(context.seed, "frozen words"):
            table = embedding_table(spec, context, width=width, vectors=vectors).weight.detach()
        folders = [folder for name in vectors if (folder := local_folder(name, context.weights))]
        # of what it is made of: random values are not the same to the last bit on all processors
        stamp = fingerprint_of(words, spec.pad, context.seed, *([width] if not folders else map(digest, folders)))
        context.fitted[key] = FrozenEmbedding(table, f"{len(table)}x{stamp[:8]}")
    return copy.deepcopy(cast("FrozenEmbedding", context.fitted[key]))


def embedding_table(spec: InputSpec, context: DataContext, *, width: int, vectors: Sequence[str] = ()) -> nn.Embedding:
    """An embedding of ``spec.vocabulary``; the padding row is zero and stays so.

    With ``vectors`` each folder (``words.txt`` and ``vectors.safetensors``) fills columns of its own, side by
    side; a word that a folder lacks gets normal values there, a tenth as spread as the folder's own. Without,
    all values are uniform in +-0.1 (VSE++) and ``width`` wide.

    Raises:
        ConfigError: a folder is missing or damaged, or shares no word with the vocabulary.
    """
    rows = len(spec.vocabulary)
    if vectors:
        table = torch.cat([_columns(folder, spec.vocabulary, context) for folder in vectors], dim=1)
    else:
        table = torch.empty(rows, width).uniform_(-_RANDOM_RANGE, _RANDOM_RANGE)
    # after the draw: the other rows do not depend on where padding stands
    if 0 <= spec.pad < rows:
        table[spec.pad] = 0
    return nn.Embedding(rows, table.shape[1], padding_idx=spec.pad, _weight=table)


def _columns(name: str, vocabulary: Sequence[str], context: DataContext) -> Tensor:
    key = f"word vectors {name}"
    if key not in context.fitted:  # read once for all clients
        folder = local_folder(name, context.weights)
        if folder is None:
            raise missing_folder(name, context.weights, "vectors")
        context.fitted[key] = _read(folder)
    fitted: tuple[dict[str, int], Tensor, Tensor] = context.fitted[key]  # type: ignore[assignment]
    row_of, vectors, spread = fitted
    looked_up: dict[tuple[str, ...], Tensor] = context.fitted.setdefault(f"rows of {key}", {})  # type: ignore[assignment]
    if (words := tuple(vocabulary)) not in looked_up:  # once for all models
        looked_up[words] = torch.tensor([row_of.get(word.lower(), -1) for word in words])
    rows = looked_up[words]
    known = rows >= 0
    if not known.any():
        raise ConfigError(f"vectors '{name}' has none of the {len(rows)} words of the vocabulary; check the tokenizer")
    _logger.debug("vectors %s cover %d of %d words", name, int(known.sum()), len(rows))
    table = torch.randn(len(rows), vectors.shape[1]) * (_UNSEEN_SPREAD * spread)
    table[known] = vectors[rows[known]]
    return table


def _read(folder: Path) -> tuple[dict[str, int], Tensor, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        words = (folder / "words.txt").read_text(encoding="utf-8").splitlines()
        vectors = load_file(folder / "vectors.safetensors")["vectors"].float().clone()
    except (OSError, KeyError, SafetensorError) as error:
        raise ConfigError(f"vectors folder '{folder}' needs words.txt and vectors.safetensors: {error}") from error
    if len(words) != len(vectors):
        raise ConfigError(f"vectors folder '{folder}': {len(words)} words but {len(vectors)} vectors")
    return {word: row for row, word in enumerate(words)}, vectors, vectors.std()
