"""Words for what connector and tier do not support: they refuse it at start."""

from __future__ import annotations

from forebay.errors import ConfigInvalid

__all__ = ["need", "unsupported"]


def unsupported(what: str, field: str, part: str = "connector") -> ConfigInvalid:
    """The error that ``what``, which comes of the setting ``field``, is not supported by this ``part`` of ours."""
    return ConfigInvalid(f"the vLLM {part} does not support {what}", field=field)


def need(ok: bool, what: str, field: str, part: str = "connector") -> None:
    """Refuse ``what`` unless it is ``ok``. Raises `ConfigInvalid`."""
    if not ok:
        raise unsupported(what, field, part)
