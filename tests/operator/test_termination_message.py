"""Termination messages: the decisive lines are found, secrets are left out, and engines do write them."""

import json
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.operator.manifested import one, rendered

from kvist_operator.manifests.termination_log import FILE, FOLDER, VARIABLE
from kvist_operator.status.termination_message import last_words, masked, shortened

NOTICED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
API_SERVER = f"""
(APIServer pid=1)   File "/usr/lib/vllm/v1/engine/utils.py", line 1351, in launch_core_engines
(APIServer pid=1)     wait_for_engine_startup(
(APIServer pid=1)   File "/usr/lib/vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup
(APIServer pid=1)     raise RuntimeError(
(APIServer pid=1) {NOTICED}
/usr/lib/python3.12/resource_tracker.py:254: UserWarning: There appear to be 1 leaked shared_memory objects
  warnings.warn('resource_tracker: There appear to be %d '
"""
CORE = """
(EngineCore pid=99) ERROR 11-21 12:00:00 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=99) ERROR 11-21 12:00:00 [core.py:1510]   File "/usr/lib/vllm/core.py", line 1480, in run
(EngineCore pid=99) ERROR 11-21 12:00:00 [core.py:1510]     engine_core = EngineCoreProc(*args)
(EngineCore pid=99) ERROR 11-21 12:00:00 [core.py:1510]                   ^^^^^^^^^^^^^^^^^^^^^
(EngineCore pid=99) ERROR 11-21 12:00:00 [core.py:1510] AssertionError: hidden size 33 is odd
"""
LOGGED = """
first (<class 'KeyError'>, KeyError('a'), <traceback object at 0x7f>)
then (<class 'vllm.v1.EngineDeadError'>, EngineDeadError('noticed'), <traceback object at 0x7f>)
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CORE + API_SERVER, "AssertionError: hidden size 33 is odd"),
        (API_SERVER, NOTICED),
        ("one\n\ntwo\nthree\nfour\n", "two three four"),
        ("", ""),
        (
            "torch.AcceleratorError: CUDA error: an illegal access",
            "torch.AcceleratorError: CUDA error: an illegal access",
        ),
        (LOGGED, "KeyError: a"),
    ],
)
def test_the_decisive_line_is_found(text: str, words: str) -> None:
    """The words are those of the cause, or else the last lines, never frames or quoted code."""
    assert last_words(text).words == words


@pytest.mark.parametrize(
    ("text", "reason", "remedy"),
    [
        (
            "error: argument --max-num-seqs: invalid int value: 'many'",
            "BadArguments",
            "spec.engine.maxNumSeqs",
        ),
        ("error: argument --seed: expected one argument", "BadArguments", "spec.engine.extraArgs"),
        (
            "ValueError: Total number of attention heads (40) must be divisible by tensor parallel size (3).",
            "BadArguments",
            "spec.engine.tensorParallelSize",
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690",
            "CommunicationFailed",
            "NCCL_DEBUG=INFO in spec.engine.env",
        ),
        ("PermissionError: [Errno 13] Permission denied: '/root/.cache'", "CannotWrite", "fsGroup"),
        (
            "RevisionNotFoundError: 404 Client Error.\n\nRevision Not Found for url: x",
            "ModelUnavailable",
            "spec.model.revision",
        ),
        ("HfHubHTTPError: 429 Client Error: Too Many Requests for url", "ModelUnavailable", "tokenSecretRef"),
        (
            "ValueError: User-specified max_model_len (99) is greater than the derived",
            "BadArguments",
            "maxModelLen",
        ),
        (
            "LM', 'TransformersForCausalLM']) [type=value_error, input_value=ArgsKwargs((), {})]",
            "ModelUnsupported",
            "engine.image",
        ),
    ],
)
def test_what_is_known_has_a_reason_and_a_remedy(text: str, reason: str, remedy: str) -> None:
    """Known errors that the gallery of pods lacks have a reason and a remedy."""
    found = last_words(text)

    assert (found.reason, remedy in found.remedy) == (reason, True)


LETTERS = string.ascii_letters + string.digits


@given(
    st.sampled_from(
        ["hf_{}", "Bearer {}", "token={}", "HF_TOKEN: {}", "api_key='{}'", "https://u:{}@hub.example.com/x"]
    ),
    st.text(LETTERS, min_size=16, max_size=40),
    st.text(max_size=30),
)
def test_no_secret_is_repeated(form: str, secret: str, around: str) -> None:
    """A secret is masked in any form and in any context."""
    assume(secret not in around)
    text = f"{around} {form.format(secret)} {around}"

    assert secret not in masked(text)
    assert secret not in last_words(f"ValueError: {text}").words


def test_masking_leaves_the_rest_alone() -> None:
    """Text about tokens is not masked, because it holds no secret."""
    said = "maximum number of tokens: 4096; 128 tokens per step; max_tokens=2048, token: None"

    assert masked(said) == said


@given(st.text(max_size=3000))
def test_quoted_text_is_one_bounded_line(text: str) -> None:
    """Any log gives one bounded line of printable characters."""
    words = last_words(text).words

    assert len(words) <= 400
    assert words == shortened(words)


PROGRAM = """
import json, logging, logging.config, sys
logging.config.dictConfig(json.load(open(sys.argv[1])))
core, front = logging.getLogger("vllm.v1.engine.core"), logging.getLogger("vllm.entrypoints.api")
core.info("starting")
front.error("a request that could not be parsed")
try:
    raise ValueError("To serve at least one request, (16.0 GiB KV cache is needed, which is larger than the "
                     "available KV cache memory (5.27 GiB). Based on the available memory, the estimated "
                     "maximum model length is 43136.")
except ValueError:
    core.exception("%s failed to start.", "EngineCore")
raise RuntimeError("Engine core initialization failed. See root cause above.")
"""


def test_an_engine_leaves_the_cause_and_nothing_else(tmp_path: Path) -> None:
    """With the rendered file a process writes the core's errors to the termination log, and everything to the
    console."""
    settings = json.loads(one(rendered("minimal"), "ConfigMap", "twig-engine")["data"][FILE])
    assert settings["handlers"]["last"]["filename"] == "/dev/termination-log"
    left = tmp_path / "termination-log"
    settings["handlers"]["last"]["filename"] = str(left)
    (tmp_path / FILE).write_text(json.dumps(settings))

    command = [sys.executable, "-c", PROGRAM, str(tmp_path / FILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    found = last_words(left.read_text())
    assert (found.reason, "to 43136" in found.remedy) == ("OutOfMemory", True)
    assert "Traceback" not in left.read_text()
    assert "could not be parsed" not in left.read_text()
    assert all(
        word in done.stdout for word in ("starting", "could not be parsed", "Traceback", "EngineCore failed")
    )
    assert "Logging error" not in done.stderr


def test_a_termination_log_elsewhere_is_written_to() -> None:
    """A termination log whose path the overlay sets is the one that is written."""
    own = {"containers": [{"name": "engine", "terminationMessagePath": "/tmp/last"}]}
    text = one(rendered("minimal", podTemplate={"spec": own}), "ConfigMap", "twig-engine")["data"][FILE]

    assert json.loads(text)["handlers"]["last"]["filename"] == "/tmp/last"


@pytest.mark.parametrize(
    ("engine", "ours", "level"),
    [
        ({}, True, "INFO"),
        ({"env": [{"name": "VLLM_LOGGING_LEVEL", "value": "debug"}]}, True, "DEBUG"),
        ({"env": [{"name": "VLLM_LOGGING_LEVEL", "value": "loud"}]}, True, "INFO"),
        ({"env": [{"name": VARIABLE, "value": "/mine.json"}]}, False, ""),
        ({"env": [{"name": "VLLM_CONFIGURE_LOGGING", "value": "0"}]}, False, ""),
        ({"extraArgs": ["--logging-config.formatter", "json"]}, False, ""),
        ({"extraArgs": ["--log_level=DEBUG"]}, False, ""),
    ],
)
def test_configured_logging_is_kept(engine: dict[str, object], ours: bool, level: str) -> None:
    """The user's level is used; any other logging setting of users leaves out file, volume and variable."""
    found = rendered("minimal", engine=engine)
    made = [o for o in found.objects if (o["kind"], o["metadata"]["name"]) == ("ConfigMap", "twig-engine")]
    pod = one(found, "Deployment", "twig")["spec"]["template"]["spec"]
    paths = [e["value"] for e in pod["containers"][0]["env"] if e["name"] == VARIABLE]
    mounted = any(m["mountPath"] == FOLDER for m in pod["containers"][0]["volumeMounts"])

    assert (bool(made), mounted, paths == [f"{FOLDER}/{FILE}"]) == (ours, ours, ours)
    if made:
        assert json.loads(made[0]["data"][FILE])["loggers"]["vllm"]["level"] == level
