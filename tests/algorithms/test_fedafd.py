"""FedAFD: who learns from which loss, steps by hand, fusion in evaluation, broadcasts of encoders, costs, learning."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from by_hand import as_left, group, outcome, play, three_kinds
from polyfed.algorithms.fedafd import FedAFD
from polyfed.data.samples import Batch
from polyfed.data.view import DataContext, InputSpec
from polyfed.errors import RunError
from polyfed.federation.client import Client
from polyfed.federation.cohort import Answer, Request
from polyfed.federation.knowledge import Knowledge
from polyfed.federation.ledger import Ledger
from polyfed.federation.payload import Payload, Representations, Weights
from polyfed.models.discriminators import Discriminator
from polyfed.models.encoders.bert import Bert
from polyfed.models.encoders.resnet import ResNet
from polyfed.models.fused import Guidance, Seen
from polyfed.models.fusion import GranularityFusion
from polyfed.models.model import Model
from polyfed.randomness import isolated
from polyfed.session import Session
from sessions import prepared, request, site_of, woken

Config = dict[str, Any]
Values = dict[str, Tensor]
CLIENTS = ("image", "text", "paired")
SLOW, FAST, SEVERAL = 0.02, 0.3, 0.1  # rates of discriminators and of fusion, there of several modalities


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYFED_CACHE", str(tmp_path / "cache"))


def sgd(rate: float) -> Config:
    return {"optimizer": {"kind": "sgd", "lr": rate, "momentum": 0.0, "clip": None}}


def session_of(folder: Path, **algorithm: Any) -> Session:
    """One client of each kind, with SGD everywhere."""
    plain = {
        "public_batch_size": 12,
        "discriminator": sgd(SLOW),
        "fusion_training": sgd(FAST),
        "fusion_training_several": sgd(SEVERAL),
    }
    config = three_kinds(name="fedafd", **(plain | algorithm))
    config["clients"]["paired"]["count"] = 1
    return prepared(config, folder)


def known_of(session: Session) -> Knowledge:
    return session.experiment.algorithm.known(session.server)


def encoders_of(session: Session, *modalities: str) -> Values:
    """The server's encoders as they are now."""
    wanted = tuple(f"encoders.{name}." for name in modalities or session.server.model.modalities)
    return {name: x.clone() for name, x in session.server.model.state_dict().items() if name.startswith(wanted)}


def asked(session: Session, client: str, known: Knowledge, encoders: Values | None = None, number: int = 1) -> Payload:
    """What a client answers that is asked to train."""
    fields = {"representations": known, "encoders": Weights(encoders or {}), "version": 1}
    return site_of(session).handle(request(client, Payload(fields), (number, 0), session.accepted.get(client)))


def heard(session: Session, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, Values, Values]]:
    """(round, client, encoders it is sent, the server's at that time), filled while the session goes on."""
    found: list[tuple[int, str, Values, Values]] = []
    carry = session.engine.exchange

    def exchange(requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        now = encoders_of(session)
        for one in requests:
            sent = {name: value.clone() for name, value in one.payload.fields.get("encoders", {}).items()}
            found.append((one.round, one.client, sent, now))
        yield from carry(requests, deadline)

    monkeypatch.setattr(session.engine, "exchange", exchange)
    return found


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- gradients


def parts(client: Client) -> dict[str, float]:
    """The norm of all gradients by part of the model; -1 where there is none."""
    squares: dict[str, float] = defaultdict(lambda: -1.0)
    for name, value in client.model.named_parameters():
        part = name.split(".")[1].split("_")[0] if name.startswith("extras.") else name.split(".")[0]
        if value.grad is not None:
            squares[part] = max(squares[part], 0.0) + float(value.grad.square().sum())
        squares.setdefault(part, -1.0)
    return dict(squares)


def scene(session: Session, name: str) -> tuple[FedAFD, Client, Knowledge, Batch, Guidance]:
    algorithm, client, known = session.experiment.algorithm, woken(session, name), known_of(session)
    assert isinstance(algorithm, FedAFD)
    guidance = algorithm._received(client, Weights(encoders_of(session, *client.info.modalities)), 1)
    assert guidance is not None
    client.model.train()
    return algorithm, client, known, client.public_set.batch(torch.arange(10)), guidance


@pytest.mark.parametrize("name", CLIENTS)
def test_the_task_teaches_encoders_head_and_fusion(tmp_path: Path, name: str) -> None:
    algorithm, client, _, _, guidance = scene(session_of(tmp_path), name)
    algorithm._task_loss(client, client.train.batch(torch.arange(10)), guidance).backward()
    found = parts(client)
    assert found["discriminator"] == -1
    assert min(found[part] for part in ("encoders", "heads", "fusion")) > 0
    assert all(value.grad is None and not value.requires_grad for value in guidance.model.parameters())


@pytest.mark.parametrize("form", ["minimax", "non_saturating"])
@pytest.mark.parametrize("name", CLIENTS)
def test_the_alignment_teaches_encoders_alone(tmp_path: Path, name: str, form: str) -> None:
    algorithm, client, known, public, _ = scene(session_of(tmp_path, adversarial=form), name)
    local = algorithm._local(client, public, known)
    assert tuple(local) == client.info.modalities
    algorithm.alignment(client, public, local, known).backward()
    found = parts(client)
    assert found.pop("encoders") > 0
    assert set(found.values()) == {-1}
    for modality in client.info.modalities:
        assert any(value.grad is not None for value in client.model.encoders[modality].parameters())


@pytest.mark.parametrize("name", CLIENTS)
def test_discriminators_teach_themselves_alone(tmp_path: Path, name: str) -> None:
    algorithm, client, known, public, _ = scene(session_of(tmp_path), name)
    algorithm.discriminating(client, public, algorithm._local(client, public, known), known).backward()
    found = parts(client)
    assert found.pop("discriminator") > 0
    assert set(found.values()) == {-1}
    judges = [value for key, value in client.model.named_parameters() if "discriminator" in key]
    assert all(value.grad is not None for value in judges)  # those of the same and of the other modality


# ---- steps by hand


class ByHand:
    """A client's round 1 as plain loops; its model, which descends by gradients alone, is the result."""

    def __init__(self, session: Session, name: str) -> None:
        self.session, self.name = session, name
        self.settings = session.experiment.algorithm
        self.member = session.federation.members[name]
        self.model = session.federation.client_model(self.member).train()
        self.streams, self.known = woken(session, name), known_of(session)
        self.teacher = copy.deepcopy(session.server.model).eval().requires_grad_(False)
        self.views = session.federation.train(self.member, session.experiment.server.model)

    def joint(self) -> None:
        for epoch in range(self.settings.local_epochs):
            public = [b for k in range(3) for b in self.public(f"align-{epoch}-{k}")]
            for private, other in zip(self.private(epoch), public, strict=False):
                local = self.local(other)
                self.judge(local, other, 1.0)
                self.descend(self.task(private) + self.settings.beta * self.deceive(local, other), fusion=True)

    def alternate(self) -> None:
        for epoch in range(self.settings.local_epochs):
            for other in self.public(f"align-{epoch}-0"):
                local = self.local(other)
                self.judge(local, other, self.settings.beta)
                self.descend(self.settings.beta * self.deceive(local, other), fusion=False)
            for private in self.private(epoch):
                self.descend(self.task(private), fusion=True)

    def private(self, epoch: int) -> list[Batch]:
        return list(self.streams.batches(self.streams.train, f"task-{epoch}"))

    def public(self, purpose: str) -> list[Batch]:
        return list(self.streams.public_batches(purpose, self.settings.public_batch_size))

    def local(self, batch: Batch) -> Values:
        return {name: self.model.represent(name, x) for name, x in batch.inputs.items()}

    def levels(self, local: Values) -> Iterator[tuple[Tensor, torch.nn.Module, Tensor]]:
        for modality, values in local.items():
            for other, real in self.known.items():
                kind = "own" if other == modality else "cross"
                yield values, self.model.extras[f"discriminator_{kind}_{modality}"], real

    def judge(self, local: Values, batch: Batch, factor: float) -> None:
        losses = []
        for fake, judge, real in self.levels(local):
            right = F.logsigmoid(judge(real[batch.index])).mean() + torch.log(1 - judge(fake.detach()).sigmoid()).mean()
            losses.append(-right)
        names = [key for key, _ in self.model.named_parameters() if "discriminator" in key]
        self._step(factor * torch.stack(losses).sum(), {key: SLOW for key in names})

    def deceive(self, local: Values, batch: Batch) -> Tensor:
        losses = []
        for fake, judge, real in self.levels(local):
            false = judge(fake)
            if self.settings.adversarial == "minimax":
                losses.append(F.logsigmoid(judge(real[batch.index])).mean() + torch.log(1 - false.sigmoid()).mean())
            else:
                losses.append(-torch.log(false.sigmoid()).mean())
        return torch.stack(losses).sum()

    def task(self, batch: Batch) -> Tensor:
        task, head = self.member.settings.task, self.model.heads[self.member.head]
        there = self.views.batch(batch.index)
        fused = {}
        for name, x in batch.inputs.items():
            own, other = (F.normalize(values) for values in (self.model.embed(name, x), self.guide(name, there)))
            fused[name] = self.model.extras["fusion"](own, other)
        if task.component_name() == "classification":
            return F.cross_entropy(head(next(iter(fused.values()))), batch.targets[task.target])
        loss: Tensor = head(*(F.normalize(fused[name]) for name in task.between), None)
        return loss

    def guide(self, name: str, there: Batch) -> Tensor:
        return self.teacher.embed(name, there.inputs[name])

    def descend(self, loss: Tensor, *, fusion: bool) -> None:
        rates = {key: 0.05 for key, _ in self.model.named_parameters() if not key.startswith("extras.")}
        if fusion:
            rate = SEVERAL if len(self.model.modalities) > 1 else FAST
            rates |= {key: rate for key, _ in self.model.named_parameters() if key.startswith("extras.fusion")}
        self._step(loss, rates)

    def _step(self, loss: Tensor, rates: dict[str, float]) -> None:
        named = dict(self.model.named_parameters())
        found = torch.autograd.grad(loss, [named[key] for key in rates], allow_unused=True)
        with torch.no_grad():
            for (key, rate), gradient in zip(rates.items(), found, strict=True):
                if gradient is not None:
                    named[key] -= rate * gradient


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize(
    "options",
    [
        {"baa_update": "joint", "beta": 0.7},
        {"baa_update": "alternate", "adversarial": "non_saturating", "beta": 0.7},
        {"baa_update": "alternate", "beta": 0.3},
    ],
    ids=["joint", "released", "alternate-minimax"],
)
def test_training_equals_plain_loops(tmp_path: Path, name: str, options: Config) -> None:
    epochs = 1 if name == "paired" else 2  # rounding grows fast there
    session = session_of(tmp_path, local_epochs=epochs, **options)
    before = {key: value.clone() for key, value in woken(session, name).model.state_dict().items()}
    hand = ByHand(session, name)
    with isolated(0, 1, name, "fit", 0):  # dropout draws as the step's does
        getattr(hand, options["baa_update"])()
    answer = asked(session, name, hand.known, encoders_of(session, *hand.streams.info.modalities))
    found = woken(session, name, (2, 0), after=(1, 0)).model
    for key, value in hand.model.state_dict().items():
        torch.testing.assert_close(found.state_dict()[key], value, atol=1e-6, rtol=1e-5, msg=key)
    moved = {
        key.split(".")[0] + key.split(".")[1] for key in before if not torch.equal(before[key], value_of(found, key))
    }
    assert {f"encoders{modality}" for modality in hand.streams.info.modalities} <= moved
    assert "extrasfusion" in moved
    assert sum("discriminator" in key for key in moved) == 2 * len(hand.streams.info.modalities)
    unfused = found.eval().represent
    for modality, sent in answer.fields["representations"].items():
        samples = hand.streams.public_set
        x = samples.inputs[modality](samples.rows[modality])
        torch.testing.assert_close(sent, unfused(modality, x).detach(), atol=1e-6, rtol=1e-5)


def value_of(model: Model, key: str) -> Tensor:
    return model.state_dict()[key]


def test_released_clients_share_one_pair_of_discriminators(tmp_path: Path) -> None:
    session = session_of(tmp_path, share_discriminators=True)
    algorithm, client, known, public, _ = scene(session, "paired")
    local = algorithm._local(client, public, known)
    found = [(modality, id(judge), id(real)) for modality, judge, real in algorithm._levels(client, local, known)]
    own, cross = (id(client.model.extras[f"discriminator_{kind}_every"]) for kind in ("own", "cross"))
    image, text = (id(known[name]) for name in ("image", "text"))
    assert found == [("image", own, image), ("image", cross, text), ("text", own, text), ("text", cross, image)]


def test_new_fusions_a_round_forget_their_optimiser(tmp_path: Path) -> None:
    adam = {"optimizer": {"kind": "adam"}}
    session = session_of(tmp_path, reset_fusion=True, fusion_training=adam)
    play(session, 1, 2)
    state = as_left(session, "image").optimizer_state["fusion"]
    steps = {int(value) for key, value in state.items() if key.startswith("step:")}
    assert steps == {2}  # of one epoch of two batches, not of two


@pytest.mark.parametrize(("wanted", "public"), [(None, 2), (1, 1), (5, 5)])
def test_public_batches_are_spread_over_an_epoch(tmp_path: Path, wanted: int | None, public: int) -> None:
    session = session_of(tmp_path, public_batches_per_epoch=wanted)
    client = woken(session, "image")
    steps = list(session.experiment.algorithm._steps(client, client.public_set, known_of(session), 0))
    assert sum(batch is not None for batch, _ in steps) == 2
    assert sum(batch is not None for _, batch in steps) == public


# ---- evaluation


def seen_by(session: Session, client: Client, teacher: Values) -> dict[str, Tensor]:
    """Fused representations of all test samples, not brought to unit norm again, one by one."""
    guide = session.federation.server_model()
    guide.load_state_dict(teacher, strict=False)
    guide.eval()
    client.model.eval()
    member = session.federation.members[client.name]
    own, there = client.test, session.federation.test(member, session.experiment.server.model)
    found = {}
    with torch.no_grad():
        for name in own.modalities:
            rows = []
            for k in range(len(own)):
                index = torch.tensor([k])
                local = F.normalize(client.model.embed(name, own.batch(index).inputs[name]))
                received = F.normalize(guide.embed(name, there.batch(index).inputs[name]))
                rows.append(client.model.extras["fusion"](local, received))
            found[name] = torch.cat(rows)
    return found


@pytest.mark.parametrize("name", ["image", "text"])
def test_accuracy_is_that_of_fused_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    session = session_of(tmp_path, local_epochs=4)
    sent = heard(session, monkeypatch)
    play(session, 1, 1)
    (teacher,) = (encoders for _, client, encoders, _ in sent if client == name)
    client = as_left(session, name)
    found = session.experiment.algorithm.assess(client).payload.scalars
    logits = client.head(seen_by(session, client, teacher)[name]).detach()
    labels = client.test.targets[client.task.target]
    assert found["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), abs=1e-5)
    assert found["accuracy"] == pytest.approx(100 * float((logits.argmax(1) == labels).float().mean()))
    assert abs(client.evaluate(client.test)["loss"] - found["loss"]) > 1e-4  # its own features give something else


@pytest.mark.parametrize("renormalise", [True, False])
def test_recall_is_that_of_fused_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renormalise: bool) -> None:
    session = session_of(tmp_path, renormalise=renormalise, local_epochs=3)
    sent = heard(session, monkeypatch)
    play(session, 1, 1)
    (teacher,) = (encoders for _, client, encoders, _ in sent if client == "paired")
    client = as_left(session, "paired")
    found = session.experiment.algorithm.assess(client).payload.scalars
    fused = seen_by(session, client, teacher)
    norms = fused["image"].norm(dim=1)
    assert not torch.allclose(norms, torch.ones_like(norms), atol=1e-3)
    if renormalise:
        fused = {modality: F.normalize(values) for modality, values in fused.items()}
    items = client.test.items
    first = torch.stack([(items == item).nonzero()[0, 0] for item in items.unique()])  # a picture has many captions
    pictures, captions = fused["image"][first], fused["text"]
    for cutoff in (1, 5, 10):
        hits = [
            bool((items[(picture @ captions.T).topk(cutoff).indices] == item).any())
            for picture, item in zip(pictures, items[first], strict=True)
        ]
        back = [
            bool((items[first][(caption @ pictures.T).topk(cutoff).indices] == item).any())
            for caption, item in zip(captions, items, strict=True)
        ]
        assert found[f"image_to_text_r@{cutoff}"] == pytest.approx(100 * sum(hits) / len(hits))
        assert found[f"text_to_image_r@{cutoff}"] == pytest.approx(100 * sum(back) / len(back))


def test_a_client_without_encoders_is_judged_by_its_own_features(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    for name in CLIENTS:
        client = woken(session, name)
        assert session.experiment.algorithm.assess(client).payload.scalars == client.evaluate(client.test)


# ---- broadcasts


@pytest.mark.parametrize("fusion", ["vectors", "maps"])
def test_kept_features_change_nothing(tmp_path: Path, fusion: str) -> None:
    runs = {}
    for every, cached in ((10, True), (10, False), (1, True)):
        settings = {"broadcast_every": every, "cache_global_features": cached, "fusion": fusion}
        runs[every, cached] = outcome(play(session_of(tmp_path / f"{every}{cached}", **settings), 1, 3))
    furthest = 0.0
    for party, values in runs[10, True].items():
        for key, value in values.items():
            torch.testing.assert_close(value, runs[10, False][party][key], atol=1e-6, rtol=1e-6, msg=f"{party} {key}")
            furthest = max(furthest, float((value - runs[1, True][party][key]).abs().max()))
    assert furthest > 1e-3


@pytest.mark.parametrize(("every", "times"), [(10, 1), (1, 2)])
def test_private_data_are_encoded_once_a_broadcast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, times: int
) -> None:
    encoded: list[int] = []
    encode = Guidance._encode

    def counted(guidance: Guidance, name: str, rows: Tensor) -> Seen:
        encoded.append(len(rows))
        return encode(guidance, name, rows)

    monkeypatch.setattr(Guidance, "_encode", counted)
    session = play(session_of(tmp_path, broadcast_every=every, local_epochs=2), 1, 2)
    distinct = 0
    for name in session.accepted:
        train = session.federation.train(session.federation.members[name])
        distinct += sum(len(rows.unique()) for rows in train.rows.values())
    assert sum(encoded) == times * distinct


def test_late_clients_get_the_encoders_of_the_current_window_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = three_kinds(name="fedafd", broadcast_every=3)
    config["run"] |= {"sampling": {"cohort": 2}, "seed": 3}
    session = prepared(config, tmp_path)
    sent = heard(session, monkeypatch)
    play(session, 1, 7)
    current: Values = {}
    got: dict[str, int] = {}
    late = 0
    for number, client, encoders, now in sent:
        version = number - (number - 1) % 3
        current = now if number == version else current
        if got.get(client) == version:
            assert not encoders
            continue
        modalities = next(info.modalities for info in session.server.clients if info.id == client)
        wanted = tuple(f"encoders.{modality}." for modality in modalities)
        assert same(encoders, {name: value for name, value in current.items() if name.startswith(wanted)})
        got[client], late = version, late + (number > version)
        assert number == version or not same(encoders, {name: now[name] for name in encoders})
    assert late > 1
    assert not [event for event in session.server.records if event["kind"] == "event"]


def test_a_client_whose_reply_is_lost_gets_the_encoders_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_of(tmp_path, broadcast_every=10)
    carry = session.engine.exchange

    def losing(requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        for answer in carry(requests, deadline):
            lost = answer.client == "text" and requests[0].round == 1
            yield Answer("text", error="the line broke") if lost else answer

    monkeypatch.setattr(session.engine, "exchange", losing)
    sent = heard(session, monkeypatch)
    play(session, 1, 3)
    assert [number for number, client, encoders, _ in sent if client == "text" and encoders] == [1, 2]
    assert [number for number, client, encoders, _ in sent if client == "image" and encoders] == [1]
    assert session.accepted["text"] == (3, 0)


def test_a_client_that_lost_its_encoders_says_so(tmp_path: Path) -> None:
    session = play(session_of(tmp_path, broadcast_every=10), 1, 1)
    session.accepted.pop("image")
    with pytest.raises(RunError, match="encoders of round 1 are needed, but this client has none"):
        asked(session, "image", known_of(session), number=2)
    session.accepted["text"] = (1, 0)
    fields = {"representations": known_of(session), "encoders": Weights({}), "version": 11}
    with pytest.raises(RunError, match="encoders of round 11 are needed, but this client has those of round 1"):
        site_of(session).handle(request("text", Payload(fields), (11, 0), (1, 0)))


def test_released_clients_receive_all_encoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted, modalities in (("own", {"image"}), ("all", {"image", "text"})):
        session = session_of(tmp_path / wanted, send_encoders=wanted)
        sent = heard(session, monkeypatch)
        play(session, 1, 1)
        (encoders,) = (encoders for _, client, encoders, _ in sent if client == "image")
        assert {name.split(".")[1] for name in encoders} == modalities
        assert same(encoders, {name: value for name, value in sent[0][3].items() if name in encoders})


def test_a_modality_that_the_server_does_not_encode_goes_unfused(tmp_path: Path) -> None:
    config = three_kinds(name="fedafd")
    server = config["server"]["model"]
    task = {"name": "classification", "target": "label"}
    config["server"] |= {"model": server | {"encoders": {"image": server["encoders"]["image"]}}, "task": task}
    session = play(prepared(config, tmp_path), 1, 2)
    assert not [event for event in session.server.records if event["kind"] == "event"]
    found = session.experiment.algorithm.evaluate_clients(session.server, session.cohort(3, Ledger()))
    assert set(found) == {"image", "text", "paired-0", "paired-1"}


def test_modalities_may_stand_in_any_order(tmp_path: Path) -> None:
    config = three_kinds(name="fedafd")
    model = config["clients"]["paired"]["model"]
    encoders = dict(reversed(model["encoders"].items()))
    config["clients"]["paired"] = config["clients"]["paired"] | {"model": model | {"encoders": encoders}}
    session = play(prepared(config, tmp_path), 1, 1)
    assert set(session.accepted) == {"image", "text", "paired-0", "paired-1"}


# ---- costs


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
    """Ten rounds with K = 10 at the paper's size; nobody trains."""
    config = three_kinds(name="fedafd", broadcast_every=10)
    config["clients"]["paired"]["count"] = 1
    config["run"]["transport"] = {"weights": dtype}
    session = prepared(config, tmp_path)
    server, ledger = session.server, Ledger()
    server._model = model = large()
    known = Representations({name: torch.zeros(10_000, 256) for name in ("image", "text")}, order="whole")
    modalities = {info.id: info.modalities for info in server.clients}

    def exchange(requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        for one in requests:
            own = {name: known[name] for name in modalities[one.client]}
            fields = {"representations": Representations(own, order="whole"), "num_examples": 1}
            yield Answer(one.client, Payload(fields))

    monkeypatch.setattr(session.engine, "exchange", exchange)
    monkeypatch.setattr(FedAFD, "gather", lambda *arguments: None)
    for number in range(1, 11):
        server.begin(number)
        session.experiment.algorithm.aggregate(server, session.cohort(number, ledger), known)
    counts = {name: sum(x.numel() for x in encoder.parameters()) for name, encoder in model.encoders.items()}
    assert counts == {"image": IMAGE, "text": TEXT}
    assert (IMAGE + TEXT) * size / 2**20 == pytest.approx(mib, abs=0.01)

    found: dict[tuple[str, str, str], int] = defaultdict(int)
    for line in ledger.records:
        found[line["client"], line["direction"], line["kind"]] += line["bytes"]
    for client, own in modalities.items():
        tensors = [x for name in own for x in model.encoders[name].state_dict().values()]
        held = sum(x.numel() * (size if x.is_floating_point() else x.element_size()) for x in tensors)
        trained = sum(counts[name] for name in own) * size
        assert trained <= held < 1.01 * trained  # the rest is batch statistics
        assert found[client, "down", "weights"] == held
        assert found[client, "down", "representations"] == 10 * 2 * ROWS
        assert found[client, "up", "representations"] == 10 * len(own) * ROWS
    received = sum(found["paired", "down", kind] for kind in ("weights", "representations"))
    if dtype == "float16":
        assert received / 10 / 2**20 == pytest.approx(49.26, abs=0.1)  # Table 2 of the supplement


def test_discriminators_and_branches_have_the_papers_size() -> None:
    fusion = GranularityFusion(256)
    assert sum(x.numel() for x in Discriminator(256).parameters()) == 41_217
    assert sum(x.numel() for x in fusion.pooled[0].parameters()) == 33_728
    assert sum(x.numel() for x in fusion.parameters()) == 134_912
    three = GranularityFusion(256, shared_global_branch=True)
    assert sum(x.numel() for x in three.parameters()) == 101_184


# ---- learning


def test_fused_clients_learn_topics(tmp_path: Path) -> None:
    config = three_kinds(name="fedafd", local_epochs=4, public_batches_per_epoch=2)
    del config["clients"]["image"], config["clients"]["paired"]
    words = {"name": "tokens", "length": 24, "tokenizer": {"name": "hashing", "size": 400}}
    bag = {"text": {"name": "bag", "width": 8, "view": words}}
    training = {"optimizer": {"kind": "adam", "lr": 0.03}, "batch_size": 32}
    config["clients"]["text"] = group(1, "texts", bag, training, target="topic")
    config["clients"]["text"]["model"]["dim"] = 8
    config["data"]["sources"]["texts"] |= {"train": 400, "test": 100, "difficulty": 0.0}
    session = prepared(config, tmp_path)
    accuracies = []
    for number in range(1, 4):
        play(session, number, number)
        cohort = session.cohort(number, Ledger())
        accuracies.append(session.experiment.algorithm.evaluate_clients(session.server, cohort)["text"]["accuracy"])
    assert accuracies[-1] > 2 * 100 / 6


def test_the_alignment_brings_clients_to_the_server(tmp_path: Path) -> None:
    """Means of the public representations come closer than without alignment."""
    distances = {}
    for beta in (0.0, 2.0):
        session = session_of(tmp_path / str(beta), beta=beta, local_epochs=10, discriminator=sgd(0.5))
        known = known_of(session)
        answer = asked(session, "image", known, encoders_of(session, "image"))
        mean = answer.fields["representations"]["image"].mean(0)
        distances[beta] = float((mean - known["image"].mean(0)).norm())
    assert distances[2.0] < 0.7 * distances[0.0]
