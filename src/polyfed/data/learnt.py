"""What views learn from the public set, kept in the run folder as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from polyfed.core.errors import ConfigError, DataError
from polyfed.core.files import write_atomically
from polyfed.core.untrusted import file_json
from polyfed.data.source import Column
from polyfed.data.view import DataContext

_T = TypeVar("_T")


def learnt(
    context: DataContext, name: str, learn: Callable[[], Mapping[str, Any]], read: Callable[[Mapping[str, Any]], _T]
) -> _T:
    """What ``read`` makes of the run's file ``name``, learnt and written if it is not there; without a run, learnt.

    A resumed run, and a saved model without its data, must have what the first round had.

    Raises:
        DataError: the file cannot be read.
    """
    if context.bundles is None:
        return read(learn())
    path = context.bundles / f"{name}.json"
    if not path.exists():
        write_atomically(path, json.dumps(learn(), ensure_ascii=False).encode())
    try:
        return read(file_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not readable ({error}); remove the file to learn it again") from error


def public_column(context: DataContext, modality: str, who: str, instead: str) -> Column:
    """The public set's column of a modality.

    Raises:
        ConfigError: there is none; the message says ``who`` learns from it, and what to do ``instead``.
    """
    if modality not in context.public:
        raise ConfigError(
            f"{who} learns from the public set, which has no '{modality}' "
            f"(it has: {', '.join(context.public) or 'nothing'}); {instead}, or add a public set with it"
        )
    return context.public[modality]
