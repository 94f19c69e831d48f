"""The images of the tests: no containers are pulled, so an image is a few programs and a folder of content.

A container's root is the machine's own, in an overlay; the programs of its image come first on its PATH.
An image that is not in the table cannot be pulled, as in any registry.
"""

import compileall
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import kvist_sim
from kvist_sim import model
from kvist_sim.envoy import find_envoy

from .errors import WaitingError

PROGRAMS: Final = "/image/bin"
"""Where a container finds them."""
PULL_ERROR: Final = "ErrImagePull"
BACK_OFF: Final = "ImagePullBackOff"
_HUB: Final = "docker.io/"
"""The registry of a name without one."""
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


NO_ROOM: Final = (
    "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is"
    " needed, which is larger than the available KV cache memory (5.27 GiB). Based on the available memory,"
    " the estimated maximum model length is 43136. Try increasing `gpu_memory_utilization` or decreasing"
    " `max_model_len` when initializing the engine."
)
"""Last words of a vLLM whose cache has no room for one sequence."""
MIRROR: Final = "registry.example.com"
"""The registry inside of examples/10-airgapped."""
MIRRORED: Final = {
    "kvist/kvist-operator": "kvist-operator",
    "kvist/kvist-epp": "kvist-epp",
    "mirror/envoy": "envoyproxy/envoy",
    "mirror/vllm-openai": "vllm/vllm-openai",
}
"""Copies, and what they are copies of."""

Programs = Mapping[str, Mapping[str, str]]
"""Name of a program → its file, by repository."""


@dataclass(frozen=True)
class Image:
    """One repository, any tag of it."""

    programs: Mapping[str, str] = field(default_factory=dict)
    """Name → what a shell runs instead, before the arguments."""
    user: int = 0
    """Where a pod names none."""
    entry: Sequence[str] = ()
    """What is run where a container names no command."""
    content: Path | None = None
    """What a volume of this image shows."""


def table() -> dict[str, Image]:
    """By repository. Raises EnvoyMissingError."""
    python = f"exec {sys.executable}"
    found = {
        "vllm/vllm-openai": Image({"vllm": f"{python} -m kvist_sim.engine"}),
        "kvist-epp": Image({"kvist-epp": f"{python} -m kvist_epp", "python": python}, user=65532),
        "kvist-operator": Image({"kvist-operator": f"{python} -m kvist_operator"}, user=65532),
        "envoyproxy/envoy": Image({"envoy": f"exec {find_envoy()}"}, user=101),
        "kvist-test/python": Image({"python3": python}),
        "kvist-test/no-room": Image({"vllm": f"echo {shlex.quote(NO_ROOM)} >&2; exit 1;"}),
        "kvist-test/model": Image(content=model.folder()),
    }
    return found | {f"{MIRROR}/{copy}": found[name] for copy, name in MIRRORED.items()}


def repository(reference: str) -> str:
    """Return the repository of ``registry.example/name:tag@digest``, without tag, digest and the default
    registry."""
    name = reference.partition("@")[0].removeprefix(_HUB)
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(":")[0]


def _of_files(files: Mapping[str, str]) -> Image:
    """The first is what is run, and not as root where a pod names no user."""
    programs = {name: f"exec {file}" for name, file in files.items()}
    return Image(programs, user=65532, entry=list(files)[:1])


class Images:
    """The table, with the programs as files."""

    def __init__(self, folder: Path, more: Programs | None = None) -> None:
        """``more``: images besides those of the table."""
        self._folder = folder
        self._table = table() | {name: _of_files(files) for name, files in (more or {}).items()}
        files = [file for files in (more or {}).values() for file in files.values()]
        self._folders = {Path(file).parent for file in files}

    def prepare(self) -> None:
        """Write the programs, and compile the Python code they run: pods may not write beside it."""
        for name, image in self._table.items():
            home = self.folder(name)
            home.mkdir(parents=True)
            for program, command in image.programs.items():
                path = home / program
                path.write_text(f'#!/bin/sh\n{command} "$@"\n')
                path.chmod(0o755)
        for package in _packages():
            compileall.compile_dir(package, quiet=2)

    def shown(self) -> list[Path]:
        """Folders that a container must reach whatever user it runs as."""
        return shown(self._folders)

    def folder(self, reference: str) -> Path:
        """With its programs."""
        return self._folder / repository(reference).replace("/", "_")

    def get(self, reference: str) -> Image:
        """Raises WaitingError for one that is not there."""
        found = self._table.get(repository(reference))
        if found is None:
            why = f'failed to pull and unpack image "{reference}": failed to resolve reference: not found'
            raise WaitingError(PULL_ERROR, why)
        return found

    def content(self, reference: str) -> Path:
        """Return the content of an image for an image volume. Raises WaitingError."""
        found = self.get(reference).content
        if found is None:
            raise WaitingError(PULL_ERROR, f'image "{reference}" has no content for a volume')
        return found


def variables() -> dict[str, str]:
    """Return the variables that every image sets."""
    return {"PATH": f"{PROGRAMS}:{_PATH}", "HOME": "/"}


def shown(more: Iterable[Path] = ()) -> list[Path]:
    """Folders that a container must reach whatever user it runs as: Python, its packages, this project."""
    wanted = {*more, Path(sys.prefix), Path(sys.base_prefix), Path(kvist_sim.__file__).parents[2]}
    wanted |= {package.parent for package in _packages()}
    wanted |= {Path(find_envoy()).parent, model.folder()}
    real = sorted({Path(os.path.realpath(path)) for path in wanted} | wanted)
    return [path for path in real if not any(path.is_relative_to(o) for o in real if o != path)]


def _packages() -> list[Path]:
    import kvist_epp
    import kvist_operator

    return [Path(str(package.__file__)).parent for package in (kvist_epp, kvist_operator, kvist_sim)]
