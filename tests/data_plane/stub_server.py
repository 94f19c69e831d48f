"""``python -m tests.data_plane.stub_server TRANSPORT ENDPOINT PORT``: a picker to be killed."""

import asyncio
import sys
from typing import cast

from tests.data_plane.stub import StubPicker, Transport


async def main(transport: Transport, endpoint: str, port: int) -> None:
    """Print the port, serve until killed."""
    picker = StubPicker()
    picker.picks(endpoint)
    server = await picker.serve(transport, port)
    print(server.port, flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(cast("Transport", sys.argv[1]), sys.argv[2], int(sys.argv[3])))
