"""Word embeddings, random or from files of word vectors (GloVe), and encoders that start with them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import Field, SerializeAsAny
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import local_folder, missing_folder
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.tokens import Tokens
from polyfed.models.encoder import Encoder, token_length

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

    def table(self, spec: InputSpec, context: DataContext) -> nn.Embedding:
        """The embeddings as set.

        Raises:
            ConfigError: the view gives no tokens, or word vectors cannot be had.
        """
        token_length(spec, self.component_name())
        return embedding_table(spec, context, width=self.width, vectors=self.vectors, freeze=self.freeze_embedding)


def embedding_table(
    spec: InputSpec, context: DataContext, *, width: int, vectors: Sequence[str] = (), freeze: bool = False
) -> nn.Embedding:
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
    return nn.Embedding(rows, table.shape[1], padding_idx=spec.pad, _weight=table, _freeze=freeze)


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
