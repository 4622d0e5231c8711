"""The units with which systemd starts the service of a user at the first connection.

The sandbox of drivers is aionn's. So the unit takes rights from the service itself, and none that drivers need to confine themselves
(Landlock and seccomp need no privilege), to run code that an engine generates, or to change their schedule.
"""

from __future__ import annotations

import os
import sys

NAMES = ("aionn.socket", "aionn.service")

_SOCKET = """\
[Unit]
Description=Socket of the service that shares neural networks among apps (aionn)

[Socket]
ListenStream=%t/aionn/service.sock
SocketMode=0600
DirectoryMode=0700

[Install]
WantedBy=sockets.target
"""

_SERVICE = """\
[Unit]
Description=Neural networks for all apps of this user (aionn)
Requires=aionn.socket

[Service]
Type=notify
ExecStart={command} serve
Restart=on-failure
# Drivers go on for the streams of their apps for at most a minute, also while the service restarts.
KillMode=process
TimeoutStopSec=20
TasksMax=4096
LimitNOFILE=65536
NoNewPrivileges=yes
LockPersonality=yes
RestrictAddressFamilies=AF_UNIX
RestrictSUIDSGID=yes
SystemCallArchitectures=native
UMask=0077

[Install]
WantedBy=default.target
"""


def units() -> dict[str, str]:
    """Return the units by their names."""
    command = f"{sys.executable} -m aionn"
    return dict(zip(NAMES, (_SOCKET, _SERVICE.format(command=command.replace("%", "%%"))), strict=True))


def write_units(folder: str) -> list[str]:
    """Write the units into a folder, which is made if it is missing. Returns their paths.

    Raises:
        OSError: the folder cannot be written to.
    """
    os.makedirs(folder, exist_ok=True)
    paths = []
    for name, text in units().items():
        path = os.path.join(folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        paths.append(path)
    return paths
