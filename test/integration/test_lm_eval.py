"""lm-evaluation-harness asks the server and gets transformers' log-likelihoods."""
# ruff: noqa: E402 (importorskip comes first)

import json

import pytest
import torch
import transformers

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed; it is large: pip install 'lm-eval[api]'")
pytest.importorskip("starlette", reason="granite4-neuron[serve] is not installed")

from lm_eval.tasks import TaskManager

from granite4_neuron import load
from granite4_neuron.generation import bundled_checkpoint
from test.support.serving import MODEL, serving

QUESTIONS = [
    {"question": "An assignment statement evaluates", "choices": [" the expression list", " a number", " nothing"]},
    {"question": "The import statement is", "choices": [" used", " a big language of its own", "\n===="]},
    {"question": "é \N{SNOWMAN}", "choices": [" x", "\N{SNOWMAN}\N{SNOWMAN}"]},
]
TASK = """\
task: statements
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def test_log_likelihoods_are_transformers(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "statements.yaml").write_text(TASK.format(file=data))
    folder = str(bundled_checkpoint())
    with serving(*load(dtype=torch.float32)) as server:
        arguments = dict(model=MODEL, base_url=f"{server.address}/v1/completions", tokenizer=folder, batch_size=2)
        results = lm_eval.simple_evaluate(
            "local-completions",
            model_args=dict(tokenizer_backend="huggingface", num_concurrent=2, **arguments),
            tasks=["statements"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            bootstrap_iters=0,
        )
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    model = transformers.GraniteMoeHybridForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = {sample["doc_id"]: sample["filtered_resps"] for sample in results["samples"]["statements"]}
    assert len(found) == len(QUESTIONS)
    for number, question in enumerate(QUESTIONS):
        context = tokenizer.encode(question["question"])
        for (log_likelihood, is_greedy), choice in zip(found[number], question["choices"], strict=True):
            tokens = tokenizer.encode(question["question"] + choice)
            with torch.inference_mode():
                logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            places = range(len(context) - 1, len(tokens) - 1)
            expected = sum(float(logprobs[place, tokens[place + 1]]) for place in places)
            assert float(log_likelihood) == pytest.approx(expected, abs=1e-4)
            chosen = [int(logprobs[place].argmax()) for place in places]
            assert (str(is_greedy) == "True") == (chosen == tokens[len(context) :])
