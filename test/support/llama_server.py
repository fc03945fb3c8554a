"""A stand-in for llama-server, without a model."""

import shlex
import sys
import textwrap

# Its log-probabilities depend only on its options: slots, batch, cache and drafts.
_PROGRAM = """
    import json, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer

    given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    slots = int(given.get("-np", 1))
    if slots == 2:
        sys.exit("error: no two slots")
    drafts = 3 * ("--spec-type" in given)
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer("{}")

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if asked.get("stream"):
                answer = self.complete(asked["prompt"], asked)
                timings = answer["timings"]
                events = [dict(tokens=[7]) for _ in range(asked["n_predict"])] + [dict(tokens=[], timings=timings)]
                self.answer("".join("data: " + json.dumps(event) + "\\n\\n" for event in events))
                return
            answers = [self.complete(prompt, asked) for prompt in asked["prompt"]]
            self.answer(json.dumps(answers if len(answers) > 1 else answers[0]))

        def complete(self, prompt, asked):
            is_known = asked.get("cache_prompt", True)
            hit = max([len(one) for one in seen if is_known and one == prompt[: len(one)]], default=0)
            seen.append(prompt)
            logprob = -slots - 0.25 * ("-ub" in given) - 0.5 * (hit > 0)
            token = dict(id=7, logprob=logprob)
            rows = [dict(token, top_logprobs=[token]) for _ in range(asked["n_predict"])]
            rows[1:4] = [dict(row, top_logprobs=[]) if drafts else row for row in rows[1:4]]
            return dict(completion_probabilities=rows, timings=dict(cache_n=hit, draft_n=drafts))

        def answer(self, text):
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    HTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
"""


def write_llama_server(folder):
    """Write the program to a folder."""
    program = folder / "llama-server"
    module = folder / "llama_server.py"
    module.write_text(textwrap.dedent(_PROGRAM))
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(module)])} "$@"\n')
    program.chmod(0o700)
