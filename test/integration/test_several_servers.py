"""Two servers behind nginx, with the configuration of docs/several-machines.md."""

import re
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from granite4_neuron import load
from test.support.nginx import nginx
from test.support.serving import MODEL, serving

PAGE = Path(__file__).parents[2] / "docs" / "several-machines.md"
KEY = "a key"
SYSTEM = "You are a helpful assistant who answers in few words. " * 4


@contextmanager
def proxy(folder, *servers):
    """Run nginx before these servers; yield its address."""
    [configuration] = re.findall(r"^```nginx\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for number, server in enumerate(servers, start=1):
        configuration = configuration.replace(f"10.0.0.{number}:8000", server.address.removeprefix("http://"))
    with nginx(folder, configuration.replace("listen 8080", "listen PORT")) as address:
        yield address


def talk(client, name, turns):
    """Have a conversation of `turns` turns; return its answers."""
    messages, said = [{"role": "system", "content": SYSTEM}], []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{name} {turn}?"})
        answer = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=8,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Conversation-Id": name},
        )
        said.append(answer.choices[0].message.content)
        messages.append({"role": "assistant", "content": said[-1]})
    return said


def test_a_conversation_stays_on_its_server(tmp_path):
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed")
    options = dict(api_key=KEY, hosts=None, max_length=2048)  # `serve` with a key takes any host
    with serving(*load(), **options) as one, serving(*load(), **options) as two, proxy(tmp_path, one, two) as address:
        before = {}

        def prompts(server):  # the number of cache lookups since the last call
            found = server.cache.stats.queries - before.get(server, 0)
            before[server] = server.cache.stats.queries
            return found

        with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
            places, texts = {}, {}
            for number in range(8):
                name = f"conversation {number}"
                texts[name] = talk(client, name, 3)
                places[name] = (prompts(one), prompts(two))
            assert set(places.values()) == {(3, 0), (0, 3)}
            assert all(server.cache.stats.hit_tokens > 0 for server in (one, two))
            # Each server gives the same text.
            for server in (one, two):
                with openai.OpenAI(base_url=f"{server.address}/v1", api_key=KEY) as direct:
                    assert talk(direct, "conversation 0", 3) == texts["conversation 0"]
                prompts(server)
            # When one server ends, its conversations go on at the other, and the other's stay there.
            one.service.is_ending = True
            for name in places:
                assert talk(client, name, 1) == texts[name][:1]
            assert prompts(one) == 0 and prompts(two) == 8
            one.service.is_ending = False
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.stream(
            "POST",
            f"{address}/v1/completions",
            json={"prompt": "x", "max_tokens": 1500, "stream": True, "ignore_eos": True},
            headers=headers,
            timeout=60,
        ) as stream:
            assert next(stream.iter_lines()).startswith("data: ")
            assert one.engine.has_work or two.engine.has_work  # the proxy passes events on as they are generated
