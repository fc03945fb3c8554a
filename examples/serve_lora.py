"""Serve a model with a LoRA adapter, and ask both: python examples/serve_lora.py [MODEL ADAPTER]

It needs pip install -e '.[serve]' and OpenAI's client. Without arguments peft makes an adapter for the small model.
"""

import re
import subprocess
import sys
import tempfile

from openai import OpenAI


def new_adapter(folder: str) -> list[str]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from granite4_neuron.generation import bundled_checkpoint

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(bundled_checkpoint())
    # A new PEFT adapter changes nothing by default. This one has random weights.
    config = LoraConfig(target_modules=["in_proj", "out_proj"], lora_alpha=64, init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(folder)
    return [str(bundled_checkpoint()), folder]


arguments = sys.argv[1:] if len(sys.argv) in (1, 3) else sys.exit(__doc__)
with tempfile.TemporaryDirectory() as folder:
    model, adapter = arguments or new_adapter(folder)
    command = [sys.executable, "-m", "granite4_neuron", "serve", "--model", model, "--adapter", f"mine={adapter}"]
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        url = re.search(r"http\S+", server.stdout.readline())[0]  # Serving ... at http://127.0.0.1:8000/v1
        client = OpenAI(base_url=url, api_key="none")
        for each in client.models.list():
            answer = client.completions.create(model=each.id, prompt="An assignment statement", max_tokens=20)
            print(f"{each.id}: {answer.choices[0].text!r}")
        server.terminate()
