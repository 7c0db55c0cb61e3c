"""The mapping of a model family, for the configuration of one model.

1. The configuration is a dict, an object of transformers, or a ``config.json`` on disk or in a
   bucket; `family` reads it into a dict.
2. `xckpt.mapping.families` fills the family's rules with its values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final, Protocol

from xckpt.errors import MappingError, XckptError
from xckpt.mapping.families import Document, check_family, family_mapping
from xckpt.mapping.mapping import LeafMapping
from xckpt.storage.foreign.files import open_file
from xckpt.storage.foreign.paths import find_path

MAX_CONFIG_BYTES: Final = 1 << 24


class ModelConfig(Protocol):
    """A configuration object, as transformers has them."""

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON values."""
        ...


Config = Document | ModelConfig | str | os.PathLike[str]
"""A model's configuration: a dict, one of transformers', or the path or URL of a ``config.json`` or
of the folder that holds one."""


def family(name: str, config: Config, **choices: bool | str) -> LeafMapping:
    """The mapping from a family's torch checkpoints to its Flax parameters.

    The way back is its inverse. All classes of a family (with any head, or none) share a mapping:
    it takes the leaves that exist. Weights that torch holds under two names may be there once
    or twice.

    Args:
        name: a family, as a ``config.json`` calls it in ``model_type``.
        config: the model's configuration.
        choices: the options of the family, such as ``scanned=True`` (the layers of one kind are
            one array, stacked on axis 0) and ``rope="pairs"`` for Llama.

    Raises:
        MappingError: there is no such family or choice, or the configuration lacks a key.
        TypeError: the configuration is of another type.

    Example:
        >>> from xckpt.convert import TensorSpec
        >>> sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        >>> mapping = family("llama", sizes, scanned=True)
        >>> source = {
        ...     f"layers.{layer}.mlp.up_proj.weight": TensorSpec((48, 32), "float32")
        ...     for layer in (0, 1)
        ... }
        >>> print(mapping.resolve(source).targets["layers/mlp/up_proj/kernel"])
        float32[2, 32, 48]
    """
    check_family(name)  # Before a configuration is looked for.
    return family_mapping(name, _config_dict(config), choices)


def _config_dict(config: Config) -> Document:
    if isinstance(config, Mapping):
        return config
    if isinstance(config, str | os.PathLike):
        return _read_config(config)
    if not hasattr(config, "to_dict"):
        raise TypeError(f"config takes a dict, an object of transformers or a path, not {config!r}")
    return config.to_dict()


def _read_config(path: str | os.PathLike[str]) -> Document:
    """The content of a ``config.json``, given its path or its folder's."""
    try:
        file_path = find_path(path)
        file_path = file_path / "config.json" if file_path.is_dir() else file_path
        with closing(open_file(file_path)) as file:
            text = file.whole(MAX_CONFIG_BYTES)
        if text is None:
            raise ValueError(f"it is longer than the {MAX_CONFIG_BYTES:,} bytes that are read")
        config = json.loads(text)
    except (OSError, ValueError, RecursionError, XckptError) as error:
        raise MappingError(f"{path} is not a model's configuration: {error}") from error
    if not isinstance(config, dict):
        raise MappingError(f"{file_path} is not a model's configuration: it is not a JSON object")
    return config
