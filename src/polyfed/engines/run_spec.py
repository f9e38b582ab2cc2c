"""What a place must know of a run to host clients in it."""

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
"""What is known when a run begins; the rest is planned."""


class RunSpec(Settings):
    """What a place must know of a run to host clients in it; the same for all clients and rounds."""

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="identifies the run")
    seed: int
    rounds: int
    algorithm: SerializeAsAny[Algorithm]
    salt: str = Field(default="", description="key of the digests of class names in names of heads; empty: none")
    precision: Precision = "float32"
    transport: Transport = Field(default_factory=Transport)
    server_model: ModelSettings | None = Field(
        default=None, description="architecture of the server's model, for methods that send its encoders to clients"
    )
    public_order: str = Field(default="", description="digest of the public set and its order; empty: there is none")
    keep_models: bool = Field(default=False, description="keep clients' models after each step, whatever the method")
    attackers: tuple[SerializeAsAny[Attack], ...] = Field(
        default=(), description="attacks of simulated clients; sites of a deployment refuse them"
    )
    privacy: PrivacySettings | None = Field(default=None, description="differential privacy of replies, with its noise")
    secure: SerializeAsAny[SecureSum] | None = Field(
        default=None, description="how clients add up their replies, which then leave them in no other form"
    )
    late_replies: bool = Field(default=False, description="whether replies may count in later rounds than their own")
    evaluates: bool = Field(default=True, description="whether clients are asked for test metrics")
    polyfed: str = Field(default=__version__, description="version of polyfed that the server runs")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all of it, in hexadecimal digits: places that were told of other settings have another."""
        return sha256(self.model_dump_json().encode()).hexdigest()

    @property
    def terms(self) -> str:
        """SHA-256 of what decides replies, in hexadecimal digits: without what a run is called, and how long it is."""
        return sha256(self.model_dump_json(exclude={*OF_A_RUN, "rounds"}).encode()).hexdigest()

    @property
    def policy(self) -> Policy:
        """What protects the replies, as far as a place knows."""
        return Policy(self.algorithm, self.rounds, self.privacy, self.secure)
