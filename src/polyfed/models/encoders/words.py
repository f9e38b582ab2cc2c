"""Encoders over a table of word embeddings, random or from files of word vectors (GloVe): a mean, and a GRU."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal, cast

import torch
from jaxtyping import Float, Int64
from pydantic import Field, SerializeAsAny
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from polyfed.core.errors import ConfigError
from polyfed.core.randomness import isolated
from polyfed.data.arrow import fingerprint_of
from polyfed.data.backbones import digest, local_folder, missing_folder
from polyfed.data.view import DataContext, InputSpec, View
from polyfed.data.views.tokens import Tokens
from polyfed.models import towers
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
    vectors: tuple[str, ...] = Field(default=(), description="folders of word vectors, put side by side")
    freeze_embedding: bool = Field(default=False, description="do not train the word embeddings")

    def table(self, spec: InputSpec, context: DataContext) -> WordTable:
        """Table of word embeddings.

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
        ConfigError: see ``embedding_table``.
    """
    words = fingerprint_of(*spec.vocabulary)
    if (key := f"frozen words {(*vectors,) or width} {spec.pad} {words}") not in context.fitted:
        with isolated(context.seed, "frozen words"):
            table = embedding_table(spec, context, width=width, vectors=vectors).weight.detach()
        folders = [folder for name in vectors if (folder := local_folder(name, context.weights))]
        # a digest of the sources: random values differ in their last bits between processors
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
        if (folder := local_folder(name, context.weights)) is None:
            raise missing_folder(name, context.weights, "vectors")
        context.fitted[key] = _read(folder)
    row_of, vectors, spread = cast("tuple[dict[str, int], Tensor, Tensor]", context.fitted[key])
    looked_up = cast("dict[tuple[str, ...], Tensor]", context.fitted.setdefault(f"rows of {key}", {}))
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


class Bag(WordEncoder):
    """Mean of word embeddings, dropout, an optional hidden layer (GELU), projection to d."""

    short_name: ClassVar[str] = "bag"

    projecting = ("hidden",)

    dropout: float = Field(default=0.2, ge=0, lt=1, description="share of the mean dropped in training")
    hidden: int | None = Field(default=None, ge=1, description="width of a hidden layer; none by default")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps token ids [b, l] to [b, dim].

        Raises:
            ConfigError: the view gives no tokens, or word vectors cannot be had.
        """
        return _BagModule(self.table(spec, context), spec.pad, dim, self.dropout, self.hidden)


class _BagModule(nn.Module):
    def __init__(self, embedding: WordTable, pad: int, dim: int, dropout: float, hidden: int | None) -> None:
        super().__init__()
        self.embedding = embedding
        self.pad = pad
        width = embedding.embedding_dim
        inner = [] if hidden is None else [nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout)]
        self.project = nn.Sequential(nn.Dropout(dropout), *inner, nn.Linear(hidden or width, dim))

    def forward(self, tokens: Int64[Tensor, "b l"]) -> Float[Tensor, "b d"]:
        embedding: Tensor = self.project(self._mean(tokens))
        return embedding

    def _mean(self, tokens: Int64[Tensor, "b l"]) -> Float[Tensor, "b c"]:
        table = self.embedding.weight
        # its kernel holds no words [b, l, c], but has neither a second derivative nor a form for ``vmap`` or an export
        learns = torch.is_grad_enabled() and table.requires_grad
        if learns or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return towers.masked_mean(self.embedding(tokens), towers.valid_positions(tokens, self.pad))
        return F.embedding_bag(tokens, table, mode="mean", padding_idx=self.pad if 0 <= self.pad < len(table) else None)

    def split(self) -> tuple[nn.Module, int]:
        """The word embeddings and their mean, without the layers after these."""
        return _BagTrunk(self.embedding, self.pad, self.project[0]), self.embedding.embedding_dim

    def positions(self, tokens: Int64[Tensor, "b l"]) -> towers.Positions:
        return self.project(self.embedding(tokens)), towers.valid_positions(tokens, self.pad)


class _BagTrunk(nn.Module):
    def __init__(self, embedding: WordTable, pad: int, dropout: nn.Module) -> None:
        super().__init__()
        self.embedding, self.pad, self.dropout = embedding, pad, dropout

    def forward(self, tokens: Int64[Tensor, "b l"]) -> towers.LocalFeatures:
        mask = towers.valid_positions(tokens, self.pad)
        words = self.dropout(self.embedding(tokens))
        return towers.LocalFeatures(towers.masked_mean(words, mask), words, mask)


class GRU(WordEncoder):
    """Word embeddings, a (bidirectional) GRU, its state projected to d; with ``pie``, attention over them.

    ``readout: final`` is the state of each direction after the whole text; ``last`` is that of both at the last word,
    as in PVSE and CreamFL, where the backward direction has read that word only.
    """

    short_name: ClassVar[str] = "gru"

    projecting = ("pie", "project")

    hidden: int | None = Field(default=None, ge=1, description="width of a direction; all together d by default")
    bidirectional: bool = Field(default=True, description="read backwards as well")
    readout: Literal["final", "last"] = Field(default="final", description="both whole directions, or as in CreamFL")
    project: bool = Field(default=False, description="linear layer on the state even where its width is d already")
    pie: bool = Field(default=False, description="attention over the word embeddings (PVSE, CreamFL)")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="share of the word embeddings dropped in training")

    def build(self, dim: int, spec: InputSpec, context: DataContext) -> nn.Module:
        """Maps token ids [b, l] to [b, dim].

        Raises:
            ConfigError: the view gives no tokens, or word vectors cannot be had.
        """
        return _GRUModule(self, self.table(spec, context), spec.pad, dim)


class _GRUModule(nn.Module):
    def __init__(self, settings: GRU, embedding: WordTable, pad: int, dim: int) -> None:
        super().__init__()
        directions = 2 if settings.bidirectional else 1
        width, hidden = embedding.embedding_dim, settings.hidden or max(1, dim // directions)
        state = directions * hidden
        self.pad, self.readout = pad, settings.readout
        self.embedding, self.dropout = embedding, nn.Dropout(settings.dropout)
        # two modules instead of a bidirectional one: that would read the padding first
        self.forwards = nn.GRU(width, hidden, batch_first=True)
        self.backwards = nn.GRU(width, hidden, batch_first=True) if settings.bidirectional else None
        self.project = nn.Linear(state, dim) if settings.project or state != dim else nn.Identity()
        self.pie = towers.PIE(width, dim) if settings.pie else None

    def _read(self, tokens: Int64[Tensor, "b l"]) -> tuple[Tensor, Tensor, Tensor]:
        """Embedded words, mask and lengths of texts without columns of padding."""
        tokens = towers.trimmed(tokens, self.pad)
        mask = towers.valid_positions(tokens, self.pad)
        return self.dropout(self.embedding(tokens)), mask, towers.lengths_of(mask)

    def forward(self, tokens: Int64[Tensor, "b l"]) -> Float[Tensor, "b d"]:
        words, mask, lengths = self._read(tokens)
        out: Tensor = self.project(self._state(words, lengths))
        return out if self.pie is None else self.pie(out, words, mask)

    def split(self) -> tuple[nn.Module, int]:
        return _GRUTrunk(self), self.forwards.hidden_size * (1 if self.backwards is None else 2)

    def local(self, tokens: Int64[Tensor, "b l"]) -> towers.LocalFeatures:
        words, _, lengths = self._read(tokens)
        state, states = self._state(words, lengths), self._states(words, lengths)
        return towers.LocalFeatures(state, *self._untrimmed(states, tokens))

    def positions(self, tokens: Int64[Tensor, "b l"]) -> towers.Positions:
        words, _, lengths = self._read(tokens)
        return self._untrimmed(self.project(self._states(words, lengths)), tokens)

    def _untrimmed(self, states: Tensor, tokens: Tensor) -> towers.Positions:
        # one length for all batches, whatever was trimmed, so that they can be put together
        return F.pad(states, (0, 0, 0, tokens.shape[1] - states.shape[1])), towers.valid_positions(tokens, self.pad)

    def _states(self, words: Tensor, lengths: Tensor) -> Float[Tensor, "b l h"]:
        states: Tensor = self.forwards(words)[0]
        if self.backwards is None:
            return states
        # back to front within the text: padding stays behind it in both directions
        mirrored = self.backwards(towers.reversed_valid(words, lengths))[0]
        return torch.cat([states, towers.reversed_valid(mirrored, lengths)], dim=-1)

    def _state(self, words: Tensor, lengths: Tensor) -> Float[Tensor, "b h"]:
        state = final_state(self.forwards, words, lengths)
        if self.backwards is None:
            return state
        # the backward direction has read one word only when it is at the last one
        if self.readout == "last":
            return torch.cat([state, self.backwards(towers.last_valid(words, lengths).unsqueeze(1))[0][:, 0]], dim=-1)
        mirrored = towers.reversed_valid(words, lengths)
        return torch.cat([state, final_state(self.backwards, mirrored, lengths)], dim=-1)


class _GRUTrunk(nn.Module):
    def __init__(self, encoder: _GRUModule) -> None:
        super().__init__()
        # no parameter without a gradient may stay
        encoder.project, encoder.pie = nn.Identity(), None
        self.gru = encoder

    def forward(self, tokens: Int64[Tensor, "b l"]) -> towers.LocalFeatures:
        return self.gru.local(tokens)


def final_state(gru: nn.GRU, x: Float[Tensor, "b l c"], lengths: Int64[Tensor, " b"]) -> Float[Tensor, "b h"]:
    """State of a one-directional GRU after the last valid position.

    On the CPU padding is skipped (packed); elsewhere it is read and ignored, as packing would wait for the
    device, and cannot be traced for an export.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return towers.last_valid(gru(x)[0], lengths)
    state: Tensor = gru(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1]
    return state[-1]
