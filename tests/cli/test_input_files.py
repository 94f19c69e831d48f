"""Files with pools are read as users write them, or from stdin; nothing is lost without a word."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.pools import resource

from kvist.__main__ import main

SPEC = {"model": {"source": "hf://Qwen/Qwen3-32B-FP8"}, "accelerator": {"product": "NVIDIA-H100-80GB-HBM3"}}


def pool(**more: Any) -> dict[str, Any]:
    """Return a pool that can be rendered, with more fields of the object."""
    return {**resource("minimal"), "spec": SPEC, **more}


def stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Let the command read this content, in a locale that knows ASCII only."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))


@pytest.mark.parametrize("field", ["replicas", "gateway"])
def test_a_field_at_the_wrong_depth_is_refused(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A section of the spec without its indentation would have no effect, so it is an error."""
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(pool(**{field: 3})))

    assert main(["render", "-f", str(file)]) == 2
    assert f"{field}: is not a field of an InferencePool: settings of a pool belong below spec" in (
        capsys.readouterr().err
    )


def test_a_second_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command would read only the last of several files, so it says how to write them."""
    with pytest.raises(SystemExit):
        main(["render", "-f", str(tmp_path / "a"), "-f", str(tmp_path / "b")])
    assert "given twice; write all pools to one file, with --- between" in capsys.readouterr().err


def test_json_may_be_indented_by_tabs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """YAML refuses tabs and JSON allows them; a key that occurs twice is refused in both."""
    file = tmp_path / "pool.json"
    text = json.dumps(pool(), indent="\t")
    file.write_text("\ufeff" + text, encoding="utf-8")
    assert main(["render", "-f", str(file)]) == 0

    file.write_text(text.replace('"spec": {', '"kind": "InferencePool",\n\t"spec": {'))
    capsys.readouterr()
    assert main(["render", "-f", str(file)]) == 2
    assert "'kind' occurs twice" in capsys.readouterr().err

    for text, said in (
        ("kind: a\n\tname: b\n", "'\\t'"),
        ("{kind: Pool, spec: {model: @x}}", "character '@'"),
    ):
        file.write_text(text)
        assert main(["render", "-f", str(file)]) == 2
        assert said in capsys.readouterr().err


def test_stdin_is_read_as_files_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command reads UTF-8 in any locale, with a byte order mark or without, and refuses other text."""
    text = yaml.safe_dump(pool(metadata={"name": "twig", "annotations": {"team": "søk"}}), allow_unicode=True)
    for content in (text.encode(), b"\xef\xbb\xbf" + text.encode()):
        stdin(monkeypatch, content)
        assert main(["render", "-f", "-"]) == 0
    capsys.readouterr()
    stdin(monkeypatch, text.encode("latin-1"))
    assert main(["render", "-f", "-"]) == 2
    assert "--filename -: cannot be read: 'utf-8' codec" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "said"), [("-", "Bad file descriptor"), ("", "no file is named: write its path, or - for stdin")]
)
def test_no_input_is_an_error(
    file: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A closed stdin, as some service managers give it, and an empty name are named."""
    monkeypatch.setattr("sys.stdin", None)
    for command in ("plan", "render"):
        assert main([command, "-f", file]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--gateway", "gke-l7-rilb"],
            "'gke-l7-rilb' is no controllerName such as istio.io/gateway-controller",
        ),
        (["--gateway", ""], "'' is no controllerName"),
        (["--claim", "models=RW"], "'RW' is no access mode: write ReadWriteOnce, "),
        (["--claim", "models=ReadOnlyMany,"], "'' is no access mode"),
    ],
)
def test_what_no_cluster_has_is_refused(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Controllers of gateways and access modes of claims that cannot exist would have no effect."""
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(pool()))

    assert main(["render", "-f", str(file), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_claim_that_is_only_read_cannot_be_downloaded_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many nodes can mount it, so the note names the downloads."""
    model = {**SPEC["model"], "cache": {"claim": "models"}}
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(pool(spec={**SPEC, "model": model})))

    assert main(["render", "-f", str(file), "--claim", "models=ReadOnlyMany"]) == 0
    assert "claim models is ReadOnlyMany, so that downloads cannot write to it" in capsys.readouterr().err
