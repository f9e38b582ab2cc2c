"""What holds of weightings whatever their formula: properties, edges, and what each needs."""

import math
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from weighting_clients import CLASSES, DIM, SIZE, choose, client, ensemble, evidence, known, labels, unit, voter

from polyfed.aggregation.ensemble import Ensemble
from polyfed.aggregation.weighting import Weighting
from polyfed.core.errors import ConfigError, PayloadError
from polyfed.core.settings import Settings

NAMES = ("count", "entropy", "gca", "iot", "margin", "mean", "paired_only", "sed", "variance")
COMPARING = ("entropy", "gca", "margin", "sed", "variance")
"""Weightings that look at what the client says."""


# ---- properties


@pytest.mark.parametrize("name", sorted(set(COMPARING) - {"gca"}))  # Eq. 4 takes inner products as they come
def test_the_scale_of_a_client_plays_no_part_in_cosines(name):
    one = client(1)
    scaled = SimpleNamespace(values=7 * one.values, examples=one.examples, modalities=1)
    weigh = choose(name).log_weights
    torch.testing.assert_close(weigh(evidence(scaled)), weigh(evidence(one)))


@pytest.mark.parametrize("name", NAMES)
def test_a_client_without_a_modality_does_not_count_in_it(name):
    both, only = client(0, modalities=2), client(1, modalities=2)
    text = SimpleNamespace(values=known()["b"] + 0.1 * unit(SIZE, DIM, seed=7), examples=5, modalities=2)
    found = {}
    for output, sent in (("a", [both, only]), ("b", [text])):
        found[output] = ensemble(choose(name), sent, output=output)
    assert found["a"].weights().shape == (2, SIZE)
    valid = found["b"].result().valid
    torch.testing.assert_close(found["b"].result().values[valid], text.values[valid])
    assert bool(valid.any())


PICTURES = torch.arange(SIZE) // 3


@pytest.mark.parametrize("fields", [{}, {"mask_siblings": True}, {"include_self": True}])
@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize("repeated", ["a", "b", "ab"])
def test_comparing_distinct_rows_is_comparing_all(name, fields, repeated):
    if fields.keys() - type(choose(name)).model_fields.keys():
        pytest.skip("no such setting")
    weighting, sent = choose(name, **fields), client(1)
    server = {other: g[PICTURES] if other in repeated else g for other, g in known().items()}
    if "a" in repeated:
        sent.values = sent.values[PICTURES]
    places = dict.fromkeys(repeated, PICTURES)
    ours, plain = (
        weighting.log_weights(evidence(sent, of=server, items=PICTURES, inverse_index=how)) for how in (places, {})
    )
    torch.testing.assert_close(ours, plain)


# ---- edges


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"gca", "variance"}))
def test_a_single_public_sample_is_the_mean_of_the_right(name):
    sent = [client(seed, modalities=2, size=1) for seed in (0, 0)]
    torch.testing.assert_close(ensemble(choose(name), sent).result().values, sent[0].values)


def test_a_single_public_sample_has_no_contrast_and_no_variance():
    assert choose("gca").log_weights(evidence(client(0, size=1))).tolist() == [0.0]
    assert choose("variance").log_weights(evidence(client(0, size=1))).tolist() == [-math.inf]


def test_entropies_below_the_floor_weigh_alike():
    sure, surer = (
        SimpleNamespace(values=scale * torch.eye(CLASSES)[labels()], examples=1, modalities=1) for scale in (30.0, 1e4)
    )
    how = {"of": {}, "labels": labels()}
    found = ensemble(choose("entropy"), [sure, surer], **how).weights()
    torch.testing.assert_close(found, torch.full((2, SIZE), 0.5, dtype=torch.float64))
    assert choose("entropy").log_weights(evidence(sure, **how)).tolist() == pytest.approx([1000.0] * SIZE)
    assert choose("entropy", floor=0.5).log_weights(evidence(sure, **how)).tolist() == [2.0] * SIZE


def test_rows_that_nobody_gets_right_have_no_target():
    wrong = SimpleNamespace(values=torch.eye(CLASSES)[(labels() + 1) % CLASSES], examples=1, modalities=1)
    half = SimpleNamespace(values=wrong.values.clone(), examples=1, modalities=1)
    half.values[:6] = torch.eye(CLASSES)[labels()[:6]]
    found = ensemble(choose("entropy"), [wrong, half], of={}, labels=labels()).result()
    assert found.valid.tolist() == [True] * 6 + [False] * 6
    torch.testing.assert_close(found.values[:6], half.values[:6].double())
    assert found.values[6:].abs().sum() == 0


def test_constant_scores_have_no_weight_by_variance():
    flat = SimpleNamespace(values=torch.ones(SIZE, CLASSES), examples=1, modalities=1)
    assert choose("variance").log_weights(evidence(flat, of={})).tolist() == [-math.inf] * SIZE


def test_one_class_has_no_margin():
    alone = SimpleNamespace(values=unit(SIZE, 1), examples=1, modalities=1)
    assert choose("margin").log_weights(evidence(alone, of={})).tolist() == [0.0] * SIZE


@pytest.mark.parametrize("name", ["count", "iot"])
def test_a_client_without_samples_does_not_count(name):
    empty = SimpleNamespace(values=unit(SIZE, DIM), examples=0, modalities=2)
    assert choose(name).log_weights(evidence(empty)) == -math.inf


@pytest.mark.parametrize("name", COMPARING)
def test_nan_stays_in_its_row_and_is_refused_by_the_ensemble(name):
    spoiled = client(1)
    spoiled.values = spoiled.values.clone()
    spoiled.values[3, 0] = math.nan
    logs, keep = choose(name).log_weights(evidence(spoiled)), torch.arange(SIZE) != 3
    torch.testing.assert_close(logs[keep], choose(name).log_weights(evidence(client(1)))[keep])
    with pytest.raises(PayloadError, match="NaN"):
        Ensemble(SIZE, DIM).add(spoiled.values, logs)
    without = Ensemble(SIZE, DIM)
    without.add(spoiled.values, logs.masked_fill(~keep, -math.inf))
    assert without.result().valid.tolist() == (keep & (logs > -math.inf)).tolist()


# ---- what each needs


def test_all_are_found_by_name():
    assert tuple(Weighting.available()) == NAMES

    class Method(Settings):
        weights: Weighting = choose("gca")

    assert Method.model_validate({"weights": {"name": "sed", "temperature": 0.1}}).weights == choose(
        "sed", temperature=0.1
    )
    assert Method().model_dump(mode="json")["weights"]["name"] == "gca"


@pytest.mark.parametrize("name", NAMES)
def test_needs_are_declared_and_are_the_only_needs(name):
    weighting, vote = choose(name), voter(1)
    assert weighting.needs_partner == (name == "gca")
    assert weighting.needs_labels == (name in ("gca", "sed", "entropy"))
    alone, unlabelled = evidence(client(1), of={"a": known()["a"]}), evidence(vote, output="class", of={})
    for need, lacking in ((weighting.needs_partner, alone), (weighting.needs_labels, unlabelled)):
        if need:
            with pytest.raises(ConfigError, match=r"another modality|true classes"):
                weighting.log_weights(lacking)
        else:
            weighting.log_weights(lacking)


@pytest.mark.parametrize("name", ["gca", "sed", "entropy", "margin"])
def test_masking_siblings_needs_items(name):
    with pytest.raises(ConfigError, match="needs the items"):
        choose(name, mask_siblings=True).log_weights(evidence(client(1)))


@pytest.mark.parametrize("name", ["sed", "entropy", "margin", "variance"])
def test_a_modality_that_the_server_lacks_is_refused(name):
    with pytest.raises(ConfigError, match=r"no representations of 'z'.*\['a', 'b', 'c'\]"):
        choose(name).log_weights(evidence(client(1), output="z"))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"name": "gca", "tau": 0}, "greater than 0"),
        ({"name": "sed", "temperature": -1}, "greater than 0"),
        ({"name": "entropy", "floor": 0}, "greater than 0"),
        ({"name": "sedd"}, "did you mean 'sed'"),
        ({"name": "margin", "floor": 1}, "unknown key 'floor'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, match):
    with pytest.raises(ValidationError, match=match):
        Weighting.model_validate(fields)
