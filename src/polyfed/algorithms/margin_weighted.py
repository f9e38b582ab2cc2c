"""Margin-weighted distillation."""

from __future__ import annotations

from polyfed.aggregation.weightings.by_evidence import Margin
from polyfed.algorithms.fedmd import FedMD
from polyfed.algorithms.shared.teacher import Teacher


class MarginWeighted(FedMD):
    """FedMD whose consensus counts a client by how clearly it prefers its answer on a sample.

    A stand-in, not a reconstruction: FedAFD (CVPR 2026) compares with a method called FedDFA, of which no more is known
    here than that its weights look at decision boundaries.
    """

    teacher: Teacher = Teacher(weights=Margin())
