"""``python -m tests.docs`` writes the parts of docs/ and examples/ that come from the code; ``test_docs.py``
and ``test_examples.py`` check that they are up to date."""

import ast
import copy
import json
from pathlib import Path
from typing import Any, Final

import yaml

from kvist_epp.names import BASE_MODEL_HEADER
from kvist_operator.manifests.bootstrap import AUTHORITY_FOLDER, SDS_FILE, authority, bootstrap
from kvist_operator.spec import read_pool
from kvist_sim.envoy import Gateway, Json, config
from kvist_sim.envoy_pools import Pool, Pools, Route, joined, pools_config
from kvist_sim.envoy_settings import PickerTls

ROOT: Final = Path(__file__).parent.parent
GUIDES: Final = ROOT / "docs" / "guides"
ENVOY: Final = GUIDES / "attach-envoy.yaml"
ORIGINAL_DST: Final = GUIDES / "attach-envoy-original-dst.yaml"
SEVERAL_POOLS: Final = GUIDES / "several-pools.yaml"
LAPTOP: Final = ROOT / "docs" / "tutorials" / "laptop-envoy.yaml"
EDGE: Final = ROOT / "examples" / "03-plain-envoy" / "config.yaml"
MODELS: Final = ROOT / "examples" / "05-two-models" / "config.yaml"
ARCHITECTURE: Final = ROOT / "docs" / "architecture.md"
PROGRAMS: Final = (
    "epp/kvist_epp",
    "operator/kvist_operator",
    "sim/kvist_sim",
    "cli/kvist",
    "common/kvist_kube",
)
SIMULATED: Final = "# Written by `make docs` from kvist_sim.envoy, the configuration that the tests run.\n"
RENDERED: Final = "# Written by `make docs`: what the operator's own Envoys run (kvist_operator.manifests).\n"


def envoy(**choices: Any) -> Json:
    """Return the configuration of the guide: two engines, the picker beside Envoy, clients on port 8080."""
    gateway = Gateway(
        endpoints=["10.0.0.1:8000", "10.0.0.2:8000"],
        picker="127.0.0.1:9002",
        picker_tls=PickerTls(),
        trusts_clients=False,
        port=8080,
        **choices,
    )
    return config(gateway)


def laptop() -> Json:
    """Return the configuration of the tutorial: two engines and the picker on this host."""
    gateway = Gateway(
        endpoints=["127.0.0.1:8001", "127.0.0.1:8002"],
        picker="127.0.0.1:9002",
        picker_tls=PickerTls(),
        trusts_clients=False,
        port=8080,
    )
    return config(gateway)


def original_dst() -> Json:
    """Return the guide's configuration without a list of engines."""
    return envoy(selection="original_dst", failure_mode_allow=False)


def several_pools(**choices: Any) -> Json:
    """Return the configuration of the guide on several pools; ``choices`` override fields of `Pools`."""
    return pools_config(Pools(**(SEVERAL | choices)))


SEVERAL: Final[dict[str, Any]] = {
    "pools": {
        "small": Pool(endpoints=["10.0.1.1:8000", "10.0.1.2:8000"], pickers=("10.0.1.10:9002",)),
        "large": Pool(endpoints=["10.0.2.1:8000", "10.0.2.2:8000"], pickers=("10.0.2.10:9002",)),
        "large-next": Pool(endpoints=["10.0.3.1:8000"], pickers=("10.0.3.10:9002",)),
    },
    "routes": [
        Route(models=("qwen3-32b",), pools={"large": 90, "large-next": 10}, header=BASE_MODEL_HEADER),
        Route(models=("qwen3-4b",), pools={"small": 1}),
    ],
    "default": "small",
    "model_headers": ("127.0.0.1:9002",),
    "tls": PickerTls(),
    "port": 8080,
    "gateway": {"trusts_clients": False},
}
"""Two models, an adapter of the larger one (routed by its base model), and a canary of the larger one."""


def edge() -> Json:
    """Return the ConfigMap of examples/03-plain-envoy."""
    pool = read_pool(yaml.safe_load((EDGE.parent / "pool.yaml").read_text()))
    whole = bootstrap(pool) | {"node": {"id": "edge", "cluster": "edge"}}
    data = {"envoy.yaml": _yaml(whole), SDS_FILE: json.dumps(authority(pool), indent=1)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "edge"}, "data": data}


def two_models() -> Json:
    """Return the ConfigMap of examples/05-two-models."""
    names = ("small", "large")
    found = {name: read_pool(yaml.safe_load((MODELS.parent / f"{name}.yaml").read_text())) for name in names}
    each = {name: _own_authority(bootstrap(pool), name) for name, pool in found.items()}
    routes = [Route(models=("large",), pools={"large": 1})]
    pools = Pools(pools={}, routes=routes, default="small", model_headers=())
    whole = joined(pools, each, _model_header(each["small"]))
    data = {"envoy.yaml": _yaml(whole | {"node": {"id": "models", "cluster": "models"}})}
    for name, pool in found.items():
        data[f"{name}-{SDS_FILE}"] = json.dumps(_own_authority(authority(pool), name), indent=1)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "models"}, "data": data}


def _own_authority(made: Json, pool: str) -> Json:
    """Give each pool its own file and folder, because its pickers have their own authority."""
    text = json.dumps(made).replace(f"/{SDS_FILE}", f"/{pool}-{SDS_FILE}")
    found: Json = json.loads(text.replace(AUTHORITY_FOLDER, f"{AUTHORITY_FOLDER}/{pool}"))
    return found


def _model_header(like: Json) -> Json:
    """Return the cluster of the filter: its Service, with certificates that Envoy does not verify."""
    made = copy.deepcopy(like)
    [picker] = [cluster for cluster in made["static_resources"]["clusters"] if cluster["name"] == "picker"]
    [[end]] = [each["lb_endpoints"] for each in picker["load_assignment"]["endpoints"]]
    end["endpoint"]["address"]["socket_address"]["address"] = "model-header.default.svc"
    picker["transport_socket"] = PickerTls().transport_socket()
    return made


class _Text(yaml.SafeDumper):
    """Dumps long texts as blocks."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Text.add_representer(str, _block)


def _yaml(document: Json) -> str:
    return yaml.dump(document, Dumper=_Text, sort_keys=False, width=110)


def packages() -> str:
    """Return a table of all packages with the first sentences of their docstrings, between two comments."""
    rows = ["| package | what it is |", "|---|---|"]
    for program in PROGRAMS:
        for file in sorted((ROOT / program).rglob("__init__.py"), key=lambda file: file.parent.parts):
            text = ast.get_docstring(ast.parse(file.read_text()))
            if text is not None and file.parent.name != "pb":
                paragraph = " ".join(text.partition("\n\n")[0].split())
                sentence = paragraph.replace("``", "`").partition(". ")[0].rstrip(".")
                place = file.parent.relative_to((ROOT / program).parent)
                rows.append(f"| [`{'.'.join(place.parts)}`](../{file.relative_to(ROOT)}) | {sentence} |")
    return "\n".join(("<!-- packages -->", *rows, "<!-- /packages -->"))


def with_packages(page: str) -> str:
    """Return docs/architecture.md with the table of today."""
    before, _, rest = page.partition("<!-- packages -->")
    _, _, after = rest.partition("<!-- /packages -->")
    return before + packages() + after


def write() -> None:
    """Write all generated files, and the generated part of docs/architecture.md."""
    ARCHITECTURE.write_text(with_packages(ARCHITECTURE.read_text()))
    for path, head, made in (
        (ENVOY, SIMULATED, envoy()),
        (ORIGINAL_DST, SIMULATED, original_dst()),
        (LAPTOP, SIMULATED, laptop()),
        (SEVERAL_POOLS, SIMULATED, several_pools()),
        (EDGE, RENDERED, edge()),
        (MODELS, RENDERED, two_models()),
    ):
        path.write_text(head + _yaml(made))


if __name__ == "__main__":
    write()
