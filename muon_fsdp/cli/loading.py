"""Build the model of `muon-fsdp plan` on the meta device, from a name, a configuration file or Python code."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from muon_fsdp.benchmarks.public_models import PUBLIC_MODELS
from muon_fsdp.training.arguments import ConfigError
from muon_fsdp.training.model import GPT, PRESETS


def named_models() -> dict[str, Callable[[], nn.Module]]:
    """Return what builds each model that has a name: public models and the presets of `muon-fsdp train`."""
    return {**PUBLIC_MODELS, **{name: partial(GPT, config) for name, config in PRESETS.items()}}


def load_model(text: str, dtype: torch.dtype | None) -> nn.Module:
    """Build a model on the meta device.

    Args:
        text: a name, the path of a Hugging Face config.json or of its folder, or package.module:callable.
        dtype: the precision of its parameters. None keeps the precision that a callable builds, and means float32 for
            all other models.

    Raises:
        ConfigError: the model can't be built.
    """
    # Imported code may print, but stdout holds only the results of the command.
    with redirect_stdout(sys.stderr), torch.device("meta"):
        if Path(text).exists():
            model, own_dtype = _from_config(Path(text)), False
        elif ":" in text:
            model, own_dtype = _from_code(text), True
        else:
            model, own_dtype = _by_name(text), False
    wanted = dtype if dtype is not None or own_dtype else torch.float32
    model = model if wanted is None else model.to(wanted)
    elsewhere = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    if elsewhere:
        raise ConfigError(
            f"{text} puts its parameter {elsewhere[0]!r} on a device of its own; build it without a device argument, "
            "so that torch.device('meta') applies"
        )
    return model


def _by_name(name: str) -> nn.Module:
    """Build a public model or a preset."""
    models = named_models()
    if name.lower() in models:
        return models[name.lower()]()
    if name.endswith(".json") or "/" in name or os.sep in name:
        raise ConfigError(
            f"no such file or folder: {name}; models are not downloaded: pass the path of a Hugging Face config.json "
            "or of its folder, package.module:callable, or one of the names, which a wrong name lists"
        )
    close = difflib.get_close_matches(name.lower(), models, n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise ConfigError(
        f"unknown model {name!r}{hint} The names are {', '.join(models)}. Or pass a Hugging Face config.json, its "
        "folder, or package.module:callable."
    )


def _from_config(path: Path) -> nn.Module:
    """Build a model with Transformers from a config.json, given as a file or as its folder."""
    file = path / "config.json" if path.is_dir() else path
    try:
        content: Any = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"no such file: {file}; pass the folder of a Hugging Face model, or its config.json"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {file}: {getattr(error, 'strerror', None) or error}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ConfigError(f"{file} has no 'model_type', so it is not the configuration of a Hugging Face model")
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(f'Transformers is needed to read {file}; install with: pip install "muon_fsdp[integrations]"')
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # shapes are known without the network
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()  # its advice about training would only distract here
    model_type = content.pop("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"Transformers {transformers.__version__} does not know the model type {model_type!r} of {file}: install a "
            "newer version, or pass package.module:callable for your own model."
        )
    try:
        model = _build(transformers, transformers.AutoConfig.for_model(model_type, **content))
    except Exception as error:  # each architecture raises its own kinds of errors
        raise ConfigError(
            f"Transformers {transformers.__version__} can't build a model of type {model_type!r} from {file}: "
            f"{_first_line(error)} Pass package.module:callable for your own model."
        ) from error
    assert isinstance(model, nn.Module)
    return model.to("meta")  # wav2vec2 and others create a small tensor on the CPU regardless of torch.device


def _build(transformers: Any, config: Any) -> Any:
    """Build the class that the configuration names, else a causal language model, else the model without a head."""
    for name in config.architectures or ():
        named: Any = getattr(transformers, name, None)
        is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
        if is_model and isinstance(config, named.config_class):
            return named(config)
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel
    return auto.from_config(config, trust_remote_code=False)


def _from_code(text: str) -> nn.Module:
    """Import package.module:callable, also from the current folder, and call it."""
    module_name, _, attribute = text.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"can't import {module_name!r} (from the current folder or an installed package): {_first_line(error)}"
        ) from error
    try:
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise ConfigError(f"module {module_name!r} has no {attribute!r}") from error
    if not callable(found):
        raise ConfigError(
            f"{text} is an object of type {type(found).__name__}, not a class or a function that returns a model"
        )
    try:
        model = found()
    except Exception as error:
        raise ConfigError(
            f"{text}() failed with {_first_line(error)} It is called without arguments, on the meta device."
        ) from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{text}() returned an object of type {type(model).__name__}, not a torch.nn.Module")
    return model


def _first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message, or two lines if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    shown = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {shown.rstrip('.')}."
