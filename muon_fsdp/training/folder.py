"""Create the folder of a run and lock it, so that two runs do not write to the same one."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from muon_fsdp.training.arguments import ConfigError
from muon_fsdp.training.checkpoint import gather_failures
from muon_fsdp.training.parallel import World


@contextmanager
def lock_folder(folder: Path, world: World) -> Iterator[None]:
    """Create `folder` and hold its lock while the context is entered; all ranks call it.

    Two runs in one folder would mix their metrics and delete each other's checkpoints.

    Raises:
        ConfigError: another run holds the lock, or the folder cannot be written to.
    """
    failure, lock = "", None
    if world.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = (folder / "lock").open("w")
            _lock(lock.fileno(), folder)
        except BlockingIOError:
            failure = f"another run is writing to {folder}: wait until it ends, or pass another --output"
        except OSError as error:
            reason = "it is a file" if folder.is_file() else error.strerror or error
            failure = f"cannot write to --output {folder}: {reason}"
    failure = gather_failures(failure, world)[0]
    try:
        if failure:
            raise ConfigError(failure)
        yield
    finally:
        if lock is not None:
            lock.close()


def _lock(file: int, folder: Path) -> None:
    """Lock an open file until the process ends, even by a kill; print a note where the file system has no locks."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        print(f"note: {folder} cannot be locked here; do not start a second run in it", flush=True)
