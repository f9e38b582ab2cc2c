"""Verdicts on claims: paired tests over seeds, adjusted for all claims of a family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from polyfed.lab.studies.claims import Claim
from polyfed.reporting.statistics import FEWEST_SEEDS, Sample, holm

Verdict = Literal["held", "contradicted", "open", "not run"]

_LEVEL = 0.05


@dataclass(frozen=True)
class Judgement:
    """A claim with what the seeds say of it.

    Attributes:
        claim: at one point, or over all.
        sample: left against right by seed; None where no seed has both.
        p: of the two-sided paired test, adjusted for all claims of the family (Holm); NaN where a seed is missing.
        verdict: held or contradicted where p is below the level.
    """

    claim: Claim
    sample: Sample | None
    p: float
    verdict: Verdict


def judge(claims: Sequence[Claim], samples: Sequence[Sample | None], seeds: Sequence[int]) -> list[Judgement]:
    """Judge claims as one family, each by its left against right over the study's seeds.

    Nothing is decided on fewer than five ``seeds``, or where one of them is missing: nobody stops where it suits.
    P-values are adjusted over all claims (Holm 1979), also those that were not run, so that running a part changes no
    verdict.
    """
    shown = [None if sample is None else claim.towards(sample) for claim, sample in zip(claims, samples, strict=True)]
    adjusted = holm([sample.p if sample and _is_complete(sample, seeds) else math.nan for sample in shown])
    return [
        Judgement(claim, sample, p, _verdict(towards, p))
        for claim, sample, towards, p in zip(claims, samples, shown, adjusted, strict=True)
    ]


def _is_complete(sample: Sample, seeds: Sequence[int]) -> bool:
    return len(seeds) >= FEWEST_SEEDS and {*seeds} == {*sample.seeds}


def _verdict(towards: Sample | None, p: float) -> Verdict:
    if towards is None:
        return "not run"
    if not p < _LEVEL:
        return "open"
    return "held" if towards.is_above else "contradicted"
