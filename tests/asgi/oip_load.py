"""Load for a server of the Open Inference Protocol: many clients, each with one connection and one request at a time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Load"]


@dataclass
class Load:
    """What the clients have seen.

    Attributes:
        address: HOST:PORT. request: the whole request, as HTTP. answer: the body of every right answer.
        statuses: how many answers had each status. wrong: answers of status 200 with another body.
        lost: connections that ended without an answer. gap_s: the longest time between two right answers, whatever the client.
    """

    address: str
    request: bytes
    answer: bytes
    statuses: Counter[int] = field(default_factory=Counter)
    wrong: int = 0
    lost: int = 0
    over: bool = False
    gap_s: float = 0.0
    _last_s: float = 0.0
    _reached: dict[int, asyncio.Event] = field(default_factory=dict)

    async def client(self) -> None:
        """Ask until `over`."""
        host, port = self.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            while not self.over:
                writer.write(self.request)
                head = await reader.readuntil(b"\r\n\r\n")
                status = int(head.split(b" ", 2)[1])
                fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
                body = await reader.readexactly(int(fields[b"content-length"]))
                self.statuses[status] += 1
                if status == 200:
                    now_s = time.monotonic()
                    self.gap_s, self._last_s = max(self.gap_s, now_s - (self._last_s or now_s)), now_s
                self._reach()
                if status == 200 and body != self.answer:
                    self.wrong += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost += 1
            self._reach()
        finally:
            writer.close()

    async def until(self, successes: int) -> None:
        """Return when there have been so many more successes, or a connection was lost."""
        await self._reached.setdefault(self.statuses[200] + successes, asyncio.Event()).wait()

    def _reach(self) -> None:
        for wanted in [wanted for wanted in self._reached if wanted <= self.statuses[200] or self.lost]:
            self._reached.pop(wanted).set()
