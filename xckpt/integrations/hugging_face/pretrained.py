"""The weights of a trainer's checkpoint, written for ``from_pretrained``."""

from __future__ import annotations

from typing import Final

from xckpt.api.open import open as open_checkpoint
from xckpt.api.save import check_path
from xckpt.convert import Mapping, Rule, convert
from xckpt.errors import UnsupportedLeafError
from xckpt.integrations.hugging_face.state import notes_of
from xckpt.mapping.operations import Drop
from xckpt.storage.location import Location, storage_errors

__all__ = ["save_pretrained"]


ADAPTED: Final = (
    "{} holds adapters of PEFT ({}), and from_pretrained would find no weights under such names: "
    'fill the model, xckpt.load_into(path, {{"model": model}}, unexpected="ignore"), then call its '
    "own save_pretrained(folder)"
)


def save_pretrained(checkpoint: str, folder: str, *, dtype: str | None = None) -> None:
    """Write the weights of a trainer's checkpoint where ``from_pretrained(folder)`` reads them.

    Args:
        checkpoint: one of `xckpt.integrations.hugging_face.XckptTrainer`.
        folder: a local one; gets ``model.safetensors``, and ``config.json`` and
            ``generation_config.json`` if the model has such configurations.
        dtype: element type of the weights, such as ``"bfloat16"``; None leaves them.

    Raises:
        NotACheckpointError: there is none, or it is not that trainer's; nothing was written.
        StorageError: the folder is a file or a bucket, or cannot be written.
        TypeError: one of both is no path.
        UnsupportedLeafError: it holds adapters of PEFT, which ``from_pretrained`` reads elsewhere.
    """
    for each in (checkpoint, folder):
        check_path(each, "save_pretrained(checkpoint, folder)")
    found, place = notes_of(checkpoint), Location.parse(folder)
    for name in open_checkpoint(checkpoint):
        if name.startswith("model/base_model.") or ".base_layer." in name:
            raise UnsupportedLeafError(ADAPTED.format(checkpoint, name))
    others = ("optimizer", "random", "scaler", "scheduler")
    rules = [Rule(f"{part}/{{name...}}", (), [Drop("unchecked")]) for part in others]
    weights = Mapping([Rule("model/{name...}", "{name...}"), *rules])
    target = str(place.within("model.safetensors"))
    convert(checkpoint, target, mapping=weights, dtype=dtype, overwrite=True)
    for name in ("config", "generation_config"):  # the one only of a model that generates
        text = found.get(name)
        if text is not None and place.folder is not None:
            with storage_errors(file := place.folder / f"{name}.json"):
                file.write_text(text, encoding="utf-8")
