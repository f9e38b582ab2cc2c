"""What the server of a small prototype federation knows of a class space."""

from __future__ import annotations

from polyfed.aggregation.prototypes import GlobalPrototypes, by_space
from polyfed.runs.session import Session
from prototype_federations import SPACE

NAMES = ("image", "text-0", "text-1")


def known_of(session: Session, space: str = SPACE) -> GlobalPrototypes:
    return by_space(session.server.state["prototypes"], GlobalPrototypes)[space]


def global_of(session: Session, space: str = SPACE) -> dict[int, list[float]]:
    known = known_of(session, space)
    return dict(zip(known.present.nonzero().flatten().tolist(), known.means.tolist(), strict=True))
