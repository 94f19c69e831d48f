"""Carries out a Dockerfile without containers, and runs its entry point as a pod would. Pure: makes one
script for a shell that has mounts and process ids of its own.

Each stage's root is an overlay of the machine's own, with this Python as the base image's; the checkout is
not to be seen in it. Not as in a real image: what else is on the machine is there, too.
"""

import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.images.dockerfile import Copy, Run, Stage

ROOT: Final = Path(__file__).parents[2]
PATH: Final = "/usr/local/bin:/usr/bin:/bin"
"""Of the base image."""
PASSED: Final = (
    "PIP_",
    "SSL_",
    "http_proxy",
    "https_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "no_proxy",
    "NO_PROXY",
)
"""How a machine says where its packages come from."""
ALONE: Final = (
    *("unshare", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--propagation", "private"),
    *("/bin/bash", "-c"),
)


@dataclass(frozen=True)
class Start:
    """Arguments, environment and files with which the image is started."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    """Path in the container, below /tmp or /run → file of the machine."""


def script(stages: Sequence[Stage], context: Path, work: Path, start: Start) -> list[str]:
    """The command: builds all stages below ``work``, an empty folder, then becomes the entry point."""
    lines = ["exec 2>&1; set -e"]
    for number, stage in enumerate(stages):
        lines += _root(work / str(number))
        for step in stage.steps:
            lines += _step(step, stage, stages, context, work, number)
    lines += _measures(work / str(len(stages) - 1))
    lines += _running(stages[-1], work / str(len(stages) - 1), start)
    return [*ALONE, "\n".join(lines)]


def _root(folder: Path) -> Iterable[str]:
    base = Path(sys.base_prefix)
    yield f"mkdir -p {folder}; mount -t tmpfs -o mode=755 t {folder}; cd {folder}; mkdir up work root"
    yield "mount -t overlay o -o lowerdir=/,upperdir=up,workdir=work root; cd root"
    yield "mount -t proc proc proc; mount --rbind /dev dev"
    yield "for d in tmp run; do mount -t tmpfs -o mode=1777 t $d; done"
    yield f"mount -t tmpfs -o mode=755 t .{ROOT}"
    yield from (f"chmod o+x .{shlex.quote(str(above))}" for above in (base, *base.parents[:-1]))
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = base / "bin" / name
    yield f"rm -rf usr/local/lib/{name}; ln -s {base}/lib/{name} usr/local/lib/{name}"
    yield f"for n in python python3; do ln -sf {python} usr/local/bin/$n; done"
    yield f"printf '#!/bin/sh\\nexec {python} -m pip \"$@\"\\n' >usr/local/bin/pip"
    yield "chmod 755 usr/local/bin/pip"


def _step(
    step: Copy | Run, stage: Stage, stages: Sequence[Stage], context: Path, work: Path, number: int
) -> Iterable[str]:
    root = work / str(number) / "root"
    if isinstance(step, Run):
        variables = _environment(stage, passed())
        yield f"chroot {root} /usr/bin/env -i {variables} /bin/sh -c {shlex.quote(step.command)}"
        return
    names = [one.name for one in stages]
    source = work / str(names.index(step.stage)) / "root" if step.stage else context
    if step.target.endswith("/"):
        yield f"mkdir -p {root}{step.target}"
    for one in step.sources:
        yield f"cp -a {source}/{one.lstrip('/')} {root}{step.target}"


def passed() -> dict[str, str]:
    """Variables of this process that package clients need."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED)}


def _environment(stage: Stage, more: Mapping[str, str]) -> str:
    return shlex.join(f"{name}={value}" for name, value in {**more, **stage.environment}.items())


def _measures(folder: Path) -> Iterable[str]:
    """Yield the shell commands that log the figures that tests check."""
    packages = f"{folder}/root/opt/kvist/lib/python3*/site-packages"
    yield f'echo "site-packages KiB: $(du -sk {packages} | cut -f1)"'
    yield f'echo "packages: $(ls -d {packages}/*.dist-info | wc -l)"'
    yield f"! chroot {folder}/root /usr/local/bin/python -m pip --version"
    yield f"! ls {folder}/root/opt/kvist/bin/pip"


def _running(stage: Stage, folder: Path, start: Start) -> Iterable[str]:
    root = folder / "root"
    for inside, file in start.files.items():
        yield f"mkdir -p {root}{Path(inside).parent}; cp {file} {root}{inside}; chmod 644 {root}{inside}"
    user, _, group = stage.user.partition(":")
    drop = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs"]
    drop += ["--inh-caps=-all", "--bounding-set=-all"]
    become = (
        f"env -i {_environment(stage, start.environment)} {shlex.join([*stage.entrypoint, *start.arguments])}"
    )
    inside = f"mount -o remount,ro,bind / && ! touch /opt/kvist/x && cd / && exec {shlex.join(drop)} {become}"
    yield f"echo starting; exec chroot {root} /bin/bash -c {shlex.quote(inside)}"
