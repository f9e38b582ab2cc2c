"""Spec of a run for the sites that host its clients."""

from __future__ import annotations

from hashlib import sha256

from pydantic import Field, SerializeAsAny

from polyfed.algorithms.algorithm import Algorithm
from polyfed.core.settings import Settings
from polyfed.core.version import __version__
from polyfed.federation.attack import Attack
from polyfed.federation.participant import Precision
from polyfed.models.model import ModelSettings
from polyfed.privacy.policy import Policy
from polyfed.privacy.secure_sum import SecureSum
from polyfed.privacy.settings import PrivacySettings
from polyfed.wire.transport import Transport

OF_A_RUN = ("run", "public_order", "polyfed")
"""Fields that are set when a run begins; all others are planned."""


class RunSpec(Settings):
    """Settings of a run that a site needs to host clients; the same for all clients and rounds."""

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="identifier of the run")
    seed: int
    rounds: int
    algorithm: SerializeAsAny[Algorithm]
    salt: str = Field(default="", description="key of the digests of class names in names of heads; empty: none")
    precision: Precision = "float32"
    transport: Transport = Field(default_factory=Transport)
    server_model: ModelSettings | None = Field(
        default=None, description="architecture of the server's model, for methods that send its encoders to clients"
    )
    public_order: str = Field(default="", description="digest of the public set and its order; empty: no public set")
    keep_models: bool = Field(default=False, description="keep clients' models after each step, whatever the method")
    attackers: tuple[SerializeAsAny[Attack], ...] = Field(
        default=(), description="attacks of simulated clients; sites of a deployment refuse them"
    )
    privacy: PrivacySettings | None = Field(default=None, description="differential privacy of replies, with its noise")
    secure: SerializeAsAny[SecureSum] | None = Field(
        default=None, description="secure sum of the clients' replies, which then leave in no other form"
    )
    late_replies: bool = Field(default=False, description="whether replies may count in later rounds than their own")
    evaluates: bool = Field(default=True, description="whether clients are asked for test metrics")
    polyfed: str = Field(default=__version__, description="version of polyfed that the server runs")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all fields, in hexadecimal digits; it differs for sites that received other settings."""
        return sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def terms(self) -> str:
        """SHA-256 of the fields that decide replies, in hexadecimal digits: all but the run's name and length."""
        return sha256(self.model_dump_json(exclude={*OF_A_RUN, "rounds"}).encode()).hexdigest()

    @property
    def policy(self) -> Policy:
        """Protection of the replies, as far as a site can enforce it."""
        return Policy(self.algorithm, self.rounds, self.privacy, self.secure)
