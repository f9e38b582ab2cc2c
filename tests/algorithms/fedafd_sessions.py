"""Small federations of FedAFD, and what their participants send each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from polyfed.runs.session import Session
from polyfed.wire.payload import Payload, Representations, Weights
from sessions import crossing, of_samples, prepared, request, site_of
from small_federations import sgd, three_kinds

Values = dict[str, Tensor]
CLIENTS = ("image", "text", "paired")
SLOW, FAST, SEVERAL = 0.02, 0.3, 0.1  # rates of discriminators and of fusion, there of several modalities


def session_of(folder: Path, **algorithm: Any) -> Session:
    """One client of each kind, with SGD everywhere."""
    plain = {
        "adversarial": {"batch_size": 12, "training": sgd(SLOW)},
        "fusion": {"training": sgd(FAST), "training_several": sgd(SEVERAL)},
    }
    sections = {key: part | algorithm.get(key, {}) for key, part in plain.items() if algorithm.get(key, {}) is not None}
    config = three_kinds(name="fedafd", **(algorithm | sections))
    config["clients"]["paired"]["count"] = 1
    return prepared(config, folder)


def known_of(session: Session) -> Representations:
    return session.experiment.algorithm.public.server_outputs(session.server)


def encoders_of(session: Session, *modalities: str) -> Values:
    """The server's encoders as they are now."""
    wanted = tuple(f"encoders.{name}." for name in modalities or session.server.model.modalities)
    return {name: x.clone() for name, x in session.server.model.state_dict().items() if name.startswith(wanted)}


def asked(
    session: Session, client: str, known: Representations, encoders: Values | None = None, number: int = 1
) -> Payload:
    """A client's reply to ``fit``, with its representations of all exchanged samples."""
    fields = {"representations": crossing(session, known), "encoders": Weights(encoders or {}), "version": 1}
    after = session.cohorts.accepted.get(client)
    reply = site_of(session).handle(request(client, Payload(fields), (number, 0), after))
    return Payload(reply.fields | {"representations": of_samples(session, reply.fields["representations"])})
