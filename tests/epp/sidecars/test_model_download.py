"""The download of models: the files that vLLM loads, in parts of about the same size."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.hub import COMMIT as HUB_COMMIT
from tests.fakes.hub import hub_with

from kvist_epp.sidecars.model_download import HubFile, divided, main, wanted

COMMIT = "b968826d9c46dd6066d109eabc6255188de91218"


def names(files: list[HubFile]) -> list[str]:
    """Return the names of files."""
    return [each.name for each in files]


def test_only_files_that_vllm_loads_are_fetched() -> None:
    """Safetensors, configuration, tokenizer and templates; neither copies in other formats nor pictures."""
    kept = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "chat_template.jinja",
        "tokenizer.model",
        "x.py",
    ]
    left = ["pytorch_model.bin", "original/model.safetensors", "onnx/model.json", "figure.png", "README.md"]
    assert names(wanted(HubFile(name, 1) for name in (*kept, *left))) == kept


def test_a_repository_without_safetensors_gives_its_other_weights() -> None:
    """Older repositories have weights as .bin or .pt."""
    files = [HubFile(name, 1) for name in ("config.json", "pytorch_model.bin", "model.pt")]
    assert names(wanted(files)) == ["config.json", "pytorch_model.bin"]
    assert names(wanted([HubFile("model.pt", 1)])) == ["model.pt"]


@given(
    sizes=st.lists(st.integers(0, 10_000), max_size=60),
    parts=st.integers(1, 12),
    order=st.randoms(use_true_random=False),
)
def test_parts_are_complete_and_even(sizes: list[int], parts: int, order: Any) -> None:
    """Every file is in exactly one part, whatever the order in which the hub lists them, and two parts differ
    by at most the largest file."""
    files = [HubFile(f"f{i}", size) for i, size in enumerate(sizes)]
    found = divided(files, parts)
    shuffled = list(files)
    order.shuffle(shuffled)

    assert sorted(names([each for part in found for each in part])) == sorted(names(files))
    assert divided(shuffled, parts) == found
    totals = [sum(each.size for each in part) for part in found]
    assert max(totals) - min(totals) <= max(sizes, default=0)


class Hub:
    """A hub with one repository, which counts downloads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, away: bool = False) -> None:
        self.fetched: list[str] = []
        self.away = away
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", self.info)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.download)

    def info(self, repository: str, *, revision: str | None, files_metadata: bool) -> Any:
        """Return the files of a repository."""
        if self.away:
            raise ConnectionError("no route to host")
        assert files_metadata
        found = [SimpleNamespace(rfilename=f"{i}.safetensors", size=10 - i) for i in range(4)]
        return SimpleNamespace(siblings=[*found, SimpleNamespace(rfilename="a.json", size=None)])

    def download(self, repository: str, name: str, *, revision: str | None, cache_dir: Path) -> None:
        """Fetch one file."""
        self.fetched.append(f"{repository}@{revision}/{name}")


def test_each_part_fetches_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pods of a Job fetch every file once between them; a pinned part that is there needs no hub."""
    hub = Hub(monkeypatch)
    for part in ("0", "1"):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", part)
        assert main([str(tmp_path), f"acme/m@{COMMIT}", "--parts=2"]) == 0
    every = [*(f"{i}.safetensors" for i in range(4)), "a.json"]
    assert sorted(hub.fetched) == [f"acme/m@{COMMIT}/{name}" for name in every]

    hub.away, hub.fetched = True, []
    assert main([str(tmp_path), f"acme/m@{COMMIT}", "--parts=2"]) == 0
    assert hub.fetched == []


def test_a_branch_is_looked_up_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revision that is not a commit may have changed on the hub."""
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)
    hub = Hub(monkeypatch)
    assert main([str(tmp_path), "acme/m"]) == main([str(tmp_path), "acme/m"]) == 0
    assert len(hub.fetched) == 10


def test_a_failure_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last line of the log, which becomes the container's message, names the model and the problem."""
    Hub(monkeypatch, away=True)
    assert main([str(tmp_path), f"acme/m@{COMMIT}"]) == 1
    assert re.fullmatch(
        rf"acme/m@{COMMIT} cannot be downloaded: ConnectionError: no route.*", caplog.messages[-1]
    )


def test_a_part_that_does_not_exist_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index beyond the number of parts is a mistake of the Job."""
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    with pytest.raises(SystemExit):
        main([str(tmp_path), "acme/m", "--parts=2"])


def test_the_cache_serves_the_hubs_client_without_a_hub(tmp_path: Path) -> None:
    """Two parts from a hub, each by a process of its own, are a snapshot that the hub's client finds offline,
    by commit, as vLLM does."""
    files = {"config.json": b"{}", "a.safetensors": b"a" * 5000, "b.safetensors": b"b" * 4000, "x.png": b"x"}
    with hub_with(files) as address:
        for part in ("0", "1"):
            environment = {"HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", "JOB_COMPLETION_INDEX": part}
            command = [
                "-m",
                "kvist_epp.sidecars.model_download",
                str(tmp_path),
                f"kvist/twig@{HUB_COMMIT}",
                "--parts=2",
            ]
            subprocess.run([sys.executable, *command], env={**os.environ, **environment}, check=True)
    code = f"import huggingface_hub as h; print(h.snapshot_download('kvist/twig', revision='{HUB_COMMIT}'))"
    offline = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=offline, check=True, capture_output=True, text=True
    )
    folder = Path(found.stdout.strip())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: data for name, data in files.items() if name != "x.png"
    }
