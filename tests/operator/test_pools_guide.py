"""The statements of docs/guides/pools.md hold."""

import re
from pathlib import Path

import yaml
from tests.operator.manifested import one, rendered, resource
from tests.operator.test_status import NOW, WELL, conditions, subject

from kvist_operator.manifests.render import ORDER
from kvist_operator.spec import read_pool
from kvist_operator.status import status

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "pools.md").read_text()


def test_the_overlay_of_the_guide_is_merged() -> None:
    """The guide's example is accepted and has the effect that its comment states."""
    [text] = [each for each in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL) if "nodeSelector" in each]
    overlay = yaml.safe_load(text)["spec"]["podTemplate"]
    pod = one(rendered("minimal", podTemplate=overlay), "Deployment", "twig")["spec"]["template"]["spec"]

    assert pod["tolerations"] == overlay["spec"]["tolerations"]
    [cache] = [volume for volume in pod["volumes"] if volume["name"] == "cache"]
    assert cache == {"name": "cache", "persistentVolumeClaim": {"claimName": "hub-cache"}}


def test_the_examples_of_the_guide_are_read() -> None:
    """Every example of a spec without a model is accepted together with one."""
    read = 0
    for text in re.findall(r"```yaml\n(spec:\n.*?)```", GUIDE, re.DOTALL):
        spec = yaml.safe_load(text)["spec"]
        found = resource("two-nodes")
        found["spec"] = {**spec, "model": {"source": "hf://Qwen/Qwen3-8B", **spec.get("model", {})}}
        read_pool(found)
        read += 1
    assert read >= 4


def test_the_guide_names_every_kind_every_volume_and_every_condition() -> None:
    """The guide mentions every kind of object and condition; reasons are in the troubleshooting guide."""
    volumes = {
        v["name"]
        for v in one(rendered("agents"), "Deployment", "twig")["spec"]["template"]["spec"]["volumes"]
    }
    known = {"Role", "RoleBinding"} | volumes - {"adapter-1"}

    missing = [word for word in {*ORDER, *known} - {"RoleBinding"} if word not in GUIDE]
    assert missing == []
    assert [kind for kind in conditions(status(subject(), WELL, {}, NOW)) if f"`{kind}`" not in GUIDE] == []
