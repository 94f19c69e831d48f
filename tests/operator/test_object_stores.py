"""Weights in S3 and Google Cloud Storage: the arguments of engines, refusals, remarks."""

from typing import Any

import pytest
from tests.crd.cases import planned
from tests.operator.manifested import rendered, resource

from kvist_kube.quantity import parse_bytes
from kvist_operator.errors import ModelNotFound, SpecError
from kvist_operator.models.source import model_facts
from kvist_operator.plan.resources import STREAM_BUFFER
from kvist_operator.spec import read_pool

Json = dict[str, Any]


def engine_of(case: str = "bucket", **spec: Any) -> Json:
    """Return the engines' container."""
    found = [o for o in rendered(case, **spec).objects if o["metadata"]["name"] == "twig"]
    [made] = [each for each in found if each["kind"] == "Deployment"]
    container: Json = made["spec"]["template"]["spec"]["containers"][0]
    return container


def model(**more: Any) -> Json:
    """Return spec.model of the pool with a bucket."""
    found: Json = {**resource("bucket")["spec"]["model"], **more}
    return found


@pytest.mark.parametrize("source", ["s3://models/llama/3.3-70b", "gs://models/llama/3.3-70b"])
def test_engines_stream_weights_from_the_bucket(source: str) -> None:
    """vLLM gets the address and its loader, keys come from the Secret by reference, and nothing is mounted or
    downloaded to the node."""
    engine = engine_of(model=model(source=source))
    words = engine["args"] if "args" in engine else engine["command"]
    env = {each["name"]: each for each in engine["env"]}

    assert source in " ".join(words)
    assert "--load-format runai_streamer" in " ".join(words)
    assert env["AWS_ACCESS_KEY_ID"]["valueFrom"]["secretKeyRef"] == {"name": "bucket", "key": "id"}
    assert env["HF_HUB_OFFLINE"]["value"] == "1"
    assert "ephemeral-storage" not in engine["resources"]["requests"]
    assert not {"model", "weights"} & {each["name"] for each in engine["volumeMounts"]}


def test_the_memory_of_streaming_is_bounded_and_reserved() -> None:
    """The streamer of each process gets 5 GiB, which the pod requests on top; a value of the user stays."""
    streamed, mounted = engine_of(), engine_of("claim")
    env = {each["name"]: each.get("value") for each in streamed["env"]}
    gpus = int(streamed["resources"]["limits"]["nvidia.com/gpu"])
    amounts = [parse_bytes(each["resources"]["limits"]["memory"]) for each in (streamed, mounted)]

    assert env["RUNAI_STREAMER_MEMORY_LIMIT"] == str(STREAM_BUFFER)
    assert amounts[0] - amounts[1] == pytest.approx(gpus * STREAM_BUFFER, rel=0.001)
    own = engine_of(engine={"env": [{"name": "RUNAI_STREAMER_MEMORY_LIMIT", "value": "0"}]})
    assert {"name": "RUNAI_STREAMER_MEMORY_LIMIT", "value": "0"} in own["env"]


@pytest.mark.parametrize("loader", ["runai_streamer_sharded", "modelexpress", "auto"])
def test_another_loader_for_object_stores_is_kept(loader: str) -> None:
    """The user's loader replaces that of the plan."""
    words = " ".join(engine_of(engine={"extraArgs": ["--load-format", loader]})["args"])
    assert words.count("--load-format") == 1
    assert f"--load-format {loader}" in words


def test_a_loader_that_reads_no_object_store_is_refused() -> None:
    """The error names the field, the flag and the remedy."""
    with pytest.raises(
        SpecError, match=r"spec\.engine\.extraArgs: --load-format pt does not read s3://: leave"
    ):
        rendered("bucket", engine={"extraArgs": ["--load-format", "pt"]})


def test_facts_of_a_model_in_a_bucket_have_to_be_given() -> None:
    """The operator has no keys for the bucket; the error names both fields."""
    found = resource("bucket")
    del found["spec"]["model"]["shape"]
    with pytest.raises(ModelNotFound, match=r"set spec\.model\.shape\.config .*checkpointSize"):
        model_facts(read_pool(found).model)


def test_a_note_says_that_the_picker_has_no_tokenizer() -> None:
    """Without spec.picker.tokenizer, a note names the field."""
    notes = rendered("bucket", picker={}).notes
    assert any("the picker does not read s3://; set spec.picker.tokenizer" in each.message for each in notes)


def test_an_image_for_cpus_is_unverified() -> None:
    """Such images may lack the loader, and the plan says so."""
    found = resource("bucket")
    found["spec"] |= {"accelerator": {"resourceName": "cpu", "memory": "400Gi"}, "engine": {}}
    assert any("vllm[runai]" in each for each in planned(found).doubts)
