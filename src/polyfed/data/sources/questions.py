"""Questions with answers: another source whose answers, texts or sets of texts, become classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, SerializeAsAny, field_validator, model_validator

from polyfed.core.errors import DataError
from polyfed.data.answers import OTHER, AskedQuestion, Learnt, QuestionKind, Several, learn, one_answer, plain_answer
from polyfed.data.arrow import LazyColumn, fingerprint_of, flat_values, is_list, place_of
from polyfed.data.source import Column, Source, Split
from polyfed.data.tokenization import texts_of

ANSWER, KIND, PRIOR, KIND_PRIOR = "answer", "kind", "prior", "kind_prior"
"""The targets: class of the answer, kind of the question, and the classes of two guesses."""


class Questions(Source):
    """Another source with questions and answers, whose most frequent training answers become classes.

    To the targets of that source it adds ``answer`` (the answer's class; the last class, ``<other>``, stands for all
    answers outside the table), ``kind`` (the kind of question, by the rules in ``kinds``), ``prior`` (class of the most
    frequent training answer, the same for all) and ``kind_prior`` (that among training questions of the same kind).

    Table and priors are learnt from the split ``train_split`` alone, whichever split is opened. Answers are compared in
    lower case with single spaces. An answer is a text, a class number, or a list of texts (``several``).
    """

    of: SerializeAsAny[Source] = Field(description="source that holds pictures, questions and answers")
    question: str = Field(default="questions", description="column with a question, or a list of questions, an item")
    answers: str = Field(default="answers", description="column with the answers, parallel to the questions")
    train_split: str = Field(default="train", description="split that the classes are learnt from")
    most: int | None = Field(default=3000, ge=1, description="number of answers that become classes; None: all")
    table: tuple[str, ...] = Field(
        default=(), description="the classes, given instead of learnt: sites that train one model need the same"
    )
    several: Several = Field(
        default="set", description="several answers to a question: their set is the class, or the one given most often"
    )
    kinds: tuple[QuestionKind, ...] = Field(
        default=(), description="kinds of questions, {name, question, answer}; first match"
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
            raise ValueError(f"answer '{twice}' cannot be a class, or is one twice; name different answers")
        return value

    @model_validator(mode="after")
    def _distinct_kinds(self) -> Self:
        names = [kind.name for kind in self.kinds]
        if len(set(names)) < len(names):
            raise ValueError(f"kinds {names} must have different names")
        taken = sorted({ANSWER, KIND, PRIOR, KIND_PRIOR} & set(self.targets))
        if taken:
            raise ValueError(f"target '{taken[0]}' is what this source makes of the answers; name yours otherwise")
        return self

    def open(self, split: str, *, name: str, data_dir: Path | None) -> Split:
        """Open one split; reads the training questions and answers."""
        inner = self._inner(split, name, data_dir)
        here = self._read(inner, name, data_dir)
        if split == self.train_split:
            learnt = self._learn(here)
        else:
            learnt = self._learn(self._read(self._inner(self.train_split, name, data_dir), name, data_dir))
        made = {ANSWER: _answer, KIND: _kind, PRIOR: _prior, KIND_PRIOR: _kind_prior}
        columns = {_virtual(target): here.column(target, learnt, values) for target, values in made.items()}
        classes = {ANSWER: learnt.classes, KIND: learnt.kind_names, PRIOR: learnt.classes, KIND_PRIOR: learnt.classes}
        return replace(
            inner,
            targets={**inner.targets, **{target: _virtual(target) for target in made}},
            classes={**inner.classes, **classes},
            read=lambda column: columns[column] if column in columns else inner.read(column),
        )

    def identity(self, data_dir: Path | None) -> dict[str, Any]:
        """That of the source that the questions are from."""
        return self.of.identity(data_dir)

    def _inner(self, split: str, name: str, data_dir: Path | None) -> Split:
        source = self.of.model_copy(update={"columns": self.columns, "targets": self.targets})
        return source.open(split, name=name, data_dir=data_dir)

    def _read(self, split: Split, name: str, data_dir: Path | None) -> _Asked:
        answers = split.read(self.answers)
        names: tuple[str, ...] = ()
        kind = answers.values.type
        if pa.types.is_integer(kind.value_type if is_list(kind) else kind):  # names are with targets only
            source = self.of.model_copy(update={"columns": {}, "targets": {ANSWER: self.answers}})
            names = source.open(split.name, name=name, data_dir=data_dir).classes.get(ANSWER, ())
        stamp = fingerprint_of(self.model_dump_json(exclude={"of"}))
        return _Asked(split.read(self.question), answers, names, self.several, stamp)

    def _learn(self, train: _Asked) -> Learnt:
        if not train.asked:
            raise DataError(
                f"{train.questions.where}: no questions to learn the answers from; name another train_split"
            )
        return learn(train.asked, self.kinds, self.most, self.table)


@dataclass(frozen=True)
class _Asked:
    """Questions and answers of a split.

    Attributes:
        questions: column of texts or lists of texts.
        answers: parallel column.
        names: names of the answers where these are numbers; without, the numbers are names.
        several: see ``one_answer``.
        stamp: changes with the settings.
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
            DataError: a question or an answer is missing, or an item has more of one than of the other.
        """
        questions, given = texts_of(self.questions), self._given()
        if len(questions) != len(given):
            raise DataError(
                f"{self.questions.where} has {len(questions)} questions, but {self.answers.where} answers "
                f"{len(given)}; every question needs its answer at the same place"
            )
        return [AskedQuestion(plain_answer(text), self._answer(row, given[row])) for row, text in enumerate(questions)]

    def _given(self) -> list[Any]:
        """One entry a question: the list level of the items is undone, that of several answers is not."""
        column = self.answers
        if self.questions.nested:
            self._require_parallel()
            values: list[Any] = flat_values(column).to_pylist()
        else:
            values = column.values.to_pylist()
        return values

    def _require_parallel(self) -> None:
        if not self.answers.nested:
            raise DataError(f"{self.answers.where}: one answer an item, but {self.questions.where} holds lists")
        lengths = [pc.fill_null(pc.list_value_length(part.values), 0) for part in (self.questions, self.answers)]
        unequal = pc.index(pc.equal(*lengths), False).as_py()
        if unequal >= 0:
            raise DataError(
                f"{self.questions.where} and {self.answers.where}, row {unequal}: lists of different length; "
                "every question needs its answer at the same place"
            )

    def _answer(self, row: int, given: Any) -> str:
        try:
            return self._named(given) if isinstance(given, int) else one_answer(given, self.several)
        except ValueError as error:
            place = place_of(self.answers, row) if self.questions.nested else f"{self.answers.where}, row {row}"
            raise DataError(f"{place}: {error}; mend or leave out the question") from error

    def _named(self, number: int) -> str:
        if self.names and not 0 <= number < len(self.names):
            raise ValueError(f"answer {number} is not in 0 to {len(self.names) - 1}")
        return plain_answer(self.names[number] if self.names else str(number))

    def column(self, target: str, learnt: Learnt, values: Any) -> Column:
        """The column of a target, made when it is first looked at; nested as the questions are."""
        stamp = fingerprint_of(self.questions.fingerprint, self.answers.fingerprint, self.stamp, learnt.table, target)
        where = f"{self.answers.where}, {target}"
        return LazyColumn(lambda: self._shaped(values(self.asked, learnt)), stamp, where, self.questions.nested)

    def _shaped(self, values: Sequence[int]) -> pa.ChunkedArray:
        flat = pa.array(values, pa.int64())
        if not self.questions.nested:
            return pa.chunked_array([flat])
        lengths = pc.fill_null(pc.list_value_length(self.questions.values), 0).to_numpy()
        ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return pa.chunked_array([pa.ListArray.from_arrays(pa.array(ends), flat)])


def _virtual(target: str) -> str:
    """Name of a made column: none that a table would have."""
    return f"<{target}>"


def _answer(asked: Sequence[AskedQuestion], learnt: Learnt) -> list[int]:
    return learnt.number(one.answer for one in asked)


def _kind(asked: Sequence[AskedQuestion], learnt: Learnt) -> list[int]:
    return learnt.kinds_of(asked)


def _prior(asked: Sequence[AskedQuestion], learnt: Learnt) -> list[int]:
    return learnt.number([learnt.usual[None]]) * len(asked)


def _kind_prior(asked: Sequence[AskedQuestion], learnt: Learnt) -> list[int]:
    return learnt.guesses(learnt.kinds_of(asked))
