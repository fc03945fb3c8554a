#!/usr/bin/env bash
# Runs the tests of XLA, NxD Inference and nki-library, which other tests leave out. Makes the environment .venv-xla for
# them, and clones the public sources of NxD Inference, NxD and nki-library into it, unless NXDI_SRC, NXD_SRC and
# NKI_LIBRARY_SRC name others. Takes 12 GB of memory and 8 GB of disk. With --slow it runs the slow tests too. The exit
# status is 3 if the sources are missing.
set -euo pipefail
cd "$(dirname "$0")/.."

sources=(
    "NXDI_SRC neuronx-distributed-inference 4bcdc54bf3b6ccdad490e5cd0680a3dc95270b8e"
    "NXD_SRC neuronx-distributed fbac349b61a3adbb123c2983835af692840ff62f"
    "NKI_LIBRARY_SRC nki-library d2ad3a579498d1888aa8740af97fd325dd5f2740"
)
# One process for each group, one after another, takes less memory.
groups=(
    "test/integration/test_model.py"
    "test/integration/test_device_graphs.py test/integration/test_nxdi_device.py"
    "test/integration/test_neuron_slots.py test/integration/test_neuron_fused_speculation.py
        test/integration/test_neuron_commands.py"
    "test/integration/test_dense.py test/integration/test_neuron_example.py test/integration/test_neuron_inference_demo.py
        test/integration/test_neuron_long_context.py test/integration/test_neuron_sharding.py
        test/integration/test_vllm_neuron.py test/unit/devices/neuron/nxdi test/unit/vllm/test_neuron.py"
    "test/integration/test_nki_device.py test/integration/test_nki_library.py test/integration/test_nki_library_ssd.py"
)

default="not slow and not exhaustive"
chosen=$default
if [ "${1:-}" = --slow ]; then chosen="not exhaustive"; fi

clone() { # a repository of AWS at a commit, into a folder
    rm -rf "$3.part"
    git init -q "$3.part" &&
        GIT_TERMINAL_PROMPT=0 git -C "$3.part" fetch -q --depth 1 "https://github.com/aws-neuron/$1" "$2" &&
        git -C "$3.part" checkout -q FETCH_HEAD && mv "$3.part" "$3"
}

[ -d .venv-xla ] || python3 -m venv .venv-xla
.venv-xla/bin/pip install -q -r requirements/nxdi.txt

export PJRT_DEVICE=CPU
results=$(mktemp -d)
trap 'rm -r "$results"' EXIT
status=0
env -u NXDI_SRC -u NXD_SRC -u NKI_LIBRARY_SRC .venv-xla/bin/pytest -q -m "versions and $default" \
    --junitxml="$results/xla.xml" test || status=1

variables=()
for each in "${sources[@]}"; do
    read -r variable name commit <<<"$each"
    folder=${!variable:-.venv-xla/src/$name}
    if [ ! -d "$folder" ] && ! clone "$name" "$commit" "$folder"; then
        echo "SKIPPED: $name cannot be cloned; set $variable to a checkout of its commit $commit." >&2
        [ $status = 0 ] && exit 3
        exit 1
    fi
    variables+=("$variable=$(realpath "$folder")")
done
for number in "${!groups[@]}"; do
    echo "+ ${variables[*]} pytest" ${groups[$number]}
    # shellcheck disable=SC2086 # words of a group are files
    # A thread that waits for another on a busy core would take the time of a third.
    env "${variables[@]}" OMP_NUM_THREADS=1 .venv-xla/bin/pytest -q -rs -n 0 -m "$chosen" \
        --junitxml="$results/$number.xml" ${groups[$number]} || status=1
done
.venv-xla/bin/python - "$results" <<'END' || status=1
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

missing = re.compile("NXDI_SRC|NXD_SRC|NKI_LIBRARY_SRC|torch_xla is not")
unused = 0
for title, files in (("XLA", "xla.xml"), ("NxD Inference and nki-library", "[0-9]*.xml")):
    tests = [test for file in Path(sys.argv[1]).glob(files) for test in ElementTree.parse(file).iter("testcase")]
    skips = [test.find("skipped").get("message") for test in tests if test.find("skipped") is not None]
    failed = sum(test.find("failure") is not None or test.find("error") is not None for test in tests)
    seconds = sum(float(test.get("time")) for test in tests)
    print(f"{title}: {len(tests) - len(skips) - failed} passed, {len(skips)} skipped, {failed} failed in {seconds:.0f}s")
    if title != "XLA":
        unused = sum(bool(missing.search(reason)) for reason in skips)
if unused:
    sys.exit(f"{unused} tests were skipped although they have what they need.")
END
exit $status
