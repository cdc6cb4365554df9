"""Ties a child process to its parent, so that nothing is left running whatever ended the daemon."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Ask the kernel to kill the calling process when the thread that started it ends (Linux).

    Meant to run between fork and exec; the children are therefore started from the main thread.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
