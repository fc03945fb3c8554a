"""Fields that would change the text, and that this server does not support: requests with them are refused by name.

Any other field that is unknown here changes nothing, and is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

# Returns what is wrong with a value; None if it asks for what the server does anyway.
Check = Callable[[Any], str | None]


def accepts(*allowed: Any) -> Check:
    """Return the check of a field that may have these values."""

    def check(value: Any) -> str | None:
        if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed):
            return None
        return f"this server supports only {' or '.join(map(json.dumps, allowed))}."

    return check


def instead(way: str) -> Check:
    """Return the check of a field for which there is another way, or none; an empty value asks for nothing."""
    return lambda value: f"this server does not support it; {way}." if value else None


_LEAVE = "leave it out"
_STRUCTURED = "give structured_outputs"

OF_SAMPLING: Mapping[str, Check] = {
    "use_beam_search": accepts(False),
    "include_stop_str_in_output": accepts(False),
    "skip_special_tokens": accepts(True),
    "return_tokens_as_token_ids": accepts(False),
    "truncation_side": accepts("left"),
    # vLLM's older names.
    "guided_json": instead(_STRUCTURED),
    "guided_regex": instead(_STRUCTURED),
    "guided_choice": instead(_STRUCTURED),
    "guided_grammar": instead(_STRUCTURED),
    # Samplers of llama-server, switched off.
    "top_n_sigma": accepts(-1, 0),
    "dynatemp_range": accepts(0),
    "xtc_probability": accepts(0),
    "dry_multiplier": accepts(0),
    "mirostat": accepts(0),
    "repeat_penalty": accepts(1),
}
OF_COMPLETIONS: Mapping[str, Check] = {**OF_SAMPLING, "suffix": instead(_LEAVE)}
OF_CHATS: Mapping[str, Check] = {
    **OF_SAMPLING,
    "functions": instead("give tools"),
    "function_call": instead("give tool_choice"),
    "modalities": accepts(["text"]),
    "echo": accepts(False),
    "add_special_tokens": accepts(False),
    "chat_template": instead(_LEAVE),
}
OF_CHAT_MESSAGES: Mapping[str, Check] = {
    "function_call": instead("give tool_calls"),
    "prefix": instead("give continue_final_message"),
    "partial": instead("give continue_final_message"),
}
OF_RESPONSES: Mapping[str, Check] = {
    **OF_SAMPLING,
    "background": accepts(False),
    "prompt": instead("give input"),
    "max_tokens": instead("give max_output_tokens"),
    "response_format": instead("give text.format"),
    "n": accepts(1),
}
OF_MESSAGES: Mapping[str, Check] = {
    **OF_SAMPLING,
    "stop": instead("give stop_sequences"),
    "output_format": instead("give output_config.format"),
    "response_format": instead("give output_config.format"),
    "n": accepts(1),
}
