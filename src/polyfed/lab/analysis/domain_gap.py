"""Gap between data sets: the distance of their mean embeddings (FedCola, section 5.2)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from polyfed.core.errors import ConfigError, DataError
from polyfed.data.source import Split
from polyfed.lab.analysis.encoders import Encoders, drawn, require_different
from polyfed.lab.analysis.results import AnalysisResult
from polyfed.reporting.tables import TextTable, count, figure


def mean_embedding(
    batches: Iterable[Float[Tensor, "b d"]], *, normalise: bool = False
) -> tuple[Float[Tensor, " d"], int]:
    """Mean of embeddings that come in batches, in float64, and their number; no batch is kept.

    Args:
        batches: at least one embedding in all.
        normalise: scale each embedding to unit L2 norm first.

    Raises:
        DataError: there is no embedding, or the mean is not finite.
    """
    total, number = torch.zeros(0, dtype=torch.float64), 0
    for batch in batches:
        rows = F.normalize(batch.double(), dim=-1) if normalise else batch.double()
        total = rows.sum(0) + (total if number else 0)  # the width is known from the first batch on
        number += len(rows)
    if number == 0 or not bool(total.isfinite().all()):
        raise DataError(f"{number} embeddings have no finite mean; look for an empty data set or NaN in the encoder")
    return total / number, number


def mean_distance(first: Float[Tensor, " d"], second: Float[Tensor, " d"]) -> float:
    """||e_1 - e_2||_2 of two mean embeddings (FedCola, section 5.2)."""
    return float(torch.linalg.vector_norm(first.double() - second.double()))


def domain_gaps(
    encoders: Encoders,
    anchor: str,
    others: Sequence[str],
    *,
    split: str = "train",
    normalise: bool = False,
    most: int | None = None,
) -> AnalysisResult:
    """Gaps between the data set ``anchor`` and each of ``others``, modality by modality.

    Every row (picture, caption) counts once, in the evaluation view.

    Args:
        encoders: what embeds the data sets.
        anchor: a source; in the paper the multi-modal data set.
        others: further sources; in the paper the uni-modal data sets.
        split: split of all of them.
        normalise: scale embeddings to unit norm first. The paper does not say; its gaps of about 5 a modality
            are possible only without (with unit norm no gap exceeds 2), so off by default.
        most: at most so many rows of each data set, drawn at random; None: all.

    Raises:
        ConfigError: a source is unknown, or shares no modality with the anchor and the encoders.
        DataError: a source has no such split.
    """
    require_different([anchor, *others], "data sets")
    splits = {name: encoders.split(name, split) for name in (anchor, *others)}
    compared = {name: _shared_modalities(encoders, splits[anchor], splits[name]) for name in others}
    # the anchor is embedded once for all others, in the modalities that any of them has
    of_anchor = list(dict.fromkeys(chain.from_iterable(compared.values())))
    means: dict[str, dict[str, Tensor]] = defaultdict(dict)
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for name, modalities in {anchor: of_anchor, **compared}.items():
        for modality in modalities:
            samples = encoders.samples(splits[name], modality)
            rows = drawn(len(samples.inputs[modality]), most, "gap", name, modality)
            embeddings = encoders.embeddings(samples, modality, rows)
            means[name][modality], counts[name][modality] = mean_embedding(embeddings, normalise=normalise)
    gaps = {name: {m: mean_distance(means[anchor][m], means[name][m]) for m in compared[name]} for name in others}
    asked = {"encoders": encoders.name, "anchor": anchor, "split": split, "normalise": normalise}
    return _result(asked, gaps, counts)


def _result(
    asked: Mapping[str, object], gaps: Mapping[str, Mapping[str, float]], counts: Mapping[str, Mapping[str, int]]
) -> AnalysisResult:
    sums = {name: math.fsum(by_modality.values()) for name, by_modality in gaps.items()}
    total = math.fsum(value for by_modality in gaps.values() for value in by_modality.values())
    lines = [
        (f"{asked['anchor']} - {name}, {modality}", figure(value, 4), count(counts[name][modality]))
        for name, by_modality in gaps.items()
        for modality, value in by_modality.items()
    ]
    scale = "unit norm" if asked["normalise"] else "not normalised"
    note = f"L2 distance of mean embeddings ({scale}) by {asked['encoders']}; split {asked['split']}."
    lines.append(("sum", figure(total, 4), ""))
    table = TextTable("Gaps between data sets", ("between", "gap", "samples"), lines, (note,))
    return AnalysisResult({**asked, "gaps": gaps, "counts": counts, "sums": sums, "total": total}, [table])


def _shared_modalities(encoders: Encoders, anchor: Split, other: Split) -> list[str]:
    shared = [name for name in encoders.modalities(anchor) if name in other.columns]
    if not shared:
        raise ConfigError(
            f"'{anchor.source}' ({', '.join(anchor.columns)}) and '{other.source}' ({', '.join(other.columns)}) have "
            f"no modality in common that there is an encoder for ({', '.join(encoders.views)}); name other sources"
        )
    return shared
