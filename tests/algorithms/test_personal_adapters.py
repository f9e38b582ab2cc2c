"""Methods with a second adapter that stays at its client: what is added up, what crosses, a round of each by hand."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from by_hand import assert_mean, copies, descend, divergence, model_of, unit
from polyfed.aggregation.prototypes import ClassAverage, ClassMeans, prototype_tensors
from polyfed.aggregation.router import routing_loss
from polyfed.algorithms.feddpa import InstanceWeighted
from polyfed.algorithms.rcsr import MeansCheck, change_of, moving_means, of_clients
from polyfed.core.errors import ConfigError, PayloadError
from polyfed.core.randomness import isolated
from polyfed.data.samples import Batch
from polyfed.federation.client import ClientInfo
from polyfed.federation.cohort import Cohort, Reply
from polyfed.losses.soft_contrastive import SoftContrastive
from polyfed.models.adapters.layers import adapted_layers
from polyfed.models.frozen import frozen_tensors
from polyfed.models.model import CachedModel, Model
from polyfed.models.personal_adapters import (
    PERSONAL,
    RECEIVED,
    SHARED,
    adapter_tensors,
    add_adapters,
    copy_adapter,
    renew_adapter,
    training_only,
    use_adapters,
)
from polyfed.runs.experiment import Experiment
from polyfed.runs.session import Session
from polyfed.tasks.retrieval import PairRetrieval
from polyfed.wire.ledger import Ledger
from polyfed.wire.payload import Payload, Prototypes, Weights
from sessions import first_cohort, metrics, prepared, woken
from small_federations import CAPTIONS, RETRIEVAL, Config, adapted, named, plain_sgd, scenes

RATE = 0.001
Tensors = dict[str, Tensor]


def session_of(folder: Path, **algorithm: Any) -> Session:
    return prepared(plain_sgd(adapted(**algorithm), batch_size=8), folder)


def pair(tmp_path: Path, *names: str) -> Model:
    """A client's model with further adapters, all of them drawn."""
    session = session_of(tmp_path, name="fedit")
    model = session.federation.client_model(session.federation.members["paired-0"]).eval()
    add_adapters(model, *names)
    for number, name in enumerate((SHARED, *names)):
        renew_adapter(model, name, number)
        for key, value in adapter_tensors(model, name).items():
            if ".lora_B." in key:
                value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(number)))
    return model


def summed(model: Model, weights: dict[str, float]) -> Model:
    """The model whose layers are W + s sum_a weight_a B_a A_a, without adapters in use."""
    model = copy.deepcopy(model)
    use_adapters(model, weights)
    for layer in adapted_layers(model).values():
        base = layer.get_base_layer()
        change = sum(weight * layer.lora_B[name].weight @ layer.lora_A[name].weight for name, weight in weights.items())
        base.weight = torch.nn.Parameter(base.weight + 2.0 * change)
        layer.enable_adapters(False)
    return model


# ---- several adapters of a layer


def test_outputs_of_adapters_in_use_add_up_for_all_or_by_sample(tmp_path: Path) -> None:
    model, x = pair(tmp_path, PERSONAL), torch.randn(3, 3, 16, 16)
    weights = {SHARED: 0.3, PERSONAL: 0.7}
    expected = summed(model, weights).embed("image", x)
    use_adapters(model, weights)
    torch.testing.assert_close(model.embed("image", x), expected)
    own = torch.tensor([0.0, 0.7, 1.0])[:, None, None]
    use_adapters(model, {SHARED: 1 - own, PERSONAL: own})
    rows = model.embed("image", x)
    torch.testing.assert_close(rows[1], expected[1])
    for row, name in ((0, SHARED), (2, PERSONAL)):
        use_adapters(model, {name: 1.0})
        torch.testing.assert_close(rows[row], model.embed("image", x)[row])


def test_further_adapters_are_neither_exchanged_nor_frozen_and_each_copy_has_its_own(tmp_path: Path) -> None:
    session = session_of(tmp_path, name="fedit")
    model = session.federation.client_model(session.federation.members["paired-0"])
    exchanged, frozen, trained = list(model.exchanged()), frozen_tensors(model), len(model.trained())
    add_adapters(model, PERSONAL, RECEIVED)
    assert list(model.exchanged()) == exchanged
    assert frozen_tensors(model).keys() == frozen.keys()
    assert len(model.trained()) == trained + len(adapter_tensors(model, PERSONAL))
    assert not any(value.requires_grad for name, value in model.named_parameters() if f".{RECEIVED}." in name)
    other = copy.deepcopy(model)
    for name, value in adapter_tensors(other, PERSONAL).items():
        value.fill_(2.0)
        assert bool((adapter_tensors(model, PERSONAL)[name] != 2.0).any())
    for name, value in frozen_tensors(other).items():
        assert value.data_ptr() == frozen[name].data_ptr()
    model.load(model.exchanged())
    copy_adapter(model, SHARED, RECEIVED)
    for name, value in adapter_tensors(model, RECEIVED).items():
        assert torch.equal(value, adapter_tensors(model, SHARED)[name.replace(RECEIVED, SHARED)])


def test_only_one_adapter_is_trained_within_a_block(tmp_path: Path) -> None:
    model = pair(tmp_path, PERSONAL)
    before = set(model.trained())
    with training_only(model, PERSONAL):
        assert set(model.trained()) == set(adapter_tensors(model, PERSONAL))
    assert set(model.trained()) == before


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (None, "no client's model has low-rank adapters; give encoders 'hf' an adapter 'lora'"),
        ({"name": "ia3"}, "no client's model has low-rank adapters"),
        ({"name": "lora", "dora": True}, "those of adapter 'lora with dora' do not add up"),
    ],
)
def test_models_without_plain_low_rank_adapters_are_refused(
    adapter: Config | None, message: str, tmp_path: Path
) -> None:
    config = copy.deepcopy(adapted(name="feddpa"))
    for participant in (config["server"], *config["clients"].values()):
        for encoder in participant["model"]["encoders"].values():
            encoder.pop("adapter", None)
            encoder |= {} if adapter is None else {"adapter": adapter}
    with pytest.raises(ConfigError, match=message):
        prepared(config, tmp_path)


@pytest.mark.parametrize(("method", "length"), [("feddpa", {}), ("feddat", {"local_steps": 3})])
def test_a_batch_that_lacks_what_has_adapters_is_left_out(method: str, length: Config, tmp_path: Path) -> None:
    config = by_names(name=method, **length)
    reader = config["clients"]["few"]["model"]["encoders"]["text"] | {"adapter": None, "trainable": "none"}
    for participant in (config["server"], *config["clients"].values()):
        # names are read as they are; texts have no adapters either
        participant["model"] = copy.deepcopy(participant["model"])
        participant["model"]["encoders"] |= {"text": reader, "names": reader}
        participant["task"] = participant["task"] | {"names": participant["task"]["names"] | {"modality": "names"}}
    for source, text in (("pictures", "captions"), ("drawings", "text")):
        config["data"]["sources"][source]["columns"] = {"image": "image", "text": text}
    session = prepared(plain_sgd(config, batch_size=8), tmp_path)
    algorithm: Any = session.experiment.algorithm
    for missing in (24, 12):  # of 24: all batches lack pictures, then some may
        client = woken(session, "few")
        rows = client.train.rows["image"].clone()
        rows[: int(len(rows) * missing / 24)] = -1
        client.train = dataclasses.replace(client.train, rows={**client.train.rows, "image": rows})
        received = session.server.weights_for(client.info)
        algorithm.fit(client, received)
        moved = [not torch.equal(value, received[name]) for name, value in client.model.exchanged().items()]
        assert any(moved) == (missing < 24)
        own = adapter_tensors(client.model, PERSONAL)
        assert any(bool(value.any()) for name, value in own.items() if ".lora_B." in name) == (missing < 24)


# ---- FedDPA


def both_by_hand(session: Session, client_id: str, start: dict[str, Tensor], weight: float) -> dict[str, Tensor]:
    """A client's parameters after round 1: its own adapter trained beside the received one, then the rest alone."""
    member, model = session.federation.members[client_id], model_of(session, client_id, start).train()
    renew_adapter(model, PERSONAL, 0, client_id)
    own, client = adapter_tensors(model, PERSONAL).keys(), woken(session, client_id)
    phases: list[tuple[str, bool, dict[str, float]]] = [
        ("personal-0", True, {SHARED: 1 - weight, PERSONAL: weight}),
        ("task-0", False, {SHARED: 1.0}),
    ]
    with isolated(0, 1, client_id, "fit", 0):
        for purpose, is_own, weights in phases:
            use_adapters(model, weights)

            def chosen(name: str, gradient: Tensor, is_own: bool = is_own) -> Tensor:
                return gradient if (name in own) == is_own else torch.zeros_like(gradient)

            for batch in client.batches(session.federation.train(member), purpose):
                loss = member.settings.task.loss(model, model.heads[member.head], batch)
                descend(model, loss, RATE, chosen)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_feddpa_trains_both_and_averages_the_shared_adapter(tmp_path: Path) -> None:
    session = session_of(tmp_path, name="feddpa", weight=0.4)
    server, start = session.server, copies(session.server.weights)
    trained = {info.id: both_by_hand(session, info.id, start[server.type_of(info)], 0.4) for info in server.clients}
    session.experiment.algorithm.round(server, first_cohort(session))
    counts = {info.id: info.samples for info in server.clients}
    for name, value in server.weights["paired"].items():
        having = {client: tensors for client, tensors in trained.items() if name in tensors}
        assert_mean({name: value}, having, counts)
        assert PERSONAL not in name
    for client, tensors in trained.items():
        kept = woken(session, client, (2, 0), (1, 0)).state["personal"]
        assert kept.keys() == {name for name in tensors if f".{PERSONAL}." in name}
        for name, value in kept.items():
            torch.testing.assert_close(value, tensors[name], atol=1e-6, rtol=1e-6)
        assert any(bool(value.any()) for name, value in kept.items() if ".lora_B." in name)


def test_feddpa_weighs_each_input_by_its_likeness_to_the_clients_own(tmp_path: Path) -> None:
    model, x, ids = pair(tmp_path, PERSONAL), torch.randn(4, 3, 16, 16), torch.tensor([[3, 5, 7]])
    plain = copy.deepcopy(model)
    use_adapters(model, {PERSONAL: 1.0})
    z = model.represent("image", x).detach()
    known = z[:2]
    with torch.no_grad():
        weighted = InstanceWeighted(model, {"image": known}, 0.5, 0.2)
        rows, texts = weighted.embed("image", x), weighted.embed("text", ids)
    for row in range(4):
        alpha = max(0.0, 0.5 * sum(float(z[row] @ one) for one in known) / 2)
        expected = summed(plain, {SHARED: 1 - alpha, PERSONAL: alpha}).embed("image", x)[row]
        torch.testing.assert_close(rows[row], expected)
    with torch.autocast("cpu", torch.bfloat16):  # which rounds no likeness
        z = model.represent("image", x).detach()
        model.represent = lambda name, x: z  # type: ignore[method-assign]
        alphas = weighted.weight("image", x)
    torch.testing.assert_close(alphas, 0.5 * (z @ known.T).mean(1).clamp_min(0))
    # nothing is known of what has no training inputs, as names of classes
    torch.testing.assert_close(texts, summed(plain, {SHARED: 0.8, PERSONAL: 0.2}).embed("text", ids))


def test_feddpa_f_trains_personal_adapters_in_the_last_rounds_alone(tmp_path: Path) -> None:
    session = session_of(tmp_path, name="feddpa", fine_tuning={"rounds": 1}, instance=None)
    algorithm, server = session.experiment.algorithm, session.server
    algorithm.round(server, first_cohort(session))
    shared = copies(server.weights)
    client = woken(session, "paired-0", (2, 0), (1, 0))
    assert "personal" not in client.state
    server.begin(2)
    algorithm.round(server, session.cohort(2, Ledger()))
    assert all(torch.equal(value, shared["paired"][name]) for name, value in server.weights["paired"].items())
    assert woken(session, "paired-0", (3, 0), (2, 0)).state["personal"]
    with pytest.raises(ConfigError, match=r"fine_tuning\.rounds is 2, which leaves none of run\.rounds 2.*at most 1"):
        session_of(tmp_path / "all", name="feddpa", fine_tuning={"rounds": 2})


def test_feddpa_averages_factors_as_fedit_does() -> None:
    with pytest.raises(ConfigError, match="averaging: is by_type, but the method goes with 'separate'"):
        Experiment.parse(adapted(name="feddpa", averaging="by_type"))


# ---- FedDAT


def mutual_by_hand(session: Session, client_id: str, start: dict[str, Tensor], share: float, tau: float) -> Tensors:
    """A client's parameters after round 1: student and teacher in turn on each batch."""
    member, model = session.federation.members[client_id], model_of(session, client_id, start).train()
    renew_adapter(model, PERSONAL, 0, client_id)
    copy_adapter(model, SHARED, RECEIVED)
    own, head, task = adapter_tensors(model, PERSONAL).keys(), model.heads[member.head], member.settings.task
    student_uses, teacher_uses = {SHARED: 1.0}, {PERSONAL: 0.5, RECEIVED: 0.5}

    def scored(batch: Batch, uses: dict[str, float]) -> tuple[Tensor, Tensor]:
        use_adapters(model, uses)
        shared = CachedModel(model)
        return task.loss(shared, head, batch), task.scores(shared, head, batch)

    def step(loss: Tensor, learner: Tensor, target: Tensor, is_own: bool) -> None:
        distance = tau**2 * divergence(learner, target.detach(), tau).mean()
        descend(
            model,
            (1 - share) * loss + share * distance,
            RATE,
            lambda name, gradient: gradient if (name in own) == is_own else torch.zeros_like(gradient),
        )

    with isolated(0, 1, client_id, "fit", 0):
        for batch in woken(session, client_id).batches(session.federation.train(member), "task-0"):
            loss, student = scored(batch, student_uses)
            step(loss, student, scored(batch, teacher_uses)[1], is_own=False)
            loss, teacher = scored(batch, teacher_uses)
            step(loss, teacher, student, is_own=True)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_feddat_student_and_teacher_learn_from_each_other(tmp_path: Path) -> None:
    session = session_of(tmp_path, name="feddat", kl_weight=0.3, temperature=2.0)
    server, start = session.server, copies(session.server.weights)
    for tensors in start.values():  # B is zero at first, where both give the same scores
        for name, value in tensors.items():
            if ".lora_B." in name:
                value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))
    server.update_weights(copies(start))
    trained = {
        info.id: mutual_by_hand(session, info.id, start[server.type_of(info)], 0.3, 2.0) for info in server.clients
    }
    session.experiment.algorithm.round(server, first_cohort(session))
    counts = {info.id: info.samples for info in server.clients}
    for name, value in server.weights["paired"].items():
        assert_mean({name: value}, {client: own for client, own in trained.items() if name in own}, counts, 1e-5)
    for client, tensors in trained.items():
        for name, value in woken(session, client, (2, 0), (1, 0)).state["personal"].items():
            torch.testing.assert_close(value, tensors[name], atol=1e-5, rtol=1e-5)


def test_scores_of_retrieval_rank_the_candidates_of_both_directions(tmp_path: Path) -> None:
    session = session_of(tmp_path, name="fedit")
    member = session.federation.members["paired-0"]
    model = session.federation.client_model(member).eval()
    batch = next(iter(session.federation.train(member).batches(4)))
    u, v = (model.represent(name, batch.inputs[name]) for name in ("image", "text"))
    scores = member.settings.task.scores(model, model.heads[member.head], batch)
    torch.testing.assert_close(scores, torch.cat([u @ v.T, v @ u.T]) / 0.07)
    soft = PairRetrieval(objective="soft_contrastive")
    distances = (torch.cdist(u, v).square() + 1e-6).sqrt()
    scores = soft.scores(model, SoftContrastive(3.0, 2.0), batch)
    torch.testing.assert_close(scores, 2 * (3 - 2 * torch.cat([distances, distances.T])), atol=1e-4, rtol=1e-4)


def test_feddat_needs_scores(tmp_path: Path) -> None:
    config = adapted(name="feddat")
    config["clients"]["text"]["task"] = [config["clients"]["text"]["task"]] * 2
    with pytest.raises(ConfigError, match=r"task 'joint' of client 'text' gives none; choose classification, vqa"):
        prepared(config, tmp_path)


# ---- RCSR


def means_by_hand(session: Session, client_id: str, tensors: Tensors) -> dict[str, Tensor]:
    """Modality -> mean unit representation of a client's training samples, of unit norm."""
    model, samples = model_of(session, client_id, tensors).eval(), woken(session, client_id).train
    means = {}
    for name in model.modalities:
        rows = torch.cat([model.represent(name, batch.inputs[name]) for batch in samples.batches(7)])
        means[name] = F.normalize(rows.mean(0), dim=0).detach()
    return means


def anchored_by_hand(
    session: Session, client_id: str, start: Tensors, goals: dict[str, Tensor], weight: float
) -> Tensors:
    """A client's parameters after round 1, its task's loss with the cosine to each modality that it lacks."""
    member, model = session.federation.members[client_id], model_of(session, client_id, start).train()
    lacking = [goal for name, goal in goals.items() if name not in model.modalities]
    with isolated(0, 1, client_id, "fit", 0):
        for batch in woken(session, client_id).batches(session.federation.train(member), "task-0"):
            shared = CachedModel(model)  # dropout draws once
            loss = member.settings.task.loss(shared, model.heads[member.head], batch)
            for goal in lacking:
                (mean,) = [shared.represent(name, x).mean(0) for name, x in batch.inputs.items()]
                loss = loss + weight * (1 - mean @ goal / mean.norm())
            descend(model, loss, RATE)
    return {name: value.detach().clone() for name, value in model.exchanged().items()}


def test_rcsr_anchors_clients_that_lack_a_modality_and_weighs_all_alike_at_first(tmp_path: Path) -> None:
    session = session_of(tmp_path, name="rcsr", anchor_weight=0.7, decay=0.5)
    server, start = session.server, copies(session.server.weights)
    goals = {name: unit(1, 8, seed=number)[0] for number, name in enumerate(("image", "text"))}
    server.state["prototypes"] = goals

    trained = {
        info.id: anchored_by_hand(session, info.id, start[server.type_of(info)], goals, 0.7) for info in server.clients
    }
    means = {client: means_by_hand(session, client, tensors) for client, tensors in trained.items()}
    session.experiment.algorithm.round(server, first_cohort(session))
    alike = dict.fromkeys(trained, 1.0)
    for name, value in server.weights["paired"].items():
        having = {client: tensors for client, tensors in trained.items() if name in tensors}
        assert_mean({name: value}, having, alike, 1e-5)
    for name, goal in goals.items():
        own = torch.stack([one.get(name, goal) for one in means.values()]).mean(0)
        expected = F.normalize(0.5 * goal + 0.5 * own, dim=0)
        torch.testing.assert_close(server.state["prototypes"][name], expected, atol=1e-4, rtol=1e-4)
    assert any(bool(value.any()) for name, value in server.state["router"].items() if "score" in name)


def test_routing_loss_is_that_of_a_loop_and_turns_from_a_client_that_disagrees() -> None:
    own, goal, weights = unit(6, 5).reshape(3, 2, 5), unit(2, 5, seed=1), torch.tensor([0.5, 0.3, 0.2])

    def cosine(a: Tensor, b: Tensor) -> Tensor:
        return a @ b / (a.norm() * b.norm())

    expected = 0.1 * sum(float(w * w.log()) for w in weights)
    for m in range(2):
        expected += float(1 - cosine(sum(weights[k] * own[k, m] for k in range(3)), goal[m]))
    directions = [(own[k, 0] - own[k, 1]) / (own[k, 0] - own[k, 1]).norm() for k in range(3)]
    common = sum(weights[k] * directions[k] for k in range(3))
    expected += 0.2 / 2 * float(1 - cosine(common, goal[0] - goal[1]))
    expected += 0.2 / 2 * sum(float(weights[k] * (1 - cosine(directions[k], common))) for k in range(3))
    assert float(routing_loss(weights, own, goal, 0.1, 0.2)) == pytest.approx(expected, rel=1e-5)

    own[0] = own[1] = goal
    own[2] = -goal
    scores = torch.zeros(3, requires_grad=True)
    routing_loss(scores.softmax(0), own, goal, 0.1, 0.2).backward()
    assert scores.grad is not None
    assert scores.grad[2] > 0 > scores.grad[0]


def test_a_router_weighs_alike_until_it_has_learnt(tmp_path: Path) -> None:
    session = session_of(tmp_path, name="rcsr", router={"training": {"optimizer": {"kind": "adam", "lr": 0.1}}})
    algorithm, server, largest = session.experiment.algorithm, session.server, []
    for number in (1, 2):
        server.begin(number)
        algorithm.round(server, session.cohort(number, Ledger()))
        largest.append(metrics(session)["largest_weight"])
    assert largest[0] == pytest.approx(0.25)
    assert largest[1] > 0.26


def by_names(**algorithm: Any) -> Config:
    """Clients of pictures alone with names of classes that their model reads."""
    return named(adapters={name: {"name": "lora", "rank": 2} for name in ("image", "text")}, **algorithm)


def test_rcsr_anchors_pictures_to_texts_that_they_have_names_alone_of(tmp_path: Path) -> None:
    config = by_names(name="rcsr")
    config["data"]["sources"]["scenes"] = scenes(24, 6, 6) | CAPTIONS
    few = config["clients"]["few"]
    config["clients"]["paired"] = few | {"source": "scenes", "task": RETRIEVAL | {"mask_siblings": True}}
    session = prepared(plain_sgd(config, batch_size=8), tmp_path)
    algorithm: Any = session.experiment.algorithm
    server, client = session.server, woken(session, "few")
    algorithm.round(server, first_cohort(session))
    assert server.state["prototypes"].keys() == {"image", "text"}
    server.begin(2)
    algorithm.round(server, session.cohort(2, Ledger()))
    client.load_weights(server.weights_for(client.info))
    goals = {name: unit(1, 8, seed=number)[0] for number, name in enumerate(("image", "text"))}
    batch = next(iter(client.train.batches(4)))
    mean = client.model.represent("image", batch.inputs["image"]).mean(0)
    loss = algorithm.anchor(client, Prototypes(goals))(CachedModel(client.model), batch)
    torch.testing.assert_close(loss, 1 - F.cosine_similarity(mean, goals["text"], dim=0))


@pytest.mark.parametrize("kind", [adapted, by_names])
def test_rcsr_needs_two_modalities(kind: Any, tmp_path: Path) -> None:
    config = kind(name="rcsr")
    config["clients"] = {"image": next(iter(config["clients"].values()))}
    del config["server"]
    with pytest.raises(ConfigError, match=r"'rcsr' aligns two modalities, and clients have image; give some"):
        prepared(config, tmp_path)


class Reduced:
    """A cohort of which every other reply counts for half of its samples, as one that has been scaled down."""

    def __init__(self, cohort: Cohort) -> None:
        self.cohort, self.clients = cohort, cohort.clients

    def ask(self, *step: Any, **more: Any) -> Iterator[Reply]:
        for number, reply in enumerate(self.cohort.ask(*step, **more)):
            count = reply.num_examples // (1 + number % 2)
            yield Reply.received(Payload({**reply.payload.fields, "num_examples": count}), reply.sender)


@pytest.mark.parametrize("router", [{}, None])
def test_rcsr_counts_a_reply_that_was_scaled_down_for_as_much_less(router: Config | None, tmp_path: Path) -> None:
    session = session_of(tmp_path, name="rcsr", router=router, anchor_weight=0)
    server, start = session.server, copies(session.server.weights)
    trained = {
        info.id: anchored_by_hand(session, info.id, start[server.type_of(info)], {}, 0) for info in server.clients
    }
    cohort: Any = Reduced(first_cohort(session))
    session.experiment.algorithm.round(server, cohort)
    shares = {
        info.id: (info.samples if router is None else 1) / (1 + number % 2)
        for number, info in enumerate(server.clients)
    }
    for name, value in server.weights["paired"].items():
        assert_mean({name: value}, {client: own for client, own in trained.items() if name in own}, shares, 1e-5)


def test_rcsr_takes_replies_and_what_it_knows_from_any_device() -> None:
    """Replies that came as bytes are on the CPU, and so is what a resumed run has read, beside a server on a GPU."""
    info = ClientInfo("a", "a", ("image",), "retrieval", 5, "x")
    with FakeTensorMode():
        gpu, far, near = torch.device("cuda:0"), torch.zeros(8, device="cuda"), torch.zeros(8)
        means = ClassMeans(near[None], torch.ones(1, dtype=torch.int32), torch.ones(1, dtype=torch.bool))
        reply = Reply.received(Payload({"prototypes": Prototypes(prototype_tensors("image", means))}), info)
        for known in ({}, {"text": near}, {"text": far}):
            assert of_clients([reply], known, ["image", "text"], gpu).device == gpu
            assert moving_means(known, {"image": far, "text": far}, 0.9).device == gpu
        for new, old in ((near, far), (far, near)):
            name = "encoders.image.w"
            assert change_of({name: new}, {name: old}, "image").device == new.device


def test_means_of_representations_are_in_full_precision_under_autocast() -> None:
    average, rows = ClassAverage(1, 8), torch.randn(64, 8)
    with torch.autocast("cpu", torch.bfloat16):
        average.add(rows, torch.zeros(64, dtype=torch.int64))
    torch.testing.assert_close(average.result().means[0], rows.mean(0))


def test_rcsr_personal_adapters_stay_and_are_judged(tmp_path: Path) -> None:
    session = session_of(tmp_path, name="rcsr", personal=True)
    algorithm, server = session.experiment.algorithm, session.server
    algorithm.round(server, first_cohort(session))
    client = woken(session, "text", (2, 0), (1, 0))
    assert any(bool(value.any()) for name, value in client.state["personal"].items() if ".lora_B." in name)
    judged = algorithm.evaluate_clients(server, session.cohort(2, Ledger()))
    shared = woken(session, "text", (2, 0))
    shared.load_weights(server.weights["text"])
    assert shared.test is not None
    assert judged["text"]["loss"] != shared.evaluate(shared.test)["loss"]


@pytest.mark.parametrize(
    ("names", "width", "message"),
    [
        (("text",), 8, r"prototypes of \['text'\] from a client with \['image'\]"),
        ((), 8, r"prototypes of \[\] from"),
        (("image",), 5, r"prototypes of shape \[1, 5\], expected \[1, 8\]"),
    ],
)
def test_rcsr_refuses_prototypes_that_a_client_cannot_have(
    names: tuple[str, ...], width: int, message: str, tmp_path: Path
) -> None:
    server = session_of(tmp_path, name="rcsr").server
    server.state["prototypes"] = {"image": torch.ones(8)}
    one = ClassMeans(torch.ones(1, width), torch.ones(1, dtype=torch.int32), torch.ones(1, dtype=torch.bool))
    sent = Prototypes({key: value for name in names for key, value in prototype_tensors(name, one).items()})
    reply = Reply(weights=Weights(server.weights["image"]), prototypes=sent, loss=1.0)
    (reply.client,) = [client for client in server.clients if client.id == "image"]
    with pytest.raises(PayloadError, match=message):
        MeansCheck(server)(reply)
