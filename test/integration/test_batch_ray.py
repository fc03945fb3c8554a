"""Files of requests answered on the machines of a Ray cluster, here two nodes on one machine."""

import json
import shutil
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from granite4_neuron import UserError
from granite4_neuron.commands.cli import main
from granite4_neuron.serving.batch.cluster import _connected, cpus_of_a_worker, reason_of

NUM_LINES = 800


@pytest.mark.parametrize(
    "nodes, workers, devices, expected",
    [
        ([{"CPU": 8}], 1, {}, 7),
        ([{"CPU": 8}], 2, {}, 3),
        ([{"CPU": 4}, {"CPU": 4}], 2, {}, 3),
        ([{"CPU": 4}, {"CPU": 4}], 5, {}, 1),
        ([{"CPU": 16}, {"CPU": 2}], 2, {}, 8),
        ([{"CPU": 1}, {"CPU": 9, "GPU": 2}], 2, {"GPU": 1}, 4),
        ([{"CPU": 1}, {"CPU": 1}], 1, {}, 1),
        ([{"CPU": 2}], 2, {}, None),
        ([{"CPU": 1}], 1, {}, None),
        ([{}], 1, {}, None),
        ([{"CPU": 8, "GPU": 1}], 2, {"GPU": 1}, None),
    ],
)
def test_one_cpu_is_left_for_ray(nodes, workers, devices, expected):
    """Without it Ray would wait for ever."""
    if expected is not None:
        assert cpus_of_a_worker(nodes, workers, devices) == expected
        return
    with pytest.raises(
        UserError, match=rf"the cluster has \d CPUs on 1 nodes; {workers} workers.* need {workers + 1} "
    ):
        cpus_of_a_worker(nodes, workers, devices)


@pytest.mark.parametrize(
    "said, expected",
    [
        ("actor died\n  File x\ngranite4_neuron.errors.UserError: no.\n\nTo change retries, configure a: b", "no."),
        ("ValueError: first\n\nThe above\n\nOSError: [Errno 5] x", "OSError: [Errno 5] x"),
        ("the node is gone", "the node is gone"),
        ("", "RuntimeError"),
    ],
)
def test_a_workers_error_is_found(said, expected):
    assert reason_of(RuntimeError(said)) == expected


@pytest.mark.parametrize(
    "options, expected",
    [
        ([], {}),
        (["--backend", "torch", "--device", "cuda:0", "--tp-degree", "2"], {"GPU": 2}),
        (["--backend", "torch", "--device", "neuron", "--tp-degree", "4"], {"neuron_cores": 4}),
        (["--backend", "nxdi", "--compiled", "ranks"], {"neuron_cores": 4}),
        (["--backend", "nxdi", "--compiled", "none"], "none has no neuron_config.json; give the folder that the comp"),
        (["--backend", "nxdi", "--compiled", "damaged"], "neuron_config.json is damaged (it has no number of ranks)"),
        (["--backend", "nxdi"], "the backend nxdi needs a folder of compiled graphs"),
    ],
)
def test_a_worker_gets_the_devices_of_its_model(options, expected, texting_folder, tmp_path, monkeypatch, capsys):
    seen = []

    def stand_in(address, workers, devices):
        seen.append(devices)
        raise UserError("there is no cluster")

    monkeypatch.setattr("granite4_neuron.serving.batch.cluster.Cluster", stand_in)
    monkeypatch.chdir(tmp_path)
    for folder, config in (("ranks", dict(tp_degree=4)), ("damaged", dict(tp_degree="4"))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "neuron_config.json").write_text(json.dumps(dict(neuron_config=config)))
    (tmp_path / "in.jsonl").write_text('{"prompt": "A text"}\n')
    assert main(["batch", "in.jsonl", "out.jsonl", "--model", str(texting_folder), "--ray", "auto", *options]) == 2
    if isinstance(expected, str):
        assert expected in capsys.readouterr().err and not seen
    else:
        assert seen == [expected]


class OfRay(Exception):
    """A stand-in for Ray's base of exceptions."""


@pytest.mark.parametrize("kind", [Exception, RuntimeError, TimeoutError, ConnectionError, ValueError, OfRay])
def test_a_cluster_that_does_not_start_is_reported(monkeypatch, kind):
    def init(**_):
        raise kind("it timed out")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, exceptions=SimpleNamespace(RayError=OfRay)))
    with pytest.raises(UserError, match=r"there is no Ray cluster at local \(it timed out\)"), _connected("local"):
        pass


@pytest.fixture(scope="module")
def address():
    pytest.importorskip("ray.data", reason="Ray is not installed: pip install -e '.[ray]'")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    cluster.add_node(num_cpus=4)
    yield cluster.address
    cluster.shutdown()


def workers_of(process):
    return [each for each in process.children(recursive=True) if each.name().startswith("ray::MapWorker")]


@pytest.mark.exhaustive
def test_any_number_of_workers_gives_the_same_bytes(address, tmp_path, texting_folder, capsys):
    """Also if one of them is killed, and if the run continues one that was cut off."""
    given, model = tmp_path / "in.jsonl", ["--model", str(texting_folder)]
    with open(given, "w") as file:
        for number in range(NUM_LINES):
            body = {"prompt": f"Number {number}", "max_tokens": 8 + number % 30, "temperature": 1.0}
            line = {"custom_id": str(number), "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n" if number % 100 else "nonsense\n")
    assert main(["batch", str(given), str(tmp_path / "here.jsonl"), *model]) == 0
    expected = (tmp_path / "here.jsonl").read_bytes()
    for number in (1, 2, 5):
        output = tmp_path / f"{number}.jsonl"
        arguments = ["batch", str(given), str(output), *model, "--ray", address, "--workers", str(number)]
        killed = []
        if number == 2:
            output.write_bytes(expected[: len(expected) // 5])
            shutil.copy(tmp_path / "here.jsonl.record", tmp_path / "2.jsonl.record")
            before = output.stat().st_size

            def kill(output=output, before=before, killed=killed):
                while output.stat().st_size < before + 10_000:
                    time.sleep(0.02)
                worker = workers_of(psutil.Process())[0]
                worker.kill()
                killed.append(worker)

            thread = threading.Thread(target=kill)
            thread.start()
        assert main(arguments) == 0
        assert output.read_bytes() == expected
        if number == 2:
            thread.join()
            assert killed
    capsys.readouterr()
    arguments[2] = str(tmp_path / "new.jsonl")
    assert main([*arguments, "--max-model-len", "10000"]) == 2
    assert "--max-model-len is 10,000; the model's longest text has 600 tokens." in capsys.readouterr().err
    assert main([*arguments, "--workers", "8"]) == 2
    assert "the cluster has 8 CPUs on 2 nodes; 8 workers need 9 CPUs" in capsys.readouterr().err
    assert main([*arguments, "--ray", "127.0.0.1:9"]) == 2
    assert "there is no Ray cluster at 127.0.0.1:9" in capsys.readouterr().err
    assert not (tmp_path / "new.jsonl").exists()
