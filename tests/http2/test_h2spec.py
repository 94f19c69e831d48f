"""Every case of h2spec, strict ones included, against the real server."""

import asyncio
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.http2.binaries import TOOLS, binary
from tests.http2.picker_port import PickerPort, opened

from kvist_epp.http2.tls import Certificates

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"
LEAST = 140
"""h2spec 2.2.1 has 146 cases; far fewer would mean that it did not run."""


class Case(NamedTuple):
    """One case of the report."""

    name: str
    """Like ``http2/6.5.3: Sends …``."""
    outcome: str
    """``passed``, ``skipped`` or ``failed``."""
    why: str


def excused() -> set[str]:
    """The cases docs/protocol.md says do not apply, each as ``- h2spec `http2/6.5.3: …`: reason``."""
    return set(re.findall(r"^- h2spec `([^`]+)`: \S", PROTOCOL.read_text(), re.MULTILINE))


def version() -> str:
    """Which h2spec this is; the tool itself does not know."""
    found = re.findall(r"summerwind/(h2spec v[0-9.]+)", (TOOLS / "go.mod").read_text())
    return str(found[0])


def read(report: Path) -> list[Case]:
    """The cases of a JUnit report."""
    cases = []
    for case in ET.parse(report).getroot().iter("testcase"):
        fault = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if fault is None else "skipped" if fault.tag == "skipped" else "failed"
        name = f"{case.get('package')}: {case.get('classname')}"
        cases.append(Case(name, outcome, "" if fault is None else " ".join((fault.text or "").split())))
    return cases


async def run(port: PickerPort, report: Path, *, tls: bool) -> list[Case]:
    """Run the tool against a port."""
    options = ["--strict", "--timeout", "5", "--junit-report", str(report)]
    process = await asyncio.create_subprocess_exec(
        binary("h2spec"),
        "--host=127.0.0.1",
        f"--port={port.server.port}",
        *options,
        *(["--tls", "--insecure"] if tls else []),
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        await asyncio.wait_for(process.wait(), 100)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return read(report)


async def test_h2spec(
    tls: Certificates | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every case passes, but for those that docs/protocol.md excuses with a reason."""
    async with opened(tls) as port:
        cases = await run(port, tmp_path / "report.xml", tls=tls is not None)
        mistakes = port.server.stats.connections_ended["internal"]
    failed = [case for case in cases if case.outcome == "failed" and case.name not in excused()]
    counts = {kind: [case.outcome for case in cases].count(kind) for kind in ("passed", "skipped", "failed")}
    where = "TLS" if tls else "plaintext"
    with capsys.disabled():
        print(f"\n{version()} in {where}: {len(cases)} cases, {counts}")  # noqa: T201
        for case in failed:
            print(f"  failed: {case.name}: {case.why}")  # noqa: T201
    assert failed == []
    assert counts["skipped"] == 0
    assert len(cases) >= LEAST
    assert mistakes == 0
