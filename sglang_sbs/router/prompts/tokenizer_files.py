"""Finds the folder with a model's tokenizer: a local one, or one of Hugging Face by its id."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""All that the router reads of a model."""
_REASON_CHARS = 200


def tokenizer_folder(named: Path) -> Path:
    """``named`` if it exists, else the files of the model with this id, fetched if need be.
    ``huggingface_hub`` does the work, so its variables count (``HF_HOME``, ``HF_TOKEN``,
    ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``), and the engines of this machine share its cache.
    Raises: ValueError, neither a path that exists nor a model that can be had."""
    if named.exists():
        return named
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    flag = f"--tokenizer-path {named}"
    if named.is_absolute() or len(named.parts) > 2:
        raise ValueError(f"{flag}: no such folder; give a model's directory or its ORG/NAME")
    logger.info("looking for the tokenizer of %s at Hugging Face", named)
    try:
        return Path(snapshot_download(str(named), allow_patterns=list(_FILES)))
    except HFValidationError:
        why = "no such folder, and no id of a model; give a model's directory or its ORG/NAME"
        raise ValueError(f"{flag}: {why}") from None
    except Exception as error:  # the hub's answers, its time-outs, a full disk: all end the same
        reason = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
        raise ValueError(
            f"{flag}: no such folder, and Hugging Face does not give a model of that name "
            f"({reason[:_REASON_CHARS]}); give a directory with its tokenizer.json, or look at "
            "HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE"
        ) from error
