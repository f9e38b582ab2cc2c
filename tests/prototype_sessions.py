"""Sessions of methods that exchange prototypes, and what their server knows of a class space."""

from __future__ import annotations

from pathlib import Path

from polyfed.aggregation.prototypes import GlobalPrototypes, by_space
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from sessions import prepared
from small_federations import Config

SPACE = "label:18x7bd651f0"  # the target, how many classes, and a digest of their names
NAMES = ("image", "text-0", "text-1")


def began(config: Config, folder: Path, rounds: int = 1) -> Session:
    """A session after so many rounds."""
    session = prepared(config, folder)
    for number in range(1, rounds + 1):
        play(session, number)
    return session


def play(session: Session, number: int, ledger: Ledger | None = None) -> None:
    """One round."""
    session.server.begin(number)
    session.experiment.algorithm.round(session.server, session.cohort(number, ledger or Ledger()))


def known_of(session: Session, space: str = SPACE) -> GlobalPrototypes:
    return by_space(session.server.state["prototypes"], GlobalPrototypes)[space]


def global_of(session: Session, space: str = SPACE) -> dict[int, list[float]]:
    known = known_of(session, space)
    return dict(zip(known.present.nonzero().flatten().tolist(), known.means.tolist(), strict=True))
