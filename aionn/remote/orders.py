"""What an app asks of its template of drivers: one more driver. Both sides read this, before anything heavy is imported."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from aionn.caching.private_folder import is_name_of_folder

OWN_NUMBER, NUMBER_OF_LAST = 0, 4
"""Where in the page that app and template share the template's number stands, and that of the driver which it has made last."""

PAGE_BYTES = 4096
MOST_BYTES = 1 << 16
"""The most bytes of an order."""

READY, MADE, LEARNS = b"ready", b"made", b"learns"
"""A template says READY when it waits for orders, and MADE when it has made a driver. It says LEARNS when it has made one and imports the
library of its device next, until it is READY again. Any other text says what keeps it from that."""

CONTROL_FD, COUNTER_FD, SOCKET_FD, PAGE_FD = 3, 4, 5, 6
"""The descriptors of a driver, and the two more of one that is to leave a template."""

PLACES = (CONTROL_FD, 1, COUNTER_FD, SOCKET_FD, PAGE_FD)
"""The numbers of what a driver is started with: its control socket, the pipe for its output, its counter, and what a template needs."""

LEAVES_TEMPLATE = "template"
"""The last argument of a driver that is to leave a template. Spaces follow, in whose place longer arguments of other drivers are shown."""

SPACES = 256

POOL_SIZES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
"""Variables that bound the thread pools of libraries which an engine's settings do not reach, such as NumPy's BLAS."""


def may_differ(name: str) -> bool:
    """Return whether no library that a template has loaded reads that variable, or only one whose number of threads is set by a call.

    Any other variable may have been read when a library was loaded, so a template cannot change it. Variables of Intel's OpenMP belong to
    engines that are loaded later. Packages such as scikit-learn set some when an app imports them.
    """
    return name.startswith(("AIONN_FAKE_DEVICE", "AIONN_TEST_", "KMP_")) or name in POOL_SIZES


def encode_order(arguments: Iterable[str], environment: Mapping[str, str]) -> bytes:
    """Return the message for a driver with these arguments and variables."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    return b"\0".join(os.fsencode(text) for text in (str(len(variables)), *variables, *arguments))


def decode_order(message: bytes) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the variables."""
    count, *texts = (os.fsdecode(text) for text in message.split(b"\0"))
    variables, arguments = texts[: int(count)], texts[int(count) :]
    return arguments, dict(variable.split("=", 1) for variable in variables)


def why_refused(arguments: Sequence[str], state_dir: str) -> str:
    """Return why a driver with these arguments is not made for a confined service, or an empty text.

    Such a service has given up its rights. Were it taken over, an order must not give them back. `state_dir`: of the service.
    """
    if not arguments[4:] or arguments[4] == "off":
        return "the service is confined, so none of its drivers goes without a sandbox; start it with AIONN_SANDBOX=off for that"
    if arguments[3] != state_dir or not (arguments[5:] and is_name_of_folder(arguments[5])):
        return "its folders are not those of the service"
    return ""
