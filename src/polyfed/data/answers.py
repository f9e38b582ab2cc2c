"""Answers as classes: a table of the most frequent ones, kinds of questions, and what a guess without looking gives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from polyfed.core.settings import Settings

OTHER = "<other>"
"""Name of the last class of a target: all answers outside the table. No model predicts it."""

ANY_KIND = "other"
"""The kind of questions that no rule matches."""

Several = Literal["set", "majority"]


class AskedQuestion(NamedTuple):
    """A question, its answer, and what each annotator answered; lower-cased, with single spaces."""

    question: str
    answer: str
    votes: tuple[str, ...] = ()


class QuestionKind(Settings):
    """A kind of questions; a question is of the first kind whose patterns match."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="part of metric names: accuracy_<name>")
    question: str | None = Field(default=None, description="regular expression found in the lower-cased question")
    answer: str | None = Field(default=None, description="regular expression of the whole lower-cased answer")

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.name == ANY_KIND:
            raise ValueError(f"'{ANY_KIND}' is the kind of questions that no rule matches; take another name")
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
    """What the training split says of answers.

    Attributes:
        table: the answers that are classes, in class order.
        kinds: the rules, in order.
        most_frequent: kind (by number) -> its most frequent training answer; None -> that of all questions.
    """

    table: tuple[str, ...]
    kinds: tuple[QuestionKind, ...]
    most_frequent: dict[int | None, str]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.table, OTHER)

    @property
    def kind_names(self) -> tuple[str, ...]:
        return (*(kind.name for kind in self.kinds), ANY_KIND)

    def number(self, answers: Iterable[str]) -> list[int]:
        """Class of each answer; that of OTHER for those outside the table."""
        # a dictionary, as tuple.index would look through thousands of answers for each question
        classes = {answer: number for number, answer in enumerate(self.table)}
        return [classes.get(answer, len(self.table)) for answer in answers]

    def guesses(self, kinds: Iterable[int]) -> list[int]:
        """Class of the most frequent training answer of each kind; of all where training had no such question."""
        return self.number(self.most_frequent.get(kind, self.most_frequent[None]) for kind in kinds)


def learn_answers(
    asked: Sequence[AskedQuestion], kinds: Sequence[QuestionKind], most: int | None, table: Sequence[str] = ()
) -> AnswerClasses:
    """Count training answers; among equally frequent ones the first in the alphabet comes first.

    Args:
        asked: training questions with answers, at least one.
        kinds: rules, in order.
        most: number of answers that become classes; None: all.
        table: the answers that are classes, where they are given instead of learnt.
    """
    counts: dict[int | None, Counter[str]] = {None: Counter(one.answer for one in asked)}
    for one in asked:
        counts.setdefault(kind_of(kinds, one), Counter())[one.answer] += 1
    # ties go by the alphabet: the classes must not depend on the order of the questions
    ranked = {kind: sorted(times, key=lambda answer: (-times[answer], answer)) for kind, times in counts.items()}
    classes = tuple(map(plain_answer, table)) or tuple(ranked[None][:most])
    return AnswerClasses(classes, tuple(kinds), {kind: answers[0] for kind, answers in ranked.items()})


def kind_of(kinds: Sequence[QuestionKind], asked: AskedQuestion) -> int:
    """Number of the first kind that matches; the number of kinds if none does."""
    return next((number for number, kind in enumerate(kinds) if kind.matches(asked)), len(kinds))


def plain_answer(text: str) -> str:
    return " ".join(text.lower().split())


def plain_answers(given: Any) -> tuple[str, ...]:
    """A text, or the texts of several answers, each as ``plain_answer``.

    Raises:
        ValueError: there is no answer, or it is not a text.
    """
    texts = list(given) if isinstance(given, list | tuple) else [given]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(f"{given!r} is no answer: a text or a list of texts is needed")
    return tuple(map(plain_answer, texts))


def one_answer(answers: Sequence[str], several: Several) -> str:
    """The answers to a question as one class name.

    Args:
        answers: at least one, as ``plain_answers`` gives them.
        several: ``set``: all of them, whatever their order and repetition; ``majority``: the one given most often,
            of equally frequent ones the one named first.
    """
    # Counter keeps the order of first occurrence among equally frequent answers
    if several == "majority":
        return Counter(answers).most_common(1)[0][0]
    return ", ".join(sorted(set(answers)))
