"""The life of one container: pulled, started, probed, started again, stopped."""

import asyncio
import itertools
import signal
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp

from . import images
from .errors import StartError, WaitingError
from .facts import Facts, environment, expanded
from .follow import Json, now
from .images import Image, Images
from .network import PodNetwork
from .probes import Asker, Probing
from .process import Process
from .sandbox import MESSAGE, Launch, identity
from .status import Condition, terminated
from .volumes import Volumes

BACK_OFF_SECONDS: Final = 0.25
"""Before the second restart, twice as long before each other; ten on a real node."""
LONGEST_BACK_OFF: Final = 300.0
RETRY_SECONDS: Final = 1.0
LEAST_GRACE: Final = 2.0
"""Seconds that SIGTERM gets even if preStop took all."""
MESSAGE_BYTES: Final = 4096
LOG_BYTES: Final = 2048
"""Of a log that stands in for a last message."""


class Host(Protocol):
    """Parts of a pod that a container needs."""

    facts: Facts
    volumes: Volumes
    images: Images
    network: PodNetwork
    folder: Path
    logs: Path
    ending: bool
    forced: bool

    def tell(self) -> None:
        """The status has changed."""

    def event(self, reason: str, message: str, *, warning: bool = False) -> None:
        """Something a person may want to know."""

    async def pause(self, seconds: float) -> None:
        """Wait for so many seconds, or until a change."""

    async def within_grace(self, work: Coroutine[Any, Any, object]) -> None:
        """Until it is done, or the time to end is up."""

    def extend(self, seconds: float) -> None:
        """At least so much is left of the time to end."""


class Container:
    """One of a pod."""

    def __init__(self, host: Host, spec: Json, *, policy: str) -> None:
        self.spec = spec
        self.condition = Condition(spec["name"], spec["image"])
        self._host = host
        self._policy = policy
        self._process: Process | None = None
        self._starting = asyncio.Lock()
        self._probes: list[asyncio.Task[None]] = []
        self._readiness: asyncio.Task[None] | None = None

    async def live(self) -> bool:
        """Until it has ended for good, or the pod ends; whether it succeeded."""
        for turn in itertools.count():
            process = await self._started()
            if process is None:
                return False
            code = await process.wait()
            self._ended(process, code)
            if self._host.ending or self._policy == "Never" or (code == 0 and self._policy == "OnFailure"):
                return code == 0
            await self._back_off(turn)
        raise AssertionError

    async def _started(self) -> Process | None:
        """A running process, as soon as there can be one; None when the pod ends first."""
        failures = 0
        while not self._host.ending:
            async with self._starting:
                try:
                    if not self._host.ending:
                        return await self._start()
                except WaitingError as error:
                    self._waits(error, failures)
                except StartError as error:
                    self._waits(WaitingError("CreateContainerError", str(error)), failures)
            failures += 1
            await self._host.pause(RETRY_SECONDS)
        return None

    async def _start(self) -> Process:
        image = self._host.images.get(self.spec["image"])
        launch = self._launch(image)
        process = await Process.start(launch, self._log)
        self._process = process
        self._begun()
        return process

    def _launch(self, image: Image) -> Launch:
        host, spec = self._host, self.spec
        variables = environment(spec, host.facts, images.variables())
        words = (*spec.get("command", image.entry), *spec.get("args", ()))
        command = [expanded(word, variables) for word in words]
        if not command:
            raise WaitingError("CreateContainerError", "this image has no entry point: give a command")
        folder = self._folder / str(self.condition.restarts)
        folder.mkdir(parents=True, exist_ok=True)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._message.write_bytes(b"")
        self._message.chmod(0o666)
        return Launch(
            folder=folder,
            network=host.network.name,
            hostname=host.facts.name,
            identity=identity(host.facts.pod, spec, image.user),
            command=command,
            environment=variables,
            programs=host.images.folder(spec["image"]),
            shown=host.images.shown(),
            etc=host.folder / "etc",
            message=self._message,
            message_at=spec.get("terminationMessagePath", MESSAGE),
            volumes={m["name"]: host.volumes.sources[m["name"]] for m in spec.get("volumeMounts", [])},
            mounts=spec.get("volumeMounts", []),
            directory=spec.get("workingDir", "/"),
            read_only=bool(spec.get("securityContext", {}).get("readOnlyRootFilesystem")),
        )

    @property
    def _folder(self) -> Path:
        return self._host.folder / "containers" / str(self.spec["name"])

    @property
    def _message(self) -> Path:
        return self._folder / f"{self.condition.restarts}.message"

    @property
    def _log(self) -> Path:
        return self.log(self.condition.restarts)

    def log(self, restart: int) -> Path:
        """Return the log file of one start of the container."""
        return self._host.logs / str(self.spec["name"]) / f"{restart}.log"

    def _begun(self) -> None:
        it, process = self.condition, self._process
        assert process is not None
        it.before, it.ended, it.waiting, it.running = it.ended or it.before, None, ("", ""), now()
        it.id = f"{self._host.facts.pod['metadata']['uid']}-{self.spec['name']}-{it.restarts}"
        it.started = "startupProbe" not in self.spec
        it.ready = it.started and "readinessProbe" not in self.spec
        self._probes = [asyncio.create_task(self._probe(process))]
        self._host.tell()

    def _ended(self, process: Process, code: int) -> None:
        for task in (*self._probes, *([self._readiness] if self._readiness else [])):
            task.cancel()
        it = self.condition
        message = self._last_words(code)
        it.ended = terminated(code, began=it.running, message=message, killed_by_us=process.killed)
        it.running, it.ready, it.started, self._readiness = "", False, False, None
        self._host.tell()

    def _last_words(self, code: int) -> str:
        said = self._message.read_bytes()[-MESSAGE_BYTES:]
        if not said and code and self.spec.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            said = self._log.read_bytes()[-LOG_BYTES:]
        return said.decode(errors="replace")

    async def _back_off(self, turn: int) -> None:
        """None before the first restart."""
        seconds = min(LONGEST_BACK_OFF, BACK_OFF_SECONDS * 2 ** (turn - 1)) if turn else 0.0
        if seconds:
            name = f"{self.spec['name']} pod={self._host.facts.name}"
            message = f"back-off {seconds:g}s restarting failed container={name}"
            self.condition.waiting = ("CrashLoopBackOff", message)
            self._host.event("BackOff", message, warning=True)
            self._host.tell()
        deadline = asyncio.get_running_loop().time() + seconds
        while not self._host.ending and (left := deadline - asyncio.get_running_loop().time()) > 0:
            await self._host.pause(left)
        self.condition.restarts += 1

    def _waits(self, error: WaitingError, failures: int) -> None:
        """Said once, and once more when it goes on: a pull that fails becomes a pull that backs off."""
        reason, message = error.reason, error.message
        if reason == images.PULL_ERROR and failures:
            reason, message = images.BACK_OFF, f'Back-off pulling image "{self.spec["image"]}": {error}'
        if self.condition.waiting != (reason, message):
            self.condition.waiting = (reason, message)
            self._host.event("Failed", message, warning=True)
            self._host.tell()

    async def _probe(self, process: Process) -> None:
        ports = {p["name"]: p["containerPort"] for p in self.spec.get("ports", ()) if "name" in p}
        asker = Asker(self._host.network.address, ports, process.execute)
        if "startupProbe" in self.spec and not await Probing(asker, self.spec["startupProbe"]).first():
            self._fails("Startup", process)
            return
        self.condition.started = True
        if "livenessProbe" in self.spec:
            self._probes.append(asyncio.create_task(self._liveness(asker, process)))
        if "readinessProbe" in self.spec:
            watching = Probing(asker, self.spec["readinessProbe"]).watch(self._ready, good=False)
            self._readiness = asyncio.create_task(watching)
        else:
            self.condition.ready = True
        self._host.tell()

    async def _liveness(self, asker: Asker, process: Process) -> None:
        probe = self.spec["livenessProbe"]
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        failed = asyncio.Event()
        watching = asyncio.create_task(Probing(asker, probe).watch(lambda _: failed.set(), good=True))
        try:
            await failed.wait()
        finally:
            watching.cancel()
        self._fails("Liveness", process)

    def _fails(self, kind: str, process: Process) -> None:
        message = f"Container {self.spec['name']} failed {kind.lower()} probe, will be restarted"
        self._host.event("Unhealthy", f"{kind} probe failed", warning=True)
        self._host.event("Killing", message)
        self._probes.append(asyncio.create_task(self._killed(process)))

    async def _killed(self, process: Process) -> None:
        """For a probe: SIGTERM, and SIGKILL when the grace is over."""
        process.signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._host.facts.pod["spec"].get("terminationGracePeriodSeconds", 30)):
                await process.wait()
        process.signal(signal.SIGKILL)

    def _ready(self, good: bool) -> None:
        self.condition.ready = good
        if not good:
            self._host.event("Unhealthy", "Readiness probe failed", warning=True)
        self._host.tell()

    async def stop(self) -> None:
        """preStop, SIGTERM, SIGKILL; readiness is asked until the end, so that a Service sees who still
        serves."""
        async with self._starting:
            process = self._process
        for task in self._probes:
            task.cancel()
        if process is None or process.ended:
            return
        before = self.spec.get("lifecycle", {}).get("preStop")
        if before and not self._host.forced:
            await self._host.within_grace(self._before(before, process))
            self._host.extend(LEAST_GRACE)
        if not self._host.forced:
            process.signal(signal.SIGTERM)
            await self._host.within_grace(process.wait())
        process.signal(signal.SIGKILL)
        await process.wait()

    async def _before(self, action: Json, process: Process) -> None:
        if "sleep" in action:
            await asyncio.sleep(action["sleep"]["seconds"])
        elif "exec" in action:
            await process.execute(action["exec"]["command"], LONGEST_BACK_OFF * 10)
        elif "httpGet" in action:
            with suppress(OSError, aiohttp.ClientError):
                await Asker(self._host.network.address, {}, process.execute).get(action["httpGet"])
