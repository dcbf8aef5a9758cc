"""The configuration of a module: the arguments of its constructor, in a YAML file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from cadenza.compat.neural.logs import logging
from cadenza.errors import nearest
from cadenza.status.reprs import signature_of
from cadenza.version import __version__

PACKAGES = {"nemo": "cadenza.compat.nemo"}
"""Maps the top-level package of a class in NeMo's files to the package that provides it here."""


class Configurable:
    """Remembers the arguments of its constructor, writes them to a file, and creates an object from such a file."""

    _init_params: dict[str, Any]

    def __new__(cls, *arguments: Any, **keywords: Any) -> Self:
        new = super().__new__(cls)
        object.__setattr__(new, "_init_params", _given(cls, arguments, keywords))  # nn.Module is not initialised yet
        return new

    @property
    def init_params(self) -> dict[str, Any]:
        """The arguments of its constructor by name, with default values."""
        return self._init_params

    def serialize(self) -> dict[str, Any]:
        """Return its class and its arguments as plain values.

        Raises:
            ValueError: An argument is not a plain value.
        """
        return {"header": self._create_config_header(), "init_params": self._serialize_configuration()}

    def export_to_config(self, config_file: str) -> None:
        """Write its class and its arguments to a file. The file is JSON, which is also YAML.

        Raises:
            ValueError: An argument is not a plain value.
        """
        text = json.dumps(self.serialize(), indent=2)
        Path(config_file).expanduser().write_text(text + "\n", encoding="utf-8")
        logging.info("The configuration of %s was written to %s", type(self).__name__, config_file)

    @classmethod
    def import_from_config(
        cls,
        config_file: str,
        section_name: str | None = None,
        name: str | None = None,
        overwrite_params: Mapping[str, Any] | None = None,
    ) -> Self:
        """Create an object from a file of `export_to_config`, or of NeMo.

        Args:
            config_file: A YAML file.
            section_name: The section of the file; None for the whole file.
            name: The name of the new module.
            overwrite_params: Arguments that replace those in the file.

        Raises:
            ImportError: The file has no such section, or describes another class.
        """
        return cls.deserialize(cls._validate_config_file(config_file, section_name), name, overwrite_params)

    @classmethod
    def deserialize(
        cls, configuration: Mapping[str, Any], name: str | None = None, overwrite_params: Mapping[str, Any] | None = None
    ) -> Self:
        """Create an object from the result of `serialize`.

        Raises:
            ImportError: It describes another class.
        """
        kind = cls._class_of(configuration)
        params = {**configuration["init_params"], **(overwrite_params or {}), **({} if name is None else {"name": name})}
        return kind(**cls._deserialize_configuration(params))

    # NeMo 0.10: a module that overrides export_to_config and import_from_config calls the next two methods.

    def _create_config_header(self) -> dict[str, Any]:
        """Return its class and the version, for a file."""
        path = f"{type(self).__module__}.{type(self).__qualname__}"
        return {"nemo_core_version": f"cadenza {__version__}", "collection_type": "unknown", "full_spec": path}

    @classmethod
    def _validate_config_file(cls, config_file: str, section_name: str | None = None) -> dict[str, Any]:
        """Return the content of a file of `export_to_config`, or of NeMo.

        Raises:
            ImportError: The file has no such section, or describes another class.
        """
        content: dict[str, Any] = _read(Path(config_file).expanduser())
        if section_name is not None:
            if section_name not in content:
                raise ImportError(f"{config_file} has no section {section_name!r}.{nearest(section_name, content)}")
            content = content[section_name]
        if missing := [section for section in ("header", "init_params") if section not in content]:
            raise ImportError(f"{config_file} has no section {missing[0]!r}; it has {list(content)}")
        cls._class_of(content)
        return content

    @classmethod
    def _class_of(cls, configuration: Mapping[str, Any]) -> type[Self]:
        path = configuration["header"]["full_spec"]
        kind = _class_at(path)
        if not (isinstance(kind, type) and issubclass(kind, cls)):
            raise ImportError(f"the configuration is of {path}, which is not a {cls.__name__}. Call the method of that class.")
        return kind

    def _serialize_configuration(self) -> dict[str, Any]:
        """Return the arguments as plain values. Override it for arguments of other kinds."""
        wrong = {name: value for name, value in self._init_params.items() if not is_plain(value)}
        if wrong:
            raise ValueError(
                f"only numbers, strings, booleans, None, and lists and dicts of them can be written to a configuration; "
                f"{type(self).__name__} has {', '.join(f'{name}={value!r}' for name, value in wrong.items())}. Override "
                "_serialize_configuration and _deserialize_configuration."
            )
        return self._init_params

    @classmethod
    def _deserialize_configuration(cls, params: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the constructor. Override it together with `_serialize_configuration`."""
        return params


def is_plain(value: object) -> bool:
    """Return whether a value consists of numbers, strings, booleans, None, lists and dicts."""
    if isinstance(value, list):
        return all(is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(name, str) and is_plain(item) for name, item in value.items())
    return value is None or type(value) in (str, int, float, bool)


def _given(kind: type, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    signature = signature_of(kind.__init__)  # type: ignore[misc]  # it is called for this very class
    try:
        bound = signature.bind(None, *arguments, **keywords)
    except TypeError:  # the constructor's call reports the error; a copy has no arguments
        return {}
    bound.apply_defaults()
    named = [parameter.name for parameter in signature.parameters.values() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    return {name: bound.arguments[name] for name in named[1:]}


def _read(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError as error:
        if find_spec("yaml") is None:
            raise ImportError(f"{path} is not JSON, and reading YAML needs PyYAML. Install it: pip install pyyaml") from error
    import yaml  # type: ignore[import-untyped]  # optional

    return yaml.safe_load(text)


def _class_at(path: str) -> Any:
    """Return the class of a path such as ``package.module.Outer.Inner``."""
    first, _, rest = path.partition(".")
    parts = f"{PACKAGES.get(first, first)}.{rest}".split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        try:
            found: Any = import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            continue
        for part in parts[end:]:
            found = getattr(found, part, None)
        return found
    return None
