"""Settings without effect: a value other than the default is refused where it cannot act."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import BaseModel


class NoEffectError(ValueError):
    """A setting has no effect.

    Attributes:
        name: of the setting.
        value: as YAML has it.
        obstacle: why it has none, as the continuation of 'has no effect'.
        default: its value if it is left out, likewise.
    """

    def __init__(self, name: str, value: str, obstacle: str, default: str) -> None:
        super().__init__(f"{name} has no effect {obstacle}; it is {value}: leave it at {default}")
        self.name, self.value, self.obstacle, self.default = name, value, obstacle, default


def require_default(settings: BaseModel, obstacle: str, *names: str) -> None:
    """Check that settings which cannot act are left at their defaults; for validators.

    Args:
        settings: that hold them.
        obstacle: why they cannot, such as ``with kind: sgd``.
        names: of the fields.

    Raises:
        NoEffectError: one is not; the message says which, why, and what to change.
    """
    for name in names:
        value = getattr(settings, name)
        default = type(settings).model_fields[name].get_default(call_default_factory=True)
        if value != default:
            raise NoEffectError(name, shown(value), obstacle, shown(default))


def shown(value: Any) -> str:
    """A value as YAML would have it, on one line."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    plain = list(plain) if isinstance(plain, tuple) else plain
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=1000)
    return text.removesuffix("\n...\n").strip()
