"""A bound on the nesting of hivemind's messages.

hivemind's decoder calls itself in C for every tuple inside a tuple and overflows the stack of the process on a small
message, before any record is validated. With the guard such a message is an ordinary error of its sender.
"""

import threading
from typing import Any

from hivemind.utils import MSGPackSerializer

MAX_NESTING = 16
"""hivemind itself nests three levels at most."""


def install() -> None:
    """Install the guard in this process; calling it again changes nothing."""
    if getattr(MSGPackSerializer, "_spes_guard", False):
        return
    decode = MSGPackSerializer._decode_ext_types.__func__
    nesting = threading.local()

    def guarded(cls: Any, type_code: int, data: bytes) -> object:
        level: int = getattr(nesting, "level", 0)
        if level >= MAX_NESTING:
            raise ValueError(f"message nested deeper than {MAX_NESTING} levels")
        nesting.level = level + 1
        try:
            return decode(cls, type_code, data)
        finally:
            nesting.level = level

    MSGPackSerializer._decode_ext_types = classmethod(guarded)
    MSGPackSerializer._spes_guard = True
