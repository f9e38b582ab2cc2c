"""Costs of FedAFD, FedAID and FedDRA at the sizes of their papers: bytes and parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aligned_sessions import config_of, parts_of

from polyfed.algorithms.algorithm import Reply
from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.algorithms.shared.teacher import Ensembles
from polyfed.data.view import DataContext, InputSpec
from polyfed.federation.filters import each
from polyfed.federation.types import Blueprint
from polyfed.losses.adversarial import Discriminator
from polyfed.models.aligner import AlignerSettings
from polyfed.models.binding import Parts
from polyfed.models.encoders.from_config import Bert, ViT
from polyfed.models.encoders.resnet import ResNet
from polyfed.models.fusion import GranularityFusion
from polyfed.models.model import Model
from polyfed.models.slots import model_slots
from polyfed.runs.session import Session
from polyfed.wire.ledger import Ledger
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, Representations, Weights
from polyfed.wire.transport import Transport
from sessions import prepared
from small_federations import Config, three_kinds


def large() -> Model:
    """The paper's server model, without memory."""
    spec, words = InputSpec((3, 224, 224)), InputSpec((64,), vocabulary=tuple(f"w{k}" for k in range(30_522)), pad=0)
    context = DataContext(Path("unused"))
    with torch.device("meta"):
        image = ResNet(size="101", pie=True).build(256, spec, context)
        text = Bert(size="base", pooling="pooler").build(256, words, context)
    return Model({"image": image, "text": text}, {}, 256)


ROWS, IMAGE, TEXT = 10_000 * 256 * 4, 45_647_936, 109_679_104  # bytes of a modality; parameters


@pytest.mark.parametrize(("dtype", "size", "mib"), [("float32", 4, 592.52), ("float16", 2, 296.26)])
def test_costs_of_fedafd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, size: int, mib: float) -> None:
    """Ten rounds with K = 10 at the paper's size; no client trains."""
    config = three_kinds(name="fedafd", fusion={"broadcast_every": 10}, task=None, distiller=None)
    config["clients"]["paired"]["count"] = 1
    config["run"]["exchange"] = {"transport": {"weights": dtype}}
    session = prepared(config, tmp_path)
    server, ledger = session.server, Ledger()
    model = large()
    server.load_model = lambda weights: model
    server.load_weights({})
    known = Representations({name: torch.zeros(10_000, 256) for name in ("image", "text")}, order="whole")
    modalities = {info.id: info.modalities for info in server.clients}

    def exchange(requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        for one in requests:
            own = {name: known[name] for name in modalities[one.client]}
            fields = {"representations": Representations(own, order="whole"), "num_examples": 1}
            yield Answer(one.client, Payload(fields))

    monkeypatch.setattr(session.engine, "exchange", exchange)
    monkeypatch.setattr(Ensembles, "add", lambda *arguments: None)
    # every pair of the paper's public set has an image of its own
    monkeypatch.setattr(PublicExchange, "inverse_index", lambda self, participant: {})
    monkeypatch.setattr(PublicExchange, "server_outputs", lambda self, server: known)
    for number in range(1, 11):
        server.begin(number)
        session.experiment.algorithm.round(server, session.cohort(number, ledger))
    counts = {name: sum(x.numel() for x in encoder.parameters()) for name, encoder in model.encoders.items()}
    assert counts == {"image": IMAGE, "text": TEXT}
    assert (IMAGE + TEXT) * size / 2**20 == pytest.approx(mib, abs=0.01)

    actual: dict[tuple[str, str, str], int] = defaultdict(int)
    for line in ledger.records:
        actual[line["client"], line["direction"], line["kind"]] += line["bytes"]
    for client, own in modalities.items():
        tensors = [x for name in own for x in model.encoders[name].state_dict().values()]
        held = sum(x.numel() * (size if x.is_floating_point() else x.element_size()) for x in tensors)
        trained = sum(counts[name] for name in own) * size
        assert trained <= held < 1.01 * trained  # the rest is batch statistics
        assert actual[client, "down", "weights"] == held
        assert actual[client, "down", "representations"] == 10 * 2 * ROWS
        assert actual[client, "up", "representations"] == 10 * len(own) * ROWS
    received = sum(actual["paired", "down", form] for form in ("weights", "representations"))
    if dtype == "float16":
        assert received / 10 / 2**20 == pytest.approx(49.26, abs=0.1)  # Table 2 of the supplement


def test_discriminators_and_branches_have_the_papers_size() -> None:
    fusion = GranularityFusion(256)
    assert sum(x.numel() for x in Discriminator(256).parameters()) == 41_217
    assert sum(x.numel() for x in fusion.pooled[0].parameters()) == 33_728
    assert sum(x.numel() for x in fusion.parameters()) == 134_912
    assert sum(x.numel() for x in GranularityFusion(256, shared_global_branch=True).parameters()) == 101_184


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


def test_costs_of_fedaid(tmp_path: Path) -> None:
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
