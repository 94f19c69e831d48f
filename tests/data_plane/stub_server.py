"""``python -m tests.data_plane.stub_server TRANSPORT ENDPOINT PORT [CERTIFICATES]``: a picker to be killed.

``CERTIFICATES``: the folder of its certificate and key; plaintext without.
"""

import asyncio
import sys
from typing import cast

from tests.data_plane.stub import StubPicker, Transport

from kvist_epp.extproc.pick_request import PickRequest, PickResult
from kvist_epp.http2.tls import Certificates


async def _never(_: PickRequest) -> PickResult:
    await asyncio.Event().wait()
    raise AssertionError


async def main(transport: Transport, endpoint: str, port: int, folder: str) -> None:
    """Print the port and serve until killed; without an endpoint, requests get no answer."""
    picker = StubPicker()
    if endpoint:
        picker.picks(endpoint)
    else:
        picker.answer = _never
    server = await picker.serve(transport, port, Certificates(cert_path=folder) if folder else None)
    print(server.port, flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    transport, endpoint, port, folder = (*sys.argv[1:], "")[:4]
    asyncio.run(main(cast("Transport", transport), endpoint, int(port), folder))
