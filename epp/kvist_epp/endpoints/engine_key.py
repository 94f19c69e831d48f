"""The engines' API key, from a file that may change while the picker runs.

vLLM reads its key once, when it starts. While a key is replaced, engines that have restarted want the new key
and the others the old one, so a request that is answered with 401 is repeated with the key before.
"""

from pathlib import Path
from typing import Final

AUTHORIZATION: Final = "Authorization"
UNAUTHORIZED: Final = (401, 403)
KEPT: Final = 2
"""Keys that are tried: the file's, and the one that it had before."""


def is_final_refusal(status: int) -> bool:
    """Return whether an engine will never accept the request: status 4xx, but not a timeout or overload."""
    return 400 <= status < 500 and status not in (408, 429)


class EngineKey:
    """The key in a file, and the one before it."""

    def __init__(self, file: str = "") -> None:
        """``file``: path of the file; empty = engines need no key."""
        self._file = Path(file) if file else None
        self._keys: tuple[str, ...] = ()

    @property
    def given(self) -> bool:
        """Whether there is a file."""
        return self._file is not None

    def headers(self) -> list[dict[str, str]]:
        """Return the headers to try, one after the other. Raises OSError when the file cannot be read."""
        if self._file is None:
            return [{}]
        key = self._file.read_text().strip()
        if key not in self._keys:
            self._keys = (key, *self._keys)[:KEPT]
        ordered = sorted(self._keys, key=lambda each: each != key)
        return [{AUTHORIZATION: f"Bearer {each}"} for each in ordered]
