"""Costs of FedAFD at the size of its paper: bytes and parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from polyfed.algorithms.shared.public_exchange import PublicExchange
from polyfed.algorithms.shared.teacher import Ensembles
from polyfed.data.view import DataContext, InputSpec
from polyfed.losses.adversarial import Discriminator
from polyfed.models.encoders.from_config import Bert
from polyfed.models.encoders.resnet import ResNet
from polyfed.models.fusion import GranularityFusion
from polyfed.models.model import Model
from polyfed.wire.ledger import Ledger
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, Representations
from sessions import prepared
from small_federations import three_kinds


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
def test_costs_are_the_papers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, size: int, mib: float
) -> None:
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
    three = GranularityFusion(256, shared_global_branch=True)
    assert sum(x.numel() for x in three.parameters()) == 101_184
