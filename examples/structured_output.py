"""Texts that follow a JSON schema or a regular expression: python examples/structured_output.py [MODEL]"""

import json
import sys

from granite4_neuron import generate, load
from granite4_neuron.generation.structured_outputs import Grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "keyword": {"enum": ["assert", "import", "lambda"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 99},
        "is_expression": {"type": "boolean"},
    },
    "required": ["keyword", "lines", "is_expression"],
}

runtime, tokenizer = load(*sys.argv[1:2])
grammars = Grammars(tokenizer, runtime.config.vocab_size)  # reads the vocabulary once, for any number of constraints

constraint = grammars.constraint("json", SCHEMA)
text = generate(runtime, tokenizer, "Lambda expressions as JSON: ", constraint=constraint, max_tokens=100)
print(json.loads(text))

constraint = grammars.constraint("regex", r"3\.[0-9]{1,2}")
print(generate(runtime, tokenizer, "New in version ", constraint=constraint, max_tokens=10))
