"""Questions with answers: another source, with answers, texts or sets of texts, as classes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
from pydantic import Field, SerializeAsAny, field_validator, model_validator

from polyfed.core.errors import DataError
from polyfed.core.settings import Settings
from polyfed.data.arrow import fingerprint_of, innermost, is_list, list_lengths, lists_of, struct_part
from polyfed.data.source import Column, Count, Source, Split

OTHER = "<other>"
"""Name of the last class, of all answers outside the table; models do not predict it."""

ANY_KIND = "other"
"""Kind of the questions without a matching rule."""

Several = Literal["set", "majority"]


class AskedQuestion(NamedTuple):
    """A question, its answer, and the answer of each annotator; lower-cased, with single spaces."""

    question: str
    answer: str
    by_annotator: tuple[str, ...] = ()


class QuestionKind(Settings):
    """A kind of questions; a question is of the first kind whose patterns match."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="part of metric names: accuracy_<name>")
    question: str | None = Field(default=None, description="regular expression found in the lower-cased question")
    answer: str | None = Field(default=None, description="regular expression of the whole lower-cased answer")

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.name == ANY_KIND:
            raise ValueError(f"'{ANY_KIND}' is the kind of questions without a matching rule; choose another name")
        if self.question is None and self.answer is None:
            raise ValueError(f"kind '{self.name}' has no pattern; give it a question or an answer")
        for key, pattern in (("question", self.question), ("answer", self.answer)):
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ValueError(f"{key} '{pattern}' is not a regular expression: {error}") from error
        return self

    def matches(self, asked: AskedQuestion) -> bool:
        if self.question is not None and not re.search(self.question, asked.question):
            return False
        return self.answer is None or re.fullmatch(self.answer, asked.answer) is not None


@dataclass(frozen=True)
class AnswerClasses:
    """Answer classes learnt from the training split.

    Attributes:
        table: Answers that are classes, in class order.
        kinds: Rules, in order.
        most_frequent: Number of a kind -> its most frequent training answer; None -> that of all questions.
    """

    table: tuple[str, ...]
    kinds: tuple[QuestionKind, ...]
    most_frequent: dict[int | None, str]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.table, OTHER)

    @property
    def kind_names(self) -> tuple[str, ...]:
        return (*(rule.name for rule in self.kinds), ANY_KIND)

    def number(self, answers: Iterable[str]) -> list[int]:
        """Class of each answer; that of OTHER for those outside the table."""
        # a dictionary, as tuple.index would search thousands of answers per question
        classes = {answer: number for number, answer in enumerate(self.table)}
        return [classes.get(answer, len(self.table)) for answer in answers]

    def guesses(self, kinds: Iterable[int]) -> list[int]:
        """Class of the most frequent training answer of each kind, or of all kinds if training lacks the kind."""
        return self.number(self.most_frequent.get(number, self.most_frequent[None]) for number in kinds)


def learn_answers(
    asked: Sequence[AskedQuestion], kinds: Sequence[QuestionKind], most: int | None, table: Sequence[str] = ()
) -> AnswerClasses:
    """Answer classes by frequency in training, equally frequent ones in alphabetical order.

    Args:
        asked: Training questions with answers, at least one.
        kinds: Rules, in order.
        most: Number of answers that become classes; None: all.
        table: Given classes, in place of learnt ones.
    """
    counts: dict[int | None, Counter[str]] = {None: Counter(one.answer for one in asked)}
    for one in asked:
        counts.setdefault(kind_of(kinds, one), Counter())[one.answer] += 1
    # ties go by the alphabet: the classes must not depend on the order of the questions
    ranked = {number: sorted(times, key=lambda answer: (-times[answer], answer)) for number, times in counts.items()}
    classes = tuple(map(plain_answer, table)) or tuple(ranked[None][:most])
    return AnswerClasses(classes, tuple(kinds), {number: answers[0] for number, answers in ranked.items()})


def kind_of(kinds: Sequence[QuestionKind], asked: AskedQuestion) -> int:
    """Number of the first kind that matches; the number of kinds if none does."""
    return next((number for number, rule in enumerate(kinds) if rule.matches(asked)), len(kinds))


def plain_answer(text: str) -> str:
    return " ".join(text.lower().split())


def plain_answers(given: Any) -> tuple[str, ...]:
    """One or several answers, each as ``plain_answer``.

    Raises:
        ValueError: answers are missing or not texts.
    """
    texts = list(given) if isinstance(given, list | tuple) else [given]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(f"{given!r} is not an answer; give a text or a list of texts")
    return tuple(map(plain_answer, texts))


def one_answer(answers: Sequence[str], several: Several) -> str:
    """The answers to a question as one class name.

    Args:
        answers: at least one, as ``plain_answers`` gives them.
        several: ``set``: the set of all answers; ``majority``: the most frequent answer, of equally frequent ones the
            first.
    """
    # Counter keeps the order of first occurrence among equally frequent answers
    if several == "majority":
        return Counter(answers).most_common(1)[0][0]
    return ", ".join(sorted(set(answers)))


ANSWER, KIND, PRIOR, KIND_PRIOR, VOTES = "answer", "kind", "prior", "kind_prior", "votes"
"""Targets: class of the answer, kind of the question, classes of two guesses, and of all annotators' answers."""

_TEXT = "answer"  # part of answers that are structs, as in VQA v2 on the hub


class Questions(Source):
    """Another source with questions and answers, whose most frequent training answers become classes.

    It adds the targets ``answer`` (the answer's class; the last class, ``<other>``, stands for all answers outside the
    table), ``kind`` (the kind of question, by the rules in ``kinds``), ``prior`` (class of the most frequent training
    answer, the same for all) and ``kind_prior`` (that among training questions of the same kind).

    Table and priors are learnt from the split ``train_split`` alone, whichever split is opened. Answers are compared in
    lower case with single spaces. An answer is a text, a class number, or a list of texts (``several``); a text may be
    the part ``answer`` of a struct. ``several: majority`` adds the target ``votes``: the class of each annotator's
    answer, [n, annotators], -1 where a question has fewer.
    """

    of: SerializeAsAny[Source] = Field(description="source that holds images, questions and answers")
    question: str = Field(default="questions", description="column with one question, or a list of questions, per item")
    answers: str = Field(default="answers", description="column with the answers, parallel to the questions")
    train_split: str = Field(default="train", description="split that the classes are learnt from")
    most: int | None = Field(default=3000, ge=1, description="number of answers that become classes; None: all")
    table: tuple[str, ...] = Field(default=(), description="given classes: sites that train one model need the same")
    several: Several = Field(default="set", description="class of several answers: their set, or the most frequent one")
    kinds: tuple[QuestionKind, ...] = Field(
        default=(), description="kinds {name, question, answer}, by the first match"
    )

    @model_validator(mode="before")
    @classmethod
    def _columns_of_the_source(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("of") is not None and not data.get("columns"):
            return data | {"columns": Source.model_validate(data["of"]).columns}
        return data

    @field_validator("table")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = [plain_answer(name) for name in value]
        twice = next((name for name in names if names.count(name) > 1 or name in ("", OTHER)), None)
        if twice is not None:
            raise ValueError(f"answer '{twice}' cannot be a class, or is repeated; name different answers")
        return value

    @model_validator(mode="after")
    def _distinct_kinds(self) -> Self:
        names = [rule.name for rule in self.kinds]
        if len(set(names)) < len(names):
            raise ValueError(f"kinds {names} must have different names")
        if taken := sorted({ANSWER, KIND, PRIOR, KIND_PRIOR, VOTES} & set(self.targets)):
            raise ValueError(f"target '{taken[0]}' is made by this source; choose another name for yours")
        return self

    @property
    def target_names(self) -> tuple[str, ...]:
        own = (ANSWER, KIND, PRIOR, KIND_PRIOR, VOTES)
        return (*self.targets, *(own if self.several == "majority" else own[:-1]))

    def beside(self, folder: Path, name: str, data_dir: Path | None) -> Self:
        """See ``Source``."""
        return self.model_copy(update={"of": self.of.beside(folder, name, data_dir)})

    def account(self, *, name: str, data_dir: Path | None, used: Collection[str] = ()) -> tuple[Count, ...]:
        """See ``Source``."""
        return self.of.account(name=name, data_dir=data_dir, used={*used, self.question, self.answers})

    def most_items(self, split: str, name: str) -> int | None:
        """See ``Source``."""
        return self.of.most_items(split, name)

    def open(self, split: str, *, name: str, data_dir: Path | None) -> Split:
        """Open one split; reads the training questions and answers."""
        inner = self._inner(split, name, data_dir)
        asked = self._asked(inner, name, data_dir)
        train = asked
        if split != self.train_split:
            train = self._asked(self._inner(self.train_split, name, data_dir), name, data_dir)
        if not train.asked:
            where = train.questions.where
            raise DataError(f"{where}: no questions to learn the answers from; name another train_split")
        classes = learn_answers(train.asked, self.kinds, self.most, self.table)

        def kinds() -> list[int]:
            return [kind_of(self.kinds, one) for one in asked.asked]

        values: dict[str, Callable[[], pa.Array]] = {
            ANSWER: lambda: pa.array(classes.number(one.answer for one in asked.asked), pa.int64()),
            KIND: lambda: pa.array(kinds(), pa.int64()),
            PRIOR: lambda: pa.array(classes.number([classes.most_frequent[None]]) * len(asked.asked), pa.int64()),
            KIND_PRIOR: lambda: pa.array(classes.guesses(kinds()), pa.int64()),
        }
        if self.several == "majority":
            values[VOTES] = lambda: _padded([classes.number(one.by_annotator) for one in asked.asked])
        # column names that tables do not have
        learnt = *classes.table, train.questions.fingerprint, train.answers.fingerprint
        columns = {f"<{target}>": asked.column(target, learnt, make) for target, make in values.items()}
        return replace(
            inner,
            targets={**inner.targets, **{target: f"<{target}>" for target in values}},
            classes={**inner.classes, **(dict.fromkeys(values, classes.names) | {KIND: classes.kind_names})},
            read=lambda column: columns[column] if column in columns else inner.read(column),
        )

    def _inner(self, split: str, name: str, data_dir: Path | None) -> Split:
        source = self.of.model_copy(update={"columns": self.columns, "targets": self.targets})
        return source.open(split, name=name, data_dir=data_dir)

    def _asked(self, split: Split, name: str, data_dir: Path | None) -> _Asked:
        answers = _texts_of(split.read(self.answers))
        names: Sequence[str] = ()
        # names of numbered answers are metadata of the files, which only targets have
        if pa.types.is_integer(innermost(answers.values.type)):
            source = self.of.model_copy(update={"columns": {}, "targets": {ANSWER: self.answers}})
            names = source.open(split.name, name=name, data_dir=data_dir).classes.get(ANSWER, ())
        stamp = fingerprint_of(self.model_dump_json(exclude={"of"}))
        return _Asked(split.read(self.question), answers, names, self.several, stamp)


def _texts_of(answers: Column) -> Column:
    """A column of answers as texts or numbers, in place of structs.

    Raises:
        DataError: structs lack the text.
    """
    dtype = innermost(answers.values.type)
    if not pa.types.is_struct(dtype):
        return answers
    if dtype.get_field_index(_TEXT) < 0:
        raise DataError(f"{answers.where}: holds {dtype}, without a part '{_TEXT}'; name a column of answers")
    return Column(struct_part(answers.values, _TEXT), answers.fingerprint, answers.where, is_list(answers.values.type))


def _padded(classes: Sequence[Sequence[int]]) -> pa.Array:
    """Rows of equal length, padded with -1."""
    width = max(map(len, classes), default=0)
    rows = np.full((len(classes), width), -1, np.int64)
    for row, own in zip(rows, classes, strict=True):
        row[: len(own)] = own
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), width)


@dataclass(frozen=True)
class _Asked:
    """Questions and answers of a split.

    Attributes:
        questions: column of texts or lists of texts.
        answers: parallel column.
        names: names of numbered answers; empty: numbers are names.
        several: see ``one_answer``.
        stamp: Digest of the settings.
    """

    questions: Column
    answers: Column
    names: Sequence[str]
    several: Several
    stamp: str

    @cached_property
    def asked(self) -> list[AskedQuestion]:
        """All questions, in item order, with their answers.

        Raises:
            DataError: a question or an answer is missing, or their numbers differ.
        """
        texts = self.questions.texts()
        if self.questions.nested:  # flattens the lists of items, not those of several answers
            self._require_parallel_lists()
            given = self.answers.flat_values().to_pylist()
        else:
            given = self.answers.values.to_pylist()
        if len(texts) != len(given):
            what = f"{self.questions.where} has {len(texts)} questions, but {self.answers.where} answers {len(given)}"
            raise DataError(f"{what}; every question needs its answer at the same position")
        answered = zip(texts, (self._answers(row, one) for row, one in enumerate(given)), strict=True)
        return [AskedQuestion(plain_answer(text), one_answer(own, self.several), own) for text, own in answered]

    def _require_parallel_lists(self) -> None:
        if not self.answers.nested:
            raise DataError(f"{self.answers.where}: one answer per item, but {self.questions.where} holds lists")
        unequal = np.flatnonzero(list_lengths(self.questions.values) != list_lengths(self.answers.values))
        if len(unequal):
            what = f"{self.questions.where} and {self.answers.where}, row {unequal[0]}: lists of different length"
            raise DataError(f"{what}; every question needs its answer at the same position")

    def _answers(self, row: int, given: Any) -> tuple[str, ...]:
        try:
            if not isinstance(given, int):
                return plain_answers(given)
            if self.names and not 0 <= given < len(self.names):
                raise ValueError(f"answer {given} is not in 0 to {len(self.names) - 1}")
            return (plain_answer(self.names[given] if self.names else str(given)),)
        except ValueError as error:
            place = self.answers.place_of(row) if self.questions.nested else f"{self.answers.where}, row {row}"
            raise DataError(f"{place}: {error}; mend or leave out the question") from error

    def column(self, target: str, table: Sequence[str], make: Callable[[], pa.Array]) -> Column:
        """Column of a target, made at first use, and nested like the questions."""

        def values() -> pa.ChunkedArray:
            flat = pa.chunked_array([make()])
            return lists_of(flat, list_lengths(self.questions.values)) if self.questions.nested else flat

        stamp = fingerprint_of(self.questions.fingerprint, self.answers.fingerprint, self.stamp, table, target)
        return Column(values, stamp, f"{self.answers.where}, {target}", self.questions.nested)
