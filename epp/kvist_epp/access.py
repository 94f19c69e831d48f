"""Where the cluster is and who we are, for the picker and the operator alike.

By the official client's own readers of kubeconfig files and of what a pod is given.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import ConfigException, load_kube_config
from kubernetes.aio.config.incluster_config import InClusterConfigLoader
from yaml import YAMLError

from kvist_epp.errors import ApiError, SettingsError

__all__ = ["HOME", "SERVICE_ACCOUNT", "Configuration", "Load", "cluster", "own_namespace"]

logging.getLogger("kubernetes.aio.config.kube_config").setLevel(logging.ERROR)
"""It warns of a missing file each time it looks; the error says so, too, and is told once."""

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where every pod finds its token, the cluster's authority and its namespace."""
HOME: Final = Path("~/.kube/config")
Load = Callable[[], Awaitable[Configuration]]


def cluster(
    environment: Mapping[str, str],
    *,
    account: Path = SERVICE_ACCOUNT,
    home: Path = HOME,
    otherwise: str = "for engines outside of Kubernetes use --endpoints-file",
) -> Load:
    """Where the cluster is: ``KUBECONFIG``, else the pod we run in, else ``~/.kube/config``.

    Raises ``SettingsError`` when there is none of these; ``otherwise`` says what to do then.
    """
    files = environment.get("KUBECONFIG", "")
    if files:
        return lambda: _from_files(files)
    if "KUBERNETES_SERVICE_HOST" in environment:
        return lambda: _from_pod(environment, account)
    if home.expanduser().exists():
        return lambda: _from_files(str(home.expanduser()))
    raise SettingsError(
        "no cluster: not in a pod (KUBERNETES_SERVICE_HOST is not set), KUBECONFIG is not set, and there is "
        f"no {home}; {otherwise}"
    )


def own_namespace(environment: Mapping[str, str], *, account: Path = SERVICE_ACCOUNT) -> str:
    """The namespace we run in: ``POD_NAMESPACE``, ``NAMESPACE`` (llm-d's name of it), the service
    account's, else ``default``."""
    told = environment.get("POD_NAMESPACE") or environment.get("NAMESPACE")
    file = account / "namespace"
    return told or (file.read_text().strip() if file.is_file() else "") or "default"


async def _from_files(files: str) -> Configuration:
    """The client library lets several builtin exceptions out of a file that is missing or no kubeconfig."""
    configuration = Configuration()
    try:
        await load_kube_config(files, client_configuration=configuration, persist_config=False)
    except (ConfigException, YAMLError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ApiError(f"kubeconfig {files}: {error}") from error
    return configuration


async def _from_pod(environment: Mapping[str, str], account: Path) -> Configuration:
    """The token is read again every minute, by the client library itself."""
    configuration = Configuration()
    loader = InClusterConfigLoader(str(account / "token"), str(account / "ca.crt"), environ=environment)
    loader.load_and_set(configuration)
    return configuration
