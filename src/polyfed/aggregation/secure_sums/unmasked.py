"""Sums of the same whole numbers in the clear."""

from __future__ import annotations

from typing import ClassVar

from polyfed.aggregation.secure_sum import SecureSum


class Unmasked(SecureSum):
    """The same whole numbers without masks or keys: the server sees every reply. To compare with, bit for bit."""

    masks: ClassVar[bool] = False
