"""lm-evaluation-harness: log-likelihoods and generated texts of prompts as text and as token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from benchmarks.clients.common import FOLDER, MODEL

QUESTIONS = [
    {"question": "An assignment statement evaluates", "choices": [" the expression list", " a number"]},
    {"question": "The import statement", "choices": [" is used", "\n===="]},
]
TASK = """\
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {task}
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: 0
target_delimiter: ""
"""
METRICS = {
    "multiple_choice": "metric_list: [{metric: acc}]\n",
    "generate_until": 'generation_kwargs: {until: ["\\n"], max_gen_toks: 20}\nmetric_list: [{metric: exact_match}]\n',
}


def run(url: str, folder: Path) -> Iterator[str]:
    """Run the client; yield a line for each thing that it did."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    yield f"lm_eval {metadata.version('lm_eval')}"
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    for task, metrics in METRICS.items():
        (folder / f"{task}.yaml").write_text(TASK.format(task=task, file=folder / "questions.jsonl") + metrics)
    answers = []
    for tokenized in (False, True):
        results = lm_eval.simple_evaluate(
            "local-completions",
            model_args=dict(
                model=MODEL, base_url=f"{url}/completions", tokenizer=str(FOLDER), tokenized_requests=tokenized
            ),
            tasks=list(METRICS),
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=0,
        )
        answers.append({task: [each["resps"] for each in results["samples"][task]] for task in METRICS})
    assert answers[0] == answers[1]
    yield f"as texts and as token ids, the same: {json.dumps(answers[0])}"
