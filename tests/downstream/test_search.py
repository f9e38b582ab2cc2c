from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_outcomes import outcome

from polyfed.core.errors import DataError
from polyfed.data.sources.parquet import Parquet
from polyfed.data.sources.scenes import Scenes
from polyfed.downstream.probes.out_of_domain import OutOfDomain
from polyfed.downstream.probes.retrieval import PairRetrieval
from polyfed.tasks.retrieval import PairRetrieval as Task


def test_retrieval_on_a_source_reports_its_galleries(make_bench: Any) -> None:
    (row,) = outcome(PairRetrieval(source="scenes", batch=32, draws=2), make_bench()).rows
    assert row.facts == {
        "n": 100,
        "batches": 4,
        "gallery": 32,
        "last_gallery": 4,
        "image_gallery_full": 20,
        "text_gallery_full": 100,
    }
    assert len(row.values["text_to_image_r@1"]) == 2
    assert len(row.values["text_to_image_r@1_full"]) == 1
    for way in ("image_to_text", "text_to_image"):  # five texts of each of 20 pictures
        assert row.values[f"chance_{way}_r@1_full"] == [pytest.approx(5)]
    assert row.values["chance_text_to_image_r@10_full"] == [pytest.approx(50)]
    assert all(1 / 32 < value / 100 < 1 / 4 for value in row.values["chance_r@1"])


def test_full_recalls_are_those_of_the_retrieval_task(make_bench: Any) -> None:
    bench = make_bench()
    (row,) = outcome(PairRetrieval(source="scenes"), bench).rows
    samples = bench.pairs("scenes", "test", ("image", "text"))
    expected = Task().evaluate(bench.subject.model, None, samples, batch_size=16)
    for name in ("image_to_text_r@1", "image_to_text_r@10", "text_to_image_r@5"):
        assert row.values[f"{name}_full"] == [pytest.approx(expected[name])]


def test_a_batch_of_all_is_that_of_the_retrieval_task(make_bench: Any) -> None:
    bench = make_bench()
    (row,) = outcome(PairRetrieval(source="scenes", batch=100, draws=2), bench).rows
    samples = bench.pairs("scenes", "test", ("image", "text"))
    expected = Task(in_batch=100).evaluate(bench.subject.model, None, samples, batch_size=16)
    for name in ("image_to_text_r@5", "text_to_image_r@1"):
        assert row.values[name] == [pytest.approx(expected[f"{name}_batch100"])] * 2


def test_clients_mean_worst_and_disparity(make_bench: Any) -> None:
    bench = make_bench()
    whole = bench.pairs("scenes", "test", ("image", "text"))
    tests = {"a": whole.subset(torch.arange(40)), "b": whole.subset(torch.arange(40, 100)), "c": whole.only(["image"])}
    object.__setattr__(bench.subject, "clients", lambda: tests)
    found = {row.on: row for row in outcome(PairRetrieval(batch=16, draws=3), bench).rows}
    assert list(found) == ["a", "b", "mean over clients", "worst client", "disparity"]
    for metric in found["a"].values:
        pairs = list(zip(found["a"].values[metric], found["b"].values[metric], strict=True))
        assert list(found["mean over clients"].values[metric]) == pytest.approx([(a + b) / 2 for a, b in pairs])
        assert list(found["worst client"].values[metric]) == [min(pair) for pair in pairs]
        assert list(found["disparity"].values[metric]) == pytest.approx([abs(a - b) for a, b in pairs])


def test_matches_of_the_samples_are_right_answers(make_bench: Any) -> None:
    bench = make_bench()
    whole = bench.pairs("scenes", "test", ("image", "text"))
    halves = replace(whole, matches=whole.items % 2)  # ten pictures and fifty texts each
    object.__setattr__(bench.subject, "clients", lambda: {"a": halves})
    row = outcome(PairRetrieval(draws=1, batch=100), bench).rows[0]
    for way in ("image_to_text", "text_to_image"):
        assert row.values[f"chance_{way}_r@1_full"] == [pytest.approx(50)]
        assert row.values[f"{way}_r@10_full"][0] >= row.values[f"{way}_r@1_full"][0] > 5
    assert row.values["chance_r@1"] == [pytest.approx(50)]


def test_clients_whose_every_search_would_succeed_are_left_out_and_named(make_bench: Any) -> None:
    """A lone sample, and the five texts of one picture, which are all right answers to each other."""
    bench = make_bench()
    whole = bench.pairs("scenes", "test", ("image", "text"))
    lone, siblings, more = (whole.subset(torch.arange(*part)) for part in ((0, 1), (0, 5), (5, 25)))
    object.__setattr__(bench.subject, "clients", lambda: {"lone": lone, "one picture": siblings, "more": more})
    found = outcome(PairRetrieval(batch=8, draws=2), bench)
    assert [row.on for row in found.rows] == ["more", "mean over clients", "worst client", "disparity"]
    assert found.rows[1].facts == {"clients": 1}
    assert found.notes[-1].endswith("none that do not answer each other: lone, one picture.")
    object.__setattr__(bench.subject, "clients", lambda: {"more": more})
    assert "Left out" not in " ".join(outcome(PairRetrieval(draws=1), bench).notes)


@pytest.mark.parametrize("clients", [[], [1], [1, 5]])
def test_no_client_can_be_searched(make_bench: Any, clients: list[int]) -> None:
    bench = make_bench()
    whole = bench.pairs("scenes", "test", ("image", "text"))
    tests = {str(count): whole.subset(torch.arange(count)) for count in clients}
    object.__setattr__(bench.subject, "clients", lambda: tests)
    with pytest.raises(DataError, match=r"tasks\.task: no client has two test samples with image and text that do not"):
        PairRetrieval().check(bench, "task")


@pytest.mark.parametrize("kind", [PairRetrieval, OutOfDomain])
def test_a_source_of_a_single_sample_is_refused(make_bench: Any, kind: Any) -> None:
    bench = make_bench(one=Scenes(test=1, size=16, columns={"image": "image", "text": "text"}))
    probe = PairRetrieval(source="one") if kind is PairRetrieval else OutOfDomain(sources=("scenes", "one"))
    with pytest.raises(DataError, match=r"'one' test has 1 sample\(s\) and no two that do not answer each other"):
        probe.check(bench, "task")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"between": ["image", "image"]}, "names 'image' twice"), ({"cutoffs": [1, 1]}, "different"), ({"batch": 1}, "2")],
)
def test_retrieval_settings(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PairRetrieval(**settings)


def test_data_that_it_was_trained_on_are_no_other_domain(make_bench: Any) -> None:
    night = Scenes(test=10, size=16, domain="night")
    bench = make_bench(night=night)
    probe = OutOfDomain(sources=("scenes", "night"))
    assert [row.on for row in outcome(probe, bench).rows] == ["scenes", "night"]
    object.__setattr__(bench.subject, "known", (bench.data.sources["scenes"].model_copy(update={"targets": {}}),))
    found = outcome(probe, bench)
    assert [row.on for row in found.rows] == ["night"]
    assert found.notes[-1] == "Left out, as the model was trained on it: scenes."
    assert OutOfDomain(sources=("scenes",)).unsuitable(bench) == "random was trained on scenes"


def test_the_run_may_write_a_folder_otherwise_than_the_suite(make_bench: Any, tmp_path: Path) -> None:
    bench = make_bench(other=Parquet(path="medpix2"))
    object.__setattr__(bench.data, "dir", tmp_path)
    object.__setattr__(bench.subject, "known", (Parquet(path=str(tmp_path / "medpix2")),))
    assert OutOfDomain(sources=("other",)).unsuitable(bench) == "random was trained on other"
