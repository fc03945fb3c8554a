"""From a conversation to a prompt."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from granite4_neuron import chat_template
from granite4_neuron.engine.request import check_text
from granite4_neuron.errors import UserError


def chat_prompt(tokenizer: PreTrainedTokenizerFast, user: str, system: str | None = None) -> list[int]:
    """Tokens of a conversation's beginning, by the tokenizer's chat template, up to where the assistant speaks.

    Raises:
        UserError: the tokenizer has no chat template, the template refuses the messages or fails, or it takes more time
            or memory than a template may.
    """
    for message in (user, system or ""):
        check_text(message, "the message")
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    variables = {
        **tokenizer.special_tokens_map,
        "messages": messages,
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    try:
        text = chat_template.render(_template(tokenizer), variables)
    except chat_template.TemplateFailed as error:
        raise UserError(f"this checkpoint's chat template does not render the conversation ({error}).") from None
    return tokenizer.encode(text, add_special_tokens=False)


def _template(tokenizer: PreTrainedTokenizerFast) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by name
        template = template.get("default")
    if not isinstance(template, str) or not template:
        raise UserError("this checkpoint's tokenizer has no chat template; give the prompt without --chat.")
    return template
