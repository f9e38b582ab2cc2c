"""Norm clipping."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from polyfed.aggregation.robust_rule import RobustRule


class Clip(RobustRule):
    """Each update scaled down to a multiple of the median norm of its type's last one, as it comes.

    Of weights, the change of each tensor from what the client was sent (Sun et al. 2019, "Can You Really Backdoor
    Federated Learning?"; Karimireddy et al., ICML 2021, whose centre is a momentum); of rows, each row. The median is
    that of the last round in which enough of the type replied; the first such round is buffered and has its own. It
    bounds what one client does and does not find out who it is: f clients still move a mean by f/n of the bound, every
    round.
    """

    times: float = Field(default=1.0, gt=0, description="longest update, in medians")
    samples: Literal["claimed", "capped", "equal"] = Field(
        default="capped",
        description="what a client counts for in means by sample count: what it claims (within run.bounds.weight), at "
        "most the median of its type, or all of a type alike (the type's mean)",
    )
