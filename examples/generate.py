"""Continue a prompt token by token, then two prompts as a batch: python examples/generate.py [MODEL]"""

import sys

from granite4_neuron import generate, load, stream_generate

runtime, tokenizer = load(*sys.argv[1:2])  # a folder, a GGUF file or a Hugging Face id; by default the small model

for response in stream_generate(runtime, tokenizer, "An assignment statement", max_tokens=40):
    print(response.text, end="", flush=True)
print()

prompts = ["The import statement", "Lambda expressions (sometimes called lambda forms)"]
texts = generate(runtime, tokenizer, prompts, max_tokens=40, temperature=0.7, top_p=0.9, seed=1)
for prompt, text in zip(prompts, texts, strict=True):
    print(f"\n{prompt}{text} [{text.finish_reason}]")
