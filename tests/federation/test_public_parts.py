"""Public items without a partner and a gallery: who holds them, what crosses, what is learnt of them, and refusals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import polyfed
from by_hand import play, unit
from grids import mostly_slow
from misbehaving import contents, cut_short
from polyfed.aggregation.distinct import packed, unpacked
from polyfed.aggregation.ensemble import Ensembled
from polyfed.algorithms.shared.distiller import Distiller
from polyfed.algorithms.shared.public_exchange import PublicExchange, modality_of, row_shares
from polyfed.algorithms.shared.teacher import Ensembles
from polyfed.core.errors import ConfigError, ExchangeError, PayloadError
from polyfed.data.samples import Samples
from polyfed.federation.cohort import ReplyPolicy
from polyfed.federation.data import PublicSet
from polyfed.federation.population import Population
from polyfed.models.model import Model
from polyfed.runs.experiment import Experiment
from polyfed.runs.opened import Run
from polyfed.runs.session import Session
from polyfed.wire.messages import Answer, Request
from polyfed.wire.payload import Payload, Representations
from sessions import Excluded, distil, first_cohort, metrics, population, prepared, woken
from small_federations import Config, three_kinds

PARTS: Config = {"unpaired": {"image": 5, "text": 3}, "gallery": 4}
ROWS = {"image": 8, "text": 16, "unpaired/image": 5, "unpaired/text": 6, "gallery/image": 4, "gallery/text": 8}
"""Output -> distinct inputs, of eight images with two captions each, and as many captions of other items."""
EXCHANGES = {"local_epochs": 1, "warmup_rounds": 0}


def config_of(parts: Config | None = None, /, **algorithm: Any) -> Config:
    config = three_kinds(**({"name": "change_distillation"} | (algorithm or EXCHANGES)))
    config["data"]["sources"]["scenes"]["train"] = 40
    config["public"] |= PARTS if parts is None else parts
    return config


def opened(public: Config | None = None) -> Population:
    return population(config_of(public))


def public_of(public: Config | None = None) -> PublicSet:
    return opened(public).public


def drawn(public: PublicSet) -> dict[str, list[int]]:
    views = {name: encoder.view for name, encoder in Experiment.parse(config_of()).server.model.encoders.items()}
    pairs = public.samples(views).items.unique().tolist()
    return {"pairs": pairs} | {name: part.items.unique().tolist() for name, part in public.parts(views).items()}


# ---- who they are


def test_pairs_are_the_same_whatever_other_parts_there_are() -> None:
    alone = drawn(public_of({}))
    assert list(alone) == ["pairs"]
    for beside in (PARTS, {"gallery": 7}, {"unpaired": {"text": 2}}):
        assert drawn(public_of(beside))["pairs"] == alone["pairs"]


def test_a_reserve_leaves_clients_what_they_hold_where_as_many_items_are_public() -> None:
    populations = map(opened, ({"reserve": 8}, {"unpaired": {"image": 5, "text": 3}}, {}))
    held = [[own.holding(member) for member in own.members.values()] for own in populations]
    assert held[0] == held[1] != held[2]
    assert drawn(public_of({"reserve": 8})) == drawn(public_of({}))  # no participant sees it
    with pytest.raises(ConfigError, match=r"public\.items, public\.unpaired, public\.gallery and public\.reserve"):
        public_of({"reserve": 40}).items.tolist()


def test_parts_are_the_same_in_whatever_order_they_are_written() -> None:
    turned = {"gallery": 4, "unpaired": dict(reversed(PARTS["unpaired"].items()))}
    assert drawn(public_of(turned)) == drawn(public_of())
    assert public_of(turned).order == public_of().order


def test_parts_are_disjoint_from_each_other_and_from_all_that_is_held() -> None:
    federation = opened()
    parts = drawn(federation.public)
    assert parts["gallery/image"] == parts.pop("gallery/text")
    counts = {"pairs": 8, "unpaired/image": 5, "unpaired/text": 3, "gallery/image": 4}
    assert {name: len(items) for name, items in parts.items()} == counts
    everything = [item for items in parts.values() for item in items]
    assert len(set(everything)) == len(everything) == 20
    assert sorted(everything) == federation.public.all_items.tolist()
    held = [item for name in ("paired-0", "paired-1") for item in federation.members[name].items.tolist()]
    assert sorted(held + everything) == list(range(40))  # and everything else is held privately
    ids = {federation.public.split.ids[item] for item in everything}
    for split in ("validation", "test"):
        assert not ids & set(federation.data.split("scenes", split).ids)


def test_items_held_in_addition_are_pairs() -> None:
    config = config_of()
    config["clients"]["paired"]["also"] = "public"
    federation = population(config)
    also = [item for name in ("paired-0", "paired-1") for item in federation.members[name].holdings[1].items.tolist()]
    assert sorted(also) == federation.public.items.tolist()


def test_without_a_number_pairs_are_what_the_parts_leave() -> None:
    public = public_of(PARTS | {"items": None})
    assert len(public.items) == 40 - 5 - 3 - 4
    assert len(public.all_items) == 40


@pytest.mark.parametrize(("modality", "more"), [("image", "unpaired/image"), ("text", "unpaired/text")])
def test_views_learn_from_pairs_and_unpaired_items_of_their_modality_alone(modality: str, more: str) -> None:
    public = public_of()
    parts = drawn(public)
    expected = sorted(parts["pairs"] + parts[more])
    full = public.split.modality(modality).values.to_pylist()
    assert public.columns()[modality].values.to_pylist() == [full[item] for item in expected]


def test_the_digest_distinguishes_parts_and_is_the_old_one_without_them() -> None:
    result = [public_of(parts).order for parts in (PARTS, {}, {"gallery": 5}, {"unpaired": {"image": 5}})]
    result += [public_of(parts).order for parts in ({"gallery": 6}, {"unpaired": {"text": 5}})]
    assert len(set(result)) == len(result)
    assert public_of({"gallery": 0, "unpaired": {}}).order == result[1]
    columns = {name: column.fingerprint for name, column in public_of({"gallery": 4}).columns().items()}
    assert columns == {name: column.fingerprint for name, column in public_of({}).columns().items()}


def test_every_participant_sees_the_parts_of_its_own_modalities(tmp_path: Path) -> None:
    session = prepared(config_of(), tmp_path)
    assert {name: len(part) for name, part in session.server.public.parts.items()} == {
        "unpaired/image": 5,
        "unpaired/text": 6,
        "gallery/image": 8,  # a sample a caption, as among the pairs
        "gallery/text": 8,
    }
    for name in ("image", "text"):
        parts = woken(session, name).public.parts
        assert list(parts) == [f"unpaired/{name}", f"gallery/{name}"]
        for output, part in parts.items():
            assert part.modalities == (name,)
            assert torch.equal(part.items, session.server.public.parts[output].items)


# ---- refusals


@pytest.mark.parametrize(
    ("public", "message"),
    [
        ({"unpaired": {"audio": 3}}, "public.unpaired: 'scenes' has no 'audio'"),
        ({"gallery": 30, "unpaired": {"text": 3}}, "public.items, .* and public.reserve are together 41"),
        ({"items": None, "gallery": 41}, "public.items, .* and public.reserve are together 41"),
    ],
)
def test_parts_that_cannot_be_drawn_are_refused(public: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = public_of(public).all_items


@pytest.mark.parametrize("parts", [{"gallery": 4}, {"unpaired": {"image": 4}}])
def test_parts_are_refused_where_no_participant_learns_from_them(tmp_path: Path, parts: Config) -> None:
    message = "public.unpaired and public.gallery have no effect: the method learns from pairs"
    with pytest.raises(ConfigError, match=message):
        prepared(config_of(parts, name="fedmkd"), tmp_path)


# ---- what crosses


def test_each_distinct_input_has_a_row_and_comes_back_to_all_its_samples() -> None:
    positions = torch.tensor([0, 0, 2, 1, 2])
    values = unit(3, 4)[positions]
    rows = packed(values, positions)
    assert torch.equal(rows, unit(3, 4))
    assert torch.equal(unpacked(rows, positions), values)
    assert packed(values, None) is unpacked(values, None) is values
    assert packed(values[:0], positions[:0]).shape == (0, 4)


@pytest.mark.parametrize("output", ROWS)
@pytest.mark.parametrize("more", [-1, 1])
def test_rows_of_another_number_are_refused_with_their_sender(tmp_path: Path, output: str, more: int) -> None:
    session = prepared(config_of(), tmp_path)
    server, method = session.server, session.experiment.algorithm
    known = method.public.server_outputs(server)
    honest = method.public.to_wire(server, known, known.order)
    rows = {name: torch.cat([own, own[:1]])[: len(own) + more * (name == output)] for name, own in honest.items()}
    notes = Representations(rows, order=known.order)
    message = f"'{output}' has {ROWS[output] + more} rows, but there are {ROWS[output]} distinct inputs"
    with pytest.raises(PayloadError, match=message):
        method.public.from_wire(server, notes)
    cohort, refused = first_cohort(session), Excluded()
    cohort.listener, cohort.reply_policy = refused, lambda step: ReplyPolicy()
    layout = method.public.layout(server, known, "representations")
    answer = Payload({"representations": notes, "num_examples": 1})

    def exchange(requests: Sequence[Request], deadline: float | None) -> Iterator[Answer]:
        return iter([Answer(one.client, answer) for one in requests])

    cohort.channel = replace(cohort.channel, exchange=exchange)
    with pytest.raises(ExchangeError, match="0 of 4 clients gave a usable reply"):
        list(cohort.ask(method.fit, like=layout, representations=honest))
    assert output in refused.reasons["paired-0"]


def crossed(run: Run, client: str) -> dict[str, list[int]]:
    """Direction -> bytes of representations in each round."""
    result: dict[str, list[int]] = {"down": [0, 0], "up": [0, 0]}
    for line in run.records.transfers:
        if line.client == client and line.kind == "representations":
            result[line.direction][line.round - 1] += line.bytes
    return result


def two_rounds(**run: Any) -> Config:
    config = config_of() | {"name": "parts"}
    return config | {"run": config["run"] | {"rounds": 2, "eval_every": 2} | run}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return polyfed.run(Experiment.parse(two_rounds()), tmp_path_factory.mktemp("finished") / "run", quiet=True)


@pytest.mark.slow
def test_the_ledger_has_a_row_for_each_distinct_input(finished: Run) -> None:
    """The server sends what is digested; clients send the gallery as well. A row is d = 8 numbers of four bytes."""
    for client, modalities in {"image": ["image"], "text": ["text"], "paired-0": ["image", "text"]}.items():
        digested = sum(count for name, count in ROWS.items() if not name.startswith("gallery"))
        own = sum(count for name, count in ROWS.items() if modality_of(name) in modalities)
        assert crossed(finished, client) == {"down": [digested * 8 * 4] * 2, "up": [own * 8 * 4] * 2}, client


@pytest.mark.slow
def test_interrupted_and_resumed_on_a_real_wire_it_ends_in_the_same_bits(finished: Run, tmp_path: Path) -> None:
    config = two_rounds(engine={"name": "local", "serialize": True})
    assert contents(polyfed.resume(cut_short(config, tmp_path / "run"), quiet=True)) == contents(finished)


# ---- what is learnt


def test_shares_are_of_the_rows_that_have_a_target() -> None:
    valid = {"image": torch.tensor([True, False, True]), "unpaired/image": torch.ones(4, dtype=torch.bool)}
    valid |= {"text": torch.zeros(3, dtype=torch.bool), "unpaired/text": torch.zeros(1, dtype=torch.bool)}
    assert row_shares(valid) == {"image": 2 / 6, "unpaired/image": 4 / 6, "text": 0.0, "unpaired/text": 0.0}


@pytest.mark.parametrize("public_samples", [None, 6])
def test_every_row_weighs_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, public_samples: int | None) -> None:
    """All rows in one batch, against the mean over the rows of each modality, whatever part they are of."""
    settings = EXCHANGES | {"distiller": {"weight": 3.0}, "public": {"samples": public_samples}}
    session = prepared(config_of(**settings), tmp_path)
    method, server = session.experiment.algorithm, session.server
    exchanged, seen = server.exchanged(public_samples), list[Tensor]()
    counts = {"image": len(exchanged), "text": len(exchanged)} | {
        name: len(part) for name, part in server.public.parts.items()
    }
    targets = {
        name: Ensembled(unit(n, 8, seed=k), torch.arange(n) % 3 > 0) for k, (name, n) in enumerate(counts.items())
    }
    before = method.public.outputs(server)
    parts = {name: part for name, part in server.public.parts.items() if not name.startswith("gallery")}
    learnt = {"": server.public_set} | parts

    def in_one_batch(*given: Any, **more: Any) -> Iterable[Any]:
        for _ in server.epochs(1):
            server.model.eval()  # as the rows that the loop below looks at
            yield {name: part.batch(torch.arange(len(part))) for name, part in learnt.items()}

    inner = Distiller.distillation_loss

    def noted(*given: Any) -> Tensor:
        seen.append(inner(*given))
        return seen[-1]

    monkeypatch.setattr(PublicExchange, "part_passes", in_one_batch)
    monkeypatch.setattr(Distiller, "distillation_loss", noted)
    distil(session, targets)
    expected = 0.0
    for modality in ("image", "text"):
        distances = [
            float((row - goal).norm())
            for name in (modality, f"unpaired/{modality}")
            for row, goal, valid in zip(before[name], targets[name].values, targets[name].valid, strict=True)
            if bool(valid)
        ]
        expected += sum(distances) / len(distances)
    assert float(seen[0].detach()) == pytest.approx(expected, rel=1e-5)


def distinct(rows: Tensor) -> set[bytes]:
    """Inputs by what they hold; texts without the padding, which differs between batches."""
    return {row.numpy().tobytes().rstrip(b"\0") for row in rows}


def test_images_and_captions_of_other_items_are_not_contrasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal numbers of rows, which a contrast would take for pairs: items without a partner have equal weights."""
    config = config_of({"unpaired": {"image": 4, "text": 2}, "gallery": 4}, name="creamfl", local_epochs=1)
    session = prepared(config, tmp_path)
    method, weights, inner = session.experiment.algorithm, dict[str, list[Any]](), Ensembles.log_weights

    def noted(ensembles: Ensembles, reply: Any, output: str, values: Tensor) -> Any:
        result = inner(ensembles, reply, output, values)
        weights.setdefault(output, []).append(result)
        return result

    monkeypatch.setattr(Ensembles, "log_weights", noted)
    method.round(session.server, first_cohort(session))
    assert weights["unpaired/image"] == weights["unpaired/text"] == [0.0] * 3
    for name in ("image", "text", "gallery/image", "gallery/text"):
        assert all(len(result.unique()) > 1 for result in weights[name]), name


def rows_of(samples: Samples) -> dict[str, set[bytes]]:
    return {name: distinct(values) for name, values in samples.batch(torch.arange(len(samples))).inputs.items()}


@pytest.mark.parametrize("method", mostly_slow(["change_distillation", "creamfl", "fedafd", "fedmd"], "fedmd"))
def test_no_participant_learns_from_the_gallery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Unpaired items pass through a model with gradients, items of the gallery do not."""
    config = config_of(name=method, local_epochs=1, distiller={"epochs": 2})
    if method == "change_distillation":
        config["algorithm"]["warmup_rounds"] = 0
    session = prepared(config, tmp_path)
    learnt: dict[str, set[bytes]] = {"image": set(), "text": set()}
    embed = Model.embed

    def noted(model: Model, modality: str, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            learnt[modality] |= distinct(x)
        return embed(model, modality, x)

    monkeypatch.setattr(Model, "embed", noted)
    play(session, 1, 1)
    server, parts = session.server, session.server.public.parts
    pairs = rows_of(server.public_set)
    for modality in ("image", "text"):
        unpaired = rows_of(parts[f"unpaired/{modality}"])[modality]
        assert unpaired <= learnt[modality]
        held = set().union(
            *(rows_of(session.federation.train(member)).get(modality, set()) for member in members(session))
        )
        # two items may have one caption
        gallery = rows_of(parts[f"gallery/{modality}"])[modality] - unpaired - pairs[modality] - held
        assert gallery
        assert not gallery & learnt[modality]


def members(session: Session) -> list[Any]:
    return list(session.federation.members.values())


def test_the_gallery_judges_teacher_and_server(tmp_path: Path) -> None:
    session = play(prepared(config_of(), tmp_path), 1, 1)
    result = metrics(session)
    assert result["teacher.gallery"] == 8
    assert {"teacher.r1_sum", "student.r1_sum"} <= set(result)
    session = play(prepared(config_of(PARTS | {"gallery": 0}), tmp_path / "without"), 1, 1)
    assert metrics(session)["teacher.gallery"] == 0
