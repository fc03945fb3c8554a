"""Random adapters, written by PEFT itself around transformers' model."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

from granite4_neuron.evaluation.reference import load_reference

TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj"),
    *("shared_mlp.input_linear", "shared_mlp.output_linear"),
)
# Routed experts as PEFT names them in transformers 5.x: of Granite, and of Nemotron.
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
NEMOTRON_EXPERTS = ("experts.up_proj", "experts.down_proj")


def reference(folder: Path) -> transformers.PreTrainedModel:
    """Return transformers' model of a checkpoint, in float32."""
    return load_reference(folder, torch.float32)


def save_adapter(checkpoint: Path, folder: Path, seed: int = 0, **changes) -> Path:
    """Let PEFT write an adapter of a checkpoint with random numbers throughout; return the folder."""
    options = dict(r=4, lora_alpha=8, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    model = get_peft_model(reference(checkpoint), LoraConfig(**{**options, **changes}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.5 * parameter.shape[1] ** -0.5, generator=generator)
    model.save_pretrained(folder)
    return folder


@torch.inference_mode()
def peft_logits(checkpoint: Path, adapter: Path, tokens: list[int], *others: Path) -> torch.Tensor:
    """Return PEFT's logits after every token, [tokens, vocab_size], with this adapter and `others` active together."""
    model = PeftModel.from_pretrained(reference(checkpoint), adapter, adapter_name="0").eval()
    for number, other in enumerate(others, start=1):
        model.load_adapter(other, str(number))
    model.base_model.set_adapter([str(number) for number in range(1 + len(others))])
    return model(torch.tensor([tokens]), use_cache=False).logits[0]


@torch.inference_mode()
def peft_text(checkpoint: Path, adapter: Path, tokens: list[int], count: int) -> list[int]:
    """Return the tokens that PEFT generates greedily after a prompt."""
    model = PeftModel.from_pretrained(reference(checkpoint), adapter).eval()
    text = model.generate(torch.tensor([tokens]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return text[0, len(tokens) :].tolist()
