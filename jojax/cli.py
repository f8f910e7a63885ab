"""Command lines: `--config FILE.py:arg --config.a.b=v` through ml_collections, and errors in one sentence,
exit code 2."""

import ast
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from jojax import config as configs
from jojax.errors import UserError

flags.disclaim_key_flags()  # --help of a command lists what is defined here, too


def define_config(required: bool = True) -> flags.FlagHolder:
    """Define the flag `--config`; call it once, where the module defines its other flags."""
    # new attributes are for `encoding` alone, the only group that is left unlocked
    holder = config_flags.DEFINE_config_file(
        "config", lock_config=False, accept_new_attributes=True, help_string="configs/FILE.py[:arg]"
    )
    if required:
        flags.mark_flag_as_required("config")
    return holder


def parsed_config() -> tuple[ConfigDict, str, dict[str, Any]]:
    """(validated config, 'configs/FILE.py:arg', overrides) after the flags are parsed."""
    flag: Any = flags.FLAGS["config"]
    config, overrides = configs.lock(flag.value), dict(config_flags.get_override_values(flag))
    for key, value in overrides.items():
        if value == "None":  # the flag's parser knows no other way to say it; 'none' is a choice of many keys
            configs.apply_overrides(config, {key: None})
            overrides[key] = None
    if "encoding.name" in overrides and "encoding.preset" not in overrides:
        config.encoding.pop("preset", None)  # no longer what the config's preset names
    return configs.validate(config), config_flags.get_config_filename(flag), overrides


def keep_compiled() -> None:
    """Compiled functions go to `compiled` in the folder of tokenised texts (~/.cache/jojax) or to
    JAX_COMPILATION_CACHE_DIR, so that a run that starts again does not compile anew.
    JAX_ENABLE_COMPILATION_CACHE=false turns this off."""
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        folder = Path(os.environ.get("JOJAX_CACHE") or "~/.cache/jojax").expanduser() / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))


def run_main(main: Callable[[Sequence[str]], Any], argv: Sequence[str] | None = None, positional: bool = False) -> None:
    """`absl.app.run(main)`, but what the user can mend is told in one sentence on stderr, with exit code 2.

    `positional`: main takes arguments that are no options. Bugs keep their traceback. The config is looked over
    before ml_collections parses it, whose own errors are tracebacks for a missing file or an unknown key.
    """
    try:
        logging.set_verbosity(logging.WARNING)  # libraries tell of backends that are not there, fonts, …
        app.run(main, argv=list(sys.argv if argv is None else argv), flags_parser=partial(_parse, positional))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def options(texts: Iterable[str]) -> dict[str, Any]:
    """Options of an encoding: ['rate=0.02', 'gate=k'] -> {'rate': 0.02, 'gate': 'k'}"""
    found = {}
    for text in texts:
        option, equals, value = text.partition("=")
        if not equals or option == "name":
            raise UserError(f"{text!r} is no option of an encoding: give option=value")
        try:
            found[option] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[option] = value
    return found


def _parse(positional: bool, argv: list[str]) -> list[str]:
    arguments = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
    spec = _value(arguments, "config")
    reference = configs.load(spec) if spec is not None and "config" in flags.FLAGS else None
    if reference is not None:
        for argument in arguments:
            if match := re.match(r"--?(no)?config\.([^=]+)", argument):
                _check_override(reference, match[2], argument)
    try:
        rest = flags.FLAGS(argv)
    except SystemExit:  # only --help and its like exit while parsing, with 1
        sys.exit(0)
    except flags.Error as error:
        raise UserError(_sentence(str(error), reference)) from error
    if len(rest) > 1 and not positional:
        raise UserError(f"argument {rest[1]!r} is not understood: options look like --name=value.")
    return rest


def _value(arguments: list[str], name: str) -> str | None:
    """The value of --name=value or --name value, the last one given."""
    found = None
    for i, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in (f"--{name}", f"-{name}"):
            found = value if equals else (arguments[i + 1] if i + 1 < len(arguments) else None)
    return found


def _check_override(reference: ConfigDict, key: str, argument: str) -> None:
    holder, last = configs.locate(reference, key)
    old = holder.get(last)
    if isinstance(old, ConfigDict) and key != "encoding":
        raise UserError(f"config.{key} is a group of keys: override them one by one (--config.{key}.NAME=value).")
    if isinstance(old, list):
        raise UserError(
            f"{argument}: config.{key} is a list, which cannot be overridden; its config should use a tuple."
        )
    if old is None and last in holder and holder.get_type(last) is type(None):
        raise UserError(f"{argument}: config.{key} has no type; its config should use config_dict.placeholder(TYPE).")


def _sentence(text: str, reference: ConfigDict | None) -> str:
    """absl's and ml_collections' flag errors, shortened."""
    match = re.match(r"flag --config\.([\w.]+)=(.*?): ", text)
    if match and reference is not None:
        return f"--config.{match[1]}={match[2]}: needs {configs.wanted(*configs.locate(reference, match[1]))}."
    if missing := re.match(r"flag --(\w+)=None: Flag --\w+ must have a value", text):
        return f"--{missing[1]} is missing" + (
            ": give --config=configs/FILE.py[:arg]." if missing[1] == "config" else "."
        )
    if text.startswith("Found --config."):
        return f"{text.split(' in argv')[0].removeprefix('Found ')} stands before --config; put --config first."
    if "config." in text and text.startswith("Unknown command line flag"):
        return f"{text.split(chr(39))[1]!r} is given without --config=configs/FILE.py before it."
    return text.strip().split("\n")[0].replace("command line flag", "option")
