"""Exceptions of the command line; each message is one line with the flag or field and the remedy."""

from typing import Final

FAILED: Final = 1
USAGE: Final = 2


class CommandError(Exception):
    """A command that cannot be carried out; ``exit_code`` is the process's."""

    exit_code = FAILED


class CommandUsageError(CommandError):
    """Options that do not go together, or a file that cannot be used."""

    exit_code = USAGE


class ClusterAccessError(CommandError):
    """An API server that does not answer, or has not what a command reads."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the API server's answer; 0 when there was none."""


class PickerClientError(CommandError):
    """A picker that cannot be found, does not answer, or refuses."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status of the picker's answer; 0 when there was none."""


class NoPickerError(PickerClientError):
    """A pool of which no picker runs."""
