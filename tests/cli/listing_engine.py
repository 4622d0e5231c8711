"""An engine that lists a provider whose hardware is not there, and one that would call a service."""

from __future__ import annotations

from aionn.engines.reference import ReferenceEngine
from aionn.errors import DeviceUnavailableError


class ListingEngine(ReferenceEngine):
    name = "listing"
    providers = ("CPU", "gone", "azure")

    @classmethod
    def for_provider(cls, provider: str) -> ListingEngine:
        raise DeviceUnavailableError(f"listing:{provider}", f"device 'listing:{provider}' cannot start, because no card is plugged in")
