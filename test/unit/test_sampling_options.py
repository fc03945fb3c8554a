"""Every place that takes or documents sampling options has all of those that belong there."""

import argparse
import re
from pathlib import Path

import pytest

from granite4_neuron.commands import cli
from granite4_neuron.engine.sampling_params import SAMPLING_OPTIONS
from granite4_neuron.generation import defaults
from granite4_neuron.serving.apis import unsupported
from granite4_neuron.serving.apis.chat.protocol import GenerationBody

DOCS = Path(__file__).parents[2] / "docs"
SETTINGS = {name for name, rule in SAMPLING_OPTIONS.items() if rule.is_setting}
# Their values are not single numbers, or they are about reports and ends of texts.
OTHERS = {"logit_bias", "stop", "stop_token_ids", "min_tokens", "logits_processors", "constraint"}
OTHERS |= {"allowed_token_ids", "bad_words_ids", "logprobs", "prompt_logprobs"}
OTHERS |= {"suppress_tokens", "begin_suppress_tokens", "no_repeat_ngram_size"}
# The penalties of OpenAI's API are options of `/set` in a chat, but of no command.
NOT_OF_COMMANDS = {"frequency_penalty", "presence_penalty"}


def named_in(page):
    return set(re.findall(r"`(\w+)`", (DOCS / page).read_text(encoding="utf-8")))


def test_every_option_is_a_setting_or_a_known_exception():
    assert SAMPLING_OPTIONS.keys() == SETTINGS | OTHERS and not SETTINGS & OTHERS


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_commands_have_the_settings(command):
    (commands,) = (each for each in cli.parser()._actions if isinstance(each, argparse._SubParsersAction))
    options = {action.dest for action in commands.choices[command]._actions}
    assert SETTINGS - options == NOT_OF_COMMANDS


def test_bodies_of_requests_have_the_settings():
    assert GenerationBody.model_fields.keys() >= SETTINGS


def test_no_option_counts_as_one_that_is_not_supported():
    assert not SAMPLING_OPTIONS.keys() & (defaults._NEUTRAL.keys() | defaults._WITHOUT_EFFECT)
    assert not GenerationBody.model_fields.keys() & unsupported.OF_SAMPLING.keys()


def test_the_page_of_the_api_names_each_field():
    assert GenerationBody.model_fields.keys() - {"model"} <= named_in("http-api.md")


def test_the_page_of_the_engine_names_the_options_that_turn_sampling_on():
    assert {name for name, rule in SAMPLING_OPTIONS.items() if rule.turns_on_sampling} <= named_in("engine.md")
