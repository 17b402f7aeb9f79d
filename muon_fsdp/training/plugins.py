"""Find rules by name or alias, and import the files of `--plugin`, which register more rules."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
import zlib
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path

from muon_fsdp.declarations.option import suggestion
from muon_fsdp.rules import RULES, Rule
from muon_fsdp.training.arguments import ConfigError

_LOADED: dict[str, dict[str, Rule]] = {}  # the rules that a module has registered, by the module's name


def find_rule(name: str) -> Rule:
    """Return the rule that has this name or this alias.

    Raises:
        ConfigError: there is none; the message lists all rules.
    """
    if name in RULES:
        return RULES[name]
    for rule in RULES.values():
        if name in rule.aliases:
            return rule
    aliases = [alias for rule in RULES.values() for alias in rule.aliases]
    near = suggestion(name, [*RULES, *aliases])
    available = f"{near} Available rules:" if near else "; available rules:"
    names = (f"{rule.name} ({', '.join(rule.aliases)})" if rule.aliases else rule.name for rule in RULES.values())
    raise ConfigError(
        f"unknown rule {name!r}{available} {', '.join(names)}; pass --plugin FILE to load a rule of your own"
    )


def load_plugins(plugins: Iterable[str]) -> None:
    """Import files and modules that register rules; a module that was imported before is not imported again.

    Raises:
        ConfigError: a plugin does not exist, raises an error, or registers no rule.
    """
    for plugin in plugins:
        before, is_file = dict(RULES), plugin.endswith(".py") or os.sep in plugin or Path(plugin).exists()
        try:
            with redirect_stdout(sys.stderr):  # a plugin may print, and stdout may have to be JSON
                module = _import_file(plugin) if is_file else _import_module(plugin)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"--plugin {plugin}: {_reason(error, plugin)}") from error
        new = {
            name: rule
            for name, rule in RULES.items()
            if before.get(name) is not rule or f"{type(rule).__module__}.".startswith(f"{module}.")
        }
        RULES.update(_LOADED.setdefault(module, new))
        if not _LOADED[module]:
            del _LOADED[module]
            raise ConfigError(
                f"--plugin {plugin}: it registers no rule; write @register, from muon_fsdp.rules, above your class"
            )


def _import_file(plugin: str) -> str:
    """Import a file, which may import modules beside it, and return the name of its module."""
    path = Path(plugin).resolve()
    if not path.is_file():
        what = "this is a folder" if path.is_dir() else "no such file"
        raise ConfigError(f"--plugin {plugin}: {what}; pass the path of a Python file, or package.module")
    name = f"muon_fsdp_plugin_{path.stem}_{zlib.crc32(os.fsencode(path)):08x}"
    if name in _LOADED:
        return name
    _search_in(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--plugin {plugin}: this is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return name


def _import_module(plugin: str) -> str:
    _search_in(os.getcwd())
    try:
        importlib.import_module(plugin)
    except ModuleNotFoundError as error:
        if not plugin.startswith(error.name or plugin):
            raise
        raise ConfigError(
            f"--plugin {plugin}: no such file, and no module of this name in the current folder or installed; pass "
            "the path of a Python file, or package.module"
        ) from None
    return plugin


def _search_in(folder: str) -> None:
    if folder not in sys.path and not ("" in sys.path and folder == os.getcwd()):
        sys.path.append(folder)  # last, so that no file there hides an installed package


def _reason(error: BaseException, plugin: str) -> str:
    """Return in one line what went wrong in a plugin, with the line number in its file if that is known."""
    if isinstance(error, SystemExit):
        return "it ends the program; call sys.exit only under if __name__ == '__main__'"
    lines = [line.strip() for line in str(getattr(error, "msg", None) or error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
    name = Path(plugin).name
    numbers = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == name]
    line = error.lineno if isinstance(error, SyntaxError) else numbers[-1] if numbers else None
    return f"line {line}: {text}" if line is not None else text
