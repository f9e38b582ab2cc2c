"""FedET: consensus and dissent, weights by type, the shared head and bounded updates by hand, and that it learns."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from by_hand import divergence, unit
from polyfed.aggregation.ensemble import Ensembled
from polyfed.algorithms.fedet import ClientOutput, ConsensusTarget, FedET, answers, limited
from polyfed.algorithms.shared.distiller import Distiller
from polyfed.algorithms.shared.public_exchange import PublicOutputs
from polyfed.core.randomness import generator
from polyfed.runs.config_files import merged
from polyfed.runs.session import Session
from polyfed.wire.payload import Payload
from sessions import first_cohort, of_samples, prepared, request, round_records, site_of
from small_federations import Config, classifying, unlabelled

METHOD = {"name": "fedet", "local_epochs": 1}
FORMS = ["representations", "scores"]


def config_of(tiny: Config, form: str, **algorithm: Any) -> Config:
    """A large server, two small clients with pictures of one type and one of another, and paired ones in retrieval."""
    config = classifying(tiny) if form == "scores" else copy.deepcopy(tiny)
    config["server"]["model"] = copy.deepcopy(config["server"]["model"])
    config["server"]["model"]["encoders"]["image"]["widths"] = [16, 16]
    image = config["clients"]["image"]
    other = copy.deepcopy(image)
    other["model"]["encoders"]["image"]["widths"] = [4, 8]
    if form == "scores":  # all on one source: the server has the same head
        config["server"] |= {"source": "private", "model": config["server"]["model"]}
        del config["clients"]["paired"]
        other["count"] = 2
    config["clients"]["other"] = other
    return config | {"algorithm": merged(METHOD | {"public": {"form": form}}, algorithm)}


def session_of(tiny: Config, folder: Path, form: str, **algorithm: Any) -> tuple[Session, FedET]:
    session = prepared(config_of(tiny, form, **algorithm), folder)
    method = session.experiment.algorithm
    assert isinstance(method, FedET)
    return session, method


def distiller_of(method: FedET) -> Distiller:
    assert method.distiller is not None
    return method.distiller


def asked(session: Session, method: FedET, client: str, known: PublicOutputs) -> dict[str, Any]:
    """What a client replies in round 1."""
    (info,) = (info for info in session.server.clients if info.id == client)
    weights, channels = session.server.weights_for(info), method.public.asked(known)(info)
    payload = Payload({"weights": weights, "order": known.order, "channels": channels})
    reply = site_of(session).handle(request(client, payload)).fields
    return dict(reply) | {"knowledge": of_samples(session, reply["knowledge"])}


# ---- consensus and dissent


def votes(values: list[Tensor], anchors: Tensor | None, k: int) -> tuple[list[float], list[int]]:
    """Variance and answer of each client on one sample."""
    rows = [value[k] if anchors is None else anchors @ F.normalize(value[k], dim=0) for value in values]
    return [float(row.var(correction=0)) for row in rows], [int(row.argmax()) for row in rows]


@pytest.mark.parametrize("form", FORMS)
def test_consensus_and_who_contradicts_it(tiny: Config, tmp_path: Path, form: str) -> None:
    tiny["public"]["per_item"] = 1  # captions of one picture would tie
    session, method = session_of(tiny, tmp_path / "a", form, diversity=0.5)
    twin, _ = session_of(tiny, tmp_path / "b", form, diversity=0.5)
    known = method.public.server_outputs(session.server)
    channel = "label" if form == "scores" else "image"
    aim = method.aims(session.server, known, method.votes(session.server, first_cohort(session), known))[channel]
    replies = [asked(twin, method, info.id, known) for info in twin.server.clients]
    said = [reply["knowledge"][channel].double() for reply in replies]
    anchors = None if form == "scores" else known[channel].double()
    assert len(said) > 2
    differing = 0
    for k in range(len(aim.consensus.values)):
        variances, classes = votes(said, anchors, k)
        mean = sum(v / sum(variances) * value[k] for v, value in zip(variances, said, strict=True))
        assert torch.allclose(aim.consensus.values[k].double(), mean, atol=1e-5)
        (agreed,) = votes([mean[None]], anchors, 0)[1]
        away = [c for c, answer in enumerate(classes) if answer != agreed]
        assert bool(aim.others.valid[k]) == bool(away)
        if away:
            share = sum(variances[c] for c in away)
            expected = sum(variances[c] / share * said[c][k] for c in away)
            assert torch.allclose(aim.others.values[k].double(), expected, atol=1e-5)
            differing += len(away) < len(said)
    assert differing


def test_clients_that_agree_leave_no_dissent_and_their_order_does_not_matter(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path, "scores")
    known = method.public.bundle({"label": torch.zeros(3, 4)}, "x")
    said = [ClientOutput(name, unit(3, 4, seed=seed), float(seed)) for seed, name in enumerate("abc")]
    (first, second) = (method.aims(session.server, known, {"label": order})["label"] for order in (said, said[::-1]))
    assert torch.allclose(first.consensus.values, second.consensus.values)
    assert torch.allclose(first.others.values, second.others.values)
    alike = method.aims(session.server, known, {"label": [one._replace(values=said[0].values) for one in said]})
    assert not alike["label"].others.valid.any()
    assert round_records(session)[-1]["metrics"] == {"contradicted.label": 0.0}


def test_a_client_whose_scores_are_all_equal_says_nothing(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path, "scores")
    known = method.public.bundle({"label": torch.zeros(3, 4)}, "x")
    silent = ClientOutput("a", torch.zeros(3, 4), torch.zeros(3).log())
    aim = method.aims(session.server, known, {"label": [silent]})["label"]
    assert not aim.consensus.valid.any()
    assert not aim.others.valid.any()


def test_answers_among_distinct_anchors_are_those_among_the_anchors_of_all_samples() -> None:
    """A captioned picture stands there for each of its captions, which do not answer differently for that."""
    places = torch.tensor([0, 0, 1, 2, 2, 2, 3])
    draw = generator(3)
    anchors, rows = (F.normalize(torch.randn(count, 5, generator=draw), dim=1) for count in (4, 7))
    rows[1] = anchors[0]  # whose own anchor wins, among its two copies
    nearest = [max(range(4), key=lambda k, row=row: float(row @ anchors[k])) for row in rows]
    assert answers(rows, anchors, places).tolist() == nearest
    among_all = answers(rows, anchors[places])
    assert places[among_all].tolist() == nearest
    assert len(set(nearest)) > 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("diversity", [0.0, 0.3])
def test_the_servers_loss(tiny: Config, tmp_path: Path, form: str, diversity: float) -> None:
    session, method = session_of(
        tiny, tmp_path, form, diversity=diversity, **({"temperature": 0.4} if diversity else {})
    )
    server = session.server
    server.model.eval()
    known, aims = method.public.server_outputs(server), {}
    batch = server.public_set.batch(torch.tensor([4, 0, 33]))
    valid, differs = torch.ones(80, dtype=torch.bool), torch.zeros(80, dtype=torch.bool)
    valid[0], differs[33] = False, True  # one nobody spoke for, one that somebody contradicts
    for name, values in known.items():
        goal, others = (Ensembled(unit(*values.shape, seed=s), mask) for s, mask in ((1, valid), (2, differs)))
        aims[name] = ConsensusTarget(goal, others, method.public.anchors(known, name))
    loss = method.aim_loss(server, batch, aims, distiller_of(method))
    total = 0.0
    for name, own in method.public.batch_outputs(server, server.model, batch, list(known)).items():
        own, (goal, others, anchors) = own.detach().double(), aims[name]
        for row, k in ((0, 4), (2, 33)):
            target = goal.values[k].double()
            if anchors is None:
                total += float(F.cross_entropy(own[row][None], target.argmax()[None])) / 2
            else:
                total += float((own[row] - target).norm()) / 2
        mine, theirs = own[2][None], others.values[33][None].double()
        if anchors is not None:
            mine, theirs = (rows @ anchors.double().T for rows in (mine, theirs))
        total += diversity * float(divergence(mine, theirs, 0.4)) / 2
    assert float(loss.detach()) == pytest.approx(total, rel=1e-5)
    loss.backward()
    assert all(value.grad is not None for value in server.model.encoders["image"].parameters())


def test_the_server_comes_closer_to_the_consensus(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path, "representations", distiller={"epochs": 6})
    server, valid = session.server, torch.ones(80, dtype=torch.bool)
    known = method.public.server_outputs(server)
    goal = Ensembled(unit(8).expand(80, 8).contiguous(), valid)
    aims = {name: ConsensusTarget(goal, Ensembled(goal.values, ~valid), known[name]) for name in known}
    method.distil(server, aims, distiller_of(method))
    metrics = {name: value for record in round_records(session) for name, value in record["metrics"].items()}
    for name in known:
        assert metrics[f"kd_distance_after.{name}"] < 0.9 * metrics[f"kd_distance_before.{name}"]


# ---- weights


def test_models_by_type_and_the_head_over_all(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path / "a", "scores")
    twin, _ = session_of(tiny, tmp_path / "b", "scores")
    server, known = session.server, method.public.server_outputs(session.server)
    sizes = {info.id: info.samples for info in server.clients}
    assert len(set(sizes.values())) > 1
    sent = {name: asked(twin, method, name, known)["weights"] for name in sizes}
    heads = {name for name in sent["image"] if name.startswith("heads.")}
    assert {kind: set(method.shared(server, kind)) for kind in server.types} == dict.fromkeys(server.types, heads)
    method.votes(server, first_cohort(session), known)
    for kind, members in server.types.items():
        ids = [info.id for info in members.clients]
        whole = sum(sizes[name] for name in ids)
        for name, value in server.weights[kind].items():
            if value.is_floating_point():
                mean = sum(sizes[c] / whole * sent[c][name].double() for c in ids)
                assert torch.allclose(value.double(), mean, atol=1e-6), name
    own = server.model.state_dict()
    for name in heads:
        mean = sum(size / sum(sizes.values()) * sent[c][name].double() for c, size in sizes.items())
        assert torch.allclose(own[name].double(), mean, atol=1e-6)


@pytest.mark.parametrize("shared", [True, False])
def test_the_types_get_the_head_that_the_server_made(tiny: Config, tmp_path: Path, shared: bool) -> None:
    session, method = session_of(tiny, tmp_path, "scores", share_head=shared)
    server = session.server

    def equal() -> set[bool]:
        own = server.model.state_dict()
        pairs = [(own[name], value) for model in server.weights.values() for name, value in model.items()
                 if name.startswith("heads.")]  # fmt: skip
        assert pairs
        return {torch.equal(*pair) for pair in pairs}

    assert equal() == {shared}
    before = copy.deepcopy(server.weights)
    method.round(server, first_cohort(session))
    assert equal() == {shared}
    for kind, model in server.weights.items():
        assert any(not torch.equal(value, before[kind][name]) for name, value in model.items() if "encoders" in name)


def test_heads_that_differ_stay_apart(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path, "representations")
    (paired,) = (kind for kind, members in session.server.types.items() if len(members.modalities) == 2)
    found = {kind: method.shared(session.server, kind) for kind in session.server.types}
    assert {kind for kind, names in found.items() if names} == {paired}  # the loss of retrieval


@pytest.mark.parametrize("largest", [0.1, 0.5, 100.0])
def test_updates_are_bounded(largest: float) -> None:
    received = {"a": unit(3, 4, seed=1).double(), "b": 5 * unit(2, 4, seed=2).double(), "n": torch.tensor(3)}
    trained = {"a": unit(3, 4, seed=3).double(), "b": unit(2, 4, seed=4).double(), "n": torch.tensor(9)}
    found = limited(received, trained, largest)
    flat = [torch.cat([model[name].flatten() for name in "ab"]) for model in (received, trained, found)]
    change, bound = float((flat[1] - flat[0]).norm()), largest * float(flat[0].norm())
    expected = flat[0] + min(1.0, bound / change) * (flat[1] - flat[0])
    assert torch.allclose(flat[2], expected, atol=1e-6)
    assert int(found["n"]) == 9
    if largest == 100.0:
        assert torch.equal(flat[2], flat[1])


def test_one_wild_client_cannot_carry_its_type_away(tiny: Config, tmp_path: Path) -> None:
    session, method = session_of(tiny, tmp_path, "scores", largest_update=0.01)
    server, before = session.server, copy.deepcopy(session.server.weights)
    method.votes(server, first_cohort(session), method.public.server_outputs(server))
    for kind, model in server.weights.items():
        names = [name for name, value in model.items() if value.is_floating_point()]
        change = torch.cat([(model[name] - before[kind][name]).flatten() for name in names]).norm()
        assert 0 < float(change) <= 0.01 * float(torch.cat([before[kind][n].flatten() for n in names]).norm()) + 1e-5


# ---- runs


def test_unlabelled_public_sets_are_enough_without_a_task_of_the_servers_own(tiny: Config, tmp_path: Path) -> None:
    config = unlabelled(tiny) | {"algorithm": METHOD | {"public": {"form": "scores"}}}
    session = prepared(config | {"algorithm": config["algorithm"] | {"task": None}}, tmp_path / "b")
    session.experiment.algorithm.round(session.server, first_cohort(session))
    metrics = {name: value for record in round_records(session) for name, value in record["metrics"].items()}
    assert metrics["kd_distance_after.label"] != metrics["kd_distance_before.label"]
