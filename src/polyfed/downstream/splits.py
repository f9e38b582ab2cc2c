"""What probes that train on shares of a split require of the splits that they name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

Share = Annotated[float, Field(gt=0, le=1)]
"""Of the samples of a split."""


def require_apart(train: str, validation: str | float | None, test: Sequence[str], hint: str) -> None:
    """Check that no split serves two ends.

    Args:
        train: split that is trained on.
        validation: split for early stopping; a share of ``train``, or None, is no split.
        test: splits that metrics are of.
        hint: what to do instead.

    Raises:
        ValueError: a split is named twice.
    """
    named = [train, *test, *([validation] if isinstance(validation, str) else [])]
    if len(set(named)) < len(named):
        raise ValueError(f"train '{train}', validation '{validation}' and test {list(test)} overlap; {hint}")
