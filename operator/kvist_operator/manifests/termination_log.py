"""The logging configuration by which an engine's last error gets into its pod's status. Pure.

Kubelets copy the last 2 KiB of the log there (``terminationMessagePolicy``). When vLLM's core process cannot
start (out of memory, no room for the cache), the log ends with four kilobytes of the API server's traceback,
"See root cause above", and the cause comes earlier. So errors of the core (loggers ``vllm.v1``) are also
written to the termination log, one line each with the exception but without its frames: kubelets copy the
last 4 KiB of that file, and use the log only if it is empty.

vLLM reads Python's ``dictConfig`` from ``VLLM_LOGGING_CONFIG_PATH``; only classes of the standard library are
named, since vLLM's own differ between versions. The logging configuration of users is left as it is.
"""

import json
from typing import Final

from kvist_operator.extra_args import flag_names
from kvist_operator.spec.pool import ENGINE_CONTAINER, Pool

from . import pods
from .object_names import ENGINE, Json, ObjectNames

VOLUME: Final = "logging"
FOLDER: Final = "/etc/kvist/logging"
FILE: Final = "logging.json"
VARIABLE: Final = "VLLM_LOGGING_CONFIG_PATH"
VARIABLES: Final = ("VLLM_CONFIGURE_LOGGING", VARIABLE, "VLLM_LOGGING_STREAM")
LEVEL: Final = "VLLM_LOGGING_LEVEL"
LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR")
FLAGS: Final = ("log-level", "log-config-file", "logging-config")
PATH: Final = "/dev/termination-log"
"""Path of the file for the termination message, unless a container sets another."""
POLICY: Final = {"terminationMessagePolicy": "FallbackToLogsOnError"}
"""Policy of every container: the last lines of its log are in the pod's status, so no right to read logs is
needed."""


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
            # a style instead of a Formatter, which would add the frames
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
    """Return whether the user does not configure logging."""
    variables = any(entry["name"] in VARIABLES for entry in pool.engine.env)
    return not variables and not any(name in FLAGS for _, name in flag_names(pool.engine.extra_args))


def settings(names: ObjectNames, pool: Pool) -> list[Json]:
    """Return the ConfigMap with the configuration; none if the user configures logging."""
    if not ours(pool):
        return []
    # with a configuration vLLM ignores its own variable for the level
    given = {entry["name"]: str(entry.get("value", "")).upper() for entry in pool.engine.env}.get(LEVEL)
    containers = (pool.pod_template.get("spec") or {}).get("containers") or ()
    own: Json = next((each for each in containers if each.get("name") == ENGINE_CONTAINER), {})
    path = str(own.get("terminationMessagePath") or PATH)
    document = logging(given if given in LEVELS else "INFO", path)
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    return [names.child("v1", "ConfigMap", names.engine_settings, ENGINE, data={FILE: text})]


def mounted(names: ObjectNames, pool: Pool) -> list[pods.Mounted]:
    """Return the volume with the configuration and its mount; none if the user configures logging."""
    volume = {"name": VOLUME, "configMap": {"name": names.engine_settings}}
    mount = {"name": VOLUME, "mountPath": FOLDER, "readOnly": True}
    return [pods.Mounted(volume, mount)] if ours(pool) else []


def environment(pool: Pool) -> dict[str, Json]:
    """Return the variable by which vLLM finds the configuration."""
    return {VARIABLE: {"name": VARIABLE, "value": f"{FOLDER}/{FILE}"}} if ours(pool) else {}
