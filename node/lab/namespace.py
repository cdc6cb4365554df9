"""Network namespaces without names: the kernel removes one when its last descriptor and its last process are gone."""

import ctypes
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)  # os.unshare and os.setns came with Python 3.12
_HERE = "/proc/thread-self/ns/net"


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Namespace:
    """One host's network: its own devices, addresses, routes and ports. Files and clocks are the machine's."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def create(cls) -> Self:
        """A new one with nothing but a loopback that is down. Raises OSError without the right to make it."""
        with _coming_home():
            _checked(_libc.unshare(_CLONE_NEWNET))
            return cls(os.open(_HERE, os.O_RDONLY | os.O_CLOEXEC))

    def enter(self) -> None:
        """Move the calling thread here for good; meant for a child between fork and exec."""
        _checked(_libc.setns(self.descriptor, _CLONE_NEWNET))

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Have the calling thread in here for a while."""
        with _coming_home():
            self.enter()
            yield

    @property
    def identity(self) -> tuple[int, int]:
        """What tells it from others: device and inode."""
        return _identity(os.fstat(self.descriptor))

    def close(self) -> None:
        """Let go of it."""
        os.close(self.descriptor)


def signal_all(namespaces: Iterable[Namespace], number: int) -> bool:
    """Send a signal to every process in these namespaces, 0 to none of them; whether there is one."""
    wanted, found = {namespace.identity for namespace in namespaces}, False
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or _namespace_of(process) not in wanted:
            continue
        try:
            handle = os.pidfd_open(int(process.name))
        except ProcessLookupError:
            continue
        try:
            if _namespace_of(process) in wanted:  # still, so that the handle is not that of another one with its pid
                found = True
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            continue
        finally:
            os.close(handle)
    return found


def _namespace_of(process: Path) -> tuple[int, int] | None:
    try:
        return _identity(os.stat(process / "ns" / "net"))
    except OSError:  # it has ended; a zombie has no namespace any more
        return None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


@contextmanager
def _coming_home() -> Iterator[None]:
    """Bring the calling thread back to the namespace it was in."""
    home = os.open(_HERE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        try:
            _checked(_libc.setns(home, _CLONE_NEWNET))
        finally:
            os.close(home)
