"""A prefix cache in a folder: hits in a later process, equal texts, and damaged files."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from granite4_neuron import UserError
from granite4_neuron.engine import Engine, PrefixCache, PrefixFolder, Request
from granite4_neuron.engine.prefix import folder as module
from granite4_neuron.engine.prefix.folder import _File
from granite4_neuron.state.snapshot import Snapshot
from test.support.engines import CHUNK, VOCAB, ChunkRuntime, engine_model, generate_one
from test.support.stepping import random_tokens

TOKENS = random_tokens(VOCAB, 150).tolist()
OTHERS = random_tokens(VOCAB, 150, seed=1).tolist()
SIZE = 2**24
PATTERN = "*.safetensors"


@pytest.fixture
def runtime():
    return ChunkRuntime(engine_model(), "fused")


@pytest.fixture
def place(tmp_path):
    return tmp_path / "kept"


def process(place, runtime, *prompts, size=SIZE, **request):
    """Act as a new process with an empty cache in memory. Return texts, tokens found, and logits by length."""
    folder = PrefixFolder(place, size, runtime)
    cache = PrefixCache(runtime, None, CHUNK, folder=folder)
    engine = Engine(runtime, 1, prefix_cache=cache)
    runtime.logits.clear()
    texts = [generate_one(engine, Request(prompt, 5, **request)) for prompt in prompts]
    folder.close()
    return texts, cache.stats.hit_tokens, dict(runtime.logits)


def alone(runtime, prompt):
    runtime.logits.clear()
    text = generate_one(Engine(runtime, 1), Request(prompt, 5))
    return text, dict(runtime.logits)


def test_states_with_a_salt_are_neither_written_nor_looked_for(place, runtime, caplog):
    tokens = TOKENS[:45]  # few enough snapshots that all of them are written
    for salt, others in (("one", "one"), (None, "one")):
        process(place, runtime, tokens, cache_salt=salt)
        _, found, _ = process(place, runtime, tokens, cache_salt=others)
        assert found == 0
    assert process(place, runtime, tokens)[1] == len(tokens) and not caplog.records


def is_as_alone(runtime, prompt, texts, logits):
    text, expected = alone(runtime, prompt)
    assert all(torch.equal(logits[length], expected[length]) for length in logits)
    return texts[-1] == text and logits.keys() <= expected.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prompt, hit", [(TOKENS[:70], 45), (TOKENS[:45], 45), (TOKENS[:40] + OTHERS[:9], 32)])
def test_a_later_process_goes_on_from_it(place, dtype, prompt, hit):
    runtime = ChunkRuntime(engine_model(dtype=dtype), "fused")
    process(place, runtime, TOKENS[:45])
    texts, found, logits = process(place, runtime, prompt)
    assert found == hit and min(logits, default=99) > hit and is_as_alone(runtime, prompt, texts, logits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_states_in_16_bits(place, runtime, caplog, dtype):
    """Files hold them in 16 bits, and a text after a hit is still that of the sequence alone."""
    small = ChunkRuntime(engine_model(), "fused", dtype)
    process(place, small, TOKENS[:45])
    stored = Snapshot.load(file_of(place, 45), small).tensors
    recurrent = {name: tensor.dtype for name, tensor in stored.items() if name.endswith(".ssm_state")}
    assert recurrent and set(recurrent.values()) == {dtype}
    texts, found, logits = process(place, small, TOKENS[:70])
    assert found == 45 and is_as_alone(small, TOKENS[:70], texts, logits)
    assert PrefixFolder(place, SIZE, runtime).find(TOKENS, 1) is None and not caplog.messages


def test_files_share_keys_and_values(place, runtime):
    process(place, runtime, TOKENS[:45])
    names = sorted(tuple(map(int, file.name.split("-")[:2])) for file in place.iterdir())
    assert names == [(0, 16), (16, 32), (32, 45), (45, 48), (48, 49)]
    assert {file.stat().st_mode & 0o777 for file in place.iterdir()} == {0o600}
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_prefix_that_memory_evicted_is_read_from_the_folder(place, runtime):
    folder = PrefixFolder(place, SIZE, runtime)
    cache = PrefixCache(runtime, 2**17, CHUNK, folder=folder)
    engine = Engine(runtime, 1, prefix_cache=cache)
    for prompt in (TOKENS[:45], *(random_tokens(VOCAB, 45, seed=seed).tolist() for seed in range(2, 12))):
        generate_one(engine, Request(prompt, 5))
        while folder._queue.qsize():
            time.sleep(0.01)
    assert cache.stats.evictions and cache.export(TOKENS[:45]) is None and not cache.stats.hit_tokens
    generate_one(engine, Request(TOKENS[:60], 5))
    generate_one(engine, Request(TOKENS[:60], 5))
    folder.close()
    assert cache.stats.hit_tokens == 45 + 45 and cache.stats.folder_hit_tokens == 45
    assert cache.folder_bytes == bytes_in(place)


DAMAGES = {
    "a flipped bit of the last number": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "a flipped bit in the middle": lambda data: data[:-3000] + bytes([data[-3000] ^ 16]) + data[-2999:],
    "a flipped bit of the header": lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
    "cut off": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "foreign": lambda data: b"something else entirely" * 100,
}


def file_of(place, length):
    [file] = place.glob(f"*-{length}-*")
    return file


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss(place, runtime, caplog, damage):
    process(place, runtime, TOKENS[:45])
    file = file_of(place, 45)
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    folder = PrefixFolder(place, SIZE, runtime)
    for _ in range(3):
        assert folder.find(TOKENS[:60], 1).length == 32
    folder.close()
    assert len(caplog.messages) == 1 and file.name in caplog.text and "\n" not in caplog.messages[0]
    texts, found, logits = process(place, runtime, TOKENS[:60])
    assert found == 32 and is_as_alone(runtime, TOKENS[:60], texts, logits)


def test_a_damaged_file_is_written_anew(place, runtime):
    process(place, runtime, TOKENS[:45])
    file = file_of(place, 45)
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert process(place, runtime, TOKENS[:45])[1] == 32
    assert file.read_bytes() == good and process(place, runtime, TOKENS[:45])[1] == 45


def test_a_damaged_file_spoils_those_that_continue_it(place, runtime):
    process(place, runtime, TOKENS[:45])
    file = file_of(place, 32)
    file.write_bytes(file.read_bytes()[:-1])
    assert PrefixFolder(place, SIZE, runtime).find(TOKENS[:60], 1).length == 16


def test_a_file_under_another_files_name(place, runtime, caplog):
    process(place, runtime, TOKENS[:16], OTHERS[:16])
    key = PrefixFolder(place, SIZE, runtime)._keys(OTHERS, [16])[16]
    (ours, theirs) = sorted(place.glob("0-16-*"), key=lambda file: key in file.name)
    ours.replace(theirs)
    assert PrefixFolder(place, SIZE, runtime).find(OTHERS[:20], 1) is None
    assert "belongs to another sequence than its name says" in caplog.text


def test_a_file_of_another_model(place, runtime, caplog):
    other = ChunkRuntime(engine_model(seed=1), "fused")
    process(place, other, TOKENS[:45])
    texts, found, logits = process(place, runtime, TOKENS[:45])
    assert not found and not caplog.messages and is_as_alone(runtime, TOKENS[:45], texts, logits)
    theirs = PrefixFolder(place, SIZE, other)._keys(TOKENS, [45])[45]
    ours = PrefixFolder(place, SIZE, runtime)._keys(TOKENS, [45])[45]
    [source], [target] = place.glob(f"*{theirs}*"), place.glob(f"*{ours}*")
    source.replace(target)
    assert PrefixFolder(place, SIZE, runtime).find(TOKENS[:50], 1).length == 32
    assert len(caplog.messages) == 1 and "another checkpoint" in caplog.text


def test_other_kernels_find_nothing(place, runtime, caplog):
    process(place, runtime, TOKENS[:45])
    assert PrefixFolder(place, SIZE, runtime).find(TOKENS, 1) is not None
    other = ChunkRuntime(engine_model(), "torch")
    assert PrefixFolder(place, SIZE, other).find(TOKENS, 1) is None and not caplog.messages
    texts, found, logits = process(place, other, TOKENS[:45])
    assert not found and is_as_alone(other, TOKENS[:45], texts, logits)


def test_links_pipes_and_folders_are_not_read(place, runtime, tmp_path):
    process(place, runtime, TOKENS[:45])
    for length, make in ((45, lambda file: file.symlink_to(tmp_path / "moved")), (32, os.mkfifo), (16, os.mkdir)):
        file = file_of(place, length)
        file.replace(tmp_path / "moved")
        make(file)
    assert PrefixFolder(place, SIZE, runtime).find(TOKENS, 1) is None


def test_an_incomplete_write(place, runtime):
    process(place, runtime, TOKENS[:20])
    whole = file_of(place, 20)
    left = place / f".{whole.name}.abc123"
    left.mkdir()
    (left / ".tmpAbCdEf").write_bytes(whole.read_bytes()[:1000])
    whole.unlink()
    (place / "notes.txt").write_text("mine")
    assert process(place, runtime, TOKENS[:20])[1] == 16
    assert not left.exists() and (place / "notes.txt").exists() and process(place, runtime, TOKENS[:20])[1] == 20


WRITER = """
import sys
from pathlib import Path
from test.unit.engine.prefix.test_folder import *
seed = int(sys.argv[2])
runtime = ChunkRuntime(engine_model(), "fused")
for number in range(10):
    own = random_tokens(VOCAB, 30, seed=100 * seed + number).tolist()
    process(Path(sys.argv[1]), runtime, TOKENS[:20] + own, size=int(sys.argv[3]))
"""


def start_writer(place, seed, size):
    return subprocess.Popen([sys.executable, "-c", WRITER, place, str(seed), str(size)], stderr=subprocess.PIPE)


def bytes_in(place):
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


@pytest.mark.slow
def test_two_processes_at_once(place, runtime):
    size = 400_000
    writers, most = [start_writer(place, seed, size) for seed in (1, 2)], 0
    while any(writer.poll() is None for writer in writers):
        most = max(most, bytes_in(place) if place.exists() else 0)
        time.sleep(0.005)
    for writer in writers:
        assert writer.stderr.read() == b"" and writer.returncode == 0
        writer.stderr.close()
    assert 0.5 * size < bytes_in(place) and most <= size
    assert not list(place.glob(".*")) and process(place, runtime, TOKENS[:30])[1] >= 16
    for file in place.glob(PATTERN):
        Snapshot.load(file, runtime)


KILLED = """
import os, signal
from granite4_neuron.state import snapshot
flushed = []
def flush(file):
    flushed.append(file)
    if len(flushed) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
snapshot._flush = flush
"""


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes(place, runtime):
    killed = subprocess.run([sys.executable, "-c", KILLED + WRITER, place, "1", str(SIZE)])
    assert killed.returncode == -signal.SIGKILL and len(list(place.glob(PATTERN))) == 4 and list(place.glob(".*"))
    prompt = TOKENS[:20] + OTHERS[:9]
    texts, found, logits = process(place, runtime, prompt)
    assert found >= 16 and is_as_alone(runtime, prompt, texts, logits) and not list(place.glob(".*"))


def test_the_bound_is_kept_and_the_least_recently_used_go(place, runtime):
    used, size = TOKENS[:16], 150_000
    process(place, runtime, used, size=size)
    [file] = place.glob("0-16-*")
    for seed in range(2, 12):
        assert file.exists()
        process(place, runtime, used, random_tokens(VOCAB, 40, seed=seed).tolist(), size=size)
        assert bytes_in(place) <= size
    assert process(place, runtime, used)[1] == 16
    assert process(place, runtime, random_tokens(VOCAB, 40, seed=2).tolist())[1] == 0
    before = sorted(place.iterdir())
    process(place, runtime, OTHERS[:40], size=1000)
    assert sorted(place.iterdir()) == before, "nothing may be removed for a file larger than the limit"


def test_a_full_disk(place, runtime, caplog, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("granite4_neuron.state.snapshot.save_file", full)
    texts, _, logits = process(place, runtime, TOKENS[:45])
    assert is_as_alone(runtime, TOKENS[:45], texts, logits)
    assert len(caplog.messages) == 1 and "No space left on device" in caplog.messages[0] and not list(place.iterdir())
    monkeypatch.undo()
    process(place, runtime, TOKENS[:45])
    assert process(place, runtime, TOKENS[:45])[1] == 45


ERRORS = [OSError(5, "Input/output error"), UserError("It will not."), MemoryError(), TypeError("a mistake")]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_failed_write_is_logged_once_and_later_ones_work(place, runtime, caplog, monkeypatch, error):
    write, writes = PrefixFolder._write, []

    def fails_three_times(self, *item):
        writes.append(item)
        if len(writes) <= 3:
            raise error
        write(self, *item)

    monkeypatch.setattr(PrefixFolder, "_write", fails_three_times)
    process(place, runtime, TOKENS[:45])
    assert len(writes) > 3 and len(list(place.glob(PATTERN))) == len(writes) - 3
    [record] = caplog.records
    assert record.getMessage().endswith(f"for now: {str(error) or 'MemoryError'}") and str(place) in caplog.text
    assert bool(record.exc_info) == isinstance(error, TypeError), "only an unexpected error has a traceback"


def test_it_is_logged_again_after_a_write_that_worked(place, runtime, caplog, monkeypatch):
    write, writes = PrefixFolder._write, []

    def fails_twice(self, *item):
        writes.append(item)
        if len(writes) in (1, 3):
            raise MemoryError
        write(self, *item)

    monkeypatch.setattr(PrefixFolder, "_write", fails_twice)
    process(place, runtime, TOKENS[:45])
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("limit", [-1, True, 2.5, "10GiB", float("inf")], ids=repr)
def test_an_invalid_limit_is_refused(place, runtime, limit):
    with pytest.raises(UserError, match=r"max_bytes is .*; it must be a whole number of bytes, or None for no limit\."):
        PrefixFolder(place, limit, runtime)
    assert not place.exists()


def test_no_limit(place, runtime, caplog):
    process(place, runtime, TOKENS[:45], size=None)
    assert process(place, runtime, TOKENS[:70], size=None)[1] == 45 and not caplog.messages
    assert process(place, runtime, TOKENS[:70], size=0)[1] == 70, "files in the folder are found with any limit"


@given(
    drawn=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=8),  # sizes, and whether they are spared
    needed=st.integers(0, 12),
    limit=st.integers(0, 40),
)
@example(drawn=[(5, True), (5, False)], needed=3, limit=8)
def test_as_few_files_as_possible_are_removed_for_a_new_one(drawn, needed, limit):
    sizes = [size for size, _ in drawn]
    spared = {number for number, (_, is_spared) in enumerate(drawn) if is_spared}
    files = [_File(number, number + 1, "0" * 64) for number in range(len(sizes))]
    folder = object.__new__(PrefixFolder)
    with tempfile.TemporaryDirectory() as name:
        folder.folder, folder.max_bytes = Path(name), limit
        for file in files:
            (folder.folder / file.name).touch()
        made = folder._make_room(
            needed, dict(zip(files, sizes, strict=True)), [files[number] for number in sorted(spared)]
        )
        left = [number for number, file in enumerate(files) if (folder.folder / file.name).exists()]
    assert made == (needed + sum(sizes[number] for number in spared) <= limit)
    # The first files are the least recently used ones.
    numbers = range(len(files))
    kept = [[number for number in numbers if number >= removed or number in spared] for removed in [*numbers, 99]]
    fitting = [each for each in kept if needed + sum(sizes[number] for number in each) <= limit]
    assert left == (fitting[0] if made else list(numbers))


def test_a_folder_that_goes_away(place, runtime, caplog):
    process(place, runtime, TOKENS[:45])
    folder = PrefixFolder(place, SIZE, runtime)
    for file in place.iterdir():
        file.unlink()
    place.rmdir()
    assert folder.find(TOKENS, 1) is None and not caplog.messages
    engine = Engine(runtime, 1, prefix_cache=PrefixCache(runtime, None, CHUNK, folder=folder))
    assert generate_one(engine, Request(TOKENS[:45], 5)) == alone(runtime, TOKENS[:45])[0]
    folder.close()
    assert len(caplog.messages) == 1


def test_states_with_an_adapter_are_not_written(place, runtime):
    folder = PrefixFolder(place, SIZE, runtime)
    cache = PrefixCache(runtime, None, CHUNK, folder=folder)
    generate_one(Engine(runtime, 1, prefix_cache=cache), Request(TOKENS[:45], 1))
    whole = cache.export(TOKENS[:45])
    folder.keep([token + (1 << 32) for token in TOKENS[:45]], [whole], whole.tensors["logits"])
    folder.close()
    assert {file.name.split("-")[1] for file in place.iterdir()} == {"16", "32", "45"}
    assert folder.find([token + (1 << 32) for token in TOKENS], 1) is None


def test_writes_do_not_hold_up_requests(place, runtime, monkeypatch):
    """If the writer hangs, snapshots are dropped and requests go on."""
    folders, goes_on = [], threading.Event()

    def hanging(folder, *_):
        folders.append(folder)
        goes_on.wait()

    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(PrefixFolder, "_write", hanging)
    texts, _, _ = process(place, runtime, TOKENS[:100], OTHERS[:100])
    assert is_as_alone(runtime, OTHERS[:100], texts, {})
    # A thread that outlived this test would write into a folder that is gone, and log that in another test.
    goes_on.set()
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 60)
    folders[0].close()
    assert not folders[0]._thread.is_alive()


def test_a_folder_that_others_may_enter(place, runtime, tmp_path):
    place.mkdir(0o755)
    place.chmod(0o755)
    with pytest.raises(UserError, match="nobody else may enter"):
        PrefixFolder(place, SIZE, runtime)
    for wrong in (tmp_path / "none" / "kept", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(UserError, match="is not a folder, and could not be made"):
            PrefixFolder(wrong, SIZE, runtime)
