"""Options of the subcommands, and parsers of their values, for argparse. Standard library only."""

import argparse
import re
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

DEMO_PICTURE: Final = Path("kvist-demo.png")
NAMESPACE: Final = "namespace of the pool (default: that of the context)"


def demo_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist demo``."""
    parser.add_argument(
        "--seconds",
        type=positive,
        default=25.0,
        help="measured seconds of each of the two runs (default: 25)",
    )
    parser.add_argument("--engines", type=count, default=4, help="simulated engines (default: 4)")
    parser.add_argument(
        "--rate", type=positive, help="requests per second, all engines together (default: 6 per engine)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the traffic, which is the same for the same seed (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="write JSON to stdout, and progress to stderr")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="show the picker's live page while both runs go on: print its address, and open it in a browser "
        "if there is a display; draw the picture at the end",
    )
    parser.add_argument(
        "--picture",
        type=picture_file,
        nargs="?",
        const=DEMO_PICTURE,
        metavar="FILE",
        help="draw both runs over time, as .png (1600 x 900) or .svg; needs the extra plots (without FILE, "
        f"and with --watch: {DEMO_PICTURE})",
    )


class _Once(argparse.Action):
    """An option that is refused where it is given twice, since all but the last would be ignored."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(
                f"argument {option_string}: given twice; write all pools to one file, with --- between"
            )
        setattr(namespace, self.dest, values)


def _pool(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f",
        "--filename",
        dest="file",
        action=_Once,
        required=True,
        metavar="FILE",
        help="file with the pool, or with several; - is stdin",
    )
    parser.add_argument(
        "--preset",
        dest="presets",
        action="append",
        default=[],
        metavar="FILE",
        help="file with the preset that the pool refers to, unless it is in the pool's file; can be repeated",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="plan for this accelerator instead of the pool's: H100-80GB, NVIDIA-L40S, …",
    )
    parser.add_argument(
        "--nodes",
        metavar="FILE",
        help="choose among the accelerators of these nodes (kubectl get nodes -o json); - is stdin",
    )
    parser.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="NAME=PRICE",
        help="price of one accelerator for an hour, such as H100-80GB=2.99; the cheapest kind that fits is "
        "taken; can be repeated",
    )
    parser.add_argument("--prices", metavar="FILE", help="YAML file with such prices, NAME: PRICE")


def plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist plan``."""
    _pool(parser)
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json", "yaml"),
        default="table",
        help="output format (default: table)",
    )


def render_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist render``."""
    _pool(parser)
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="API",
        help="render for a cluster that lacks this API, such as podmonitors; can be repeated",
    )
    parser.add_argument(
        "--claim",
        dest="claims",
        action="append",
        default=[],
        metavar="NAME=MODE",
        help="access mode of a claim, such as models=ReadOnlyMany; can be repeated",
    )
    parser.add_argument(
        "--gateway",
        dest="gateways",
        action="append",
        default=[],
        metavar="CONTROLLER",
        help="controllerName of the class of the pool's Gateway, such as networking.gke.io/gateway, whose "
        "routes have no timeouts; can be repeated",
    )
    parser.add_argument(
        "--openshift",
        action="store_true",
        help="render for OpenShift, which assigns user ids to pods",
    )


def compare_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist compare``."""
    plan_options(parser)
    parser.add_argument(
        "--with",
        dest="changes",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="field of the spec and its value in the second plan; can be repeated; without it the plan in "
        "the pool's status (kubectl get kvp NAME -o yaml) is compared with that of this version",
    )


def explain_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist explain``."""
    parser.add_argument(
        "request_id",
        nargs="?",
        metavar="REQUEST-ID",
        help="x-request-id or session id of a request that was decided: show why it went where it did",
    )
    parser.add_argument(
        "-f",
        "--filename",
        dest="file",
        metavar="FILE",
        help="file with the body of a request: show where it would go; - is stdin",
    )
    parser.add_argument(
        "--path",
        default="/v1/chat/completions",
        metavar="PATH",
        help="with -f: path of the request (default: /v1/chat/completions)",
    )
    parser.add_argument(
        "--header",
        dest="headers",
        action="append",
        type=header,
        default=[],
        metavar="NAME=VALUE",
        help="with -f: header of the request, such as x-session-id=abc, or the endpoints that the gateway "
        "allows: x-gateway-destination-endpoint-subset=10.0.0.1,10.0.0.2:8000; can be repeated",
    )
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="output format (default: text)"
    )
    picker_options(parser)


def header(text: str) -> tuple[str, str]:
    """Parse ``NAME=VALUE`` as a header with a lower-case name."""
    name, sign, value = text.partition("=")
    if not sign or not re.fullmatch(r"[A-Za-z0-9_-]+", name) or not value.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as x-session-id=abc")
    return name.lower(), value


def picker_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name a running picker (``picker_client.open_picker``)."""
    group = parser.add_argument_group(
        "which picker", "by the address of its metrics port, or by its pool, through the API server"
    )
    one_of = group.add_mutually_exclusive_group()
    one_of.add_argument(
        "--address",
        type=picker_address,
        metavar="URL",
        help="address of the picker's metrics port (default: http://localhost:9090)",
    )
    one_of.add_argument(
        "--pool",
        metavar="NAME",
        help="pool of kvist's operator (with -n alone: the only one there): its pickers are asked through "
        "the API server's proxy, which needs the rights to list pods and to get (-f: create) pods/proxy",
    )
    _cluster(group)
    parser.set_defaults(as_plugin=False)  # a plugin of kubectl sets it


def _cluster(group: argparse._ArgumentGroup, *, namespace: bool = True) -> None:
    """Add kubectl's options for the cluster and, unless the caller does, for the namespace."""
    if namespace:
        group.add_argument("-n", "--namespace", metavar="NAME", help=NAMESPACE)
    group.add_argument(
        "--context", metavar="NAME", help="context of the kubeconfig (default: its current one)"
    )
    group.add_argument(
        "--kubeconfig", metavar="FILE", help="kubeconfig to use (default: KUBECONFIG, or ~/.kube/config)"
    )


def pools_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist pools``."""
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument("-n", "--namespace", metavar="NAME", help=NAMESPACE)
    scope.add_argument("-A", "--all-namespaces", action="store_true", help="list the pools of all namespaces")
    _cluster(parser.add_argument_group("which cluster"), namespace=False)
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "wide", "json"),
        default="table",
        help="output format; wide has exact figures, more columns and all advice (default: table)",
    )


def why_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist why``."""
    parser.add_argument(
        "pool", metavar="POOL", nargs="?", help="name of the pool (default: the only one of the namespace)"
    )
    parser.add_argument(
        "-f",
        "--filename",
        dest="file",
        metavar="FILE",
        help="file with the pool as the cluster has it (kubectl get kvp POOL -o yaml), - is stdin; needs no "
        "cluster",
    )
    _cluster(parser.add_argument_group("which cluster"))
    parser.add_argument(
        "-o", "--output", choices=("text", "json"), default="text", help="output format (default: text)"
    )


def top_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvist top``."""
    picker_options(parser)
    parser.add_argument("--once", action="store_true", help="print the table once and end")
    parser.add_argument(
        "--interval",
        type=positive,
        default=2.0,
        metavar="SECONDS",
        help="time between two updates (default: 2)",
    )
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json"),
        default="table",
        help="json: print the picker's document once (default: table)",
    )


def picker_address(text: str) -> str:
    """Parse ``http://host:port``, ``https://…`` or ``host:port`` as the base URL of a picker's pages."""
    url = (text if "://" in text else f"http://{text}").rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address such as http://localhost:9090")
    _ = parts.port  # raises ValueError for one that is no number
    return url


def picture_file(text: str) -> Path:
    """Parse the name of a picture's file, which ends in ``.png`` or ``.svg``."""
    file = Path(text)
    if file.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text} is no picture: write a name that ends in .png or .svg")
    return file


def positive(text: str) -> float:
    """Parse a number above zero. Raises ArgumentTypeError or ValueError, like the other parsers."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def words(text: str) -> tuple[str, ...]:
    """Parse comma-separated words; empty ones are dropped."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
