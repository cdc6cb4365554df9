"""Numbers for people."""


def size(count: float, digits: int = 1) -> str:
    """Bytes, in units of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.{digits}f} TB"


def quantity(count: float, digits: int = 3) -> str:
    """A count with so many digits: 3.48M."""
    for unit in ("", "k", "M", "B"):
        if count < 1000:
            return f"{count:.{digits}g}{unit}"
        count /= 1000
    return f"{count:.{digits}g}T"


def duration(seconds: float) -> str:
    """A time."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
