"""A real nginx, with the settings that it has by default."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from test.support.waiting import until

_SETTINGS = """\
daemon off;
pid {folder}/pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    gzip on;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{configuration}
}}
"""


@contextmanager
def nginx(folder: Path, configuration: str) -> Iterator[str]:
    """Run it with what this has for `http`; yield its address, where "PORT" stands in the configuration."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = folder / "nginx.conf"
    configuration = configuration.replace("PORT", f"127.0.0.1:{port}")
    settings.write_text(_SETTINGS.format(folder=folder, configuration=configuration))
    process = subprocess.Popen([program, "-p", str(folder), "-c", str(settings)])
    try:
        until(lambda: process.poll() is not None or _answers(port))
        assert process.poll() is None
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0
