"""Which certificates pickers present, which authorities are trusted, and whether the pickers pick."""

import asyncio
import ssl
from contextlib import suppress
from typing import Any, Final

from tests.cluster.pooled import Served
from tests.cluster.space import Space, ready

from kvist_operator.manifests.object_names import GRPC_PORT, METRICS_PORT

Json = dict[str, Any]
PICKS: Final = 'kvist_epp_requests_total{outcome="picked"}'
END: Final = "-----END CERTIFICATE-----\n"


async def pickers(twig: Served) -> list[Json]:
    """Return the pickers that are ready."""
    found = await twig.room.pods(**{"app.kubernetes.io/component": "picker"})
    return [pod for pod in found if ready(pod)]


async def authorities(room: Space) -> set[str]:
    """Return the authorities that Envoy trusts, each in PEM."""
    found = await room.get("ConfigMap", "twig-epp-ca")
    return {part + END for part in found["data"]["ca.crt"].split(END) if part}


async def shown(twig: Served, pod: Json, trusted: set[str]) -> bool:
    """Whether a picker has a certificate of one of these authorities, for its Service's name."""
    context = ssl.create_default_context(cadata="".join(trusted))
    made = twig.cluster.inside.open()
    await asyncio.get_running_loop().sock_connect(made, (pod["status"]["podIP"], GRPC_PORT))
    name = f"twig-epp.{twig.room.name}.svc"
    try:
        _, writer = await asyncio.open_connection(sock=made, ssl=context, server_hostname=name)
    except ssl.SSLCertVerificationError:
        return False
    writer.close()
    with suppress(ssl.SSLError, OSError):  # it was about to say something
        await writer.wait_closed()
    return True


async def picks(twig: Served, pod: Json, series: str = PICKS) -> int:
    """Requests that a picker has picked an endpoint for; or another of its counters."""
    url = f"http://{pod['status']['podIP']}:{METRICS_PORT}/metrics"
    async with twig.cluster.http() as http, http.get(url) as response:
        lines = (await response.text()).splitlines()
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series)))
