"""Kinds of configuration values: how each is written, read, checked and shown."""

from __future__ import annotations

import ipaddress
import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.errors import ConfigInvalid

__all__ = [
    "AttachedHost",
    "AttachedHosts",
    "Boolean",
    "Choice",
    "CoreMask",
    "Duration",
    "Endpoint",
    "FilePath",
    "Folder",
    "Fraction",
    "Integer",
    "Kind",
    "ListenAddress",
    "Setting",
    "Size",
    "Text",
    "WebAddress",
    "format_duration",
    "format_size",
    "parse_duration_ms",
    "parse_size_bytes",
    "setting",
]

SIZES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "PiB": 1 << 50,
}
DURATIONS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def _quantity(text: str, units: dict[str, int], field_name: str, example: str) -> int:
    """Whole units of the smallest kind."""
    found = QUANTITY.fullmatch(text)
    by_case = {name.lower(): factor for name, factor in units.items()}
    if found is None or found[2].lower() not in by_case:
        raise ConfigInvalid(
            f"{field_name}: {text!r} is not a number with a unit ({', '.join(units)}), such as {example}",
            field=field_name,
        )
    whole, _, part = found[1].partition(".")
    value: int
    value, rest = divmod(int(whole + part) * by_case[found[2].lower()], 10 ** len(part))
    if rest:
        raise ConfigInvalid(f"{field_name}: {text!r} is not a whole number of the smallest unit", field=field_name)
    return value


def parse_size_bytes(value: int | str, field_name: str = "size") -> int:
    """Bytes of ``64GiB`` (2**30), ``64GB`` (10**9), ``4096B`` or a plain number. Raises `ConfigInvalid`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise ConfigInvalid(f"{field_name}: {value!r} is not a size, such as 64GiB", field=field_name)
    return int(value) if value.isdecimal() else _quantity(value, SIZES, field_name, "64GiB")


def parse_duration_ms(value: str, field_name: str = "duration") -> int:
    """Milliseconds of ``10s``, ``500ms``, ``2m``, ``1h``, ``1d``. Raises `ConfigInvalid`, also without a unit."""
    if not isinstance(value, str):
        raise ConfigInvalid(f"{field_name}: {value!r} is not a duration with a unit, such as 10s", field=field_name)
    return _quantity(value, DURATIONS_MS, field_name, "10s")


def _in_units(value: int, units: dict[str, int]) -> str:
    """The shortest exact way to write a value, by the largest unit that divides it."""
    name = max((name for name, factor in units.items() if value % factor == 0), key=lambda name: units[name])
    return f"{value // units[name]}{name}" if value else f"0{next(iter(units))}"


def format_size(size_bytes: int) -> str:
    """A size as `parse_size_bytes` reads it: ``64GiB``; plain bytes where no binary unit divides it."""
    return _in_units(size_bytes, {name: factor for name, factor in SIZES.items() if name == "B" or "i" in name})


def format_duration(duration_ms: int) -> str:
    """A duration as `parse_duration_ms` reads it: ``10s``."""
    return _in_units(duration_ms, DURATIONS_MS)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a port to listen on; port 0 takes a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def unspecified(self) -> bool:
        """Whether it names every address of this machine, and so none that a client could be told."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False


class Kind(ABC):
    """How values of one kind are read from TOML, an environment variable or a flag."""

    @abstractmethod
    def parse(self, value: Any, name: str, base: Path) -> Any:
        """The value, checked. ``base`` is what relative paths start from. Raises `ConfigInvalid` for ``name``."""

    @abstractmethod
    def allowed(self) -> str:
        """What may stand there, in words, for the reference page."""

    def show(self, value: Any) -> str:
        """The value as TOML."""
        return json.dumps(str(value), ensure_ascii=False)


def _refuse(name: str, value: Any, kind: Kind) -> ConfigInvalid:
    return ConfigInvalid(f"{name}: {value!r} is not {kind.allowed()}", field=name, limit=kind.allowed())


@dataclass(frozen=True, slots=True)
class Size(Kind):
    """A number of bytes."""

    least: int
    most: int
    multiple: int = 1
    power_of_two: bool = False

    def parse(self, value: Any, name: str, base: Path) -> int:
        size = parse_size_bytes(value, name)
        in_range = self.least <= size <= self.most and size % self.multiple == 0
        if not in_range or (self.power_of_two and size & (size - 1)):
            raise _refuse(name, value, self)
        return size

    def allowed(self) -> str:
        text = f"a size from {format_size(self.least)} to {format_size(self.most)}"
        if self.power_of_two:
            return f"{text}, a power of two"
        return text if self.multiple == 1 else f"{text}, a multiple of {format_size(self.multiple)}"

    def show(self, value: Any) -> str:
        return json.dumps(format_size(value))


@dataclass(frozen=True, slots=True)
class Duration(Kind):
    """A time span in milliseconds."""

    least_ms: int
    most_ms: int

    def parse(self, value: Any, name: str, base: Path) -> int:
        duration_ms = parse_duration_ms(value, name)
        if not self.least_ms <= duration_ms <= self.most_ms:
            raise _refuse(name, value, self)
        return duration_ms

    def allowed(self) -> str:
        return f"a duration from {format_duration(self.least_ms)} to {format_duration(self.most_ms)}"

    def show(self, value: Any) -> str:
        return json.dumps(format_duration(value))


@dataclass(frozen=True, slots=True)
class Integer(Kind):
    """A count."""

    least: int
    most: int

    def parse(self, value: Any, name: str, base: Path) -> int:
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not self.least <= value <= self.most:
            raise _refuse(name, value, self)
        return value

    def allowed(self) -> str:
        return f"a whole number from {self.least} to {self.most}"

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Fraction(Kind):
    """A part of a whole."""

    least: float = 0.0
    most: float = 1.0

    def parse(self, value: Any, name: str, base: Path) -> float:
        try:
            number = float(value) if not isinstance(value, bool) else -1.0
        except (TypeError, ValueError):
            raise _refuse(name, value, self) from None
        if not self.least <= number <= self.most:
            raise _refuse(name, value, self)
        return number

    def allowed(self) -> str:
        return f"a number from {self.least:g} to {self.most:g}"

    def show(self, value: Any) -> str:
        return repr(float(value))


@dataclass(frozen=True, slots=True)
class Boolean(Kind):
    """Yes or no."""

    def parse(self, value: Any, name: str, base: Path) -> bool:
        known = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
        if isinstance(value, str):
            value = known.get(value.lower(), value)
        if not isinstance(value, bool):
            raise _refuse(name, value, self)
        return value

    def allowed(self) -> str:
        return "true or false"

    def show(self, value: Any) -> str:
        return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    """One of a few words."""

    words: tuple[str, ...]

    def parse(self, value: Any, name: str, base: Path) -> str:
        if value not in self.words:
            raise _refuse(name, value, self)
        return str(value)

    def allowed(self) -> str:
        return " or ".join(f'"{word}"' for word in self.words)


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """A name: letters, digits, dot, dash and underscore."""

    most: int = 64

    def parse(self, value: Any, name: str, base: Path) -> str:
        if not isinstance(value, str) or not re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{self.most - 1}}}", value):
            raise _refuse(name, value, self)
        return value

    def allowed(self) -> str:
        return f"a name of 1 to {self.most} letters, digits, dots, dashes and underscores"


@dataclass(frozen=True, slots=True)
class Folder(Kind):
    """A directory; ``~`` is the home directory."""

    def parse(self, value: Any, name: str, base: Path) -> Path:
        if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
            raise _refuse(name, value, self)
        return base / Path(value).expanduser()

    def allowed(self) -> str:
        return "a directory"


@dataclass(frozen=True, slots=True)
class FilePath(Folder):
    """A file; ``~`` is the home directory."""

    def allowed(self) -> str:
        return "a file"


@dataclass(frozen=True, slots=True)
class AttachedHost:
    """An NVMe host that is no session's: it may connect to a tenant's subsystem and sees all volumes there."""

    tenant: str
    nqn: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.nqn}"


@dataclass(frozen=True, slots=True)
class AttachedHosts(Kind):
    """Hosts, each as ``TENANT/HOST-NQN``: a list, or one text with commas."""

    def parse(self, value: Any, name: str, base: Path) -> tuple[AttachedHost, ...]:
        given = value.split(",") if isinstance(value, str) else value
        if not isinstance(given, list | tuple):
            raise _refuse(name, value, self)
        found = []
        for one in given:
            # Base §4.7: 223 bytes at most, and UTF-8; commas and spaces are nowhere used in one.
            host = re.fullmatch(r"\s*([a-z0-9._-]+)/(nqn\.[!-+\--~]{1,219})\s*", one if isinstance(one, str) else "")
            if host is None and one != "":
                raise _refuse(name, one, self)
            if host is not None:
                found.append(AttachedHost(host[1], host[2]))
        return tuple(found)

    def allowed(self) -> str:
        return "a list of hosts, each as `TENANT/HOST-NQN`"

    def show(self, value: Any) -> str:
        return json.dumps([str(host) for host in value])


@dataclass(frozen=True, slots=True)
class BdevAddress(Kind):
    """What SPDK makes a bdev of, as ``kind:where``."""

    def parse(self, value: Any, name: str, base: Path) -> str:
        if not isinstance(value, str):
            raise _refuse(name, value, self)
        kind, _, where = value.partition(":")
        pci = re.fullmatch(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", where)
        fits = {
            "nvme": pci is not None,
            "aio": where not in ("", "."),
            "uring": where not in ("", "."),
            "malloc": re.fullmatch(r"[A-Za-z0-9]{1,16}", where) is not None,
        }
        if "\0" in where or not fits.get(kind):
            raise _refuse(name, value, self)
        return f"{kind}:{base / Path(where).expanduser()}" if kind in ("aio", "uring") else value

    def allowed(self) -> str:
        return '"nvme:PCI address", "aio:file or device", "uring:file or device" or "malloc:name"'


@dataclass(frozen=True, slots=True)
class CoreMask(Kind):
    """Which processor cores, as bits of a hexadecimal number or as a list in brackets."""

    def parse(self, value: Any, name: str, base: Path) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"0x[0-9a-fA-F]{1,64}|\[\d+(-\d+)?(,\d+(-\d+)?)*\]", value):
            raise _refuse(name, value, self)
        return value

    def allowed(self) -> str:
        return 'a core mask such as "0x3", or a list such as "[0,2-4]"'


@dataclass(frozen=True, slots=True)
class ListenAddress(Kind):
    """``host:port`` or ``[IPv6]:port``."""

    def parse(self, value: Any, name: str, base: Path) -> Endpoint:
        found = re.fullmatch(
            r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/\s]+)):(\d{1,5})", value if isinstance(value, str) else ""
        )
        if found is None or int(found[3]) > 65_535:
            raise _refuse(name, value, self)
        return Endpoint(found[1] or found[2], int(found[3]))

    def allowed(self) -> str:
        return "host:port or [IPv6 address]:port, port 0 for a free one"


@dataclass(frozen=True, slots=True)
class WebAddress(Kind):
    """An http or https address, or nothing."""

    def parse(self, value: Any, name: str, base: Path) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"(https?://[^\s/?#@]+(/[^\s?#]*)?)?", value):
            raise _refuse(name, value, self)
        return value

    def allowed(self) -> str:
        return "an http:// or https:// address, or nothing"


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the configuration."""

    key: str
    kind: Kind
    doc: str
    default_text: str = ""
    """Says in words what the default is, where it depends on something else."""


def setting(key: str, kind: Kind, default: Any, doc: str, default_text: str = "") -> Any:
    """A dataclass field that is one key of the configuration."""
    return field(default=default, metadata={"setting": Setting(key, kind, doc, default_text)})
