"""The source ``questions``, over tables in every layout and over scenes, and answers as classes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from polyfed.core.errors import DataError
from polyfed.data.assembly import assemble
from polyfed.data.scenery import ANSWERS
from polyfed.data.sources import questions
from polyfed.data.view import DataContext
from polyfed.data.views.tokens import Tokens

TRAIN = {
    "questions": [["How many?", "What?"], ["What?"], ["how many?", "how many?"]],
    "answers": [[["2"], ["Chair", "table"]], [["table", "chair"]], [["2"], ["1"]]],
}
TEST = {"questions": [["what?"], ["how many?", "why?"]], "answers": [[["chair"]], [["1"], ["2"]]]}
COUNTING = {"name": "number", "question": "^how many"}


def write(folder: Path, **splits: dict[str, list[object]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, columns in splits.items():
        rows = len(columns["questions"])
        ids = [f"{name}-{row}" for row in range(rows)]
        pq.write_table(pa.table({"id": ids, "number": list(range(rows)), **columns}), folder / f"{name}.parquet")
    return folder


def source(folder: Path, **settings: object) -> questions.Questions:
    of = {"name": "parquet", "path": str(folder), "id": "id", "columns": {"text": "questions"}}
    return questions.Questions.model_validate({"of": of, "kinds": [COUNTING]} | settings)


def targets(made: questions.Questions, split: str, cache: Path) -> dict[str, list[int]]:
    opened = made.open(split, name="qa", data_dir=None)
    samples = assemble(opened, {"text": Tokens.model_validate({"tokenizer": "hashing"})}, DataContext(cache))
    return {name: values.tolist() for name, values in samples.targets.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "qa", train=TRAIN, test=TEST)


def test_classes_are_learnt_from_training_answers_alone(folder: Path, tmp_path: Path):
    made = source(folder)
    for split in ("train", "test"):
        opened = made.open(split, name="qa", data_dir=None)
        assert opened.classes["answer"] == ("2", "chair, table", "1", questions.OTHER)
        assert opened.classes["kind"] == ("number", "other")
    assert targets(made, "train", tmp_path)["answer"] == [0, 1, 1, 0, 2]
    assert targets(made, "test", tmp_path)["answer"] == [3, 2, 0]


def test_other_test_answers_change_nothing(folder: Path, tmp_path: Path):
    before = source(folder).open("train", name="qa", data_dir=None).classes
    swamped = {"questions": [["what?"] * 50], "answers": [[["zebra"]] * 50]}
    other = write(tmp_path / "swamped", train=TRAIN, test=swamped)
    assert source(other).open("test", name="qa", data_dir=None).classes == before
    assert set(targets(source(other), "test", tmp_path)["answer"]) == {3}


def test_ids_columns_and_other_targets_are_those_of_the_wrapped_source(folder: Path, tmp_path: Path):
    made = source(folder, targets={"number": "number"})
    assert made.columns == {"text": "questions"}
    opened = made.open("test", name="qa", data_dir=None)
    assert list(opened.ids) == ["test-0", "test-1"]
    assert opened.source == "qa"
    assert targets(made, "test", tmp_path)["number"] == [0, 1, 1]


def test_one_row_a_question(tmp_path: Path):
    flat = {"questions": ["what?", "how many?", "what?"], "answers": ["Table", "2", "table"]}
    made = source(write(tmp_path / "flat", train=flat, test=flat))
    expected = {"answer": [0, 1, 0], "kind": [1, 0, 1], "prior": [0, 0, 0], "kind_prior": [0, 1, 0]}
    assert targets(made, "test", tmp_path) == expected


def test_lists_of_answers_in_rows_of_one_question(tmp_path: Path):
    flat = {"questions": ["what?", "what?"], "answers": [["b", "a"], ["a", "b", "b"]]}
    made = source(write(tmp_path / "flat", train=flat))
    assert made.open("train", name="qa", data_dir=None).classes["answer"] == ("a, b", questions.OTHER)
    counted = made.model_copy(update={"several": "majority"})
    assert counted.open("train", name="qa", data_dir=None).classes["answer"] == ("b", questions.OTHER)


def test_votes_are_the_classes_of_all_answers_whatever_their_number(tmp_path: Path):
    flat = {"questions": ["what?", "what?"], "answers": [["b", "A", "b"], ["a", "c", "b", "B"]]}
    folder = write(tmp_path / "flat", train=flat)
    assert "votes" not in targets(source(folder), "train", tmp_path)
    counted = targets(source(folder, several="majority", most=1), "train", tmp_path)["votes"]
    assert counted == [[0, 1, 0, -1], [1, 1, 0, 0]]


def test_answers_may_be_structs_with_a_text(tmp_path: Path):
    def given(*texts: str) -> list[dict[str, object]]:
        return [{"answer": text, "answer_id": k} for k, text in enumerate(texts)]

    plain = {"questions": [["a", "b"], ["c"]], "answers": [[["x", "y", "y"], ["x"]], [["z", "z"]]]}
    structs = {**plain, "answers": [[given("x", "y", "y"), given("x")], [given("z", "z")]]}
    ours, theirs = (
        targets(source(write(tmp_path / name, train=columns), several="majority"), "train", tmp_path)
        for name, columns in (("plain", plain), ("structs", structs))
    )
    assert ours == theirs
    assert ours["votes"] == [[0, 1, 1], [0, -1, -1], [2, 2, -1]]


def test_numbers_without_names_are_their_own(tmp_path: Path):
    made = source(write(tmp_path / "n", train={"questions": [["a", "b"], ["c"]], "answers": [[7, 9], [9]]}))
    assert made.open("train", name="qa", data_dir=None).classes["answer"] == ("9", "7", questions.OTHER)


def test_named_classes_are_renumbered_by_frequency(tmp_path: Path):
    scenes = {"name": "scenes", "train": 30, "test": 8, "columns": {"text": "questions"}}
    made = questions.Questions.model_validate({"of": scenes, "most": 6})
    opened, inner = (
        form.open("train", name="s", data_dir=None)
        for form in (made, made.of.model_copy(update={"targets": {"answer": "answers"}}))
    )
    given = [ANSWERS[k] for row in inner.read("answers").values.to_pylist() for k in row]
    table = opened.classes["answer"]
    assert len(table) == 7
    assert sorted(table[:6], key=lambda name: (-given.count(name), name)) == list(table[:6])
    assert min(given.count(name) for name in table[:6]) >= max(given.count(n) for n in ANSWERS if n not in table)
    result = targets(made, "train", tmp_path)["answer"]
    assert [table[k] for k in result] == [name if name in table else questions.OTHER for name in given]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"questions": [["a", "b"]], "answers": [[["1"]]]}, "row 0: lists of different length"),
        ({"questions": [["a"], ["b"]], "answers": [[["1"]], [[]]]}, r"row 1, entry 0: .*not an answer"),
        ({"questions": [["a"]], "answers": [[None]]}, "row 0, entry 0: no value"),
        ({"questions": [["a"]], "answers": ["1"]}, "one answer per item"),
        ({"questions": ["a", "b"], "answers": ["1", None]}, r"row 1: None is not an answer"),
        ({"questions": [["a"]], "answers": [[1.5]]}, "1.5 is not an answer"),
        ({"questions": ["a"], "answers": [[{"answer": None}]]}, r"row 0: \[None\] is not an answer"),
        ({"questions": ["a"], "answers": [[{"reply": "x"}]]}, "without a part 'answer'"),
    ],
)
def test_what_cannot_be_answered_is_named(tmp_path: Path, columns: dict[str, list[object]], message: str):
    made = source(write(tmp_path / "bad", train=columns))
    with pytest.raises(DataError, match=message):
        made.open("train", name="qa", data_dir=None)


def test_missing_training_split_and_columns_are_named(folder: Path):
    with pytest.raises(DataError, match=r"no split 'trian'.*did you mean 'train'"):
        source(folder, train_split="trian").open("test", name="qa", data_dir=None)
    with pytest.raises(DataError, match=r"no column 'answer'.*did you mean 'answers'"):
        source(folder, answers="answer").open("test", name="qa", data_dir=None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": {"kind": "number"}}, "target 'kind'"),
        ({"kinds": [COUNTING, COUNTING]}, "different names"),
        ({"table": ["yes", "Yes"]}, "answer 'yes' .* repeated"),
        ({"table": ["yes", questions.OTHER]}, "cannot be a class"),
        ({"several": "first"}, "several"),
        ({"most": 0}, "most"),
    ],
)
def test_settings_that_contradict_themselves(folder: Path, settings: dict[str, object], message: str):
    with pytest.raises(ValidationError, match=message):
        source(folder, **settings)


def test_targets_by_settings_are_those_of_an_open_split(folder: Path) -> None:
    for own in ({}, {"place": "number"}):
        made = source(folder, targets=own)
        assert set(made.target_names) == set(made.open("train", name="qa", data_dir=None).targets)


NUMBER = questions.QuestionKind(name="number", question="^how many")
TRUTH = questions.QuestionKind(name="yes_no", answer="yes|no")
ASKED = [
    questions.AskedQuestion("how many cats are there", "2"),
    questions.AskedQuestion("how many dogs are there", "2"),
    questions.AskedQuestion("how many ants are there", "3"),
    questions.AskedQuestion("is there a cat", "yes"),
    questions.AskedQuestion("what is there", "a cat"),
    questions.AskedQuestion("what else is there", "no"),
]


def test_the_table_goes_by_frequency_then_by_the_alphabet():
    learnt = questions.learn_answers(ASKED, (), None)
    assert learnt.table == ("2", "3", "a cat", "no", "yes")
    assert learnt.names == (*learnt.table, questions.OTHER)
    assert questions.learn_answers(ASKED, (), 2).table == ("2", "3")


def test_a_given_table_keeps_its_order_and_guesses_stay_those_of_training():
    learnt = questions.learn_answers(ASKED, (NUMBER,), 1, ("Yes", "3"))
    assert learnt.table == ("yes", "3")
    assert learnt.number(["yes", "3", "2"]) == [0, 1, 2]
    assert learnt.guesses([0]) == [2]  # "2", which this table lacks


def test_kinds_are_those_of_the_first_rule_that_matches():
    kinds = (NUMBER, TRUTH, questions.QuestionKind(name="both", question="^what", answer="a .*"))
    assert [questions.kind_of(kinds, one) for one in ASKED] == [0, 0, 0, 1, 2, 1]
    assert questions.kind_of(kinds, questions.AskedQuestion("what", "cats")) == 3
    assert questions.learn_answers(ASKED, kinds, None).kind_names == ("number", "yes_no", "both", questions.ANY_KIND)


def test_guesses_equal_a_loop_over_random_questions():
    rng = np.random.default_rng(3)
    asked = [questions.AskedQuestion(f"q{rng.integers(4)}", f"a{rng.integers(6)}") for _ in range(300)]
    kinds = tuple(questions.QuestionKind(name=f"k{k}", question=f"q{k}") for k in range(3))
    learnt = questions.learn_answers(asked, kinds, 4)
    expected = []
    for k in range(4):
        counts = Counter(one.answer for one in asked if one.question == f"q{k}")
        best = min(counts, key=lambda answer: (-counts[answer], answer))
        expected.append(learnt.table.index(best) if best in learnt.table else 4)
    assert learnt.guesses(range(4)) == expected


def test_a_kind_that_training_lacks_is_guessed_as_all_are():
    never = questions.QuestionKind(name="never", question="zebra")
    learnt = questions.learn_answers(ASKED, (NUMBER, TRUTH, never), None)
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
    assert questions.one_answer(questions.plain_answers(given), several) == expected


@pytest.mark.parametrize("given", [None, [], "", " ", ["a", ""], [1, 2], ["a", None]])
def test_odd_answers_are_refused(given):
    with pytest.raises(ValueError, match=re.escape(repr(given))):
        questions.plain_answers(given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "x"}, "no pattern"),
        ({"name": "other", "answer": "x"}, "without a matching rule"),
        ({"name": "Yes/No", "answer": "x"}, "pattern"),
        ({"name": "x", "answer": "("}, "answer '\\(' is not a regular expression"),
    ],
)
def test_useless_rules_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        questions.QuestionKind.model_validate(settings)
