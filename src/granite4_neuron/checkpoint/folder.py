"""Finds a checkpoint: in a folder, in a GGUF file, in this package, or on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
import socket
import threading
from importlib import resources
from pathlib import Path

from granite4_neuron.checkpoint.gguf.file import is_gguf
from granite4_neuron.config import GraniteMoeHybridConfig
from granite4_neuron.errors import UserError
from granite4_neuron.system.terminal import bars_of_tqdm

CONFIG = "config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
GENERATION_CONFIG = "generation_config.json"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/.*)?")
_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
_SECONDS_TO_CONNECT = 2.0
_OTHER_FORMATS = {
    "pytorch_model*.bin": "weights as pickled by torch (pytorch_model.bin)",
    "consolidated*.pth": "weights as pickled by torch (consolidated.pth)",
}


def bundled_checkpoint() -> Path:
    """Return the small trained checkpoint that comes with the package; its README.md says what it is."""
    return Path(str(resources.files("granite4_neuron") / "data" / "tiny"))


def find(model: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return the folder of a checkpoint: `model` itself, or the local copy of that Hugging Face id, downloaded if
    needed. A GGUF file is returned as it is.

    Args:
        revision: a branch, tag or commit of a Hugging Face id; None for its main branch.

    Raises:
        UserError: there is no such folder, it holds no checkpoint, or the id cannot be downloaded or is not a Granite
            model; or a folder or file has a revision.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise UserError(f"the model is {model!r}; give the folder of a checkpoint, a GGUF file or a Hugging Face id.")
    name = os.fspath(model)
    if os.path.isdir(name):
        if revision is not None:
            raise UserError(f"{name} is a folder; a revision is of a Hugging Face id, so leave it out.")
        return _checked(Path(name))
    if is_gguf(Path(name)):
        if revision is not None:
            raise UserError(f"{name} is a file; a revision is of a Hugging Face id, so leave it out.")
        return Path(name)
    if os.path.exists(name):
        raise UserError(f"{name} is not a folder but a file; give the folder of a checkpoint, or a GGUF file.")
    if not _HUB_ID.fullmatch(name):
        shown = name if name.isprintable() and name else repr(name)
        raise UserError(f"{shown} is not a folder{_suggestion(name)}")
    return _from_hub(name, revision)


def what_else_is_in(folder: Path) -> str:
    """Return a sentence on why `folder` has no weights or no config, if its other files tell; otherwise nothing."""
    if any(folder.glob("snapshots/*/config.json")):
        newest = max(folder.glob("snapshots/*/config.json"), key=lambda file: file.stat().st_mtime)
        return f" It is a folder of the Hugging Face cache; give {newest.parent}."
    if any((folder.parent.parent / "blobs").glob("*.incomplete")):
        return " It is a download that was not completed; give the Hugging Face id again to complete it."
    if file := next(iter(sorted(folder.glob("*.gguf"))), None):
        return f" It holds GGUF files; give one of them: {file}."
    for pattern, what in _OTHER_FORMATS.items():
        if any(folder.glob(pattern)):
            return f" It holds {what}; this package reads safetensors."
    if folder.parent.name == "snapshots":
        return " It is an incomplete copy in the Hugging Face cache; give the Hugging Face id to download the rest."
    return ""


def require_folder(checkpoint: Path) -> Path:
    """Return a checkpoint that is a folder.

    Raises:
        UserError: it is a GGUF file.
    """
    if is_gguf(checkpoint):
        raise UserError(
            f"{checkpoint} is a GGUF file, which compiled graphs of NxD Inference are not made from; granite4-neuron "
            "convert writes a checkpoint folder of it."
        )
    return checkpoint


def _checked(folder: Path) -> Path:
    if not (folder / CONFIG).exists():
        raise UserError(
            f"{folder / CONFIG} does not exist; a checkpoint folder holds a {CONFIG}.{what_else_is_in(folder)}"
        )
    return folder


def _suggestion(name: str) -> str:
    """Return the rest of a sentence that says that `name` is not a folder."""
    if address := _HUB_ADDRESS.fullmatch(name):
        return f"; did you mean {address[1]}?"
    if GraniteMoeHybridConfig.is_family_member(name):
        return f" on this machine; did you mean ibm-granite/granite-4.0-{name.removeprefix('granite-4.0-')}?"
    return "; give the folder of a checkpoint, a GGUF file or a Hugging Face id (owner/name)."


def _from_hub(name: str, revision: str | None) -> Path:
    # Not at the top: a folder needs no hub.
    from huggingface_hub import constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    unreachable = None if constants.HF_HUB_OFFLINE else _why_unreachable(constants.ENDPOINT)
    local = constants.HF_HUB_OFFLINE or unreachable is not None
    where = dict(revision=revision, local_files_only=local)
    try:
        with bars_of_tqdm():
            # The config first: a model that this package does not run is not worth the download of its weights.
            GraniteMoeHybridConfig.from_file(hf_hub_download(name, CONFIG, **where))
            return Path(snapshot_download(name, allow_patterns=_FILES, ignore_patterns=["*/*"], **where))
    except LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} {unreachable or 'fails'}"
        raise UserError(
            f"{name} is not a folder, and cannot be loaded from Hugging Face: {why}, and there is no copy of it in the "
            "cache. On a machine without a network copy the checkpoint's folder there; with HF_HUB_OFFLINE=1 only the "
            "cache is searched."
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(f"{name} is not a folder, and cannot be loaded from Hugging Face ({reason}).") from None


def _why_unreachable(address: str) -> str | None:
    """Return why nothing answers at a web address, or at the proxy on the way there; None if something does.

    huggingface_hub would try for half a minute, and say so after each time.
    """
    # Not at the top: it takes longer to import than everything else that --help needs.
    import urllib.request

    url = urllib.parse.urlsplit(address)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    place = (url.hostname, url.port or (443 if url.scheme == "https" else 80))
    outcome: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection(place, timeout=_SECONDS_TO_CONNECT).close()
            outcome.append(None)
        except OSError as error:
            outcome.append(f"cannot be reached ({error.strerror or error})")

    # In a thread of its own, because looking up a name has no time limit.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_SECONDS_TO_CONNECT)
    return outcome[0] if outcome else f"does not answer within {_SECONDS_TO_CONNECT:.0f} seconds"
