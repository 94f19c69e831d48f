"""How an engine's last words get into its pod's status. Pure.

Kubelets take them from the last 2 KiB of the log (``terminationMessagePolicy``). But when vLLM's core process
cannot start (out of memory, no room for the cache), the log ends with four kilobytes of the API server's
traceback, "See root cause above", and the cause is out of reach. So errors of the core (loggers ``vllm.v1``)
are also written to the termination log, one line each with the exception but without its frames: of that file
kubelets take the last 4 KiB, and look at the log only where it is empty.

vLLM reads Python's ``dictConfig`` from ``VLLM_LOGGING_CONFIG_PATH``; only classes of the standard library are
named, since vLLM's own differ between versions. Who configures vLLM's logging keeps it as it is.
"""

import json
from typing import Final

from kvist_operator.engine_flags import flag_names
from kvist_operator.spec.pool import ENGINE_CONTAINER, Pool

from . import pods
from .cluster_facts import Json
from .object_names import ENGINE, ObjectNames

VOLUME: Final = "logging"
FOLDER: Final = "/etc/kvist/logging"
FILE: Final = "logging.json"
VARIABLE: Final = "VLLM_LOGGING_CONFIG_PATH"
VARIABLES: Final = ("VLLM_CONFIGURE_LOGGING", VARIABLE, "VLLM_LOGGING_STREAM")
LEVEL: Final = "VLLM_LOGGING_LEVEL"
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
FLAGS: Final = ("log-level", "log-config-file", "logging-config")
PATH: Final = "/dev/termination-log"
"""Where kubelets put a file that anybody may write, unless a container says otherwise."""
POLICY: Final = {"terminationMessagePolicy": "FallbackToLogsOnError"}
"""Of every container: an error's last lines are seen without a right to read logs."""


def logging(level: str = "INFO", path: str = PATH) -> Json:
    """Return the logging configuration, as ``dictConfig`` reads it."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "filters": {"core": {"name": "vllm.v1"}},
        "formatters": {
            "console": {
                "format": "(%(processName)s pid=%(process)d) %(levelname)s %(asctime)s [%(name)s:%(lineno)d] "
                "%(message)s",
                "datefmt": "%m-%d %H:%M:%S",
            },
            # a style and no Formatter: that would add the frames
            "last": {
                "()": "logging.PercentStyle",
                "fmt": "%(message)s %(exc_info)s",
                "defaults": {"message": ""},
            },
        },
        "handlers": {
            "console": {
                "class": "logging.StreamHandler",
                "formatter": "console",
                "level": level,
                "stream": "ext://sys.stdout",
            },
            "last": {
                "class": "logging.FileHandler",
                "filename": path,
                "delay": True,
                "level": "ERROR",
                "filters": ["core"],
                "formatter": "last",
            },
        },
        # in this order: the console's formatter makes the message that the style needs
        "loggers": {"vllm": {"handlers": ["console", "last"], "level": level, "propagate": False}},
    }


def ours(pool: Pool) -> bool:
    """Whether the user leaves logging to us."""
    variables = any(entry["name"] in VARIABLES for entry in pool.engine.env)
    return not variables and not any(name in FLAGS for _, name in flag_names(pool.engine.extra_args))


def _level(pool: Pool) -> str:
    """vLLM would not look at its own variable any more, so we do."""
    literal = {entry["name"]: str(entry.get("value", "")).upper() for entry in pool.engine.env}
    given = literal.get(LEVEL, "")
    return given if given in LEVELS else "INFO"


def _path(pool: Pool) -> str:
    containers = (pool.pod_template.get("spec") or {}).get("containers") or ()
    own: Json = next((each for each in containers if each.get("name") == ENGINE_CONTAINER), {})
    return str(own.get("terminationMessagePath") or PATH)


def settings(names: ObjectNames, pool: Pool) -> list[Json]:
    """The ConfigMap with the file; nothing where the user does it."""
    if not ours(pool):
        return []
    text = json.dumps(logging(_level(pool), _path(pool)), indent=1, sort_keys=True) + "\n"
    meta = names.meta(names.engine_settings, ENGINE)
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {FILE: text}}]


def volumes(names: ObjectNames, pool: Pool) -> list[Json]:
    """The volume with it."""
    return [{"name": VOLUME, "configMap": {"name": names.engine_settings}}] if ours(pool) else []


def mounts(pool: Pool) -> list[Json]:
    """Return the mount of the logging configuration."""
    return pods.mounts((VOLUME, FOLDER, True)) if ours(pool) else []


def environment(pool: Pool) -> dict[str, Json]:
    """Return the variables that make vLLM use it."""
    return {VARIABLE: {"name": VARIABLE, "value": f"{FOLDER}/{FILE}"}} if ours(pool) else {}
