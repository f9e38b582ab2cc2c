"""Metrics of class scores, as all classifying probes report them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from polyfed.tasks.accuracy import balanced_accuracy, label_ranks, predictions, top
from polyfed.tasks.auroc import macro_auroc


def class_metrics(scores: Float[Tensor, "n c"], labels: Int64[Tensor, " n"]) -> dict[str, float]:
    """Accuracy, balanced accuracy and AUROC in percent; ties count against the model, in AUROC as a half."""
    found = label_ranks(scores, labels)
    return {
        "accuracy": float(top(found, 1)),
        "balanced_accuracy": float(balanced_accuracy(predictions(scores, labels, found), labels, scores.shape[1])),
        "auroc": macro_auroc(scores, labels),
    }


def absent_note(labels: Int64[Tensor, " n"], names: Sequence[str]) -> list[str]:
    """What there is to say of classes without test samples."""
    there = torch.bincount(labels, minlength=len(names))
    absent = [name for name, number in zip(names, there.tolist(), strict=True) if not number]
    return [f"Not in the test data, so left out of AUROC: {', '.join(absent)}."] if absent else []
