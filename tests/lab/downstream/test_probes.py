from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benches import VIT, outcome, values_of
from polyfed.core.errors import ConfigError, DataError
from polyfed.core.randomness import generator
from polyfed.data.sources.scenes import Scenes
from polyfed.lab.downstream.probe import Bench, FewShot, Gallery, Probe, RetrievalProbe, random_blocks, recalls_between
from polyfed.tasks.retrieval import PairRetrieval

FEW = {"source": "scenes", "target": "topic", "shares": [0.1, 1.0], "draws": 2}


# ---- few-shot


def test_few_shot_is_deterministic_and_reports_its_numbers_of_samples(make_bench: Any) -> None:
    bench = make_bench()
    before = {name: value.clone() for name, value in bench.subject.model.state_dict().items()}
    result = outcome(FewShot(**FEW), bench)
    assert values_of(result) == values_of(outcome(FewShot(**FEW), make_bench()))
    assert all(torch.equal(value, before[name]) for name, value in bench.subject.model.state_dict().items())
    assert [row.on for row in result.rows] == ["10 %", "100 %"]
    labels = bench.labels("scenes", "train", "image", "topic")
    wanted = sum(max(1, round(0.1 * int(n))) for n in labels.bincount() if n)
    assert [row.facts["n"] for row in result.rows] == [wanted, 40]
    assert [row.facts["n_test"] for row in result.rows] == [20, 20]
    assert all(len(each) == 2 for each in values_of(result)[0].values())
    assert len(set(values_of(result)[0]["accuracy"] + values_of(result)[0]["auroc"])) > 1  # draws differ


def test_few_shot_computes_features_once(make_bench: Any) -> None:
    bench, seen = make_bench(), list[int]()
    bench.subject.trunk("image").register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    for target in ("topic", "label"):
        outcome(FewShot(**FEW | {"target": target, "shares": [0.1], "draws": 1}), bench)
    assert sum(seen) == 40 + 12 + 20


def test_few_shot_takes_the_trunk_or_where_there_is_none_the_embedding(make_bench: Any) -> None:
    bench = make_bench()
    bench.subject.model.encoders["bare"] = torch.nn.Identity()
    assert bench.level("bare") == "embedding"
    probe = FewShot(**FEW | {"shares": [0.1], "draws": 1, "validation": None})
    assert "Features: trunk, width 12." in outcome(probe, bench).notes[0]


def test_few_shot_joins_sources_by_class_name(make_bench: Any) -> None:
    more = Scenes(train=30, validation=5, test=10, size=16, seed=3, targets={"topic": "topic"})
    probe = FewShot(**FEW | {"source": ["scenes", "more"], "shares": [1.0], "draws": 1})
    result = outcome(probe, make_bench(more=more))
    assert (result.rows[-1].facts["n"], result.rows[-1].facts["n_test"]) == (70, 30)
    assert result.data == "scenes+more.topic"


def test_a_modality_that_the_model_lacks_is_a_reason_not_an_error(make_bench: Any) -> None:
    bench = make_bench({"image": VIT})
    assert FewShot(**FEW | {"modality": "text"}).unsuitable(bench) == "random encodes image, not 'text'"
    assert RetrievalProbe(source="scenes").unsuitable(bench) == "random encodes image, not 'text'"
    assert RetrievalProbe().unsuitable(bench) == "random has no clients; give a run, or a source to search"


# ---- refusals

SETTINGS: list[tuple[type[Probe], dict[str, Any], str]] = [
    *[
        (FewShot, FEW | splits, "overlap; name different splits, or validation: null")
        for splits in ({"test": "train"}, {"test": "validation"}, {"validation": "train"})
    ],
    (FewShot, FEW | {"validation": None, "test": "train"}, "overlap"),
    (RetrievalProbe, {"between": ["image", "image"]}, "names 'image' twice"),
    (RetrievalProbe, {"cutoffs": [1, 1]}, "different"),
    (RetrievalProbe, {"batch": 1}, "2"),
]


@pytest.mark.parametrize(("probe_class", "settings", "message"), SETTINGS)
def test_settings_that_cannot_be(probe_class: type[Probe], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        probe_class(**settings)


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        (FewShot(**FEW | {"source": "nothing"}), "no source 'nothing' in the suite or the run; valid: scenes"),
        (FewShot(**FEW | {"target": "lable"}), "has no target 'lable'; did you mean 'label'"),
        (FewShot(**FEW | {"train": "trian"}), "no split 'trian'; did you mean 'train'"),
        (FewShot(**FEW | {"modality": "sound"}), "source 'scenes' has no columns.sound"),
        (FewShot(**FEW | {"source": "single"}), "tasks.task: 'single' train has a single class of 'topic'"),
    ],
)
def test_probes_that_do_not_suit_their_data(make_bench: Any, probe: Probe, message: str) -> None:
    bench = make_bench(single=Scenes(train=1, validation=5, test=5, size=16, targets={"topic": "topic"}))
    with pytest.raises((ConfigError, DataError), match=message):
        probe.check(bench, "task")


# ---- all


def test_streams_depend_on_task_draw_and_purpose() -> None:
    bench = Bench.__new__(Bench)
    bench.seed = 42
    first = bench.stream("a", 1, "x").initial_seed()
    assert first == generator(43, "downstream", "a", "x").initial_seed()
    others = [bench.stream(*key).initial_seed() for key in [("b", 1, "x"), ("a", 2, "x"), ("a", 1, "y")]]
    assert len({first, *others}) == 4


# ---- retrieval

Pair = tuple[Gallery, Gallery]


def pairs(n: int, items: int | None = None, seed: int = 0) -> Pair:
    stream = torch.Generator().manual_seed(seed)
    first, noise = torch.randn(n, 6, generator=stream), torch.randn(n, 6, generator=stream)
    matches = torch.arange(n) if items is None else torch.randint(items, (n,), generator=stream)
    return Gallery(F.normalize(first, dim=1), matches), Gallery(F.normalize(first + noise, dim=1), matches)


def naive(queries: Tensor, gallery: Tensor, matches: list[int], cutoff: int) -> list[bool]:
    """Whether the best right answer is among the first, where every wrong one that scores as high comes first."""
    hits = []
    for number, query in enumerate(queries.double()):
        scores = (gallery.double() @ query).tolist()
        best = max(s for s, m in zip(scores, matches, strict=True) if m == matches[number])
        rank = sum(s >= best - 1e-9 for s, m in zip(scores, matches, strict=True) if m != matches[number])
        hits.append(rank < cutoff)
    return hits


@pytest.mark.parametrize("items", [None, 9])
@pytest.mark.parametrize("size", [4, 8, 30, 64])
def test_block_recalls_are_those_of_a_loop(size: int, items: int | None) -> None:
    first, second = pairs(30, items)
    blocks = random_blocks(30, size, torch.Generator().manual_seed(3))
    galleries = [(first.at(index), second.at(index)) for index in blocks]
    result = recalls_between(galleries, (1, 5))
    for cutoff in (1, 5):
        hits: dict[str, list[bool]] = {"forward": [], "backward": []}
        for a, b in galleries:
            hits["forward"] += naive(a.values, b.values, a.matches.tolist(), cutoff)
            hits["backward"] += naive(b.values, a.values, a.matches.tolist(), cutoff)
        for way, values in hits.items():
            assert result[way][cutoff] == pytest.approx(100 * sum(values) / len(values))


def test_blocks_are_a_seeded_division_of_all() -> None:
    result = random_blocks(30, 8, torch.Generator().manual_seed(0))
    assert [len(part) for part in result] == [8, 8, 8, 6]
    assert sorted(torch.cat(result).tolist()) == list(range(30))
    again, other = (random_blocks(30, 8, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert torch.equal(torch.cat(result), torch.cat(again))
    assert not torch.equal(torch.cat(result), torch.cat(other))


# ---- probes


def test_retrieval_on_a_source_reports_its_galleries(make_bench: Any) -> None:
    (row,) = outcome(RetrievalProbe(source="scenes", batch=32, draws=2), make_bench()).rows
    assert row.facts == {"n": 100, "batches": 4, "gallery": 32, "last_gallery": 4}
    assert len(row.values["text_to_image_r@1"]) == 2


def test_recalls_in_a_batch_of_all_are_those_of_the_retrieval_task(make_bench: Any) -> None:
    bench = make_bench()
    (row,) = outcome(RetrievalProbe(source="scenes", batch=100, draws=2), bench).rows
    samples = bench.samples("scenes", "test", "image", "text")
    expected = PairRetrieval(in_batch=100).evaluate(bench.subject.model, None, samples, batch_size=16)
    for name in ("image_to_text_r@5", "text_to_image_r@1"):
        assert row.values[name] == [pytest.approx(expected[f"{name}_batch100"])] * 2


def test_clients_mean_worst_and_disparity(make_bench: Any) -> None:
    bench = make_bench()
    complete = bench.samples("scenes", "test", "image", "text")
    tests = {"a": complete.subset(torch.arange(40)), "b": complete.subset(torch.arange(40, 100))}
    tests["c"] = complete.only(["image"])
    object.__setattr__(bench.subject, "clients", lambda: tests)
    result = {row.on: row for row in outcome(RetrievalProbe(batch=16, draws=3), bench).rows}
    assert list(result) == ["a", "b", "mean over clients", "worst client", "disparity"]
    for metric in result["a"].values:
        pairs = list(zip(result["a"].values[metric], result["b"].values[metric], strict=True))
        assert list(result["mean over clients"].values[metric]) == pytest.approx([(a + b) / 2 for a, b in pairs])
        assert list(result["worst client"].values[metric]) == [min(pair) for pair in pairs]
        assert list(result["disparity"].values[metric]) == pytest.approx([abs(a - b) for a, b in pairs])


def test_clients_whose_every_search_would_succeed_are_left_out_and_named(make_bench: Any) -> None:
    """A lone sample, and the five texts of one image, which are all right answers to each other."""
    bench = make_bench()
    complete = bench.samples("scenes", "test", "image", "text")
    lone, siblings, more = (complete.subset(torch.arange(*part)) for part in ((0, 1), (0, 5), (5, 25)))
    object.__setattr__(bench.subject, "clients", lambda: {"lone": lone, "one picture": siblings, "more": more})
    result = outcome(RetrievalProbe(batch=8, draws=2), bench)
    assert [row.on for row in result.rows] == ["more", "mean over clients", "worst client", "disparity"]
    assert result.rows[1].facts == {"clients": 1}
    assert result.notes[-1].endswith("none that do not answer each other: lone, one picture.")
    object.__setattr__(bench.subject, "clients", lambda: {"more": more})
    assert "Left out" not in " ".join(outcome(RetrievalProbe(draws=1), bench).notes)


@pytest.mark.parametrize("clients", [[], [1], [1, 5]])
def test_no_client_can_be_searched(make_bench: Any, clients: list[int]) -> None:
    bench = make_bench()
    complete = bench.samples("scenes", "test", "image", "text")
    tests = {str(count): complete.subset(torch.arange(count)) for count in clients}
    object.__setattr__(bench.subject, "clients", lambda: tests)
    with pytest.raises(DataError, match=r"tasks\.task: no client has two test samples with image and text that do not"):
        RetrievalProbe().check(bench, "task")


def test_a_source_of_a_single_sample_is_refused(make_bench: Any) -> None:
    bench = make_bench(one=Scenes(test=1, size=16, columns={"image": "image", "text": "text"}))
    probe = RetrievalProbe(source="one")
    with pytest.raises(DataError, match=r"'one' test has 1 sample\(s\) and no two that do not answer each other"):
        probe.check(bench, "task")
