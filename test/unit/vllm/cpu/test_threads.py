"""The kernels' threads run in the right places where OpenMP's threads are bound."""

import os
import subprocess
import sys

import pytest

from granite4_neuron.devices.cpu import operators as cpu
from granite4_neuron.vllm.cpu.threads import bound_processors

pytestmark = pytest.mark.versions

# Prints the processors on which the main thread may run, and those of each new thread.
SCRIPT = """
import os, torch
from granite4_neuron.devices.cpu.build import load_kernels
from granite4_neuron.vllm.cpu.threads import spread_threads

load_kernels()
torch.ones(10**6).sum()
before = set(os.listdir("/proc/self/task"))
spread_threads()
print(sorted(os.sched_getaffinity(0)))
for thread in set(os.listdir("/proc/self/task")) - before:
    print(sorted(os.sched_getaffinity(int(thread))))
"""


@pytest.mark.parametrize(
    ("environment", "processors"),
    [
        ({}, set()),
        ({"GOMP_CPU_AFFINITY": "0 1 12"}, {0, 1, 12}),
        ({"KMP_AFFINITY": "granularity=fine,explicit,proclist=[2,3]"}, {2, 3}),
        ({"OMP_PLACES": "{4,5}", "OMP_PROC_BIND": "true"}, {4, 5}),
    ],
)
def test_bound_processors(environment, processors):
    assert bound_processors(environment) == processors


@pytest.mark.slow
@pytest.mark.skipif(not cpu.has_fused_kernels(), reason="the fused kernels need a C++ compiler")
@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="there are no two processors"
)
def test_a_thread_beside_the_main_one():
    first, second = sorted(os.sched_getaffinity(0))[:2]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "GOMP_CPU_AFFINITY": f"{first} {second}"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"[{first}]", f"[{second}]"]
