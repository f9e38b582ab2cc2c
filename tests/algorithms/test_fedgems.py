"""FedGEMS: who teaches the server what, its losses and those of clients by hand, and that it learns in both forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from by_hand import divergence, unit
from polyfed.aggregation.ensemble import Ensembled
from polyfed.algorithms.fedgems import DistillationTarget, FedGEMS
from polyfed.algorithms.shared.public_exchange import PublicOutputs
from polyfed.runs.config_files import merged
from polyfed.runs.session import Session
from polyfed.wire.payload import Payload
from sessions import crossing, first_cohort, of_samples, prepared, request, round_records, site_of, woken
from small_federations import Config, classifying

METHOD = {"name": "fedgems", "local_epochs": 1, "study": {"batch_size": 16}}
FORMS = ["representations", "scores"]


def config_of(tiny: Config, form: str, **algorithm: Any) -> Config:
    config = classifying(tiny) if form == "scores" else tiny
    return config | {"algorithm": merged(METHOD | {"public": {"form": form}}, algorithm)}


def session_of(tiny: Config, folder: Path, form: str, **algorithm: Any) -> tuple[Session, FedGEMS]:
    session = prepared(config_of(tiny, form, **algorithm), folder)
    method = session.experiment.algorithm
    assert isinstance(method, FedGEMS)
    return session, method


def asked(session: Session, client: str, known: PublicOutputs) -> PublicOutputs:
    (info,) = (info for info in session.server.clients if info.id == client)
    """What a client says of all exchanged samples, that gets the server's own outputs."""
    own = session.experiment.algorithm.public.outputs_for(crossing(session, known))(info)
    reply = site_of(session).handle(request(client, Payload({"knowledge": own})))
    return of_samples(session, reply.fields["knowledge"])


# ---- the ensemble


def certain(logits: list[float], truth: int) -> float | None:
    """1 / H of a client that is right, else None."""
    if max(range(len(logits)), key=logits.__getitem__) != truth:
        return None
    p = torch.tensor(logits, dtype=torch.float64).softmax(0)
    return 1 / float(-(p * p.log()).sum())


@pytest.mark.parametrize("form", FORMS)
def test_the_ensemble_counts_the_right_by_their_certainty(tiny: Config, tmp_path: Path, form: str) -> None:
    tiny["public"]["per_item"] = 1  # else captions of a picture have the same anchor: who wins is rounding
    session, method = session_of(tiny, tmp_path / "a", form, local_epochs=3)
    other, _ = session_of(tiny, tmp_path / "b", form, local_epochs=3)
    server, found = session.server, {}

    def seen(server: Any, known: PublicOutputs, targets: dict[str, Ensembled]) -> dict[str, DistillationTarget]:
        found.update(targets)
        return {}

    known = method.public.server_outputs(server)
    object.__setattr__(method, "lessons", seen)
    object.__setattr__(method, "learn", lambda *_: None)
    method.round(server, first_cohort(session))
    channel = "label" if form == "scores" else "image"
    said = [asked(other, info.id, known)[channel].double() for info in other.server.clients]
    labels = method.public.labels(server, server.public_set)
    counted = 0
    for k in range(len(said[0])):
        truth = k if labels is None else int(labels[k])
        rows = [one[k] if labels is not None else one[k] @ known[channel].double().T for one in said]
        inverse = {c: certain(row.tolist(), truth) for c, row in enumerate(rows)}
        votes = {c: value for c, value in inverse.items() if value is not None}
        assert bool(found[channel].valid[k]) == bool(votes)
        if votes:
            shares = torch.tensor(list(votes.values()), dtype=torch.float64).softmax(0)
            mean = sum(share * said[c][k] for share, c in zip(shares, votes, strict=True))
            assert torch.allclose(found[channel].values[k].double(), mean, atol=1e-4)
            counted += 1
    assert counted > 0


# ---- who teaches what


def test_the_server_is_right_where_the_own_sample_or_a_sibling_is_nearest(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path, "representations")
    server = session.server
    pictures = unit(80, 8, seed=1)[server.public_set.distinct("image")[1]]
    known = method.public.bundle({"image": pictures, "text": unit(80, 8, seed=2)}, "x")
    known["text"][:20] = pictures[:20]  # the server knows these
    found, items = method.right(server, known), server.public_set.items.tolist()
    for name, other in (("image", "text"), ("text", "image")):
        nearest = (known[name].double() @ known[other].double().T).argmax(1).tolist()
        assert found[name].tolist() == [items[j] == items[k] for k, j in enumerate(nearest)]
        assert found[name][:20].all()
        assert not found[name].all()


def test_of_scores_it_is_right_where_the_true_class_is_first(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path, "scores")
    server = session.server
    known = method.public.server_outputs(server)
    labels = server.public_set.targets["label"]
    assert method.right(server, known)["label"].tolist() == (known["label"].argmax(1) == labels).tolist()


class Fixed:
    """Says of the server what the test wants."""

    def __init__(self, method: FedGEMS, right: list[bool]) -> None:
        object.__setattr__(method, "right", lambda server, known: {"label": torch.tensor(right)})


def test_the_four_cases_and_the_store(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path, "scores", public={"samples": 4})
    server = session.server
    place = server.exchanged_index(4)
    first = method.public.bundle({"label": torch.arange(8.0).view(4, 2)}, "x")
    ensemble = Ensembled(-torch.ones(4, 2), torch.tensor([True, True, True, False]))
    Fixed(method, [True, False, True, False])
    lesson = method.lessons(server, first, {"label": ensemble})["label"]
    assert lesson.taught.tolist() == [False, True, False, False]  # right, ensemble, right, alone
    assert lesson.teacher[1].tolist() == [-1, -1]
    metrics = round_records(session)[-1]["metrics"]
    assert metrics == {"right.label": 0.5, "stored.label": 0.0, "ensemble.label": 0.25, "alone.label": 0.25}
    store = server.state["store"]
    assert store["known.label"].nonzero().flatten().tolist() == [int(place[0]), int(place[2])]
    assert store["values.label"][place[2]].tolist() == [4, 5]

    Fixed(method, [False, False, True, False])
    second = method.public.bundle({"label": 10 + torch.arange(8.0).view(4, 2)}, "x")
    lesson = method.lessons(server, second, {"label": ensemble})["label"]
    assert lesson.taught.tolist() == [True, True, False, False]  # stored, ensemble, right, alone
    assert lesson.teacher[:2].tolist() == [[0, 1], [-1, -1]]  # of round 1, although an ensemble is there
    assert server.state["store"]["values.label"][place[2]].tolist() == [14, 15]  # the latest with which it was right
    assert server.state["store"]["values.label"][place[0]].tolist() == [0, 1]

    server.begin(2)  # other samples: the store goes by public index
    again = server.exchanged_index(4)
    Fixed(method, [False] * 4)
    lesson = method.lessons(server, second, {})["label"]
    assert lesson.taught.tolist() == [int(k) in (int(place[0]), int(place[2])) for k in again]


# ---- losses by hand


@pytest.mark.parametrize("form", FORMS)
def test_the_servers_loss(tiny: Config, tmp_path: Path, form: str) -> None:
    session, method = session_of(tiny, tmp_path, form, epsilon=0.6, temperature=0.4)
    server = session.server
    server.model.eval()
    known = method.public.server_outputs(server)
    batch = server.public_set.batch(torch.tensor([0, 11, 25, 60]))
    place = torch.tensor([0, 5, -1, 30])  # the third is not exchanged
    lessons = {}
    for seed, (name, values) in enumerate(known.items()):
        taught = torch.zeros(len(values), dtype=torch.bool)
        taught[torch.tensor([5, 25, 30])] = True
        lessons[name] = DistillationTarget(unit(*values.shape, seed=seed), taught, method.public.anchors(known, name))
    loss = method.lesson_loss(server, batch, lessons, place, 0.5)
    eps, factors = 0.6, torch.tensor([1.0, 0.6, 1.0, 0.6], dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    said = method.public.batch_outputs(server, server.model, batch, list(known))
    for name, lesson in lessons.items():
        own, teacher = said[name].double(), lesson.teacher[place.clamp_min(0)].double()
        if form == "scores":
            total = total + (factors * F.cross_entropy(own, batch.targets["label"], reduction="none")).mean()
        else:
            own, teacher = (rows @ known[name].double().T for rows in (own, teacher))
        total = total + 0.5 * sum((1 - eps) * divergence(own, teacher, 0.4)[row] for row in (1, 3)) / 4
    if form == "representations":
        total = total + factors.mean() * server.task_loss(batch).double()
    assert float(loss.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    loss.backward()
    assert all(value.grad is not None for value in server.model.encoders["image"].parameters())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("masked", [True, False])
def test_the_clients_loss(tiny: Config, tmp_path: Path, form: str, masked: bool) -> None:
    session, method = session_of(tiny, tmp_path, form, epsilon=0.6, temperature=0.4)
    known, client = method.public.server_outputs(session.server), woken(session, "paired-0")
    client.model.eval()
    batch, items = client.public.pairs.batch(torch.tensor([3, 40, 7])), client.public.pairs.items
    loss = method.study_loss(client, batch, known, items if masked else None)
    expected = 0.0
    for name, own in method.public.batch_outputs(client, client.model, batch, list(known)).items():
        for row, k in enumerate(batch.index.tolist()):
            mine, theirs = own[row].detach().double(), known[name][k].double()
            seen, truth = mine, int(batch.targets["label"][row])
            if form == "representations":
                anchors, truth = known[name].double(), k
                mine, theirs = anchors @ mine, anchors @ theirs
                seen = mine.detach() / 0.4
                hidden = (items == items[k]) & (torch.arange(len(items)) != k)
                seen = seen[~hidden] if masked else seen
                truth = int((~hidden)[:k].sum()) if masked else k
            task = float(seen.exp().sum().log() - seen[truth])
            expected += (0.6 * task + 0.4 * float(divergence(mine[None], theirs[None], 0.4))) / 3
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)


def test_lessons_bring_the_server_closer(tiny: Config, tmp_path: Path) -> None:
    tiny["server"]["training"] = {"optimizer": {"kind": "adam", "lr": 0.01}, "batch_size": 16}
    session, method = session_of(tiny, tmp_path, "representations", epsilon=0.0, distiller={"epochs": 6})
    server, taught = session.server, torch.ones(80, dtype=torch.bool)
    known = method.public.server_outputs(server)
    lessons = {
        name: DistillationTarget(unit(80, 8, seed=1), taught, method.public.anchors(known, name)) for name in known
    }
    place, batch = torch.arange(80), server.public_set.batch(torch.arange(80))
    before = float(method.lesson_loss(server, batch, lessons, place).detach())
    assert method.distiller is not None
    method.learn(server, lessons, method.distiller)
    server.model.eval()
    assert float(method.lesson_loss(server, batch, lessons, place).detach()) < 0.9 * before
