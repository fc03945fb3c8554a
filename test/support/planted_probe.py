"""A probe of a few steps, some of which hang, crash or give wrong numbers: `python -m test.support.planted_probe`."""

import os
import signal
import subprocess
import sys
import time

from benchmarks.probe.command import STEPS, probe
from benchmarks.probe.process import EQUAL, WRONG, Finding, Step


def hangs(place):
    child = subprocess.Popen(["sleep", "1000"])
    yield Finding("child", EQUAL, numbers={"pid": child.pid})
    print("about to hang")
    sys.stdout.flush()
    time.sleep(1000)


def crashes(place):
    yield Finding("before", EQUAL, 1e-9)
    os.kill(os.getpid(), signal.SIGSEGV)


def is_wrong(place):
    yield Finding("sum", WRONG, 0.5, "above 0.1")
    yield Finding("place", EQUAL, message=f"{place.device}, {place.compiler}", numbers=place.options)


def raises(place):
    yield Finding("before", EQUAL)
    raise RuntimeError("the compiler\nhas given up")


def exits(place):
    yield Finding("before", EQUAL)
    os._exit(3)


PLANTED = [
    Step("test.support.planted_probe:hangs", 5),
    *(Step(f"test.support.planted_probe:{name}", 60) for name in ("crashes", "is_wrong", "raises", "exits")),
]
REAL = [step for step in STEPS if step.name in ("device versions", "operators topk_softmax")]

if __name__ == "__main__":
    sys.exit(probe([*PLANTED, *REAL], "test.support.planted_probe"))
