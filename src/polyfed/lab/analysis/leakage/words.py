"""Words of a client's texts, read from the rows of its word embeddings that an update of weights moved.

An entry that no text has gets no gradient, so its row stays, or shrinks by weight decay: it keeps its direction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor, nn

from polyfed.data.samples import Samples
from polyfed.data.tokenization import Vocabulary
from polyfed.data.views.tokens import TokenRows
from polyfed.lab.analysis.leakage.figures import NO_MODEL, AttackResult, Discrimination, Found, NoAttack, leak_verdict
from polyfed.lab.analysis.leakage.seen import SeenReply
from polyfed.lab.analysis.leakage.situation import Situation
from polyfed.models.model import Model
from polyfed.privacy.settings import UPDATE
from polyfed.wire.payload import Weights

_WORDS = "words"
_TOUCHED = 1e-3  # of the largest move; the optimiser makes moves of words that occur about equally long


@dataclass(frozen=True)
class WordRecovery:
    """Recovered entries of a vocabulary against those that the client's texts have.

    Attributes:
        precision, recall: of the recovered entries.
        guessed_precision, guessed_recall: of as many entries, the most frequent of texts that are not the client's.
        private, vocabulary: number of entries that the client's texts have, and of all.
        held, others: how far rows moved, of entries that they have and that they have not.
    """

    precision: float
    recall: float
    guessed_precision: float
    guessed_recall: float
    private: int
    vocabulary: int
    held: NDArray[np.float64]
    others: NDArray[np.float64]


def moves(before: Float[Tensor, "v d"], after: Float[Tensor, "v d"]) -> Float[Tensor, " v"]:
    """How far each row moved off its own direction."""
    before, after = before.double().cpu(), after.double().cpu()
    squares = before.square().sum(1).clamp_min(torch.finfo(torch.float64).tiny)
    along = ((before * after).sum(1) / squares)[:, None] * before
    moved: Tensor = (after - along).norm(dim=1)
    return moved


def touched_rows(moved: Float[Tensor, " v"]) -> Bool[Tensor, " v"]:
    return (moved > 0) & (moved >= _TOUCHED * moved.max())


def word_recovery(
    moved: Float[Tensor, " v"], private: set[int], spared: set[int], order: Sequence[int]
) -> WordRecovery:
    """How much of the private vocabulary is recovered.

    Args:
        moved: by entry.
        private: entries of the client's texts.
        spared: entries that are no words, such as padding.
        order: entries by how likely a guess takes them to be.
    """
    candidates = set(range(len(moved))) - spared
    recovered = candidates & set(touched_rows(moved).nonzero().flatten().tolist())
    guessed = set([entry for entry in order if entry in candidates][: len(recovered)])
    values = moved.numpy()
    return WordRecovery(
        *_quality(recovered, private),
        *_quality(guessed, private),
        private=len(private),
        vocabulary=len(candidates),
        held=values[sorted(candidates & private)],
        others=values[sorted(candidates - private)],
    )


def _quality(recovered: set[int], private: set[int]) -> tuple[float, float]:
    right = len(recovered & private)
    return right / max(1, len(recovered)), right / max(1, len(private))


def vocabularies(samples: Samples) -> dict[str, Vocabulary]:
    rows = {name: inputs for name, inputs in samples.inputs.items() if isinstance(inputs, TokenRows)}
    return {name: inputs.vocabulary for name, inputs in rows.items()}


def token_counts(samples: Samples, modality: str) -> Counter[int]:
    """How often each entry of the vocabulary stands in the texts."""
    inputs = samples.inputs[modality]
    assert isinstance(inputs, TokenRows)
    values, counts = torch.unique(inputs.ids[samples.having(modality).rows[modality]], return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def no_words(vocabulary: Vocabulary) -> set[int]:
    return {vocabulary.pad, vocabulary.unknown, *vocabulary.fixed}


def word_table(model: Model, modality: str, size: int, sent: Mapping[str, Tensor]) -> str | None:
    """Name of the word embeddings of a modality among weights that crossed; None: they did not."""
    inside = {id(module) for module in model.tower(modality).modules()}
    tables = [
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings == size and id(module) in inside
    ]
    return next((name for name in tables if name in sent), None)


# ---- the attack


def word_findings(situation: Situation) -> Found:
    for on, member, seen, name, bundle in situation.crossed():
        known = vocabularies(situation.opened.federation.train(member))
        if not isinstance(bundle, Weights):
            yield NoAttack(on, _WORDS, "no rows of word embeddings cross")
        elif name != UPDATE:
            yield NoAttack(on, _WORDS, NO_MODEL)
        elif not known:
            yield NoAttack(on, _WORDS, "the client has no texts")
        else:
            for modality, vocabulary in known.items():
                yield _words_of(situation, on, seen, name, modality, vocabulary)


def _words_of(
    situation: Situation, on: str, seen: SeenReply, name: str, modality: str, vocabulary: Vocabulary
) -> AttackResult | NoAttack:
    sent: Mapping[str, Tensor] = seen.bundles[name]
    start: Mapping[str, Tensor] = seen.received.bundles.get(name, {})
    model = situation.fresh(situation.member(seen.clients[0]))
    table = word_table(model, modality, len(vocabulary.tokens), sent)
    if table is None or table not in start:
        return NoAttack(on, _WORDS, f"word embeddings of '{modality}' do not cross, or nobody sent what they were")
    quality = _word_quality(situation, seen.clients, moves(start[table], sent[table]), modality, vocabulary)
    if not len(quality.held) or not len(quality.others):
        return NoAttack(on, _WORDS, "the client's texts have all words of the vocabulary, or none")
    told = Discrimination.of(quality.held, quality.others, situation.plan.seed)
    figures = {key: value for key, value in vars(quality).items() if isinstance(value, int | float)}
    says = leak_verdict(told.auc, is_protected=situation.is_protected)
    return AttackResult(on, "moved rows", True, {**told.to_json(), **figures}, says)


def _word_quality(
    situation: Situation, clients: Sequence[str], moved: Tensor, modality: str, vocabulary: Vocabulary
) -> WordRecovery:
    """Against all words of these clients' texts; the guess goes by the first client's test texts."""
    federation, spared = situation.opened.federation, no_words(vocabulary)
    owners = [situation.member(client) for client in clients]
    private = set[int]().union(*(token_counts(federation.train(owner), modality) for owner in owners)) - spared
    test = federation.test(owners[0])
    common = [] if test is None else [entry for entry, _ in token_counts(test, modality).most_common()]
    order = list(dict.fromkeys([*common, *range(len(vocabulary.tokens))]))
    return word_recovery(moved, private, spared, order)
