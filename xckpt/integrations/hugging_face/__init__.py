"""Hugging Face's `Trainer`: `XckptTrainer` saves and resumes; `save_pretrained` writes weights."""

from xckpt.integrations.hugging_face.pretrained import save_pretrained
from xckpt.integrations.hugging_face.trainer import XckptTrainer

__all__ = ["XckptTrainer", "save_pretrained"]
