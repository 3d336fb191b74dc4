"""Finds the folder with a model's tokenizer: a local one, or one of Hugging Face by its id."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""The only files of a model that the router reads."""
_REASON_CHARS = 200


def tokenizer_folder(named: Path) -> Path:
    """Return ``named`` if it exists, else the files of the model with this id, downloaded if
    necessary. ``huggingface_hub`` does the work, so its variables apply (``HF_HOME``, ``HF_TOKEN``,
    ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``), and engines on this machine share its cache.
    Raises: ValueError, it is neither an existing path nor an available model."""
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
        why = "no such folder, and not a model id; give a model's directory or its ORG/NAME"
        raise ValueError(f"{flag}: {why}") from None
    except Exception as error:  # hub errors, timeouts, a full disk
        reason = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
        raise ValueError(
            f"{flag}: no such folder, and Hugging Face returned no model of that name "
            f"({reason[:_REASON_CHARS]}); give a directory with its tokenizer.json, or check "
            "HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE"
        ) from error
