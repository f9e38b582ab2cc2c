"""Answers as classes, worked out by hand and against plain loops."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from pydantic import ValidationError

from polyfed.data.sources.questions import (
    ANY_KIND,
    OTHER,
    AskedQuestion,
    QuestionKind,
    kind_of,
    learn_answers,
    one_answer,
    plain_answer,
    plain_answers,
)

COUNTING = QuestionKind(name="number", question="^how many")
TRUTH = QuestionKind(name="yes_no", answer="yes|no")
ASKED = [
    AskedQuestion("how many cats are there", "2"),
    AskedQuestion("how many dogs are there", "2"),
    AskedQuestion("how many ants are there", "3"),
    AskedQuestion("is there a cat", "yes"),
    AskedQuestion("what is there", "a cat"),
    AskedQuestion("what else is there", "no"),
]


def test_the_table_goes_by_frequency_then_by_the_alphabet():
    learnt = learn_answers(ASKED, (), None)
    assert learnt.table == ("2", "3", "a cat", "no", "yes")
    assert learnt.names == (*learnt.table, OTHER)
    assert learn_answers(ASKED, (), 2).table == ("2", "3")


def test_it_does_not_depend_on_the_order_of_the_questions():
    first = learn_answers(ASKED, (COUNTING, TRUTH), 3)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(ASKED))
        assert learn_answers([ASKED[k] for k in order], (COUNTING, TRUTH), 3) == first


def test_answers_outside_the_table_share_the_last_class():
    learnt = learn_answers(ASKED, (), 2)
    assert learnt.number(["3", "2", "yes", "never heard"]) == [1, 0, 2, 2]


def test_a_given_table_keeps_its_order_and_guesses_stay_those_of_training():
    learnt = learn_answers(ASKED, (COUNTING,), 1, ("Yes", "3"))
    assert learnt.table == ("yes", "3")
    assert learnt.number(["yes", "3", "2"]) == [0, 1, 2]
    assert learnt.guesses([0]) == [2]  # "2", which this table lacks


def test_kinds_are_those_of_the_first_rule_that_matches():
    kinds = (COUNTING, TRUTH, QuestionKind(name="both", question="^what", answer="a .*"))
    assert [kind_of(kinds, one) for one in ASKED] == [0, 0, 0, 1, 2, 1]
    assert kind_of(kinds, AskedQuestion("what", "cats")) == 3
    assert learn_answers(ASKED, kinds, None).kind_names == ("number", "yes_no", "both", ANY_KIND)


def test_an_answer_pattern_is_of_the_whole_answer_and_a_question_pattern_of_a_part():
    assert not TRUTH.matches(AskedQuestion("is it", "yes and no"))
    assert QuestionKind(name="cat", question="cat").matches(AskedQuestion("how many cats", "2"))


def test_guesses_equal_a_loop_over_random_questions():
    rng = np.random.default_rng(3)
    asked = [AskedQuestion(f"q{rng.integers(4)}", f"a{rng.integers(6)}") for _ in range(300)]
    kinds = tuple(QuestionKind(name=f"k{k}", question=f"q{k}") for k in range(3))
    learnt = learn_answers(asked, kinds, 4)
    expected = []
    for k in range(4):
        counts = Counter(one.answer for one in asked if one.question == f"q{k}")
        best = min(counts, key=lambda answer: (-counts[answer], answer))
        expected.append(learnt.table.index(best) if best in learnt.table else 4)
    assert learnt.guesses(range(4)) == expected


def test_a_kind_that_training_lacks_is_guessed_as_all_are():
    learnt = learn_answers(ASKED, (COUNTING, TRUTH, QuestionKind(name="never", question="zebra")), None)
    assert [learnt.table[k] for k in learnt.guesses([0, 1, 2])] == ["2", "no", "2"]
    assert learnt.guesses([3]) == [learnt.table.index("a cat")]


@pytest.mark.parametrize(
    ("given", "several", "expected"),
    [
        ("  A  Cat ", "set", "a cat"),
        (["table", "Chair"], "set", "chair, table"),
        (["chair", "table", "chair"], "set", "chair, table"),
        (["no", "yes", "yes"], "majority", "yes"),
        (["b", "a", "a", "b"], "majority", "b"),
        (("x",), "majority", "x"),
    ],
)
def test_one_class_of_several_answers(given, several, expected):
    assert one_answer(plain_answers(given), several) == expected


@pytest.mark.parametrize("given", [None, [], "", " ", ["a", ""], [1, 2], ["a", None]])
def test_what_is_no_answer_is_refused(given):
    with pytest.raises(ValueError, match=re.escape(repr(given))):
        plain_answers(given)


def test_plain():
    assert plain_answer(" What\tIS  it ") == "what is it"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "x"}, "no pattern"),
        ({"name": "other", "answer": "x"}, "no rule matches"),
        ({"name": "Yes/No", "answer": "x"}, "pattern"),
        ({"name": "x", "answer": "("}, "answer '\\(' is not a regular expression"),
    ],
)
def test_useless_rules_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        QuestionKind.model_validate(settings)
