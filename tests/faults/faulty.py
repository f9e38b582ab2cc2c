"""Methods whose clients are struck by something, in a module that polyfed knows nothing of."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from polyfed.algorithms.algorithm import Reply, client_step
from polyfed.algorithms.creamfl import CreamFL
from polyfed.federation.client import Client
from polyfed.wire.payload import Representations, TensorBundle, Weights


class Struck(CreamFL):
    """In round 2, one client fails as in ``how``, ``times`` times; a file counts for all processes."""

    counter: str
    how: str = "kill"
    client: str = "image"
    times: int = 1

    @client_step(representations=Representations, num_examples=int)
    def fit(self, client: Client, representations: Representations) -> Reply:
        """CreamFL's, half or whole."""
        if client.name == self.client and client.clock.round == 2 and self._counted():
            if self.how == "kill":
                client.fit(client.train, epochs=1)
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "raise":
                raise ValueError("no GPU left")
            if self.how == "sleep":
                time.sleep(90)
            return _falsified(self.how, super().fit(client, representations))
        return super().fit(client, representations)

    def _counted(self) -> bool:
        path = Path(self.counter)
        done = path.stat().st_size if path.exists() else 0
        with path.open("ab") as stream:
            stream.write(b".")
        return done < self.times


FALSE_REPLY = ""
"""Fault in replies of a ``Liar``'s client ``image`` in this process; empty: none."""


class Liar(CreamFL):
    """One client's replies have the fault ``FALSE_REPLY``."""

    @client_step(representations=Representations, num_examples=int)
    def fit(self, client: Client, representations: Representations) -> Reply:
        """CreamFL's, falsified."""
        reply = super().fit(client, representations)
        return _falsified(FALSE_REPLY, reply) if FALSE_REPLY and client.name == "image" else reply


def _falsified(how: str, reply: Reply) -> Reply:
    own: Representations = reply.representations
    fields: dict[str, Any] = {"representations": own, "num_examples": reply.num_examples}
    changes: dict[str, Any] = {
        "order": {"representations": Representations(dict(own), order="another")},
        "rows": {"representations": _each(own, lambda value: value[:-1])},
        "width": {"representations": _each(own, lambda value: value[:, :4].clone())},
        "type": {"representations": _each(own, lambda value: value.to(torch.int64))},
        "modality": {"representations": Representations({**own, "sound": own["image"]}, order=own.order)},
        "no modality": {"representations": Representations({}, order=own.order)},
        "nan": {"representations": _each(own, lambda value: value * float("nan"))},
        "infinite": {"representations": _each(own, lambda value: value / 0)},
        "huge": {"representations": _each(own, lambda value: value * 1e6)},
        "weights": {"representations": Weights(dict(own))},
        "scalar": {"representations": 1.0},
        "bare": {"representations": TensorBundle(dict(own))},
        "undeclared": {"secret": own},
        "missing": {"num_examples": None},
        "text": {"num_examples": "ten"},
        "fraction": {"num_examples": 0.5},
    }
    return Reply(**{name: value for name, value in (fields | changes[how]).items() if value is not None})


def _each(own: Representations, change: Any) -> Representations:
    return Representations({name: change(value) for name, value in own.items()}, order=own.order)


FALSE = {
    "order": "representations of another public set or order (another, expected",
    "rows": "are torch.float32 [15, 8], expected [16, 8]",
    "width": "are torch.float32 [16, 4], expected [16, 8]",
    "type": "are torch.int64 [16, 8], expected [16, 8]",
    "modality": "representations of ['image', 'sound'], expected ['image']",
    "no modality": "representations of [], expected ['image']",
    "nan": "tensor 'image' has NaN or infinite values",
    "infinite": "tensor 'image' has NaN or infinite values",
    "huge": "tensor 'image' has norm 1e+06, the limit is 10000",
    "weights": "reply field 'representations' is weights, declared is representations",
    "scalar": "reply field 'representations' is float, declared is representations",
    "bare": "reply field 'representations' is tensors, declared is representations",
    "undeclared": "reply has an undeclared field 'secret' (representations)",
    "missing": "reply lacks 'num_examples' (int)",
    "text": "reply field 'num_examples' is str, declared is int",
    "fraction": "reply field 'num_examples' is float, declared is int",
}
"""Fault in a reply -> part of the reason of its client's exclusion."""
