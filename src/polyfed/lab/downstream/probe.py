"""The base of all downstream probes, and what several of them share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor

from polyfed.core.extras import brought_by
from polyfed.core.settings import Settings
from polyfed.lab.downstream.bench import Bench
from polyfed.lab.downstream.results import Outcome
from polyfed.tasks.metrics import balanced_accuracy, label_ranks, predictions, top

Share = Annotated[float, Field(gt=0, le=1)]
"""Of the samples of a split."""


class Probe(Settings):
    """A way to test a frozen encoder. Subclasses live in ``polyfed.lab.downstream.probes``."""

    home: ClassVar[str] = "polyfed.lab.downstream.probes"

    @abstractmethod
    def unsuitable(self, bench: Bench) -> str | None:
        """Why the bench's model cannot be tested so (a modality, clients are missing); None if it can."""

    @abstractmethod
    def check(self, bench: Bench, task: str) -> None:
        """Find what is wrong with data and settings before any work starts.

        Raises:
            ConfigError, DataError: naming what is wrong.
        """

    @abstractmethod
    def run(self, bench: Bench, task: str) -> Outcome:
        """Test; every random draw derives from the bench's seed and the task's name."""


def require_apart(train: str, validation: str | float | None, test: Sequence[str], hint: str) -> None:
    """Check that no split serves two ends.

    Args:
        train: split that is trained on.
        validation: split that settings go by; a share of ``train``, or None, is no split.
        test: splits that metrics are of.
        hint: what to do instead.

    Raises:
        ValueError: a split is named twice.
    """
    named = [train, *test, *([validation] if isinstance(validation, str) else [])]
    if len(set(named)) < len(named):
        raise ValueError(f"train '{train}', validation '{validation}' and test {list(test)} overlap; {hint}")


def class_metrics(scores: Float[Tensor, "n c"], labels: Int64[Tensor, " n"]) -> dict[str, float]:
    """Accuracy, balanced accuracy and AUROC in percent; ties count against the model, in AUROC as a half."""
    ranks = label_ranks(scores, labels)  # ranked once for all that depends on ranks
    return {
        "accuracy": float(top(ranks, 1)),
        "balanced_accuracy": float(balanced_accuracy(predictions(scores, labels, ranks), labels, scores.shape[1])),
        "auroc": macro_auroc(scores, labels),
    }


def macro_auroc(scores: Float[Tensor, "n c"], labels: Int64[Tensor, " n"]) -> float:
    """For two classes the AUROC by the difference of the scores; for more, the mean over classes against the rest.

    Classes that do not occur are left out of the mean; NaN if there is one alone.
    """
    with brought_by("lab"):
        from sklearn.metrics import roc_auc_score

    classes = labels.unique().tolist()  # type: ignore[no-untyped-call]
    if len(classes) < 2:
        return math.nan
    if scores.shape[1] == 2:
        return 100 * float(roc_auc_score(labels, scores[:, 1] - scores[:, 0]))
    return 100 * fmean(float(roc_auc_score(labels == label, scores[:, label])) for label in classes)


def absent_note(labels: Int64[Tensor, " n"], names: Sequence[str]) -> list[str]:
    counts = torch.bincount(labels, minlength=len(names)).tolist()
    absent = [name for name, number in zip(names, counts, strict=True) if not number]
    return [f"Not in the test data, so left out of AUROC: {', '.join(absent)}."] if absent else []
