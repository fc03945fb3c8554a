"""A smaller run of benchmarks/serving/soak.py, which sends 500 requests by default."""

import pytest

pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from benchmarks.serving import hostile_clients
from benchmarks.serving.soak import Load, soak


@pytest.mark.slow
def test_all_texts_are_right_and_nothing_is_left(monkeypatch):
    monkeypatch.setattr(hostile_clients, "LONGEST_STALL", 1)
    report = soak(Load(num_requests=120, num_clients=16, num_hostile=2))
    assert not report.mismatches
    assert report.compared_texts > 80 and report.disconnected > 5 and report.malformed > 0
    assert set(report.statuses) <= {200, 400, 404}
    assert not any(outcome.endswith("lost") for outcome in report.hostile), report.hostile
    assert not report.log
    assert report.after.is_like(report.before), (report.before, report.after)
    assert report.is_good
