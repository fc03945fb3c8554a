"""benchmarks/planning/server.py against a server of ours."""

import pytest

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from benchmarks.planning import server as planned_server


@pytest.mark.exhaustive
def test_predicted_beside_served(capsys):
    assert planned_server.main(["--num-requests", "2", "--max-num-seqs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for kind in ("predicted", "server", "ratio"):
        assert sum(kind in line for line in lines) == 3
