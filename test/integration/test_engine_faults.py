"""Many requests with faults at random places. benchmarks/engine/faults.py runs any number of them."""

from benchmarks.engine.faults import fuzz


def test_a_fault_changes_no_other_text():
    report = fuzz(2000)
    assert not report.wrong, report.wrong[:3]
    assert report.compared > 600 and report.failed > 300 and report.mixed > 30, report
    assert len(report.faults) > 15 and report.faults.total() > 600, report.faults


def test_a_fault_changes_no_other_text_on_an_asynchronous_device():
    report = fuzz(250, on_device=True)
    assert not report.wrong, report.wrong[:3]
    assert report.compared > 100 and report.ahead > 800 and report.stopped > 5, report
    assert report.drawn > 300 and report.undecided > 50, report


def test_a_fault_changes_no_other_text_with_multi_token_prediction():
    report = fuzz(600, mtp=True)
    assert not report.wrong, report.wrong[:3]
    assert report.compared > 200 and report.drafted > 1000 and report.accepted > 100, report
    assert sum(count for place, count in report.faults.items() if "MTP" in place) > 5, report.faults
