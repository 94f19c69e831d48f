"""Errors that keep a pod from starting."""


class WaitingError(Exception):
    """A container waits: ``reason`` and message become those of its waiting state."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


class StartError(Exception):
    """A container's root could not be made; says what the commands said."""
