"""Small federations of FedAFD, and what their participants send each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from polyfed.federation.public_outputs import PublicOutputs
from polyfed.runs.session import Session
from polyfed.wire.payload import Payload, Weights
from sessions import crossing, of_samples, prepared, request, site_of
from small_federations import Config, sgd, three_kinds

Values = dict[str, Tensor]
CLIENTS = ("image", "text", "paired")
RELEASED: Config = {
    "baa_update": "alternate",
    "adversarial": "non_saturating",
    "share_discriminators": True,
    "double_sigmoid": True,
    "reset_fusion": True,
    "shared_global_branch": True,
    "send_encoders": "all",
    "renormalise": False,
    "kd_loss": "mse",
    "cache_global_features": False,
}
"""What the released code does otherwise than the paper."""
SLOW, FAST, SEVERAL = 0.02, 0.3, 0.1  # rates of discriminators and of fusion, there of several modalities


def session_of(folder: Path, **algorithm: Any) -> Session:
    """One client of each kind, with SGD everywhere."""
    plain = {
        "public_batch_size": 12,
        "discriminator": sgd(SLOW),
        "fusion_training": sgd(FAST),
        "fusion_training_several": sgd(SEVERAL),
    }
    if algorithm.get("beta") == 0:  # there are no public batches
        plain = {key: value for key, value in plain.items() if key not in ("public_batch_size", "discriminator")}
    config = three_kinds(name="fedafd", **(plain | algorithm))
    config["clients"]["paired"]["count"] = 1
    return prepared(config, folder)


def known_of(session: Session) -> PublicOutputs:
    return session.experiment.algorithm.server_outputs(session.server)


def encoders_of(session: Session, *modalities: str) -> Values:
    """The server's encoders as they are now."""
    wanted = tuple(f"encoders.{name}." for name in modalities or session.server.model.modalities)
    return {name: x.clone() for name, x in session.server.model.state_dict().items() if name.startswith(wanted)}


def asked(
    session: Session, client: str, known: PublicOutputs, encoders: Values | None = None, number: int = 1
) -> Payload:
    """What a client answers that is asked to train."""
    """Its representations are those of all exchanged samples."""
    fields = {"representations": crossing(session, known), "encoders": Weights(encoders or {}), "version": 1}
    after = session.cohorts.accepted.get(client)
    reply = site_of(session).handle(request(client, Payload(fields), (number, 0), after))
    said = of_samples(session, reply.fields["representations"])
    return Payload(reply.fields | {"representations": said})
