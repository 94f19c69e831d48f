"""``python -m tests.docs``: writes what docs/ takes from the code; ``test_docs.py`` holds it to that."""

from pathlib import Path

import yaml

from kvist_sim.envoy import Gateway, Json, config
from kvist_sim.envoy_tls import PickerTls

ENVOY = Path(__file__).parent.parent / "docs" / "guides" / "envoy.yaml"
HEADER = "# Written by `make docs` from kvist_sim.envoy, the configuration that the tests run.\n"


def envoy() -> Json:
    """The configuration of the guide: two engines, the picker beside Envoy, clients on port 8080."""
    gateway = Gateway(
        endpoints=["10.0.0.1:8000", "10.0.0.2:8000"],
        picker="127.0.0.1:9002",
        picker_tls=PickerTls(),
        port=8080,
    )
    return config(gateway)


if __name__ == "__main__":
    ENVOY.write_text(HEADER + yaml.safe_dump(envoy(), sort_keys=False, width=110))
