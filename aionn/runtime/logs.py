"""What log records of a runtime carry beside their text: `aionn_device`, `aionn_model`, `aionn_burst` and `aionn_stage`."""

from __future__ import annotations


def about(*, device: str = "", model: str = "", burst: str = "", stage: str = "") -> dict[str, str]:
    """Return `extra=` for a log record. Names that are empty are left out."""
    names = {"aionn_device": device, "aionn_model": model, "aionn_burst": burst, "aionn_stage": stage}
    return {key: name for key, name in names.items() if name}
