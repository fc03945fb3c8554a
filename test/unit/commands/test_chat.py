"""`chat` as a person types it, through a pipe and at a terminal that tmux plays."""

import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from granite4_neuron.checkpoint.folder import bundled_checkpoint
from granite4_neuron.commands.chat_session import COMMANDS
from granite4_neuron.commands.cli import main
from test.support.checkpoints import save_endless
from test.support.tool_template import NEMOTRON_TEMPLATE, TOOL_TEMPLATE

QUESTION = "What is the assert statement?"
ANSWER = "Assert statements are a convenient way to insert debugging assertions\ninto a program:"
PATIENCE = 120  # in seconds, on a machine that is busy with other work


@pytest.fixture
def chat(capsys, monkeypatch):
    """Return a function from lines of standard input and arguments to (status, standard output, standard error)."""

    def command(*lines, options=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = main(["chat", *map(str, options)])
        return status, *capsys.readouterr()

    return command


def kept_and_run(output):
    """Return the numbers of tokens kept and run from each /stats."""
    return [tuple(map(int, found)) for found in re.findall(r"last prompt +│ (\d+) tokens kept, (\d+) run", output)]


class TestPipe:
    def test_each_turn_runs_its_new_tokens(self, chat):
        status, output, error = chat(QUESTION, "/stats", "lambda?", "/stats", "/undo", "/retry", "/stats")
        assert status == 0 and output.startswith(ANSWER)
        (_, first), (kept, second), (all_of_it, nothing) = kept_and_run(output)
        assert kept > first and second < 30, "what the first turn said is not run again"
        assert (all_of_it, nothing) == (first, 0), "the first message's state is there"
        assert output.count(ANSWER) == 2 and "took back: lambda?" in error

    def test_a_message_of_several_lines(self, chat):
        error = chat("What is the\\", "assert statement?", "/undo", options=["--max-tokens", 5])[2]
        assert "took back: What is the\nassert statement?" in error
        assert chat("", "  ", "/exit", QUESTION)[:2] == (0, "")

    def test_reasoning_is_shown_and_switched_off(self, chat, tmp_path):
        model = shutil.copytree(bundled_checkpoint(), tmp_path / "model")
        (model / "chat_template.jinja").write_text(NEMOTRON_TEMPLATE)
        options = ["--model", model, "--max-tokens", 5]
        schema = tmp_path / "schema.json"
        schema.write_text('{"enum": ["yes"]}')
        assert chat(QUESTION, "/undo", options=options)[0] == 0
        off = ["--chat-template-kwargs", '{"enable_thinking": false}']
        assert chat(QUESTION, options=[*options, *off, "--json-schema", schema])[1] == '"yes"\n'
        status, thought, _ = chat(QUESTION, options=[*options, "--json-schema", schema])
        assert status == 0 and thought and "yes" not in thought, "the schema applies to what follows the thought"
        for text, message in (("{", "is not JSON"), ("[]", "must be an object in JSON")):
            status, _, error = chat(QUESTION, options=[*options, "--chat-template-kwargs", text])
            assert status == 2 and f"--chat-template-kwargs {message}" in error

    def test_options_reach_the_answer(self, chat):
        output = chat(QUESTION, options=["--max-tokens", 5])
        assert len(output[1]) < 40 and "the answer was cut at its limit; see --max-tokens" in output[2]
        assert chat(QUESTION, options=["--stop", "convenient"])[1] == "Assert statements are a \n"
        hot = ["--temperature", 3, "--max-tokens", 20, "--seed"]
        hot = [chat(QUESTION, options=[*hot, seed])[1] for seed in (1, 1, 2)]
        assert hot[0] == hot[1] != hot[2]

    @pytest.mark.slow_cases
    @pytest.mark.parametrize("options", [["--speculate", "ngram"], ["--prefix-cache", "1KiB"]])
    def test_the_text_stays_the_same(self, chat, options):
        lines = [QUESTION, "What is the import statement?", QUESTION]
        common = ["--dtype", "float32", "--max-tokens", 60]
        assert chat(*lines, options=[*common, *options])[:2] == chat(*lines, options=common)[:2]

    def test_draft_model(self, chat, texting_folder):
        common = ["--model", texting_folder, "--max-tokens", 10]
        expected = chat("Hello", "/stats", options=common)[1]
        output = chat("Hello", "/stats", options=[*common, "--draft-model", texting_folder])[1]
        assert output.splitlines()[0] == expected.splitlines()[0] and "100% of" in output

    def test_system(self, chat, texting_folder):
        common = ["--model", texting_folder, "--max-tokens", 10]
        plain, given = chat("Hello", options=common)[1], chat("Hello", options=[*common, "--system", "Be brief."])[1]
        assert plain != given
        assert chat("/system Be brief.", "Hello", options=common)[1] == given
        assert chat("/system", options=[*common, "--system", "Be brief."])[1] == "Be brief.\n"
        assert chat("/system -", "/system", "Hello", options=[*common, "--system", "x"])[1] == (
            f"There is no system message.\n{plain}"
        )

    def test_options_change_between_answers(self, chat):
        hot = ["--temperature", 3, "--max-tokens", 20, "--seed", 1]
        sampled, greedy = chat(QUESTION, options=hot)[1], chat(QUESTION, options=["--max-tokens", 20])[1]
        settings = ("/set temperature 3", "/set seed=1", "/set max_tokens 20")
        status, output, error = chat(*settings, QUESTION, "/undo", "/set temperature -", "/set seed -", QUESTION)
        assert (status, output) == (0, sampled + greedy)
        assert "seed is 1." in error and "temperature is the checkpoint's." in error
        shown = chat("/set top_p 0.5", "/set")[1].splitlines()
        assert "top_p 0.5" in shown and "temperature -" in shown and "max_tokens 2048" in shown

    def test_a_file_goes_before_the_next_message(self, chat, tmp_path):
        (tmp_path / "file").write_text("What is the\n")
        *_, error = chat(f"/read {tmp_path / 'file'}", "assert statement?", "/undo", "x", "/undo")
        assert "which go before the next message" in error
        assert "took back: What is the\n\nassert statement?\ntook back: x\n" in error

    @pytest.mark.slow
    def test_tools_and_documents_reach_the_template(self, chat, texting_folder, tmp_path):
        folder = shutil.copytree(texting_folder, tmp_path / "model")
        (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
        common = ["--model", folder, "--max-tokens", 3]
        plain = chat("Hello", "/stats", options=common)[1]
        for name, objects in (("tools", [{"function": {"name": "f"}}]), ("documents", [{"text": "x"}])):
            file = tmp_path / name
            file.write_text(json.dumps(objects))
            shown = chat("Hello", "/stats", options=[*common, f"--{name}", file])[1]
            assert kept_and_run(shown)[0][1] > kept_and_run(plain)[0][1] + len(json.dumps(objects[0]))
            status, _, error = chat("Hello", options=[f"--{name}", file])
            assert status == 2 and f"chat template does not show {name}" in error
            status, _, error = chat("Hello", options=[*common, f"--{name}", tmp_path / "no file"])
            assert status == 2 and error.endswith("no file cannot be read (No such file or directory).\n")
            file.write_text("{}")
            status, _, error = chat("Hello", options=[*common, f"--{name}", file])
            assert status == 2 and f"must hold a list of {name}" in error

    def test_speed(self, chat):
        assert "last answer: 3 tokens, " in chat(QUESTION, options=["--verbose", "--max-tokens", 3])[2]

    def test_save_and_load(self, chat, tmp_path):
        file = tmp_path / "talk"
        lines = (QUESTION, f"/save {file}", "lambda?")
        _, output, error = chat(*lines)
        answer = output.partition("\n\n")[2]
        assert f"wrote {file}" in error and file.stat().st_mode & 0o777 == 0o600
        _, loaded, _ = chat(f"/load {file}", "lambda?", "/stats")
        assert answer.endswith(loaded[: loaded.index("┌")])
        ((kept, run),) = kept_and_run(loaded)
        assert kept > 100 and run < 30
        status, _, error = chat(f"/load {file}", options=["--dtype", "float32"])
        assert status == 2 and "was made in torch.bfloat16 and the model runs in torch.float32" in error

    def test_clear(self, chat):
        output = chat(QUESTION, "/clear", QUESTION, "/stats", options=["--max-tokens", 20])[1]
        answers = output[: output.index("┌")]
        assert answers == 2 * answers[: len(answers) // 2] and kept_and_run(output)[0][1] == 0

    @pytest.mark.slow_cases
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("/sing", "there is no command /sing; /help lists them, and // begins a message with a slash."),
            ("/undo", "there is no turn to take back."),
            ("/retry", "there is no message to answer again."),
            ("/undo 3", "/undo takes nothing."),
            ("/save", "/save needs a file: /save FILE."),
            ("/read", "/read needs a file: /read FILE."),
            ("/read /none/file", "/none/file cannot be read"),
            ("/set heat 3", "/set takes a name and a value; the names are temperature, top_k"),
            ("/set seed", "/set takes a name and a value"),
            ("/set temperature hot", "hot is not a number"),
            ("/set top_p 2", "top_p is 2, and must be a number above 0 and at most 1"),
            ("/save /none/file", "there is nothing to save yet."),
            ("/load /none/file", "/none/file"),
            ("x" * 400_000, "the prompt has "),
        ],
    )
    def test_an_invalid_line_ends_it(self, chat, line, message):
        status, output, error = chat(line, QUESTION)
        assert (status, output) == (2, "") and message in error

    def test_a_message_may_begin_with_a_slash(self, chat):
        assert chat("//undo is what", options=["--max-tokens", 3])[0] == 0

    def test_help_names_every_command(self, chat):
        output = chat("/help")[1]
        assert all(f" {command}" in output for command in COMMANDS)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--prefix-cache", "much"], "'much' is not a size"),
            (["--speculate", "eagle"], "must be ngram, ngram:K, mtp or mtp:K"),
            (["--temperature", -1], "-1"),
        ],
    )
    def test_options_that_are_refused(self, chat, options, message):
        status, output, error = chat(QUESTION, options=options)
        assert (status, output) == (2, "") and message in error

    def test_a_model_without_a_chat_template(self, chat, texting_folder, tmp_path):
        folder = shutil.copytree(texting_folder, tmp_path / "model")
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        status, _, error = chat("Hello", options=["--model", folder])
        assert status == 2 and "no chat template" in error

    @pytest.mark.slow
    def test_prompt_toolkit_is_not_needed_and_not_imported(self):
        program = """
import sys
sys.modules["prompt_toolkit"] = None
from granite4_neuron.commands.cli import main
sys.exit(main())
"""
        command = [sys.executable, "-c", program, "chat", "--max-tokens", "3"]
        done = subprocess.run(command, input=f"{QUESTION}\n", capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.startswith("Ass")


class Terminal:
    """A terminal that tmux plays, with a tmux server of its own. Keys go in, and the screen comes out."""

    def __init__(self, folder):
        self._tmux = ["tmux", "-L", f"granite4-chat-{os.getpid()}-{folder.name}", "-f", "/dev/null"]
        self._environment = {**os.environ, "XDG_STATE_HOME": str(folder), "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}

    def start(self, *command):
        # A shell stays afterwards, so that the last screen can be seen. Ctrl-C would end some shells too.
        line = f"trap : INT; {shlex.join(map(str, command))}; echo status $?; exec sh"
        arguments = ["new-session", "-d", "-x", "100", "-y", "50", line]
        subprocess.run([*self._tmux, *arguments], env=self._environment, check=True)

    def type(self, *keys):
        """Type keys as tmux names them, and other text as it is."""
        subprocess.run([*self._tmux, "send-keys", *keys], check=True)

    def paste(self, text):
        subprocess.run([*self._tmux, "set-buffer", text], check=True)
        subprocess.run([*self._tmux, "paste-buffer", "-p"], check=True)

    def screen(self):
        capture = [*self._tmux, "capture-pane", "-p", "-S", "-500"]
        shown = subprocess.run(capture, capture_output=True, text=True, check=True).stdout
        return "\n".join(line.rstrip() for line in shown.splitlines()).rstrip()

    def wait_for(self, is_there):
        """Wait for a screen that contains the text, or for which the function returns true, and return it."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            screen = self.screen()
            if is_there(screen) if callable(is_there) else is_there in screen:
                return screen
            time.sleep(0.1)
        pytest.fail(f"not on the screen: {is_there}\n{screen}")

    def close(self):
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True)


@pytest.fixture
def terminal(tmp_path):
    if shutil.which("tmux") is None:
        pytest.skip("the terminal is played by tmux, which is not installed")
    if importlib.util.find_spec("prompt_toolkit") is None:
        pytest.skip("prompt_toolkit is not installed")
    terminal = Terminal(tmp_path)
    yield terminal
    terminal.close()


def is_ready(screen):
    return screen.endswith("\n>")


@pytest.fixture
def endless(tmp_path):
    """Return the bundled model with an end-of-sequence token that it never generates."""
    return save_endless(tmp_path / "endless")


CHAT = (sys.executable, "-m", "granite4_neuron", "chat")


class TestTerminal:
    def test_a_conversation(self, terminal, tmp_path):
        terminal.start(*CHAT)
        terminal.wait_for("/help lists commands")
        terminal.wait_for(is_ready)
        terminal.type(QUESTION, "Enter")
        terminal.wait_for(ANSWER)
        terminal.wait_for(is_ready)
        terminal.type("/sing", "Enter")
        terminal.wait_for("(there is no command /sing; /help lists them")
        terminal.type("/stats", "Enter")
        terminal.wait_for("peak memory")
        terminal.wait_for(is_ready)
        terminal.type("/und", "Tab")
        terminal.wait_for("> /undo")
        terminal.type("Enter")
        terminal.wait_for(f"(took back: {QUESTION})")
        terminal.type("what I typed by mistake")
        terminal.wait_for("> what I typed by mistake")
        terminal.type("C-c")
        terminal.wait_for(is_ready)
        terminal.type("What is the", "M-Enter", "assert statement?", "Enter")
        screen = terminal.wait_for(lambda screen: "> What is the\n  assert statement?\n" in screen and is_ready(screen))
        terminal.paste("What is\nthe import statement?")
        terminal.type("Enter")
        terminal.wait_for("> What is\n  the import statement?\n")
        terminal.wait_for(is_ready)
        terminal.type("C-d")
        screen = terminal.wait_for("status 0")
        assert "Traceback" not in screen
        history = tmp_path / "granite4-neuron" / "chat_history"
        assert QUESTION in history.read_text() and history.stat().st_mode & 0o777 == 0o600

    def test_ctrl_c_stops_the_answer_and_not_the_program(self, terminal, endless):
        terminal.start(*CHAT, "--model", endless, "--max-tokens", 100_000)
        terminal.wait_for(is_ready)
        terminal.type("talk", "Enter")
        assert not is_ready(terminal.wait_for(lambda screen: len(screen) > 1000))
        terminal.type("typed meanwhile")
        terminal.type("C-c")
        screen = terminal.wait_for("(stopped.)")
        assert "typed meanwhile" not in screen[: screen.index("(stopped.)")]
        terminal.wait_for(is_ready)
        terminal.type("/stats", "Enter")
        terminal.wait_for("peak memory")
        terminal.type("/clear", "Enter")
        terminal.type("/exit", "Enter")
        assert "Traceback" not in terminal.wait_for("status 0")

    @pytest.mark.slow
    def test_keys_typed_during_an_answer_go_into_the_next_message(self, terminal, endless):
        terminal.start(*CHAT, "--model", endless, "--max-tokens", 1500)
        terminal.wait_for(is_ready)
        terminal.type("talk", "Enter")
        assert not is_ready(terminal.wait_for(lambda screen: len(screen) > 300))
        terminal.type("typed meanwhile")
        screen = terminal.wait_for("\n> typed meanwhile")
        assert screen.count("typed meanwhile") == 1

    @pytest.mark.slow
    def test_the_history_is_there_next_time(self, terminal):
        terminal.start(*CHAT)
        terminal.wait_for(is_ready)
        terminal.type("/system Be brief.", "Enter")
        # The terminal drops a Ctrl-D that comes before the next prompt.
        terminal.wait_for(lambda screen: "message is set" in screen and is_ready(screen))
        terminal.type("C-d")
        terminal.wait_for("status 0")
        terminal.type(shlex.join(CHAT), "Enter")
        terminal.wait_for(lambda screen: screen.count("/help lists") == 2 and is_ready(screen))
        terminal.type("Up")
        terminal.wait_for(lambda screen: screen.endswith("> /system Be brief."))
        terminal.type("Enter")
        terminal.type("/system", "Enter")
        terminal.wait_for("\nBe brief.\n")
