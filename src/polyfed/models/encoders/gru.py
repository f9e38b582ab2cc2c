"""GRU text encoder with optional PIE over its word embeddings (PVSE, CreamFL, FedAFD)."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from polyfed.data.view import DataContext, InputSpec
from polyfed.models.pooling import last_valid, lengths_of, reversed_valid, trimmed, valid_positions
from polyfed.models.towers import PIE, LocalFeatures, Positions
from polyfed.models.words import WordEncoder, WordTable


class GRU(WordEncoder):
    """Word embeddings, a (bidirectional) GRU, its state projected to d; with ``pie``, attention over them.

    ``readout: final`` takes the state of each direction after it has read the whole text; ``last`` takes both
    at the last word, as PVSE and CreamFL do, where the backward direction has read that word only.
    """

    projecting = ("pie", "project")

    hidden: int | None = Field(default=None, ge=1, description="width of a direction; all together d by default")
    bidirectional: bool = Field(default=True, description="read backwards as well")
    readout: Literal["final", "last"] = Field(
        default="final", description="whole text in both directions, or as PVSE and CreamFL"
    )
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
        self.pad = pad
        self.readout = settings.readout
        self.embedding = embedding
        self.dropout = nn.Dropout(settings.dropout)
        # two modules instead of a bidirectional one: that would read the padding first
        self.forwards = nn.GRU(width, hidden, batch_first=True)
        self.backwards = nn.GRU(width, hidden, batch_first=True) if settings.bidirectional else None
        self.project = nn.Linear(state, dim) if settings.project or state != dim else nn.Identity()
        self.pie = PIE(width, dim) if settings.pie else None

    def forward(self, tokens: Int64[Tensor, "b l"]) -> Float[Tensor, "b d"]:
        tokens = trimmed(tokens, self.pad)
        mask = valid_positions(tokens, self.pad)
        lengths = lengths_of(mask)
        words = self.dropout(self.embedding(tokens))
        out: Tensor = self.project(self._state(words, lengths))
        return out if self.pie is None else self.pie(out, words, mask)

    def split(self) -> tuple[nn.Module, int]:
        return _GRUTrunk(self), self.forwards.hidden_size * (1 if self.backwards is None else 2)

    def local(self, tokens: Int64[Tensor, "b l"]) -> LocalFeatures:
        mask = valid_positions(tokens, self.pad)
        words, lengths = self.dropout(self.embedding(trimmed(tokens, self.pad))), lengths_of(mask)
        state, states = self._state(words, lengths), self._states(words, lengths)
        # one length for all batches, whatever was trimmed, so that they can be put together
        return LocalFeatures(state, F.pad(states, (0, 0, 0, tokens.shape[1] - states.shape[1])), mask)

    def positions(self, tokens: Int64[Tensor, "b l"]) -> Positions:
        mask = valid_positions(tokens, self.pad)
        words = self.dropout(self.embedding(trimmed(tokens, self.pad)))
        states = self.project(self._states(words, lengths_of(mask)))
        return F.pad(states, (0, 0, 0, tokens.shape[1] - states.shape[1])), mask

    def _states(self, words: Tensor, lengths: Tensor) -> Float[Tensor, "b l h"]:
        states: Tensor = self.forwards(words)[0]
        if self.backwards is None:
            return states
        # back to front within the text: padding stays behind it in both directions
        mirrored = self.backwards(reversed_valid(words, lengths))[0]
        return torch.cat([states, reversed_valid(mirrored, lengths)], dim=-1)

    def _state(self, words: Tensor, lengths: Tensor) -> Float[Tensor, "b h"]:
        state = final_state(self.forwards, words, lengths)
        if self.backwards is None:
            return state
        # the backward direction has read one word only when it is at the last one
        if self.readout == "last":
            word = last_valid(words, lengths).unsqueeze(1)
            return torch.cat([state, self.backwards(word)[0][:, 0]], dim=-1)
        mirrored = reversed_valid(words, lengths)
        return torch.cat([state, final_state(self.backwards, mirrored, lengths)], dim=-1)


class _GRUTrunk(nn.Module):
    def __init__(self, encoder: _GRUModule) -> None:
        super().__init__()
        # nothing may stay that learns nothing
        encoder.project, encoder.pie = nn.Identity(), None
        self.gru = encoder

    def forward(self, tokens: Int64[Tensor, "b l"]) -> LocalFeatures:
        return self.gru.local(tokens)


def final_state(gru: nn.GRU, x: Float[Tensor, "b l c"], lengths: Int64[Tensor, " b"]) -> Float[Tensor, "b h"]:
    """State of a one-directional GRU after the last valid position.

    On the CPU padding is skipped (packed); elsewhere it is read and ignored, as packing would wait for the
    device, and cannot be traced for an export.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return last_valid(gru(x)[0], lengths)
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    state: Tensor = gru(packed)[1]
    return state[-1]
