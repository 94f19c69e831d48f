"""The operator's settings: one frozen object, to and from a command line.

``OperatorSettings.from_args(s.to_args()) == s`` for every ``s``. Each flag can also be given as an
environment variable ``KVIST_OPERATOR_<FLAG>``, dashes as underscores; the command line wins.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from kvist_epp.errors import SettingsError as ArgumentError
from kvist_epp.settings import arguments
from kvist_epp.settings.arguments import flag
from kvist_operator.errors import OperatorSettingsError, SpecError
from kvist_operator.manifests.object_names import ENVOY_IMAGE, PICKER_IMAGE
from kvist_operator.prices import parse_prices
from kvist_operator.spec.pool import DEFAULT_IMAGE

LOG_FORMATS: Final = ("auto", "json", "text")
PROGRAM: Final = arguments.Program(
    "kvist-operator",
    "Turns InferencePools into tuned vLLM Deployments, their endpoint pickers and the route to them.",
    """\
examples:
  # all namespaces, in a pod of the cluster
  kvist-operator

  # two namespaces, with a Role in each; outside of the cluster, with KUBECONFIG
  kvist-operator --namespaces serving,staging --log-format text
""",
)
_NAMESPACE: Final = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """All settings. Each field has its flag, default and help."""

    namespaces: str = flag(
        "--namespaces",
        "",
        "comma-separated namespaces whose pools are managed, each with a Role; empty: all namespaces, with a "
        "ClusterRole. Without a ClusterRole the operator cannot read node labels, so every pool must set "
        "spec.accelerator",
        unit="NAMES",
    )
    picker_image: str = flag(
        "--picker-image", PICKER_IMAGE, "container image of pickers, unless a pool sets its own", unit="IMAGE"
    )
    engine_image: str = flag(
        "--engine-image",
        DEFAULT_IMAGE,
        "container image of engines, unless a pool sets its own",
        unit="IMAGE",
    )
    envoy_image: str = flag(
        "--envoy-image",
        ENVOY_IMAGE,
        "container image of Envoy, for pools with spec.gateway.mode: Envoy",
        unit="IMAGE",
    )
    prices: str = flag(
        "--prices",
        "",
        "comma-separated prices of one accelerator for an hour, such as H100-80GB=2.99,L4=0.7; pools that "
        "name no accelerator get the cheapest kind of node that fits; empty: the smallest",
        unit="NAME=PRICE,…",
    )
    lease: str = flag(
        "--lease",
        "",
        "Lease by which replicas elect a leader, and the name under which this release manages pools; those "
        "of another release are left alone; empty: no election, for a single replica",
        unit="NAMESPACE/NAME",
    )
    workers: int = flag("--workers", 8, "number of pools that are reconciled at the same time", unit="N")
    resync: float = flag(
        "--resync",
        600.0,
        "time between two complete lists of the cluster's objects, even without events",
        unit="SECONDS",
    )
    discovery_interval: float = flag(
        "--discovery-interval",
        30.0,
        "time between two checks of which optional APIs and node labels the cluster has",
        unit="SECONDS",
    )
    fleet_interval: float = flag(
        "--fleet-interval",
        60.0,
        "time between two polls of a pool's pickers for the state of its endpoints; 0: no polls",
        unit="SECONDS",
    )
    metrics_host: str = flag(
        "--metrics-host", "", "address to listen on for metrics (default: every address)", unit="ADDRESS"
    )
    metrics_port: int = flag(
        "--metrics-port", 9095, "port for /metrics, /healthz and /readyz; 0: any free port", unit="PORT"
    )
    log_format: str = flag(
        "--log-format", "auto", "auto: text on a terminal, otherwise JSON", choices=LOG_FORMATS
    )
    log_level: str = flag(
        "--log-level", "info", "lowest level that is logged", choices=("debug", "info", "warning", "error")
    )

    def __post_init__(self) -> None:
        for name in self.watched:
            if not re.fullmatch(_NAMESPACE, name):
                raise OperatorSettingsError(f"--namespaces: {name!r} is not a valid namespace name")
        try:
            _ = self.price_list
        except SpecError as error:
            raise OperatorSettingsError(str(error)) from error
        if self.lease and not re.fullmatch(rf"{_NAMESPACE}/[a-z0-9]([-.a-z0-9]*[a-z0-9])?", self.lease):
            raise OperatorSettingsError(f"--lease: {self.lease!r} is not NAMESPACE/NAME")
        if not 0 <= self.metrics_port <= 65_535:
            raise OperatorSettingsError(f"--metrics-port: {self.metrics_port} is not a port (0 to 65535)")
        if self.workers < 1:
            raise OperatorSettingsError("--workers: must be at least 1")
        for name, least in (("resync", 1.0), ("discovery_interval", 1.0), ("fleet_interval", 0.0)):
            value = getattr(self, name)
            if not math.isfinite(value) or value < least:
                flag_name = arguments.flags_of(type(self))[name]
                raise OperatorSettingsError(f"{flag_name}: must be at least {least:g} s")

    @property
    def price_list(self) -> dict[str, float]:
        """Prices by the name of the accelerator. Raises SpecError."""
        return parse_prices(filter(None, self.prices.split(",")), "--prices")

    @property
    def watched(self) -> tuple[str, ...]:
        """Managed namespaces, each once; empty for all."""
        return tuple(dict.fromkeys(self.namespaces.split(","))) if self.namespaces else ()

    def to_args(self) -> list[str]:
        """Return the shortest command line that gives these settings."""
        return arguments.to_args(self)

    @classmethod
    def from_args(cls, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Self:
        """Return the settings of a command line; argparse exits with 2 on unknown flags.

        Raises OperatorSettingsError.
        """
        try:
            found = arguments.parse(dataclasses.fields(cls), argv, environment or {}, PROGRAM)
        except ArgumentError as error:
            raise OperatorSettingsError(str(error)) from error
        return cls(**found)
