"""A hub with one model, ``kvist/twig``, on the loopback."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Answers the requests that the hub's client sends for a snapshot."""

    files: ClassVar[dict[str, bytes]] = {}
    served: ClassVar[list[str]] = []
    listings: ClassVar[int] = 0
    """Lists of files that it still gives."""

    def do_HEAD(self) -> None:
        """A file's size and commit."""
        self._answer(send=False)

    def do_GET(self) -> None:
        """A file, or the list of them."""
        self._answer(send=True)

    def _answer(self, *, send: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/resolve/")[2].partition("/")[2]
        body = self._listing(path) if path.startswith("/api/") else self.files.get(name)
        if "/kvist/twig" not in path or body is None:
            self._missing("EntryNotFound" if "/kvist/twig" in path else "RepoNotFound")
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(body, usedforsecurity=False).hexdigest()}"')
        self.end_headers()
        if send:
            self.served.append(path)
            self.wfile.write(body)

    def _missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _listing(self, path: str) -> bytes | None:
        if "/tree/" in path and self.listings == 0:
            return None
        if "/tree/" in path:
            Hub.listings -= 1
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": "0"}
                for name, data in self.files.items()
            ]
            return json.dumps(entries).encode()
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
        return json.dumps({"id": "kvist/twig", "sha": COMMIT, "siblings": siblings}).encode()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log no requests."""


@contextmanager
def hub_with(files: Mapping[str, bytes], port: int = 0, *, listings: int = 1_000) -> Iterator[str]:
    """Serve the files while the context lasts; yield the address for ``HF_ENDPOINT``. ``listings``: how often
    the files are listed; a snapshot takes one list."""
    Hub.files, Hub.served, Hub.listings = dict(files), [], listings
    server = ThreadingHTTPServer(("127.0.0.1", port), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
