"""The common part of the clients."""

from pathlib import Path

MODEL = "tiny"  # the bundled model, by the name that the server gives it
FOLDER = Path(__file__).parents[2] / "src/granite4_neuron/checkpoint/tiny"
QUESTION = [{"role": "user", "content": "What is the assert statement?"}]
TOO_LONG = [{"role": "user", "content": "long " * 3000}]
CITIES = ("Rome", "Oslo")
