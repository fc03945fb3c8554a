"""Answer a file of prompts on a Ray cluster: python examples/batch_over_ray.py [MODEL]

It needs pip install -e '.[ray]'. --ray local starts a cluster on this machine and ends it. An address, or auto, names a
cluster that runs.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPTS = ["An assignment statement", "The import statement", "Lambda expressions", "The assert statement"]

with tempfile.TemporaryDirectory() as folder:
    given, results = Path(folder, "prompts.jsonl"), Path(folder, "results.jsonl")
    given.write_text("".join(json.dumps({"prompt": prompt, "number": i}) + "\n" for i, prompt in enumerate(PROMPTS)))
    command = [sys.executable, "-m", "granite4_neuron", "batch", given, results, "--ray", "local", "--workers", "1"]
    command += ["--max-tokens", "20", *(f"--model={model}" for model in sys.argv[1:2])]
    subprocess.run(command, check=True)
    for line in results.read_text().splitlines():
        result = json.loads(line)
        print(result["number"], result["prompt"] + result["generated_text"])
