"""Arguments of calls, which a model or a client has written."""

import json
import math
import sys

import pytest

from granite4_neuron.generation.tool_calls import parse_tool_calls
from granite4_neuron.serving.apis.tools import arguments_of

MOST = sys.float_info.max


@pytest.mark.parametrize(
    "text, expected",
    [
        ('{"x": 1e999, "y": [-1e999, 1.5]}', {"x": MOST, "y": [-MOST, 1.5]}),
        (f'{{"x": {"9" * 5000}, "y": -{"9" * 400}, "z": {2**64}}}', {"x": MOST, "y": -MOST, "z": 2**64}),
        (r'{"x": "\ud800", "y": 1}', {"x": "\ud800", "y": 1}),
        ('{"x": [1e999, "cut', {"x": [MOST]}),
        ('{"x": [NaN, "NaN"]}', {"x": [None, "NaN"]}),
        ('{"x": Infinity}', {"x": None}),
        ('{"x": "a\nb"}', {"x": "a\nb"}),
        ("[1]", {}),
        ("", {}),
        ('{"x": ' + "[" * 100_000, {}),
        ({"x": {"y": -math.inf}}, {"x": {"y": -MOST}}),
        ({"x": math.nan}, {"x": None}),
    ],
    ids=lambda each: repr(each)[:30],
)
def test_arguments_are_strict_json(text, expected):
    assert arguments_of(text) == expected
    json.dumps(arguments_of(text), allow_nan=False)


def test_a_call_in_another_order_is_strict_json_too():
    _, [call] = parse_tool_calls('<tool_call>{"arguments": {"x": 1e999}, "name": "f"}</tool_call>')
    assert json.loads(call.arguments, parse_constant=pytest.fail) == {"x": MOST}
