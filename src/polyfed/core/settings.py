"""Typed settings, and components: settings that name the class that they configure.

A component is written in YAML as a mapping with a ``name``, or as the bare name:

    algorithm: {name: creamfl, contrast: {weight: 0.5}}
    partition: iid

A short name is a module of the component's home package (``creamfl`` is ``polyfed.algorithms.creamfl``) or of its
namesake in the zone of deployment (``flower`` is ``polyfed.deploy.engines.flower``); a dotted name
(``mypackage.mymethod.MyMethod``) is any importable class, so code outside polyfed needs no registration.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeGuard, TypeVar, cast

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_core.core_schema import SerializerFunctionWrapHandler

from polyfed.core.declarations import SHORT_NAME, ClassDeclaration, components, declared_component, homes_of
from polyfed.core.errors import ConfigError, nearest, unknown
from polyfed.core.extras import how_to_install
from polyfed.core.files import folder_of_file, whole
from polyfed.core.untrusted import require_own_code

Place = Annotated[Path, AfterValidator(whole)]
"""A path that starts from the working folder, or from the folder of its run."""

PlaceBeside = Annotated[Path, AfterValidator(lambda path: whole(path, folder_of_file()))]
"""A path that starts from the folder of the file that names it."""


class Settings(BaseModel):
    """Immutable, validated settings; an unknown key is an error that names the nearest valid one.

    **Components** are settings with behaviour, chosen by name in a configuration. A family of components is a direct
    subclass that sets ``home``: the package whose modules are its short names, or the module that holds all. Where a
    module holds several public components, ``short_name`` names each. A family is itself usable as a field type: the
    field then accepts a name, a mapping with a ``name``, an instance, or the class itself. A component whose packages
    do not come with polyfed names their extra in ``pip_extra``; its module imports them only where it uses them.

    Raises:
        ConfigError: naming the first wrong key, its value and what would be valid.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    home: ClassVar[str] = ""
    pip_extra: ClassVar[str] = ""

    if not TYPE_CHECKING:  # type checkers know the fields

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigError(first_problem(error)) from error

        __init__.__pydantic_base_init__ = True  # only for who builds settings by hand: what is nested keeps its path

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            odd = [key for key in data if key not in cls.model_fields]
            if odd:
                raise UnknownKeyError(str(odd[0]), cls.model_fields)
        return data

    # ---- components

    @classmethod
    def family(cls) -> type[Settings]:
        """The ancestor (or self) that sets ``home`` in its own body; only components have one."""
        return next(base for base in cls.__mro__ if vars(base).get("home"))

    @classmethod
    def component_name(cls) -> str:
        """The name that stands for this class in a configuration: short at home, dotted elsewhere."""
        package, _, module = cls.__module__.rpartition(".")
        if not {package, cls.__module__} & {*homes_of(cls.family().home)}:
            return f"{cls.__module__}.{cls.__qualname__}"
        return str(vars(cls).get(SHORT_NAME, module))

    @classmethod
    def declared(cls) -> dict[str, ClassDeclaration]:
        return components(cls.family().home, (cls.__module__, cls.__qualname__))

    @classmethod
    def available(cls) -> dict[str, type[Settings]]:
        return {name: cls.named(name) for name in cls.declared()}

    @classmethod
    def named(cls, name: str) -> type[Settings]:
        """The component class called ``name``; only its own module is imported.

        Raises:
            ValueError: no such component; the message lists what would be valid. Or it needs a package that is not
                installed; the message has the command that installs it.
        """
        if "." in name:
            return _imported(name, cls)
        family = cls.family().__name__.removesuffix("Settings").lower()
        declared = declared_component(cls.family().home, name, (cls.__module__, cls.__qualname__))
        if declared is None:
            raise ValueError(unknown(family, name, cls.declared()))
        try:
            component: type[Settings] = getattr(importlib.import_module(declared.module), declared.name)
        except ModuleNotFoundError as error:
            hint = f"; {how_to_install(declared.texts['pip_extra'])}" if declared.texts.get("pip_extra") else ""
            raise ValueError(f"{family} '{name}' needs a package: {error}{hint}") from error
        return component

    @model_validator(mode="wrap")
    @classmethod
    def _by_name(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not cls.home:
            return handler(data)
        if isinstance(data, str):
            data = {"name": data}
        elif isinstance(data, type) and issubclass(data, cls):
            return data.model_validate({})
        if not isinstance(data, Mapping) or "name" not in data:
            if inspect.isabstract(cls) and not isinstance(data, cls):
                raise ValueError(f"needs a name; {nearest('', cls.declared())}")
            return handler(data)
        chosen = cls.named(str(data["name"]))
        fields = {key: value for key, value in data.items() if key != "name"}
        return handler(fields) if chosen is cls else cast("Self", chosen.model_validate(fields))

    @model_serializer(mode="wrap")
    def _with_name(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        if not self.home:
            return handler(self)  # type: ignore[no-any-return]
        # the declared type of a field is the family: its fields are dumped from the instance's own class
        fields = {key: getattr(self, key) for key in type(self).model_fields}
        return {"name": self.component_name(), **{key: _plain(value) for key, value in fields.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)


def is_component(candidate: Any) -> TypeGuard[type[Settings]]:
    """Whether a type is a component or a family of components."""
    return isinstance(candidate, type) and issubclass(candidate, Settings) and bool(candidate.home)


def is_import_path(text: str) -> bool:
    """Whether a text is the import path of a component, package.module.Class; nothing else is ever imported."""
    return "." in text and all(part.isidentifier() for part in text.split("."))


def _imported(name: str, family: type[Settings]) -> type[Settings]:
    if not is_import_path(name):
        raise ValueError(f"'{name}' is not an import path; give it as package.module.Class")
    path, _, attribute = name.rpartition(".")
    require_own_code(path, attribute)
    try:
        candidate = getattr(importlib.import_module(path), attribute)
    except (ImportError, AttributeError) as error:
        hint = f"; is the folder of '{path.partition('.')[0]}' on PYTHONPATH?" if isinstance(error, ImportError) else ""
        raise ValueError(f"cannot import '{name}': {error}{hint}") from error
    if not (isinstance(candidate, type) and issubclass(candidate, family)):
        raise ValueError(f"'{name}' is not a subclass of {family.__module__}.{family.__qualname__}")
    return candidate


S = TypeVar("S", bound=Settings)


def parse_settings(settings_class: type[S], content: Mapping[str, Any]) -> S:
    """Settings from a mapping.

    Raises:
        ConfigError: naming the first wrong key, its value and what would be valid.
    """
    try:
        return settings_class.model_validate(content)
    except ValidationError as error:
        raise ConfigError(first_problem(error)) from error


def first_problem(error: ValidationError) -> str:
    """The first wrong key with its path, what would be valid, and its value."""
    path, problem = innermost_problem(error)
    if problem["type"] == "missing":
        return f"{'.'.join(path)}: is required and missing"
    value = problem["input"]
    shown = f" (got {value!r})" if isinstance(value, str | int | float | bool | type(None)) else ""
    return f"{'.'.join(path) or 'config'}: {problem['msg'].removeprefix('Value error, ')}{shown}"


def innermost_problem(error: ValidationError, prefix: tuple[str, ...] = ()) -> tuple[tuple[str, ...], ErrorDetails]:
    """Path and details of the first problem: a component is validated within its section, so errors are nested."""
    problem = error.errors(include_url=False)[0]
    path = (*prefix, *map(str, problem["loc"]))
    inner = problem.get("ctx", {}).get("error")
    return innermost_problem(inner, path) if isinstance(inner, ValidationError) else (path, problem)


class UnknownKeyError(ValueError):
    """Settings have no key of that ``name``."""

    def __init__(self, name: str, valid: Iterable[str]) -> None:
        super().__init__(unknown("key", name, valid))
        self.name = name


class NoEffectError(ValueError):
    """A setting has no effect.

    Attributes:
        name: Name of the setting.
        value: Its value in YAML.
        obstacle: why it has none, as the continuation of 'has no effect'.
        default: its value if it is left out, likewise.
    """

    def __init__(self, name: str, value: str, obstacle: str, default: str) -> None:
        super().__init__(f"{name} has no effect {obstacle}; it is {value}: leave it at {default}")
        self.name, self.value, self.obstacle, self.default = name, value, obstacle, default


def require_default(settings: BaseModel, obstacle: str, *names: str) -> None:
    """Check that settings which cannot act are left at their defaults; for validators.

    Args:
        settings: Settings to check.
        obstacle: why they cannot, such as ``with kind: sgd``.
        names: Names of the fields.

    Raises:
        NoEffectError: one is not; the message has the setting, the reason and the remedy.
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
