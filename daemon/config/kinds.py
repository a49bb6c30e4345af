"""Kinds of settings: each takes what a flag, a variable or the YAML file says, judges it, and has a JSON schema."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from kvferry.daemon.config.tls_names import parse_tls_peers
from kvferry.daemon.config.values import ConfigError, is_name, parse_address, parse_device, parse_size
from kvferry.daemon.core.namespaces import Quota
from kvferry.flags import is_whole
from kvferry.proto.limits import MAX_NAME_CHARS
from kvferry.radix.tree import policy_names

MAX_TRANSPORTS = 16
MAX_RDMA_PORTS = 64
MAX_CLOSED = 256  # peers, namespaces that take no part in look-ups


def parse_quota(text: str) -> tuple[str, Quota]:
    """(namespace, quota) of "NAMESPACE=SOFT:HARD" or "NAMESPACE=SOFT:HARD:HOST_SOFT:HOST_HARD", in pages. Raises
    ConfigError.
    """
    namespace, _, numbers = text.partition("=")
    parts = numbers.split(":")
    if len(parts) not in (2, 4) or not all(is_whole(part, 12) for part in parts):
        raise ConfigError(f"quota {text!r} is not NAMESPACE=SOFT:HARD[:HOST_SOFT:HOST_HARD] with numbers of pages")
    try:
        return namespace.lower(), Quota(*map(int, parts))
    except ValueError as error:
        raise ConfigError(f"quota {text!r}: {error}") from error


def _size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


def _address(value: str) -> str:
    if value:
        parse_address(value)
    return value


def _endpoint(value: str) -> str:
    if value:
        scheme, separator, address = value.partition("://")
        if scheme != "tcp" or not separator:
            raise ConfigError(f"endpoint {value!r} is not tcp://HOST:PORT")
        parse_address(address)
    return value


def _name(value: str) -> str:
    if not is_name(value):
        raise ConfigError(
            f"name {value!r} must be 1 to {MAX_NAME_CHARS} letters, digits, '_', '.' or '-', "
            "the first a letter or digit"
        )
    return value


def _entries(value: object, what: str) -> dict[str, str]:
    """The entries of a mapping, or of NAME=VALUE in a list or separated by commas."""
    if isinstance(value, dict):
        return {str(name): str(of) for name, of in value.items()}
    found: dict[str, str] = {}
    for entry in value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]:
        name, equals, of = str(entry).strip().partition("=")
        if not equals or name in found:
            raise ConfigError(f"{what} {str(entry)!r} is not {_FORMS[what]}, or names {name!r} twice")
        found[name] = of
    return found


_FORMS = {"peer": "NAME=HOST:PORT", "quota": "NAMESPACE=SOFT:HARD[:HOST_SOFT:HOST_HARD]"}


def _peers(value: object) -> dict[str, str]:
    peers = _entries(value, "peer")
    for name, address in peers.items():
        _name(name)
        parse_address(address)
    return peers


def _quotas(value: object) -> dict[str, Quota]:
    if isinstance(value, dict) and all(isinstance(quota, Quota) for quota in value.values()):
        return value
    quotas = dict(parse_quota(f"{name}={numbers}") for name, numbers in _entries(value, "quota").items())
    for namespace in quotas:
        if namespace != "default":
            _namespace(namespace, ", or default")
    return quotas


def _words(value: object, what: str) -> tuple[str, ...]:
    """The words of a list, or those with commas between; a flag that is repeated gives a list of such."""
    if not isinstance(value, str | list | tuple):
        raise ConfigError(f"{what} {value!r} is no list of names")
    given = [value] if isinstance(value, str) else value
    words = (word.strip() for entry in given for word in str(entry).split(","))
    found = tuple(dict.fromkeys(word for word in words if word))
    if len(found) > MAX_CLOSED:
        raise ConfigError(f"{len(found)} {what}s are named; the bound is {MAX_CLOSED}")
    return found


def _names(value: object) -> tuple[str, ...]:
    return tuple(map(_name, _words(value, "name")))


def _namespaces(value: object) -> tuple[str, ...]:
    namespaces = tuple(word.lower() for word in _words(value, "namespace"))
    for namespace in namespaces:
        _namespace(namespace, "")
    return namespaces


def _namespace(text: str, beside: str) -> None:
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise ConfigError(
            f"namespace {text[:128]!r} must be 64 hexadecimal digits (see kvferry stats --format json){beside}"
        )


def _ports(value: object) -> object:
    """(first, last) of "FIRST-LAST"."""
    if not isinstance(value, str):
        return value
    first, _, last = value.partition("-")
    if not (is_whole(first, 5) and is_whole(last, 5) and 1024 <= int(first) <= int(last) <= 65535):
        raise ConfigError(f"ports {value!r} are not FIRST-LAST within 1024-65535")
    return int(first), int(last)


def _transports(value: str) -> str:
    """UCX's names with commas between; empty: the courier's own choice."""
    names = value.split(",") if value else []
    if len(names) > MAX_TRANSPORTS or not all(re.fullmatch("[a-z0-9_]{1,32}", name) for name in names):
        raise ConfigError(
            f"transports {value[:64]!r} must be 1 to {MAX_TRANSPORTS} names with commas between, each of 1 to 32 of "
            "a-z, 0-9 and '_', like rc,cuda_copy,cuda_ipc,tcp"
        )
    return value


def _rdma_ports(value: str) -> str:
    """UCX's names of RDMA ports with commas between; empty: all of the machine."""
    names = value.split(",") if value else []
    form = re.compile(r"[A-Za-z0-9_-]{1,64}:[1-9][0-9]?")
    if len(names) > MAX_RDMA_PORTS or not all(map(form.fullmatch, names)):
        raise ConfigError(
            f"RDMA ports {value[:64]!r} must be 1 to {MAX_RDMA_PORTS} with commas between, each a device of "
            "/sys/class/infiniband and its port, like mlx5_0:1,mlx5_1:1"
        )
    return value


def _device(value: str) -> str:
    parse_device(value)
    return value


def _policy(value: str) -> str:
    if value not in policy_names():
        raise ConfigError(f"policy {value!r} must be one of {', '.join(policy_names())}")
    return value


def _schema(**schema: Any) -> WithJsonSchema:
    return WithJsonSchema(schema)


_SIZE_FORM = r"^[0-9]+ *([kKmMgGtT][iI]?[bB]|[bB])?$"
Size = Annotated[
    int,
    BeforeValidator(_size),
    _schema(anyOf=[{"type": "integer", "minimum": 0}, {"type": "string", "pattern": _SIZE_FORM}]),
]
Seconds = Annotated[float, Field(ge=0.05, le=3600, allow_inf_nan=False)]
Address = Annotated[str, AfterValidator(_address)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
Name = Annotated[str, AfterValidator(_name)]
Peers = Annotated[
    dict[str, str], BeforeValidator(_peers), _schema(type="object", additionalProperties={"type": "string"})
]
Quotas = Annotated[
    dict[str, Quota],
    BeforeValidator(_quotas),
    _schema(type="object", additionalProperties={"type": "string", "pattern": "^[0-9]+:[0-9]+(:[0-9]+:[0-9]+)?$"}),
]
Ports = Annotated[tuple[int, int], BeforeValidator(_ports), _schema(type="string", pattern="^[0-9]+-[0-9]+$")]
Transports = Annotated[
    str, AfterValidator(_transports), _schema(type="string", pattern="^([a-z0-9_]{1,32}(,[a-z0-9_]{1,32})*)?$")
]
RdmaPorts = Annotated[
    str,
    AfterValidator(_rdma_ports),
    _schema(type="string", pattern="^([A-Za-z0-9_-]{1,64}:[1-9][0-9]?(,[A-Za-z0-9_-]{1,64}:[1-9][0-9]?)*)?$"),
]
_LIST = _schema(anyOf=[{"type": "array", "items": {"type": "string"}}, {"type": "string"}])
Names = Annotated[tuple[str, ...], BeforeValidator(_names), _LIST]
Namespaces = Annotated[tuple[str, ...], BeforeValidator(_namespaces), _LIST]
TlsPeers = Annotated[tuple[str, ...], BeforeValidator(parse_tls_peers), _LIST]
Device = Annotated[
    str, AfterValidator(_device), _schema(type="string", pattern=r"^(cpu|cuda(:[0-9]{1,2})?(, *cuda(:[0-9]{1,2})?)*)$")
]
Policy = Annotated[str, AfterValidator(_policy), _schema(type="string", enum=list(policy_names()))]
Choice = Literal["on", "off"]
