"""A container as a process: its own mounts, process ids and host name, the network of its pod, a root that is
an overlay of the machine's, and the user and rights that its security context gives it.

Pure: makes command lines. Not as on a real node: no cgroups (requests and limits only count for the
scheduler), no seccomp profile.
"""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from .errors import WaitingError
from .facts import CONFIG_ERROR
from .follow import Json
from .images import PROGRAMS

DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
MESSAGE: Final = "/dev/termination-log"
_VOLUMES: Final = "/.volumes"


@dataclass(frozen=True)
class Identity:
    """User and rights of a process; the container's settings override the pod's."""

    user: int
    group: int
    groups: tuple[int, ...] = ()
    bare: bool = False
    """No capabilities."""
    no_new_privileges: bool = False

    def drop(self) -> list[str]:
        """The command that becomes it."""
        groups = f"--groups={','.join(map(str, self.groups))}" if self.groups else "--clear-groups"
        found = ["/usr/bin/setpriv", f"--reuid={self.user}", f"--regid={self.group}", groups]
        if self.bare:
            found += ["--inh-caps=-all", "--bounding-set=-all"]
        return [*found, "--no-new-privs"] if self.no_new_privileges else found


def identity(pod: Json, container: Json, image_user: int) -> Identity:
    """From both security contexts. Raises WaitingError for root where it is not allowed."""
    own = container.get("securityContext", {})
    context = {**pod["spec"].get("securityContext", {}), **own}
    user = context.get("runAsUser", image_user)
    if context.get("runAsNonRoot") and user == 0:
        why = "container has runAsNonRoot and image will run as root"
        raise WaitingError(CONFIG_ERROR, why)
    groups = [context[key] for key in ("fsGroup",) if key in context]
    return Identity(
        user=user,
        group=context.get("runAsGroup", user),
        groups=(*groups, *context.get("supplementalGroups", ())),
        bare="ALL" in own.get("capabilities", {}).get("drop", ()),
        no_new_privileges=own.get("allowPrivilegeEscalation") is False,
    )


@dataclass(frozen=True)
class Launch:
    """One start of one container."""

    folder: Path
    """For its root; empty, and of this start alone."""
    network: str
    """Network namespace of the pod, below /run/netns."""
    hostname: str
    identity: Identity
    command: Sequence[str]
    environment: Mapping[str, str]
    programs: Path
    """Of its image."""
    shown: Sequence[Path]
    """Folders of the machine that any user must reach."""
    etc: Path
    """Folder with ``hosts`` and ``resolv.conf``."""
    message: Path
    """Where the container's last words go."""
    message_at: str = MESSAGE
    volumes: Mapping[str, Path] = field(default_factory=dict)
    mounts: Sequence[Json] = ()
    directory: str = "/"
    read_only: bool = False

    def argv(self, told: int) -> list[str]:
        """Return the command to run as root. A line on the descriptor ``told`` says that the container's
        process begins."""
        script = "\n".join(
            (*self._outside(), f"exec chroot . /bin/bash -c {shlex.quote(self._inside(told))}")
        )
        return [
            *("nsenter", f"--net=/run/netns/{self.network}"),
            *("unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child=SIGKILL"),
            *("--propagation", "private", "/bin/bash", "-c", script),
        ]

    def _outside(self) -> Iterable[str]:
        """The root, from outside of it; the current directory in the end."""
        where = shlex.quote(str(self.folder))
        yield f"exec 2>&1; set -e; echo {shlex.quote(self.hostname)} >/proc/sys/kernel/hostname"
        yield f"mkdir -p {where}; mount -t tmpfs -o mode=755 t {where}; cd {where}; mkdir up work root"
        yield "mount -t overlay o -o lowerdir=/,upperdir=up,workdir=work root; cd root"
        yield "mount -t proc proc proc; mount --rbind -o ro /sys sys"
        yield "mount -t tmpfs -o mode=755 t run; mount -t tmpfs -o mode=1777 t tmp"
        yield from self._devices()
        yield f"cp --remove-destination {shlex.quote(str(self.etc))}/* etc/"
        for path in self.shown:
            yield from _show(path)
        yield f"mkdir -p .{PROGRAMS}; mount --bind {shlex.quote(str(self.programs))} .{PROGRAMS}"
        yield f"mkdir .{_VOLUMES}; touch .{_VOLUMES}/message"
        yield f"mount --bind {shlex.quote(str(self.message))} .{_VOLUMES}/message"
        for name, source in self.volumes.items():
            below = shlex.quote(f".{_VOLUMES}/v-{name}")
            yield f"mkdir {below}; mount --bind {shlex.quote(str(source))} {below}"

    @staticmethod
    def _devices() -> Iterable[str]:
        yield "mount -t tmpfs -o mode=755 t dev; mkdir dev/shm dev/pts dev/mqueue"
        yield f"for d in {' '.join(DEVICES)}; do touch dev/$d; mount --bind /dev/$d dev/$d; done"
        yield "mount -t tmpfs -o mode=1777 t dev/shm; mount --bind /dev/pts dev/pts"
        yield "ln -s /proc/self/fd dev/fd"
        yield "for n in 0:stdin 1:stdout 2:stderr; do ln -s /proc/self/fd/${n%:*} dev/${n#*:}; done"

    def _inside(self, told: int) -> str:
        """Return the script for inside the root: mount points may lead over absolute links, such as
        /var/run."""
        lines = ["set -e"]
        lines += [_mount(f"{_VOLUMES}/message", self.message_at, read_only=False)]
        for mount in self.mounts:
            source = "/".join(filter(None, (f"{_VOLUMES}/v-{mount['name']}", mount.get("subPath", ""))))
            lines.append(_mount(source, mount["mountPath"], read_only=bool(mount.get("readOnly"))))
        lines.append(f"umount -l {_VOLUMES}/*; rm -d {_VOLUMES}/* {_VOLUMES}")
        lines.append(f"mkdir -p {shlex.quote(self.directory)}; cd {shlex.quote(self.directory)}")
        if self.read_only:
            lines.append("mount -o remount,ro,bind /")
        lines.append(f"echo up >&{told}; exec {told}>&-")
        lines.append(f"exec {shlex.join(running(self.identity, self.environment, self.command))}")
        return "\n".join(lines)


def _show(path: Path) -> Iterable[str]:
    """The folder itself, and the way to it for any user."""
    for above in reversed(path.parents[:-1]):
        yield f"mkdir -p .{shlex.quote(str(above))}; chmod o+x .{shlex.quote(str(above))}"
    where = shlex.quote(str(path))
    yield f"mkdir -p .{where}; mount --bind {where} .{where}"


def _mount(source: str, target: str, *, read_only: bool) -> str:
    a, b = shlex.quote(source), shlex.quote(target)
    there = f"if [ -f {a} ]; then mkdir -p {shlex.quote(str(Path(target).parent))}; touch {b}"
    lines = f"{there}; else mkdir -p {a} {b}; fi; mount --bind {a} {b}"
    return f"{lines}; mount -o remount,ro,bind {b}" if read_only else lines


def running(who: Identity, environment: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """A command under an identity, with this environment alone."""
    return [*who.drop(), "/usr/bin/env", "-i", *(f"{k}={v}" for k, v in environment.items()), *command]


def entering(pid: int, who: Identity, environment: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """A command in the container whose first process has this pid."""
    inside = ("nsenter", f"--target={pid}", "--mount", "--pid", "--net", "--uts", "--ipc", "--root", "--wd=/")
    return [*inside, *running(who, environment, command)]
