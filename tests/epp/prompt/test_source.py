"""Promises of ``source``: ``hf://`` against a hub of our own on loopback."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from tests.models import folders

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOAD = """
import sys
from kvist_epp.errors import ModelFilesError
from kvist_epp.prompt.model import Model
try:
    print(len(Model.load(sys.argv[1]).pieces) > 0)
except ModelFilesError as error:
    print(error)
"""


class Hub(BaseHTTPRequestHandler):
    """What the hub's client asks for when it takes a snapshot."""

    files: ClassVar[dict[str, bytes]] = {}
    served: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        """A file's size and commit."""
        self._answer(send=False)

    def do_GET(self) -> None:
        """A file, or the list of them."""
        self._answer(send=True)

    def _answer(self, *, send: bool) -> None:
        path = self.path.partition("?")[0]
        body = (
            self._listing(path)
            if path.startswith("/api/")
            else self.files.get(path.rpartition(f"/{COMMIT}/")[2])
        )
        if "/kvist/twig" not in path or body is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
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

    def _listing(self, path: str) -> bytes:
        if "/tree/" in path:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": "0"}
                for name, data in self.files.items()
            ]
            return json.dumps(entries).encode()
        siblings = [{"rfilename": name} for name in self.files]
        return json.dumps({"id": "kvist/twig", "sha": COMMIT, "siblings": siblings}).encode()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Silence."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """A hub with one model, whose weights nobody should fetch."""
    home = folders.write("llama3", tmp_path / "published")
    Hub.files = {path.name: path.read_bytes() for path in home.iterdir()} | {"model.safetensors": b"weights"}
    Hub.served = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def load(source: str, endpoint: str, home: Path, **environment: str) -> str:
    """What a picker's start says about this source; in a process of its own, as the hub's client reads the
    environment when it is imported."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, source],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_model_of_the_hub_is_fetched_without_its_weights(hub: str, tmp_path: Path) -> None:
    """Tokenizer and template only; the second start needs no hub."""
    first = load("hf://kvist/twig@main", hub, tmp_path / "cache")
    fetched = {path.rpartition("/")[2] for path in Hub.served if "/resolve/" in path}
    again = load("hf://kvist/twig@main", hub, tmp_path / "cache", HF_HUB_OFFLINE="1")
    assert (first, fetched, again) == ("True", {"tokenizer.json", "tokenizer_config.json"}, "True")


@pytest.mark.parametrize(
    ("source", "environment", "remedy"),
    [
        ("hf://kvist/absent", {}, "HF_TOKEN"),
        ("hf://kvist/twig", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE"),
    ],
)
def test_what_the_hub_does_not_give_names_the_remedy(
    hub: str, tmp_path: Path, source: str, environment: dict[str, str], remedy: str
) -> None:
    """A wrong name or a missing token, and an empty cache without a hub."""
    said = load(source, hub, tmp_path / "cache", **environment)
    assert (source in said, remedy in said) == (True, True)
