"""A checkpoint's defaults for sampling and stopping, from its generation_config.json or from a GGUF file."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig

from granite4_neuron.checkpoint.checkpoint import Checkpoint
from granite4_neuron.checkpoint.folder_contents import GENERATION_CONFIG
from granite4_neuron.engine import Request
from granite4_neuron.engine.sampling_params import SAMPLING_OPTIONS, Option, are_whole, is_list, is_whole
from granite4_neuron.errors import UserError, listed

_NAMES = {"min_new_tokens": "min_tokens"}  # of options here, where they differ
_USED = {
    "do_sample": Option(lambda value: isinstance(value, bool), "true or false"),
    "eos_token_id": Option(
        lambda value: is_whole(value) or (is_list(value) and are_whole(value)), "a token id or a list of them"
    ),
    **{name: rule for name, rule in SAMPLING_OPTIONS.items() if rule.from_checkpoint and name != "min_tokens"},
    "min_new_tokens": SAMPLING_OPTIONS["min_tokens"],
}
# Fields of transformers' GenerationConfig that change no text here: about its speed, its results' form, and the search
# with beams, whose number is not among them.
_WITHOUT_EFFECT = {
    *("_from_model_config", "transformers_version", "bos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache", "low_memory"),
    *("prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_early_exit", "assistant_lookbehind", "assistant_ensemble_weight", "target_lookbehind", "use_mtp"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type"),
    *("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty"),
    *("remove_invalid_values", "renormalize_logits"),
}
# Values with which other fields have no effect; null never has one.
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1,
    "penalty_alpha": 0,
    "token_healing": False,
}


def generation_config(checkpoint: Checkpoint, remark: Callable[[str], None]) -> GenerationConfig:
    """Return a checkpoint's defaults, under the names of `SamplingParams`.

    Args:
        remark: called with a sentence that names the settings that could change texts and are not used.

    Raises:
        UserError: a setting is outside its range.
    """
    stored = checkpoint.generation_config()
    source = str(checkpoint.path if checkpoint.folder is None else checkpoint.folder / GENERATION_CONFIG)
    values = {_NAMES.get(name, name): stored.get(name) for name in _USED}
    for name, rule in _USED.items():
        if stored.get(name) is not None:
            rule.check(f"{source}: {name}", stored[name])
    if values["eos_token_id"] is None:
        values["eos_token_id"] = checkpoint.config.eos_token_id
    if values["bad_words_ids"]:
        values["bad_words_ids"] = _without_ends(values["bad_words_ids"], values["eos_token_id"])
    options: dict[str, Any] = {name: value for name, value in values.items() if name in SAMPLING_OPTIONS}
    try:
        Request([0], max_tokens=max(1, values["min_tokens"] or 0), **options).check(checkpoint.config.vocab_size)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    if not_used := _not_used(stored):
        remark(f"{source} has settings that are not used here: {not_used}.")
    result = GenerationConfig()
    for name, value in values.items():
        # Also where it is None: transformers 4.57 would sample among 50 tokens by default.
        setattr(result, name, value)
    return result


def _without_ends(phrases: list[list[int]], eos_token_id: Any) -> list[list[int]]:
    """Return phrases without those that are a token that ends a text, which transformers allows."""
    ends = eos_token_id if is_list(eos_token_id) else [eos_token_id]
    return [phrase for phrase in phrases if len(phrase) > 1 or phrase[0] not in ends]


def _not_used(stored: dict[str, Any]) -> str:
    others = [
        f"{name} {reprlib.repr(value)}"
        for name, value in stored.items()
        if name not in _USED and name not in _WITHOUT_EFFECT and value is not None and value != _NEUTRAL.get(name)
    ]
    return listed(others, 12)
