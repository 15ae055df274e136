"""generate.py and fill_mask.py as commands: what they print and refuse, and how they talk in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time

import pytest
import torch
from helpers.tiny_evaluation import tiny_model
from helpers.tiny_runs import ROOT, TEXT, train_on
from tokenizers import Tokenizer

from evaluation import fill_mask, generate, generation
from evaluation.generation import LoadedModel
from training.checkpoint import write_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_on(TEXT, 320)


@pytest.fixture(scope="module")
def tiny(tokenizer: Tokenizer) -> LoadedModel:
    """What it writes is noise, but what it may read and write is exact."""
    return LoadedModel(tiny_model(tokenizer.get_vocab_size()), tokenizer, CPU)


def use(monkeypatch, tiny, script, arguments, stdin=""):
    monkeypatch.setattr(generation, "load_model", lambda path, ema, device: (tiny.model, tiny.tokenizer, None))
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    return script.main(["RUN", "--device", "cpu", *arguments])


def test_generate_command_is_repeatable_and_numbers_seeds_by_sample(monkeypatch, tiny, capsys):
    def output(*arguments):
        assert use(monkeypatch, tiny, generate, ["--prompt", "The list", "--max_new_tokens", "5", *arguments]) == 0
        return capsys.readouterr().out

    both = output("--num_samples", "2", "--seed", "3")
    assert both == output("--num_samples", "2", "--seed", "3")
    assert both == output("--seed", "3") + output("--seed", "4")
    assert both.startswith("The list")
    assert both.endswith("\n\n")


def test_generate_reads_lines_and_begins_documents(monkeypatch, tiny, capsys):
    assert use(monkeypatch, tiny, generate, ["--max_new_tokens", "2"], stdin="The list\n\nThe end\n") == 0
    lines = capsys.readouterr().out
    assert lines.startswith("The list")
    assert "\nThe end" in lines
    assert use(monkeypatch, tiny, generate, ["--max_new_tokens", "2", "--prompt", ""]) == 0
    assert capsys.readouterr().out.strip()


def test_commands_print_batches_as_one_by_one(monkeypatch, tiny, capsys):
    outputs = set()
    for size in ("1", "2", "16"):
        arguments = ["--prompt", "The list", "--prompt", "The", "--num_samples", "3", "--max_new_tokens", "20"]
        assert use(monkeypatch, tiny, generate, [*arguments, "--batch_size", size]) == 0
        outputs.add(capsys.readouterr().out)
    assert len(outputs) == 1


def test_fill_mask_command_prints_candidates_and_the_filled_text(monkeypatch, tiny, capsys):
    text = "The <mask> returns the <mask>."
    assert use(monkeypatch, tiny, fill_mask, ["--text", text, "--top_k", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == text
    assert lines[1].startswith("  gap 1: ")
    assert lines[1].count("%") == lines[2].count("%") == 2
    assert lines[3].startswith("  -> The")


@pytest.mark.parametrize(
    ("script", "arguments", "stdin", "sentence"),
    [
        (generate, [], "", "there is no text: give --prompt TEXT"),
        (generate, ["--prompt", "a", "--max_new_tokens", "0"], "", "--max_new_tokens is 0"),
        (generate, ["--prompt", "a", "--num_samples", "-1"], "", "--num_samples is -1"),
        (generate, ["--prompt", "a", "--seed", "-1"], "", "--seed is -1"),
        (generate, ["--prompt", "a", "--top_p", "2"], "", "--top_p is 2"),
        (generate, ["--prompt", "a", "--batch_size", "0"], "", "--batch_size is 0"),
        (fill_mask, [], " \n", "there is no text: give --text TEXT"),
        (fill_mask, ["--text", ""], "", "there is no <mask> in the text ''"),
        (fill_mask, ["--text", "no gap"], "", "there is no <mask> in the text 'no gap'"),
        (fill_mask, [], "no gap\n", "there is no <mask> in the text 'no gap'"),
        (fill_mask, ["--text", "<mask>", "--top_k", "0"], "", "--top_k is 0"),
    ],
)
def test_refusals_are_one_sentence(monkeypatch, tiny, capsys, script, arguments, stdin, sentence):
    assert use(monkeypatch, tiny, script, arguments, stdin) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {sentence}")
    assert error.count("\n") == 1


def test_absent_model_is_one_sentence(tmp_path, capsys):
    for script, flag in ((generate, "--prompt"), (fill_mask, "--text")):
        assert script.main([str(tmp_path / "none"), "--device", "cpu", flag, "a <mask>"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {tmp_path / 'none'}")
        assert error.count("\n") == 1


def test_text_that_is_not_utf_8_is_one_sentence(monkeypatch, tiny, capsys):
    monkeypatch.setattr(generation, "load_model", lambda path, ema, device: (tiny.model, tiny.tokenizer, None))
    for script, flag in ((generate, "--prompt"), (fill_mask, "--text")):
        for given, piped in (([flag, os.fsdecode(b"caf\xe9 <mask>")], b""), ([], b"caf\xe9 <mask>\n")):
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped), encoding="utf-8"))
            assert script.main(["RUN", "--device", "cpu", *given]) == 2
            error = capsys.readouterr().err
            assert error.startswith("error: ")
            assert "UTF-8" in error
            assert error.count("\n") == 1


# In a terminal


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    """The tiny model as a run's checkpoint on disk."""
    state = {name: parameter.detach() for name, parameter in tiny.model.state_dict().items()}
    files = {
        "config.json": json.dumps(tiny.model.config.to_dict()).encode(),
        "tokenizer.json": tiny.tokenizer.to_str().encode(),
    }
    return write_checkpoint(tmp_path_factory.mktemp("run") / "checkpoints", 3, {"model": state}, {}, files)


class Terminal:
    """A script that runs in a pseudo-terminal; `expect` reads what it prints up to a text."""

    def __init__(self, script: str, *arguments: str) -> None:
        self.fd, other = pty.openpty()
        command = [sys.executable, str(ROOT / "evaluation" / script), *arguments]
        self.process = subprocess.Popen(
            command, stdin=other, stdout=other, stderr=other, env={**os.environ, "TERM": "dumb"},
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(other)
        self.seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):  # closed by end_with
            os.close(self.fd)

    def expect(self, text: str, seconds: float = 60) -> str:
        """What came before `text`; fails where it does not come."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            piece = b""
            if ready:
                with contextlib.suppress(OSError):  # Linux: the other end is closed
                    piece = os.read(self.fd, 65536)
            assert piece, f"no {text!r} in {self.seen!r}"
            self.seen += piece.decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def end_with(self, key: str, seconds: float = 30) -> int:
        """The exit code of a script that a key ends; kills a script that goes on.

        Python can miss a Ctrl-C in the instant between printing a prompt and waiting for keys, until the next key.
        """
        deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError):  # Linux: the other end is closed
            while time.monotonic() < deadline:
                time.sleep(0.3)
                self.send(key)
                while select.select([self.fd], [], [], 8.0)[0]:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
        if time.monotonic() > deadline:
            self.process.kill()
        os.close(self.fd)
        return self.process.wait(seconds)


@pytest.mark.slow
def test_generate_in_a_terminal(checkpoint):
    """Asks, answers, is stopped by Ctrl-C in the middle of an answer, asks again, and ends at Ctrl-D."""
    # Greedy, and this model repeats itself: it never ends by itself within the test.
    options = ("--device", "cpu", "--max_new_tokens", "1000000", "--temperature", "0")
    with Terminal("generate.py", str(checkpoint), *options) as terminal:
        terminal.expect("> ")
        terminal.send("The list\n")
        terminal.expect("\x1b[1mThe list\x1b[0m")
        time.sleep(0.3)
        terminal.send("\x03")
        terminal.expect("(stopped)")
        terminal.expect("> ")
        terminal.send("\n")
        terminal.expect("> ")
        assert terminal.end_with("\x04") == 0
        assert "Traceback" not in terminal.seen


@pytest.mark.slow
def test_fill_mask_in_a_terminal(checkpoint):
    """A line without a gap is answered by a sentence and the next is awaited; Ctrl-C at the prompt ends."""
    with Terminal("fill_mask.py", str(checkpoint), "--device", "cpu", "--top_k", "3") as terminal:
        terminal.expect("> ")
        terminal.send("no gap\n")
        terminal.expect("there is no <mask> in the text 'no gap'")
        terminal.expect("> ")
        terminal.send("The <mask> returns\n")
        assert terminal.expect("  -> The").count("%") == 3
        terminal.expect("> ")
        assert terminal.end_with("\x03") == 130
        assert "Traceback" not in terminal.seen
