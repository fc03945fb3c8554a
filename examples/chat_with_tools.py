"""A chat in which the model calls a Python function: python examples/chat_with_tools.py [MODEL]

A grammar makes the first answer a call, so that the small model, which was not trained on tools, makes one too. Without
the constraint Granite 4 decides by itself.
"""

import json
import sys

from granite4_neuron import chat, load
from granite4_neuron.generation.structured_outputs import Grammars
from granite4_neuron.generation.tool_calls import Tool, calls_grammar, parse_tool_calls


def length_of(word: str) -> int:
    return len(word)


PARAMETERS = {"type": "object", "properties": {"word": {"enum": ["assert", "import"]}}, "required": ["word"]}
TOOLS = [{"type": "function", "function": {"name": "length_of", "parameters": PARAMETERS}}]

runtime, tokenizer = load(*sys.argv[1:2])
grammar = calls_grammar([Tool("length_of", PARAMETERS)], required=True, several=False)
constraint = Grammars(tokenizer, runtime.config.vocab_size).constraint("lark", grammar)

messages = [{"role": "user", "content": "How long is the name of the assert statement?"}]
answer = chat(runtime, tokenizer, messages, tools=TOOLS, constraint=constraint, max_tokens=100)
text, (call,) = parse_tool_calls(answer)
arguments = json.loads(call.arguments)
result = length_of(**arguments)
print(f"{call.name}({call.arguments}) = {result}")

function = {"name": call.name, "arguments": arguments}
messages.append({"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": function}]})
messages.append({"role": "tool", "content": json.dumps(result)})
print(chat(runtime, tokenizer, messages, tools=TOOLS, max_tokens=30))
