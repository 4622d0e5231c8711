"""The command line of `aionn fleet`: the arguments of each command. The work is in `fleet`, imported when a command is called."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from aionn.cli.amounts import bytes_of, seconds_of
from aionn.cli.printing import UsageError

__all__ = ["fleet"]

Json = Annotated[bool, Parameter(name="--json", negative="", show_default=False, help="Print one JSON value instead of a table.")]
StateDir = Annotated[str | None, Parameter(name="--state-dir")]
DeviceNames = Annotated[list[str] | None, Parameter(name="--device", negative="")]

fleet = App(name="fleet", help="Sign compiled models, and carry them between machines.")


@fleet.command
def keygen(
    key: str,
    /,
    *,
    name: str,
    device: DeviceNames = None,
    days: int | None = None,
    json: Json = False,
) -> None:
    """Make a builder's key: KEY, which signs and stays secret, and KEY.pub, which machines that pull put into their keyring.

    Args:
        key: Path of the private key, made with mode 0600. It must not exist.
        name: Name of the builder, for people.
        device: Name of a device that the key may sign for; give it again for more. Default: every device.
        days: Days after which machines adopt nothing more that the key has signed. Default: no limit.
    """
    from aionn.cli.fleet import make_key

    if days is not None and days < 1:
        raise UsageError(f"--days {days}: give at least 1, or leave it out for a key without an end")
    make_key(key, name, device or (), days, json)


@fleet.command
def push(
    cache_dir: str,
    url: str,
    /,
    *,
    key: str,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Sign what this machine has compiled into a cache, and push it to a store. Exits 1 if an entry cannot be signed.

    An entry is signed only if the records in the state directory show that a driver of this machine has compiled it.

    Args:
        cache_dir: Directory of the cache.
        url: The store: a directory, file:///path or s3://bucket/prefix. A directory is made if it is missing.
        key: Path of the builder's private key.
        state_dir: Folder of the records that vouch for the cache. Default: $XDG_STATE_HOME/aionn, else ~/.local/state/aionn.
    """
    from aionn.cli.fleet import push_entries

    push_entries(cache_dir, url, key, state_dir, json)


@fleet.command
def pull(
    url: str,
    cache_dir: str,
    /,
    *,
    device: DeviceNames = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Fetch what trusted builders have compiled for this machine, and adopt it, so that the first start is a hit.

    Exits 1 if the store does not answer for 2 seconds, or if an artifact is refused. An app then compiles what is missing.

    Args:
        url: The store: a directory, file:///path or s3://bucket/prefix.
        cache_dir: Directory of the cache; made if it is missing.
        device: Name of a device; give it again for more. Default: every installed one that starts.
        state_dir: Folder of the records that vouch for the cache; it must last as long. Default: $XDG_STATE_HOME/aionn, else
            ~/.local/state/aionn.
    """
    from aionn.cli.fleet import pull_entries

    pull_entries(url, cache_dir, device, state_dir, json)


@fleet.command
def verify(
    url: str,
    /,
    *,
    remove: Annotated[bool, Parameter(negative="", show_default=False)] = False,
    json: Json = False,
) -> None:
    """Read every statement, file and model of a store, and name those that no machine could use. Exits 1 if there is one.

    Signatures are checked with the keyring of this user, so a statement of another builder is named, too. With an empty keyring only
    the files, the models and the form of the statements are checked. A model is copied to $TMPDIR while it is checked.

    Args:
        url: The store: a directory, file:///path or s3://bucket/prefix.
        remove: Remove what was named, so that the next push or compile writes it again.
    """
    from aionn.cli.fleet import verify_store

    verify_store(url, remove, json)


@fleet.command
def gc(
    url: str,
    /,
    *,
    keep: str = "30d",
    max: str | None = None,  # noqa: A002 -- the option's name
    dry_run: Annotated[bool, Parameter(name="--dry-run", negative="", show_default=False)] = False,
    json: Json = False,
) -> None:
    """Remove old artifacts from a store: statements first, then files that no statement names.

    Nothing younger than 24 hours is removed, so it is safe while others push and pull.

    Args:
        url: The store: a directory, file:///path or s3://bucket/prefix.
        keep: How long an artifact is kept after it was pushed, and after a machine of its kind has pulled: 90s, 15m, 12h, 30d.
        max: The budget of all files, as 500M or 50G (powers of 1000). The oldest artifacts go first. Default: no budget.
        dry_run: Remove nothing, and print what would be removed.
    """
    from aionn.cli.fleet import sweep_store

    sweep_store(url, seconds_of(keep, "--keep"), None if max is None else bytes_of(max, "--max"), dry_run, json)
