"""Many requests with faults at random places. benchmarks/engine/faults.py runs any number of them."""

import pytest

from benchmarks.engine.faults import fuzz


@pytest.mark.parametrize("number", [120, pytest.param(800, marks=pytest.mark.exhaustive)])
def test_a_fault_changes_no_other_text(number):
    report = fuzz(number)
    assert not report.wrong, report.wrong[:3]
    assert report.compared > 0.3 * number and report.failed > 0.15 * number and report.mixed > 0, report
    assert len(report.faults) > 7 and report.faults.total() > 0.3 * number, report.faults


@pytest.mark.slow
def test_a_fault_changes_no_other_text_on_an_asynchronous_device():
    report = fuzz(120, on_device=True)
    assert not report.wrong, report.wrong[:3]
    assert report.compared > 200 and report.ahead > 400 and report.stopped > 5, report
    assert report.drawn > 200 and report.undecided > 40, report


@pytest.mark.slow
def test_a_fault_changes_no_other_text_with_multi_token_prediction():
    report = fuzz(600, mtp=True)
    assert not report.wrong, report.wrong[:3]
    assert report.compared > 200 and report.drafted > 300 and report.accepted > 30, report
    assert sum(count for place, count in report.faults.items() if "MTP" in place) > 2, report.faults
