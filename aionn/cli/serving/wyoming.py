"""`aionn serve-wyoming`: wake words and voice activity for Home Assistant and its satellites."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from urllib.parse import urlsplit

import aionn
from aionn.cli.printing import UsageError, say, show_warnings, url_of
from aionn.cli.serving.listening import tcp_socket, until_sigterm
from aionn.memory.limits import raise_file_limit
from aionn.service.listening import Listening, listen

try:
    from aionn.adapters.wyoming.opening import open_models
    from aionn.adapters.wyoming.server import serve as serve_satellites
except ImportError as error:
    raise UsageError("aionn serve-wyoming needs the package wyoming; install it with: pip install 'aionn[wyoming,litert]'") from error


@dataclass(frozen=True, slots=True)
class ServeWyomingOptions:
    """How `aionn serve-wyoming` serves. The command line describes each option."""

    uri: str
    models: Sequence[str]
    features: str | None
    threshold: float
    service: str | None


def serve(options: ServeWyomingOptions) -> None:
    """Serve satellites until SIGINT or SIGTERM.

    Raises:
        UsageError: an option is wrong.
        NotDoneError: the address cannot be listened on.
        AionnError: a model cannot be opened.
    """
    if not 0 < options.threshold < 1:
        raise UsageError(f"--threshold {options.threshold:g}: give a score between 0 and 1")
    show_warnings(logging.INFO)
    raise_file_limit()  # each satellite takes a descriptor
    listening, where = _listening(options.uri)
    try:
        aionn.run(_serve, options, listening, where)
    finally:
        listening.end()


def _listening(uri: str) -> tuple[Listening, str]:
    """Return the socket, and its address for people."""
    parts = urlsplit(uri)
    if parts.scheme == "tcp" and not parts.path.strip("/"):
        sock = tcp_socket(parts.netloc, "--uri")
        host, port = sock.getsockname()[:2]
        return Listening(sock, -1, ""), url_of(host, port, "tcp")
    if parts.scheme == "unix" and not parts.netloc and parts.path:
        listening = listen(os.path.abspath(parts.path), "--uri", "give another path with --uri")
        return listening, f"unix://{listening.path}"
    raise UsageError(f"--uri {uri!r} is not an address; give one as tcp://0.0.0.0:10400 or unix:///run/user/1000/wake.sock")


async def _serve(options: ServeWyomingOptions, listening: Listening, where: str) -> None:
    with until_sigterm(listening):
        async with AsyncExitStack() as stack, aionn.Runtime(start=(), name="serve-wyoming", service=options.service) as runtime:
            heard = await open_models(runtime, stack, options.models, options.features, options.threshold)
            hears = [*heard.words, *(["voice activity"] if heard.voice is not None else [])]
            say(f"listening on {where} for {', '.join(hears)}")
            await serve_satellites(heard, listening.sock)
