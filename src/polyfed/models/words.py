"""Word embeddings, random or from files of word vectors (GloVe)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from polyfed.core.errors import ConfigError
from polyfed.data.backbones import local_folder, missing_folder
from polyfed.data.view import DataContext, InputSpec

_logger = logging.getLogger(__name__)

RANDOM_RANGE = 0.1
# spread of a word without a vector over that of the vectors; 1 costs about a point of recall on Flickr8k
UNSEEN_SPREAD = 0.1


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
        table = torch.empty(rows, width).uniform_(-RANDOM_RANGE, RANDOM_RANGE)
    if 0 <= spec.pad < rows:
        table[spec.pad] = 0
    return nn.Embedding(rows, table.shape[1], padding_idx=spec.pad, _weight=table, _freeze=freeze)


def _columns(name: str, vocabulary: Sequence[str], context: DataContext) -> Tensor:
    row_of, vectors = _word_vectors(name, context)
    rows = [row_of.get(word.lower(), -1) for word in vocabulary]
    indices = torch.tensor(rows)
    hit = indices >= 0
    if not hit.any():
        raise ConfigError(f"vectors '{name}' has none of the {len(rows)} words of the vocabulary; check the tokenizer")
    _logger.debug("vectors %s cover %d of %d words", name, int(hit.sum()), len(rows))
    table = torch.randn(len(rows), vectors.shape[1]) * (UNSEEN_SPREAD * vectors.std())
    table[hit] = vectors[indices[hit]]
    return table


def _word_vectors(name: str, context: DataContext) -> tuple[dict[str, int], Tensor]:
    key = f"word vectors {name}"
    if key not in context.fitted:
        context.fitted[key] = _read(_folder(name, context))
    fitted: tuple[dict[str, int], Tensor] = context.fitted[key]  # type: ignore[assignment]
    return fitted


def _folder(name: str, context: DataContext) -> Path:
    folder = local_folder(name, context.weights)
    if folder is None:
        raise missing_folder(name, context.weights, "vectors")
    return folder


def _read(folder: Path) -> tuple[dict[str, int], Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        words = (folder / "words.txt").read_text(encoding="utf-8").splitlines()
        vectors = load_file(folder / "vectors.safetensors")["vectors"].float().clone()
    except (OSError, KeyError, SafetensorError) as error:
        raise ConfigError(f"vectors folder '{folder}' needs words.txt and vectors.safetensors: {error}") from error
    if len(words) != len(vectors):
        raise ConfigError(f"vectors folder '{folder}': {len(words)} words but {len(vectors)} vectors")
    return {word: row for row, word in enumerate(words)}, vectors
