"""Opens a checkpoint folder, a GGUF file or a model of the Hugging Face Hub. Importing this module does not import
torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from granite4_neuron.checkpoint.checkpoint import Checkpoint
from granite4_neuron.checkpoint.folder import FolderCheckpoint
from granite4_neuron.checkpoint.gguf.checkpoint import GGUFCheckpoint
from granite4_neuron.checkpoint.gguf.file import is_gguf
from granite4_neuron.checkpoint.hub import download
from granite4_neuron.config.published import hub_id, published_name
from granite4_neuron.errors import UserError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/.*)?")


def open_checkpoint(
    model: str | os.PathLike[str] | Checkpoint,
    revision: str | None = None,
    before_download: Callable[[], None] = lambda: None,
) -> Checkpoint:
    """Open a checkpoint.

    Args:
        model: a checkpoint folder, a GGUF file, or a Hugging Face id, which is downloaded if there is no copy of it on
            this machine. An open checkpoint is returned as it is.
        revision: a branch, tag or commit of a Hugging Face id; None for its main branch.
        before_download: called before an id is looked up; raises UserError for a reason not to.

    Raises:
        UserError: there is no such folder, it holds no checkpoint, or the id cannot be downloaded or is not a Granite
            model; or a folder or file has a revision.
    """
    if isinstance(model, Checkpoint):
        return model
    if not isinstance(model, (str, os.PathLike)):
        raise UserError(f"the model is {model!r}; give the folder of a checkpoint, a GGUF file or a Hugging Face id.")
    name = os.fspath(model)
    if os.path.isdir(name):
        if revision is not None:
            raise UserError(f"{name} is a folder; only a Hugging Face id has a revision; leave it out.")
        return FolderCheckpoint(Path(name))
    if is_gguf(Path(name)):
        if revision is not None:
            raise UserError(f"{name} is a file; only a Hugging Face id has a revision; leave it out.")
        return GGUFCheckpoint(Path(name))
    if os.path.exists(name):
        raise UserError(f"{name} is not a folder but a file; give the folder of a checkpoint, or a GGUF file.")
    if not _HUB_ID.fullmatch(name):
        shown = name if name.isprintable() and name else repr(name)
        raise UserError(f"{shown} is not a folder{_suggestion(name)}")
    before_download()
    return FolderCheckpoint(download(name, revision))


def _suggestion(name: str) -> str:
    """Return the rest of a sentence that says that `name` is not a folder."""
    if address := _HUB_ADDRESS.fullmatch(name):
        return f"; did you mean {address[1]}?"
    if whole_name := published_name(name):
        return f" on this machine; did you mean {hub_id(whole_name)}?"
    return "; give the folder of a checkpoint, a GGUF file or a Hugging Face id (owner/name)."
