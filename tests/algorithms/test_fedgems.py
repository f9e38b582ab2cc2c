"""FedGEMS: the server's targets, its losses and those of clients by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from by_hand import divergence, unit
from polyfed.aggregation.ensemble import Ensembled
from polyfed.algorithms.fedgems import SelectedTarget
from polyfed.runs.session import Session
from polyfed.wire.payload import Payload, Representations
from sessions import crossing, first_cohort, of_samples, prepared, request, round_records, site_of, woken
from small_federations import Config


def session_of(tiny: Config, folder: Path, **algorithm: Any) -> tuple[Session, Any]:
    method = {"name": "fedgems", "local_epochs": 1, "study": {"batch_size": 16}}
    session = prepared(tiny | {"algorithm": method | algorithm}, folder)
    return session, session.experiment.algorithm


def asked(session: Session, client: str, known: Representations) -> Representations:
    """A client's representations of all exchanged samples, given the server's."""
    (info,) = (info for info in session.server.clients if info.id == client)
    own = session.experiment.algorithm.public.for_clients(crossing(session, known)).of(info)
    reply = site_of(session).handle(request(client, Payload({"knowledge": own})))
    return of_samples(session, reply.fields["knowledge"])


# ---- the ensemble


def certain(logits: list[float], truth: int) -> float | None:
    """1 / H of a client that is right, else None."""
    if max(range(len(logits)), key=logits.__getitem__) != truth:
        return None
    p = torch.tensor(logits, dtype=torch.float64).softmax(0)
    return 1 / float(-(p * p.log()).sum())


def test_the_ensemble_counts_the_right_by_their_certainty(tiny: Config, tmp_path: Path) -> None:
    tiny["public"]["per_item"] = 1  # else captions of an image have the same anchor: which one wins is rounding
    session, method = session_of(tiny, tmp_path / "a", local_epochs=3)
    other, _ = session_of(tiny, tmp_path / "b", local_epochs=3)
    server, ensembles = session.server, {}

    def noted(server: Any, known: Representations, targets: dict[str, Ensembled]) -> dict[str, SelectedTarget]:
        ensembles.update(targets)
        return {}

    known = method.public.server_outputs(server)
    object.__setattr__(method, "selected", noted)
    object.__setattr__(method, "distil", lambda *_: None)
    method.round(server, first_cohort(session))
    sent = [asked(other, info.id, known)["image"].double() for info in other.server.clients]
    counted = 0
    for k in range(len(sent[0])):
        inverse = {c: certain((one[k] @ known["image"].double().T).tolist(), k) for c, one in enumerate(sent)}
        right = {c: value for c, value in inverse.items() if value is not None}
        assert bool(ensembles["image"].valid[k]) == bool(right)
        if right:
            shares = torch.tensor(list(right.values()), dtype=torch.float64).softmax(0)
            mean = sum(share * sent[c][k] for share, c in zip(shares, right, strict=True))
            assert torch.allclose(ensembles["image"].values[k].double(), mean, atol=1e-4)
            counted += 1
    assert counted > 0


# ---- the four cases


def test_the_server_is_right_where_the_own_sample_or_a_sibling_is_nearest(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path)
    server = session.server
    images = unit(80, 8, seed=1)[server.public_set.distinct("image")[1]]
    known = Representations({"image": images, "text": unit(80, 8, seed=2)}, order="x")
    known["text"][:20] = images[:20]  # the server knows these
    actual, items = method.right(server, known), server.public_set.items.tolist()
    for name, other in (("image", "text"), ("text", "image")):
        nearest = (known[name].double() @ known[other].double().T).argmax(1).tolist()
        assert actual[name].tolist() == [items[j] == items[k] for k, j in enumerate(nearest)]
        assert actual[name][:20].all()
        assert not actual[name].all()


def test_the_four_cases_and_the_store(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path, public={"samples": 4})
    server = session.server
    place = server.exchanged_index(4)
    ensemble = Ensembled(-torch.ones(4, 2), torch.tensor([True, True, True, False]))

    def selected(start: float, right: list[bool], **ensembles: Ensembled) -> SelectedTarget:
        object.__setattr__(method, "right", lambda server, known: {"image": torch.tensor(right)})
        own = Representations({"image": start + torch.arange(8.0).view(4, 2)}, order="x")
        return method.selected(server, own, ensembles)["image"]

    target = selected(0, [True, False, True, False], image=ensemble)
    assert target.taught.tolist() == [False, True, False, False]  # right, ensemble, right, alone
    assert target.teacher[1].tolist() == [-1, -1]
    noted = round_records(session)[-1]["metrics"]
    assert noted == {"right.image": 0.5, "stored.image": 0.0, "ensemble.image": 0.25, "alone.image": 0.25}
    store = server.state["store"]
    assert store["known.image"].nonzero().flatten().tolist() == [int(place[0]), int(place[2])]
    assert store["values.image"][place[2]].tolist() == [4, 5]

    target = selected(10, [False, False, True, False], image=ensemble)
    assert target.taught.tolist() == [True, True, False, False]  # stored, ensemble, right, alone
    assert target.teacher[:2].tolist() == [[0, 1], [-1, -1]]  # of round 1, although an ensemble is there
    assert server.state["store"]["values.image"][place[2]].tolist() == [14, 15]  # the latest with which it was right
    assert server.state["store"]["values.image"][place[0]].tolist() == [0, 1]

    server.begin(2)  # other samples: the store goes by public index
    again = server.exchanged_index(4)
    target = selected(10, [False] * 4)
    assert target.taught.tolist() == [int(k) in (int(place[0]), int(place[2])) for k in again]


# ---- losses by hand


def test_the_servers_loss_equals_a_plain_loop(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path, epsilon=0.6, temperature=0.4)
    server = session.server
    server.model.eval()
    known = method.public.server_outputs(server)
    batch = server.public_set.batch(torch.tensor([0, 11, 25, 60]))
    position = torch.tensor([0, 5, -1, 30])  # the third is not exchanged
    taught = torch.zeros(80, dtype=torch.bool).index_fill_(0, torch.tensor([5, 25, 30]), True)
    targets = {
        name: SelectedTarget(unit(*values.shape, seed=seed), taught, values)
        for seed, (name, values) in enumerate(known.items())
    }
    loss = method.server_loss(server, batch, targets, position, 0.5)
    eps, factors = 0.6, torch.tensor([1.0, 0.6, 1.0, 0.6], dtype=torch.float64)
    total = factors.mean() * server.task_loss(batch).double()
    for name, own in method.public.batch_outputs(server, server.model, batch, list(known)).items():
        teacher = targets[name].teacher[position.clamp_min(0)]
        mine, theirs = (rows.double() @ known[name].double().T for rows in (own, teacher))
        total = total + 0.5 * sum((1 - eps) * divergence(mine, theirs, 0.4)[row] for row in (1, 3)) / 4
    assert float(loss.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    loss.backward()
    assert all(value.grad is not None for value in server.model.encoders["image"].parameters())


@pytest.mark.parametrize("masked", [True, False])
def test_the_clients_loss_equals_a_plain_loop(tiny: Config, tmp_path: Path, masked: bool) -> None:
    session, method = session_of(tiny, tmp_path, epsilon=0.6, temperature=0.4)
    known, client = method.public.server_outputs(session.server), woken(session, "paired-0")
    client.model.eval()
    batch, items = client.public.pairs.batch(torch.tensor([3, 40, 7])), client.public.pairs.items
    loss = method.study_loss(client, batch, known, items if masked else None)
    expected = 0.0
    for name, own in method.public.batch_outputs(client, client.model, batch, list(known)).items():
        anchors = known[name].double()
        for row, k in enumerate(batch.index.tolist()):
            mine, theirs = anchors @ own[row].detach().double(), anchors @ anchors[k]
            hidden = (items == items[k]) & (torch.arange(len(items)) != k) & masked
            scores = mine / 0.4
            task = float(scores[~hidden].exp().sum().log() - scores[k])
            expected += (0.6 * task + 0.4 * float(divergence(mine[None], theirs[None], 0.4))) / 3
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
