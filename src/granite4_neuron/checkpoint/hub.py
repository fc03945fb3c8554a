"""Downloads checkpoints from the Hugging Face Hub, or finds them in huggingface_hub's cache."""

from __future__ import annotations

import socket
import threading
from functools import partial
from pathlib import Path

from granite4_neuron.checkpoint.folder_contents import CONFIG, NAMED_TEMPLATES
from granite4_neuron.config import config_from_file
from granite4_neuron.errors import UserError
from granite4_neuron.system.terminal import bars_of_tqdm

_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
_SECONDS_TO_CONNECT = 2.0


def download(name: str, revision: str | None) -> Path:
    """Return the local copy of a Hugging Face id; download missing files.

    Args:
        revision: a branch, tag or commit; None for the main branch.

    Raises:
        UserError: it cannot be downloaded, or is not a Granite model.
    """
    # Not at the top: a folder needs no hub.
    from huggingface_hub import constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    unreachable = None if constants.HF_HUB_OFFLINE else _why_unreachable(constants.ENDPOINT)
    local = constants.HF_HUB_OFFLINE or unreachable is not None
    try:
        with bars_of_tqdm():
            # The config first, to avoid downloading the weights of a model that this package does not run.
            config_from_file(hf_hub_download(name, CONFIG, revision=revision, local_files_only=local))
            find = partial(snapshot_download, name, revision=revision, local_files_only=local)
            # In patterns of the hub * also stands for folders.
            find(allow_patterns=[NAMED_TEMPLATES])
            return Path(find(allow_patterns=_FILES, ignore_patterns=["*/*"]))
    except LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} {unreachable or 'fails'}"
        raise UserError(
            f"{name} is not a folder, and cannot be loaded from Hugging Face: {why}, and there is no copy of it in the "
            "cache. On a machine without a network copy the checkpoint's folder there; with HF_HUB_OFFLINE=1 only the "
            "cache is searched."
        ) from None
    # Its bases have the errors of the library that huggingface_hub sends requests with, such as of a cut connection.
    except (*HfHubHTTPError.__bases__, HFValidationError, OSError) as error:  # type: ignore[misc]
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(f"{name} is not a folder, and cannot be loaded from Hugging Face ({reason}).") from None


def _why_unreachable(address: str) -> str | None:
    """Return why a web address, or the proxy on the way there, does not answer; None if it does.

    huggingface_hub would try for half a minute, with a message after each attempt.
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

    # In a separate thread, because looking up a name has no time limit.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_SECONDS_TO_CONNECT)
    return outcome[0] if outcome else f"does not answer within {_SECONDS_TO_CONNECT:.0f} seconds"
