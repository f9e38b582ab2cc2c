"""FedAID and FedDRA: the ledger's bytes of the paper's models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aligned_sessions import config_of, parts_of

from polyfed.algorithms.algorithm import Reply
from polyfed.data.view import DataContext, InputSpec
from polyfed.federation.filters import each
from polyfed.federation.types import Blueprint
from polyfed.models.aligner import AlignerSettings
from polyfed.models.binding import Parts
from polyfed.models.encoders.from_config import Bert, ViT
from polyfed.models.model import Model
from polyfed.models.slots import model_slots
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from polyfed.wire.payload import Payload, Weights
from polyfed.wire.transport import Transport
from sessions import prepared
from small_federations import Config


def crossed(ledger: Ledger) -> dict[tuple[int, str, str], set[int]]:
    """(round, step, direction) -> bytes of tensors, of each client."""
    totals: dict[tuple[int, str, str, str], int] = {}
    for line in ledger.records:
        key = (line["round"], line["step"], line["direction"], line["client"])
        totals[key] = totals.get(key, 0) + (line["bytes"] if line["kind"] == "weights" else 0)
    actual: dict[tuple[int, str, str], set[int]] = {}
    for (number, step, direction, _), size in totals.items():
        actual.setdefault((number, step, direction), set()).add(size)
    return actual


@dataclass
class OnPaper:
    """A cohort of one client that answers with the shapes of what it was asked for; heads are left out."""

    session: Session
    parts: Parts
    ledger: Ledger
    number: int
    channel: Any = field(default_factory=lambda: SimpleNamespace(transport=Transport()))

    @property
    def clients(self) -> tuple[Any, ...]:
        return self.session.server.clients[:1]

    def ask(self, step: Callable[..., Reply], like: Any = None, **sent: Any) -> Iterator[Reply]:
        (client,) = self.clients
        content = {name: value.of(client) if isinstance(value, each) else value for name, value in sent.items()}
        self.enter("down", step.__name__, content)
        full = self.session.server.weights["hospital"]
        aligner = {name: full[name] for name in self.parts.aligner}
        reply = {
            "guide": {"weights": Weights(full), "num_examples": 30},
            "judge": {"loss": 1.0},
            "teach": {"weights": Weights(aligner)},
            "align": {"weights": Weights(aligner)},
            "bind": {"weights": Weights(full), "num_examples": 30, "loss": 1.0},
        }[step.__name__]
        self.enter("up", step.__name__, reply)
        yield Reply.received(Payload(reply), client)

    def enter(self, direction: Any, step: str, content: Config) -> None:
        bare = {
            name: Weights({key: x for key, x in value.items() if ".aligner.head." not in key})
            if isinstance(value, Weights)
            else value
            for name, value in content.items()
        }
        self.ledger.enter(self.number, "hospital-0", direction, step, Payload(bare))


def on_paper(folder: Path, **algorithm: Any) -> dict[tuple[int, str, str], float]:
    """MiB by (round, step, direction) of two rounds with ViT-B, BERT-base and their align modules."""
    config = config_of(**algorithm)
    del config["server"]
    session = prepared(config, folder)
    words, settings = InputSpec((112,), tuple(f"w{k}" for k in range(28_996)), pad=0), AlignerSettings()
    context = DataContext(Path("unused"))
    with torch.device("meta"):
        image = settings.around(ViT(size="base").build(128, InputSpec((3, 224, 224)), context), "image", 128)
        text = settings.around(Bert(size="base").build(128, words, context), "text", 128)
    model = Model({"image": image, "text": text}, {}, 128)
    server, ledger = session.server, Ledger()
    (form,) = server.types.values()
    server.global_models.blueprints = {form.architecture: Blueprint(model.state_dict(), model_slots(model))}
    server.global_models.weights = {"hospital": dict(model.state_dict())}
    for number in (1, 2):
        server.begin(number)
        paper: Any = OnPaper(session, parts_of(session), ledger, number)
        session.experiment.algorithm.round(server, paper)
    return {key: size / 2**20 for key, sizes in crossed(ledger).items() for size in sizes}


IN_ANY = {
    ("guide", "up"): 792.3,
    ("judge", "down"): 792.3,
    ("judge", "up"): 0.0,
    ("teach", "down"): 0.0,
    ("teach", "up"): 54.1,
}


def test_costs_are_the_papers(tmp_path: Path) -> None:
    """ViT-B, BERT-base and their align modules; no client trains."""
    actual = on_paper(tmp_path)
    expected = {(number, *key): size for number in (1, 2) for key, size in IN_ANY.items()}
    expected |= {(1, "guide", "down"): 792.3, (2, "guide", "down"): 54.1}
    assert actual == pytest.approx(expected, abs=0.05)
    totals = {way: sum(x for key, x in actual.items() if key[0] == 2 and key[2] == way) for way in ("down", "up")}
    assert totals == pytest.approx({"down": 846.4, "up": 846.4}, abs=0.05)


def test_costs_of_feddra(tmp_path: Path) -> None:
    actual = on_paper(tmp_path, name="feddra")
    one = {("align", "down"): 792.3, ("align", "up"): 54.1, ("bind", "down"): 54.1, ("bind", "up"): 792.3}
    assert actual == pytest.approx({(number, *key): size for number in (1, 2) for key, size in one.items()}, abs=0.05)
