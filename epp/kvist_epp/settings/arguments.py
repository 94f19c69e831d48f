"""The command line: fields of the settings as flags and environment variables, the picker's and the
operator's. Standard library only."""

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias

from kvist_epp.errors import SettingsError
from kvist_epp.settings.durations import seconds

Field: TypeAlias = dataclasses.Field[Any]


@dataclass(frozen=True, slots=True)
class Program:
    """A command, as its help introduces it."""

    name: str
    description: str
    epilog: str

    @property
    def prefix(self) -> str:
        """Of its environment variables."""
        return self.name.replace("-", "_").upper() + "_"

    def flag_of(self, variable: str) -> str:
        """The flag that an environment variable stands for."""
        return f"--{dashed(variable.removeprefix(self.prefix).lower())}"


EPILOG: Final = """\
examples:
  # two engines from a file, model files from a folder, no TLS
  kvist-epp --endpoints-file endpoints.yaml --model ./qwen3 --secure-serving=false

  # the pods of an InferencePool, in a pod of its namespace (docs/guides/kubernetes.md has the Role)
  kvist-epp --pool-name qwen3-32b --model hf://Qwen/Qwen3-32B

  # pods by label, at two ports each (one data-parallel rank behind each)
  kvist-epp --endpoint-selector app=vllm,role!=prefill --endpoint-target-ports 8000,8001 \\
      --pool-namespace serving --model ./qwen3

  # tokenizer files from the hub at a revision, JSON logs on a terminal too
  kvist-epp --endpoints-file endpoints.yaml --model hf://Qwen/Qwen3-32B@main \\
      --secure-serving=false --log-format json

  # no picker: the filter before the pickers of several pools (docs/guides/several-pools.md)
  kvist-epp --role=model-header --base-models sql-lora=qwen3-32b

  # in place of llm-d's router: its flags and its configuration file (docs/guides/migrate.md)
  kvist-epp --pool-name qwen3-32b --config-file /etc/epp/config.yaml --zap-encoder=json --v=4

  # where would this request go, and why?
  curl -s localhost:9090/debug/pick -H 'x-kvist-path: /v1/chat/completions' -d @request.json
"""

PICKER: Final = Program(
    "kvist-epp",
    "Endpoint picker: sends each request to the engine that already holds its prefix.",
    EPILOG,
)
ENVIRONMENT_PREFIX: Final = PICKER.prefix


def dashed(name: str) -> str:
    """A field's name as its flag's."""
    return name.replace("_", "-")


def written(value: object) -> str:
    """A value as it is given to a flag."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def parse(
    fields: Iterable[Field],
    argv: Sequence[str],
    environment: Mapping[str, str],
    program: Program = PICKER,
) -> dict[str, Any]:
    """The value of each field; argparse exits 2 on what it cannot read. Raises SettingsError."""
    given = {word.partition("=")[0] for word in argv}
    read = {} if given & {"-h", "--help"} else environment
    used = {name: text for name, text in read.items() if text and program.flag_of(name) not in given}
    return vars(_parser(fields, used, program).parse_args(list(argv)))


class _Parser(argparse.ArgumentParser):
    """Says what is wrong, and not all flags before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists the flags\n")


def _parser(
    fields: Iterable[Field], environment: Mapping[str, str], program: Program
) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program.name,
        description=program.description,
        epilog=program.epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for f in fields:
        _add(parser, f, environment, program.prefix)
    return parser


def _add(parser: argparse.ArgumentParser, f: Field, environment: Mapping[str, str], prefix: str) -> None:
    convert = _converter(f)
    options: dict[str, Any] = {"type": convert, "default": f.default, "help": _help(f)}
    variable = prefix + f.name.upper()
    if variable in environment:
        options["default"] = _from_environment(convert, variable, environment[variable], f)
    if f.metadata["choices"]:
        options["choices"] = f.metadata["choices"]
    elif isinstance(f.default, bool):
        options |= {"nargs": "?", "const": True, "metavar": "true|false"}
    else:
        options["metavar"] = f.metadata["unit"]
    parser.add_argument(f"--{dashed(f.name)}", **options)


def _converter(f: Field) -> Callable[[str], Any]:
    if isinstance(f.default, bool):
        return _boolean
    return _duration if f.metadata["unit"] == "SECONDS" else type(f.default)


def _duration(text: str) -> float:
    try:
        return seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _help(f: Field) -> str:
    shown = f.default != ""
    return str(f.metadata["help"]).replace("%", "%%") + (f" (default: {written(f.default)})" if shown else "")


def _from_environment(convert: Any, variable: str, text: str, f: Field) -> Any:
    try:
        value = convert(text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise SettingsError(f"{variable}: {text!r} is not a {type(f.default).__name__}") from error
    if f.metadata["choices"] and value not in f.metadata["choices"]:
        raise SettingsError(f"{variable}: {text!r} is none of {', '.join(f.metadata['choices'])}")
    return value
