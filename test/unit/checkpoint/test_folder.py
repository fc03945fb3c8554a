"""A checkpoint of the Hugging Face Hub is downloaded, or found in huggingface_hub's own cache."""

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.checkpoint.loading import load_model
from granite4_neuron.checkpoint.opening import open_checkpoint

pytestmark = pytest.mark.versions

NAME, REVISION = "somebody/some-model", "0123456789abcdef0123456789abcdef01234567"
TEMPLATE = "{{ tools | tojson }}"
PROGRAM = f"""
import sys
from granite4_neuron.checkpoint.opening import open_checkpoint
print(open_checkpoint({NAME!r}, *sys.argv[1:]).path)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the Hub that a download needs: one repository, its files' sizes and hashes, and the files."""

    asked: list

    def __init__(self, folder, asked, *arguments):
        self.folder, self.asked = folder, asked
        super().__init__(*arguments)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append(path)
        if path.startswith(f"/api/models/{NAME}/tree/"):
            entries = [
                {"type": "file", "path": name, "size": (self.folder / name).stat().st_size, "oid": "0" * 40}
                for name in self.names()
            ]
            return self.answer(json.dumps(entries).encode(), {})
        if path.startswith(f"/api/models/{NAME}"):
            files = [{"rfilename": name} for name in self.names()]
            return self.answer(json.dumps({"id": NAME, "sha": REVISION, "siblings": files}).encode(), {})
        file = self.folder / path.removeprefix(f"/{NAME}/resolve/").partition("/")[2]
        if not path.startswith(f"/{NAME}/resolve/") or not file.is_file():
            self.send_error(404)
            return None
        data = file.read_bytes()
        tag = hashlib.sha256(data).hexdigest()
        return self.answer(data, {"ETag": f'"{tag}"', "X-Repo-Commit": REVISION})

    def names(self):
        return sorted(str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file())

    def answer(self, data, headers):
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(texting_folder, tmp_path):
    """Yield (the environment for a process that asks the hub, the requests that it received)."""
    asked = []
    folder = shutil.copytree(texting_folder, tmp_path / "repository")
    for name in ("additional_chat_templates/tool_use.jinja", "original/other.jinja"):
        (folder / name).parent.mkdir()
        (folder / name).write_text(TEMPLATE)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder, asked))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    address = f"http://127.0.0.1:{server.server_port}"
    yield {**environment, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}, asked
    server.shutdown()
    server.server_close()


def find(environment, *revision):
    command = [sys.executable, "-c", PROGRAM, *revision]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def test_a_download(hub, texting_folder):
    environment, asked = hub
    folder = find(environment)
    assert folder.parent.name == "snapshots" and folder.name == REVISION
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (folder / name).read_bytes() == (texting_folder / name).read_bytes()
    load_model(folder)
    assert open_checkpoint(folder).load_tokenizer().chat_template["tool_use"] == TEMPLATE
    assert not (folder / "original").exists()
    files = [path.rpartition("/")[2] for path in asked if "/resolve/" in path]
    assert files.index("config.json") < files.index("model.safetensors"), "the config tells whether the rest is wanted"


def test_the_cache_is_used_without_the_hub(hub):
    environment, asked = hub
    folder = find(environment)
    asked.clear()
    assert find({**environment, "HF_HUB_OFFLINE": "1"}) == folder and not asked
    assert find({**environment, "HF_ENDPOINT": "http://127.0.0.1:9"}) == folder and not asked


def test_a_revision(hub):
    environment, asked = hub
    assert find(environment, "v1.1").name == REVISION
    assert any(path == f"/{NAME}/resolve/v1.1/config.json" for path in asked)
    assert not any("/main" in path for path in asked)


def test_an_unsupported_model_is_not_downloaded(hub, tmp_path):
    environment, asked = hub
    config = tmp_path / "repository" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "llama"}))
    command = [sys.executable, "-m", "granite4_neuron", "generate", "--model", NAME, "x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "model_type is 'llama'" in done.stderr
    assert not any(path.endswith("safetensors") for path in asked)


def test_the_bundled_checkpoint_is_opened_in_place():
    assert open_checkpoint(bundled_checkpoint()).path == bundled_checkpoint()
