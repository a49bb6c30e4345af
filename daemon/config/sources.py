"""The sources of settings: defaults < the YAML file < KVFERRY_* < flags, and which of them gave each value."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

import yaml
from annotated_types import Ge, Le
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvferry.daemon.config.model import DaemonConfig, Flag, flag_of
from kvferry.daemon.config.values import ConfigError, nearest
from kvferry.transfer.host_tier.copy_strategies import ENVIRONMENT, check_environment

PREFIX = "KVFERRY_"
FILE_VARIABLE = "KVFERRY_CONFIG"
OTHER_VARIABLES = frozenset({FILE_VARIABLE, ENVIRONMENT})  # no settings; the second is only checked here
MAX_FILE_BYTES = 1 << 20

Given = Mapping[str, object]  # by setting, as it was written


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings as loaded. `origins`: by setting, the flag, variable or file that gave its value; none for a
    default."""

    config: DaemonConfig
    origins: Mapping[str, str]


# -- flags -----------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for each setting. What is not given is absent from the parsed arguments."""
    parser.add_argument("--config", metavar="FILE", help=f"YAML file of settings (default: ${FILE_VARIABLE}, or none)")
    for name, field in DaemonConfig.model_fields.items():
        flag = next((meta for meta in field.metadata if isinstance(meta, Flag)), Flag())
        help_ = (field.description or "").replace("%", "%%") + _default_words(name, flag)
        if field.annotation is bool:
            parser.add_argument(
                flag_of(name), dest=name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help_
            )
            continue
        choices = [word for word in get_args(field.annotation) if isinstance(word, str)]
        metavar = flag.metavar or ("{" + ",".join(choices) + "}" if choices else _metavar(name))
        action = "append" if flag.repeated else "store"
        parser.add_argument(
            flag_of(name), dest=name, action=action, default=argparse.SUPPRESS, metavar=metavar, help=help_
        )


def _metavar(name: str) -> str:
    return "SECONDS" if name.endswith("_seconds") else "N"


def _default_words(name: str, flag: Flag) -> str:
    field = DaemonConfig.model_fields[name]
    if field.is_required():
        return " (needed)"
    default = flag.default or ("" if field.default_factory is not None else shown(name, field.default))
    return f" (default: {default})" if default and field.annotation is not bool else ""


def shown(name: str, value: object) -> str:
    """A value as it may be written in any of the sources."""
    if name == "metrics":
        return str(value) or "off"
    if name.endswith("_bytes") and isinstance(value, int):
        for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
            if value and value % (1 << shift) == 0:
                return f"{value >> shift}{unit}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if name == "tls_peers" and isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    if isinstance(value, Mapping):
        return ",".join(f"{key}={_entry(entry)}" for key, entry in value.items())
    return "" if value is None else str(value)


def _entry(entry: object) -> str:
    quota = [getattr(entry, part, None) for part in ("soft", "hard", "host_soft", "host_hard")]
    return str(entry) if quota[0] is None else ":".join(map(str, quota))


# -- the sources -----------------------------------------------------------------------------------------------------


def load(
    args: argparse.Namespace, environ: Mapping[str, str] | None = None, otherwise: Mapping[str, str] | None = None
) -> Loaded:
    """Loads the settings of parsed flags, `environ` (the process's own unless given) and the YAML file that they name;
    `otherwise` comes before the defaults. ConfigError.
    """
    environ = os.environ if environ is None else environ
    path = getattr(args, "config", None) or environ.get(FILE_VARIABLE, "")
    flags = {name: value for name, value in vars(args).items() if name in DaemonConfig.model_fields}
    sources = (
        (_from_file(path), lambda name: f"{name} in {path}"),
        (_from_environment(environ), lambda name: PREFIX + name.upper()),
        (flags, flag_of),
    )
    given: dict[str, object] = dict(otherwise or {})
    origins: dict[str, str] = {}
    for values, origin in sources:
        for name, value in values.items():
            if value != "":  # as if it were not given: an unset variable of a manifest, for instance
                given[name], origins[name] = value, origin(name)
    try:
        config = DaemonConfig.model_validate(given)
    except ValidationError as error:
        raise ConfigError(_complaint(error, origins)) from error
    try:
        check_environment(environ, on_gpus=bool(config.devices))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Loaded(config, origins)


def _from_environment(environ: Mapping[str, str]) -> Given:
    names = [name for name in environ if name.startswith(PREFIX) and name not in OTHER_VARIABLES]
    found = {name: environ[name] for name in names if not _of_a_service(name, environ)}
    _check_known(found, [PREFIX + name.upper() for name in DaemonConfig.model_fields], "variable")
    return {name.removeprefix(PREFIX).lower(): value for name, value in found.items()}


def _of_a_service(name: str, environ: Mapping[str, str]) -> bool:
    """Kubernetes sets such variables for every Service of the namespace: of one named kvferry-decode,
    KVFERRY_DECODE_SERVICE_HOST and more.
    """
    service = re.sub(r"(_SERVICE_(HOST|PORT)(_.*)?|_PORT(_\d+_(TCP|UDP|SCTP)(_.*)?)?)$", "", name)
    return service != name and f"{service}_SERVICE_HOST" in environ


def _from_file(path: str) -> Given:
    if not path:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"--config {path} has more than {MAX_FILE_BYTES} characters")
    try:
        found = _Loader(text).get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        said = str(error).replace("<unicode string>", path)  # PyYAML's name for what it did not open itself
        raise ConfigError(f"--config {path}: {said}") from error
    if found is None or found == "":
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path} is a {type(found).__name__}; it must be settings, each as KEY: VALUE")
    _check_known(found, list(DaemonConfig.model_fields), f"key in {path}")
    for name, value in found.items():
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if not all(isinstance(each, str) for each in inner):  # a few aliases could stand for more than there is memory
            raise ConfigError(f"{name} in {path} must be a value, or a list or mapping of values")
    return found


class _Loader(yaml.BaseLoader):
    """Every scalar is the string that it is written as, so `off` and 10:20 are read as a flag would be; a key that
    comes twice is refused.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} comes twice", key.start_mark)
            seen.add(key.value)
        mapping: dict[object, object] = super().construct_mapping(node, deep)
        return mapping


def _check_known(found: Iterable[str], valid: list[str], what: str) -> None:
    for name in found:
        if name not in valid:
            raise ConfigError(f"{what}: {name!r} is no setting{nearest(name, valid)}")


# -- what is wrong ---------------------------------------------------------------------------------------------------


def _complaint(error: ValidationError, origins: Mapping[str, str]) -> str:
    """One line for each setting that is wrong, by the name under which it was given."""
    lines = []
    for details in error.errors(include_url=False):
        if details["type"] == "default_factory_not_called":
            continue  # it follows from another one, which is named
        lines.append(_line(details, origins))
    return "; ".join(lines)


def _line(details: ErrorDetails, origins: Mapping[str, str]) -> str:
    message = details["msg"].removeprefix("Value error, ")
    if not details["loc"]:
        return message  # of settings together; it names the flags
    name = str(details["loc"][0])
    said = origins.get(name, flag_of(name))
    if details["type"] == "missing":
        variable = PREFIX + name.upper()
        return f"{flag_of(name)} is not given, and neither is {variable}, nor {name} in a file; {_bounds(name)}"
    if details["type"] == "value_error":
        return f"{said}: {message}"
    return f"{said} is {details['input']}; {_bounds(name) or message}"


def _bounds(name: str) -> str:
    field = DaemonConfig.model_fields[name]
    choices = [word for word in get_args(field.annotation) if isinstance(word, str)]
    if choices:
        return f"it must be {', '.join(choices[:-1])} or {choices[-1]}"
    if field.annotation is bool:
        return "it must be true or false"
    low = next((meta.ge for meta in field.metadata if isinstance(meta, Ge)), None)
    high = next((meta.le for meta in field.metadata if isinstance(meta, Le)), None)
    return f"it must be {shown(name, low)} to {shown(name, high)}" if low is not None and high is not None else ""
