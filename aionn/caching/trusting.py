"""Where the keyring is, and when it is read (`keyring`). Most users have none, and a hit then imports nothing of it.

The folder is `$AIONN_TRUSTED_BUILDERS`, else `aionn/trusted_builders` in the user's configuration folder. `AIONN_ADOPT=off` switches
adopting off, whatever the folder holds.
"""

from __future__ import annotations

import os

from aionn.caching.store.threads import run_in_thread

__all__ = ["ADOPT", "EMPTY_KEYRING", "FOLDER", "Trusting", "keyring_folder"]

FOLDER = "AIONN_TRUSTED_BUILDERS"
ADOPT = "AIONN_ADOPT"
EMPTY_KEYRING = b"\x82\xa4keys\x90\xa5fault\xa0"
"""An encoded keyring (`hal.trust.encode_keyring`) that has no keys."""


def keyring_folder() -> str | None:
    """Return the absolute path of the keyring, or None if adopting is switched off. The folder need not exist."""
    if os.environ.get(ADOPT, "") not in ("", "on"):  # an unknown word is "off", too
        return None
    config = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.abspath(os.environ.get(FOLDER) or os.path.join(config, "aionn", "trusted_builders"))


class Trusting:
    """The keyring, as one connection to a driver sends it with each load.

    A keyring that exists is read for each load, so a key that is removed is revoked at the next one. Where no keyring exists, which is the
    usual case, it is looked for once.
    """

    def __init__(self) -> None:
        self._none = False

    async def keyring(self, anew: bool = False) -> bytes:
        """Return the encoded keyring.

        Args:
            anew: look for it, although there was none before.
        """
        if self._none and not anew:
            return EMPTY_KEYRING
        encoded, self._none = await run_in_thread(_encoded)
        return encoded


def _encoded() -> tuple[bytes, bool]:
    """Return the encoded keyring, and whether there is none. Blocking."""
    folder = keyring_folder()
    if folder is None or not os.path.lexists(folder):
        return EMPTY_KEYRING, True
    from aionn.caching.keyring import encoded_keyring

    return encoded_keyring(), False
