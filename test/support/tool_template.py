"""Chat templates that show tools and calls as Granite 4's and Nemotron 3's do, for the byte tokenizer; and calls."""

from granite4_neuron.generation.tool_calls import CLOSE, OPEN, CallMarks

TOOL_TEMPLATE = """\
{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}{% endif %}
{%- if tools %}
    {%- set ns.system = ns.system + 'You may call these tools:\\n<tools>' %}
    {%- for tool in tools %}{% set ns.system = ns.system + '\\n' + (tool | tojson) %}{% endfor %}
    {%- set ns.system = ns.system + '\\n</tools>' %}
{%- endif %}
{%- if documents %}
    {%- set ns.system = ns.system + '<documents>' %}
    {%- for document in documents %}{% set ns.system = ns.system + '\\n' + (document | tojson) %}{% endfor %}
    {%- set ns.system = ns.system + '\\n</documents>' %}
{%- endif %}
{%- if mood is defined %}{% set ns.system = ns.system + ' Be ' + mood %}{% endif %}
{%- if ns.system %}{{- '<|system|>' + ns.system + '<|end|>' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|assistant|>' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|user|>' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|end|>' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}"""


def spelled(name: str, arguments: str) -> str:
    """Return a call with arguments in JSON, as models write it."""
    return f'{OPEN}\n{{"name": "{name}", "arguments": {arguments}}}\n{CLOSE}'


# As dense Granite 4.2 models have it: calls and thoughts as Nemotron's, each on lines of their own, in ChatML.
GRANITE_THINKING_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>\\nCall one as <tool_call>\\n<function=name>\\n</function>\\n</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>\\n' + (value | string) + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '\\n</think>\\n' }}{% endif %}
{%- endif %}"""

NEMOTRON_TEMPLATE = """\
{%- for tool in tools or [] %}{{- '<|system|>' + tool.function.name + '<|end|>' }}{% endfor %}
{%- for message in messages %}
    {{- '<|' + (message.role if message.role != 'tool' else 'user') + '|>' }}
    {%- if message.role == 'assistant' %}
        {{- '<think>' + (message.reasoning_content or '') + '</think>' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|><think>' + ('\\n' if enable_thinking is not defined or enable_thinking else '</think>') }}
{%- endif %}"""


# Granite 3's and Nemotron Nano v2's: a list of calls. The first does not know the calls of messages.
GRANITE_3_TEMPLATE = """\
{#- Not with <tool_call>, "arguments": or </tool_call>. #}
{%- if tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>Call with <|tool_call|>: ' + (tools | tojson) + '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|><|assistant|>' }}{% endif %}"""


def _granite_3_with_thoughts(how: str) -> str:
    """Return Granite 3's template with thoughts, which the model begins itself."""
    return f"{{%- if thinking %}}{{{{- '<|system|>{how}<|end|>' }}}}{{% endif %}}\n{GRANITE_3_TEMPLATE}"


GRANITE_3_2_TEMPLATE = _granite_3_with_thoughts('"Here is my thought process:" and "Here is my response:"')
GRANITE_3_3_TEMPLATE = _granite_3_with_thoughts("<think></think> and <response></response>")

NEMOTRON_NANO_2_TEMPLATE = """\
{%- if tools %}{{- 'Tools: ' + (tools | tojson) + '<|end|>' }}{% endif %}
{%- for message in messages %}
    {{- '<|' + (message.role if message.role != 'tool' else 'user') + '|>' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- ('<TOOLCALL>[' if loop.first else ', ') + '{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + ('}]</TOOLCALL>' if loop.last else '}') }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\\n' }}{% endif %}"""


def listed(marks: CallMarks, *calls: tuple[str, str]) -> str:
    """Return calls with arguments in JSON, as models write them in a list."""
    written = ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    return f"{marks.open}[{written}]{marks.close}"


def with_parameters(name: str, **parameters: str) -> str:
    """Return a call as Nemotron models write it."""
    lines = [f"<parameter={each}>\n{value}\n</parameter>\n" for each, value in parameters.items()]
    return f"{OPEN}\n<function={name}>\n{''.join(lines)}</function>\n{CLOSE}"
