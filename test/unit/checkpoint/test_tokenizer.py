"""A tokenizer is read alike by transformers 4.57 and 5, whichever of them wrote it."""

import json
import logging
import shutil

import pytest

from granite4_neuron.checkpoint.tokenizer import read_tokenizer

pytestmark = pytest.mark.versions

FURTHER, NAMED = ["<|tool|>", "<|thought|>"], {"image_token": "<|image|>"}
# What differs in the tokenizer_config.json of a tokenizer with these tokens.
WRITTEN_BY = {
    "4": {"additional_special_tokens": FURTHER, "extra_special_tokens": NAMED, **NAMED},
    "5": {"extra_special_tokens": FURTHER, "model_specific_special_tokens": NAMED, **NAMED},
}


@pytest.mark.parametrize("version", WRITTEN_BY)
def test_further_special_tokens(texting_folder, tmp_path, caplog, monkeypatch, version):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # caplog listens at the root
    caplog.set_level(logging.WARNING, "transformers")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(texting_folder / name, tmp_path)
    file = tmp_path / "tokenizer_config.json"
    about = {**json.loads(file.read_text()), "tokenizer_class": "TokenizersBackend", **WRITTEN_BY[version]}
    file.write_text(json.dumps(about))
    plain, tokenizer = read_tokenizer(texting_folder), read_tokenizer(tmp_path)
    further = [*NAMED.values(), *FURTHER]
    assert sorted(set(tokenizer.all_special_tokens) - set(plain.all_special_tokens)) == sorted(further)
    assert sorted(tokenizer.convert_tokens_to_ids(further)) == list(range(len(plain), len(plain) + len(further)))
    assert {**plain.special_tokens_map, **NAMED}.items() <= tokenizer.special_tokens_map.items()
    assert tokenizer.decode(tokenizer.encode("a<|tool|>b<|image|>"), skip_special_tokens=True) == "ab"
    assert not caplog.records
