#!/usr/bin/env bash
# Builds the sdist and the wheel into dist/, checks both, and runs the wheel in a fresh environment. That one takes its
# dependencies from the environment of the given Python, because to install them would take minutes.
#
#     scripts/build_package.sh [PYTHON]        (default: .venv/bin/python; needs the extra dev)
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath --no-symlinks "${1:-.venv/bin/python}")
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
rm -rf dist
"$python" -m build >"$fresh/log" || { cat "$fresh/log"; exit 1; }
"$python" -m twine check --strict dist/*
"$python" -m venv "$fresh/env"
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
"$python" -c "$packages" >"$("$fresh/env/bin/python" -c "$packages")/dependencies.pth"
"$fresh/env/bin/pip" install -q --no-deps dist/*.whl
cd "$fresh"
env -u PYTHONPATH env/bin/python -c "import granite4_neuron; assert '$fresh' in granite4_neuron.__file__"
env -u PYTHONPATH env/bin/granite4-neuron generate "An assignment statement" --max-tokens 5
