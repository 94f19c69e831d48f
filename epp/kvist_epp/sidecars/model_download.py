"""The download of models from the hub into a Hugging Face cache, before engines start.

A cache that many pods share is filled in parts by the pods of a Job, a cache of one node by an init container
of each engine. Only files that vLLM loads are fetched. What is there is kept: the hub's client resumes, and a
part that is complete at a pinned commit needs no hub any more.
"""

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

logger = logging.getLogger(__name__)

WEIGHTS: Final = (".safetensors", ".bin", ".pt")
"""Formats of weights, of which vLLM loads the first that a repository has."""
SETTINGS: Final = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".jsonl")
UNUSED: Final = ("original", "metal", "onnx", "openvino")
"""Folders with copies of the weights in formats of other programs."""
COMMIT: Final = r"[0-9a-f]{40}"
CONNECTIONS: Final = 4
"""Files that one process fetches at the same time."""
DONE: Final = ".kvist"
"""Folder in the cache with an empty file for each part that is complete."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository."""

    name: str
    size: int


def wanted(files: Iterable[HubFile]) -> list[HubFile]:
    """Return the files that vLLM reads: the first format of weights that there is, and small files."""
    kept = [each for each in files if not set(PurePosixPath(each.name).parts[:-1]) & set(UNUSED)]
    suffixes = {PurePosixPath(each.name).suffix for each in kept}
    weights = next((suffix for suffix in WEIGHTS if suffix in suffixes), "")
    return [each for each in kept if PurePosixPath(each.name).suffix in (weights, *SETTINGS)]


def divided(files: Iterable[HubFile], parts: int) -> list[list[HubFile]]:
    """Divide files into parts of about the same size: the largest file goes to the part with the fewest
    bytes. The same files give the same parts in every pod."""
    found: list[list[HubFile]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for each in sorted(files, key=lambda file: (-file.size, file.name)):
        at = sizes.index(min(sizes))
        found[at].append(each)
        sizes[at] += each.size
    return found


def fill(cache: Path, repository: str, revision: str, part: int, parts: int) -> int:
    """Download one part of a repository; return its bytes. Raises OSError or an error of the hub's client."""
    pinned = re.fullmatch(COMMIT, revision) is not None
    name = f"{repository.replace('/', '--')}@{revision}.{part}-of-{parts}"
    done = cache / DONE / name
    if pinned and done.is_file():
        logger.info("%s at %s: part %d of %d is in the cache", repository, revision, part + 1, parts)
        return 0
    import huggingface_hub

    about = huggingface_hub.HfApi().model_info(repository, revision=revision or None, files_metadata=True)
    files = [HubFile(each.rfilename, each.size or 0) for each in about.siblings or ()]
    mine = divided(wanted(files), parts)[part]
    size = sum(each.size for each in mine)
    logger.info("%s: part %d of %d has %d files, %d bytes", repository, part + 1, parts, len(mine), size)

    def fetch(file: HubFile) -> None:
        # a snapshot would leave a list of all files, by which later clients find this one incomplete
        huggingface_hub.hf_hub_download(repository, file.name, revision=revision or None, cache_dir=cache)

    with ThreadPoolExecutor(CONNECTIONS) as threads:
        list(threads.map(fetch, mine))
    if pinned:
        done.parent.mkdir(exist_ok=True)
        done.touch()
    return size


def main(argv: Sequence[str] | None = None) -> int:
    """Download; return 1 with one sentence on what failed, so that the container is started again."""
    parser = argparse.ArgumentParser(prog="python -m kvist_epp.sidecars.model_download", description=__doc__)
    parser.add_argument("cache", type=Path, help="folder of the cache, as HF_HUB_CACHE")
    parser.add_argument("model", nargs="+", help="repository, or repository@revision")
    parser.add_argument(
        "--parts", type=int, default=1, help="number of parts; JOB_COMPLETION_INDEX is this one"
    )
    given = parser.parse_args(argv)
    part = int(os.environ.get("JOB_COMPLETION_INDEX", "0"))
    if not 0 <= part < given.parts:
        parser.error(f"JOB_COMPLETION_INDEX is {part}, and --parts is {given.parts}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    size = 0
    for model in given.model:
        repository, _, revision = model.partition("@")
        try:
            size += fill(given.cache, repository, revision, part, given.parts)
        except Exception as error:  # noqa: BLE001 - whatever the hub's client raises, it is tried again
            reason = " ".join(str(error).split())[:500]
            logger.error("%s cannot be downloaded: %s: %s", model, type(error).__name__, reason)  # noqa: TRY400
            return 1
    logger.info("complete: %d bytes", size)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
