"""Names of heads: equal where heads mean the same."""

from __future__ import annotations

from typing import Any

import pytest
from papers.fedaid.objectives import MGCA, GLoRIA

from polyfed.data.source import Split
from polyfed.federation.types import head_name
from polyfed.runs.experiment import Experiment
from polyfed.tasks.classification import Classification
from polyfed.tasks.retrieval import PairRetrieval
from polyfed.tasks.vqa import VQA
from small_federations import topics


def split(source: str = "a", **classes: tuple[str, ...]) -> Split:
    return Split(source, "train", ("x",), {}, {name: name for name in classes}, classes, lambda name: None)


PETS, PETS_TURNED = ("cat", "dog"), ("dog", "cat")


@pytest.mark.parametrize(
    ("task", "other", "same"),
    [
        (Classification(), Classification(margin=1.0), True),
        (Classification(), Classification(bias=False), False),
        (Classification(non_negative=True, scale=2.0), Classification(non_negative=True, scale=4.0), False),
        (PairRetrieval(objective="info_nce"), PairRetrieval(objective="info_nce", folds=5, mask_siblings=True), True),
        (PairRetrieval(objective="info_nce"), PairRetrieval(), False),
        (GLoRIA(), GLoRIA(global_weight=2.0), True),
        (MGCA(), MGCA(prototypes=10), False),
        (VQA(), VQA(use=("text",)), False),
        (VQA(), VQA(encoders="frozen"), True),
    ],
)
def test_settings_that_shape_the_head_are_in_its_name(task: Any, other: Any, same: bool) -> None:
    data = split(label=PETS, answer=PETS)
    assert (head_name(task, data) == head_name(other, data)) is same


def test_classes_differ_by_their_names_whatever_the_source() -> None:
    first = head_name(Classification(), split("a", label=PETS))
    assert first == head_name(Classification(), split("b", label=PETS))
    assert first != head_name(Classification(), split("a", label=PETS_TURNED))
    assert first != head_name(Classification(target="kind"), split("a", kind=PETS))
    assert first != head_name(Classification(), split("a", label=PETS), "mine")


def test_digests_of_classes_are_keyed_with_the_federation() -> None:
    """And not where attackers keep sites away."""
    config, pets = topics(name="fedavg"), split(label=PETS)
    salt, another = (Experiment.parse(config | {"name": name}).spec("a", "").salt for name in ("wards", "homes"))
    names = [head_name(Classification(), pets, salt=own) for own in (salt, another, "")]
    assert len(set(names)) == 3
    assert len({len(name) for name in names}) == 1, "messages are as long"
    assert names[0] == head_name(Classification(), split("b", label=PETS), salt=salt)
    config["run"]["attackers"] = {"name": "noise", "clients": 1}
    assert not Experiment.parse(config).spec("a", "").salt


def test_classes_without_names_are_those_of_their_source() -> None:
    names = [head_name(Classification(), split(source)) for source in ("a", "b.c")]
    assert names == ["classification:label:a", "classification:label:b%2Ec"]


def test_sources_of_similar_names_have_heads_of_their_own() -> None:
    names = {head_name(Classification(), split(source)) for source in ("ag.news", "ag_news", "ag%2Enews", "ag:news")}
    assert len(names) == 4
    assert not [name for name in names if "." in name]
    assert head_name(Classification(target="a:b"), split("c")) != head_name(Classification(target="a"), split("b:c"))


def test_a_task_without_classes_is_named_by_itself() -> None:
    assert head_name(PairRetrieval(), split()) == "retrieval"
    assert head_name(PairRetrieval(objective="info_nce", learn_temperature=False), split("b")) == (
        "retrieval-info_nce-no_learn_temperature"
    )
    assert head_name(PairRetrieval(), split(), "coco") == "retrieval::coco"
