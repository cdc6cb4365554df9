"""Errors of the project.

SpesError
 +-- UserError      wrong input, file, address or option: one line and a remedy, exit code 2
      +-- Unreachable    no peer answers
      +-- ClockOff       this machine's clock is not that of the others
Everything else that escapes is a bug and shows its traceback (exit code 70).
"""


class SpesError(Exception):
    """A failure that people can act on; its text is one line: what is wrong, then what to do."""

    exit_code = 1


class UserError(SpesError):
    """The user's input is wrong; nothing was changed."""

    exit_code = 2


class Unreachable(UserError):
    """No peer of the swarm answers at the given addresses."""


class ClockOff(UserError):
    """The clock of this machine differs from that of the peers: what it signs would be refused."""
