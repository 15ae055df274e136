"""tokenize_corpus, interrupted at any moment and by anything: run again, it ends with the same bytes."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from helpers.tiny_corpora import command, contents, make_texts, tokenize

import data.shards
from data.shards import ShardWriter
from preprocessing import readers, slices, tokenize_pool
from preprocessing.inputs import find_inputs


class Crash(BaseException):
    """Nothing may catch it."""


def crash_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Lets the process "die" at the number-th operation that changes the disk for good, before or after it."""
    calls: list[str] = []

    def wrapped(function: Callable) -> Callable:
        def call(*arguments, **options):
            calls.append(str(function))
            if len(calls) == number // 2 + 1 and number % 2 == 0:
                raise Crash
            result = function(*arguments, **options)
            if len(calls) == number // 2 + 1:
                raise Crash
            return result

        return call

    monkeypatch.setattr(data.shards.os, "fsync", wrapped(os.fsync))
    monkeypatch.setattr(data.shards.os, "replace", wrapped(os.replace))
    monkeypatch.setattr(Path, "unlink", wrapped(Path.unlink))


@pytest.mark.slow
def test_output_survives_a_crash_at_any_moment(tokenizer_path, tmp_path, monkeypatch, small_chunks, cheap_tokenizing):
    """Continued after a death at each single fsync, rename and deletion; also with a death while continuing."""
    source = tmp_path / "x.txt"
    source.write_text("\n\n".join([*make_texts(8), "\n".join(make_texts(30)), *make_texts(4)]))

    def attempt(output: Path) -> object:
        return tokenize(source, output, tokenizer_path, 0.4, shard_size=1500, journal_seconds=0)

    attempt(tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    number, output = 0, tmp_path / "out"
    while True:
        with monkeypatch.context() as patch:
            crash_at(patch, number)
            try:
                attempt(output)
                break  # the number is beyond the last operation
            except Crash:
                pass
        manifests = [name for name in contents(output) if name.endswith("manifest.json")]
        assert all(contents(output)[name] == expected[name] for name in manifests)  # complete or not there
        with monkeypatch.context() as patch, suppress(Crash):
            crash_at(patch, 10 if number % 3 else 25)
            attempt(output)
        attempt(output)
        assert contents(output) == expected
        shutil.rmtree(output)
        number += 1
    assert number > 50


def test_encoded_slices_are_not_encoded_again(corpus, tokenizer_path, tmp_path, monkeypatch, small_chunks):
    tokenize(corpus, tmp_path / "whole", tokenizer_path, shard_size=2000)
    real, encoded = tokenize_pool.ChunkEncoder.__call__, []

    def counted(self, chunk):
        encoded.append(chunk.num_bytes)
        if len(encoded) == 40:
            raise Crash
        return real(self, chunk)

    monkeypatch.setattr(tokenize_pool.ChunkEncoder, "__call__", counted)
    with pytest.raises(Crash):
        tokenize(corpus, tmp_path / "out", tokenizer_path, shard_size=2000)
    assert len(list((tmp_path / "out").rglob("slice_*.npz"))) > 5
    monkeypatch.setattr(tokenize_pool.ChunkEncoder, "__call__", real)
    chunks = []
    monkeypatch.setattr(
        tokenize_pool.ChunkEncoder,
        "__call__",
        lambda self, chunk: (chunks.append(chunk.num_bytes), real(self, chunk))[1],
    )
    summary = tokenize(corpus, tmp_path / "out", tokenizer_path, shard_size=2000)
    total = sum(chunk.num_bytes for chunk in readers.read_chunks(find_inputs([corpus])))
    assert total - sum(encoded[:39]) <= sum(chunks) < total - sum(encoded[:30])
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert summary is not None
    assert summary.totals.counts["text_bytes"] == total  # totals are of the folder, not of the last run


@pytest.mark.parametrize(("owner", "name"), [(slices, "write_atomically"), (ShardWriter, "append")])
def test_ctrl_c_while_a_slice_or_shard_is_written(
    corpus, tokenizer_path, tmp_path, monkeypatch, small_chunks, cheap_tokenizing, owner, name
):
    """Ctrl-C may come before or after a slice is written, or a piece of a shard: that slice or shard is made again."""
    tokenize(corpus, tmp_path / "whole", tokenizer_path, 0.4, shard_size=2000)
    real, calls = getattr(owner, name), []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 30:
            raise KeyboardInterrupt
        real(*arguments)
        if len(calls) == 15:
            raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            tokenize(corpus, tmp_path / "out", tokenizer_path, 0.4, shard_size=2000, journal_seconds=0)
    tokenize(corpus, tmp_path / "out", tokenizer_path, 0.4, shard_size=2000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def started(arguments: list[str], output: Path) -> subprocess.Popen[str]:
    """A running process that has made some progress."""
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if any(output.rglob("slice_*.npz")):
            return process
        time.sleep(0.005)
    raise AssertionError(f"ended before it could be stopped: {process.communicate()}")


@pytest.mark.slow
def test_sigkill_ends_the_workers_too(large, tokenizer_path, tmp_path):
    output = tmp_path / "out"
    process = started(command(large / "in", output, tokenizer_path, "--workers", 2), output)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert workers
    assert not psutil.wait_procs(workers, timeout=20)[1]  # nobody stays behind
    assert not list(output.rglob("manifest.json"))
    tokenize(large / "in", output, tokenizer_path, 0.1, shard_size=200_000)
    assert contents(output) == contents(large / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_sigint_and_sigterm_save_and_say_how_to_continue(large, tokenizer_path, tmp_path, number, code):
    """The whole group gets the signal, as from a terminal or a SLURM job that ends."""
    output = tmp_path / "out"
    process = started(command(large / "in", output, tokenizer_path, "--workers", 2), output)
    os.killpg(process.pid, number)
    printed, error = process.communicate(timeout=60)
    assert process.returncode == code
    assert error.strip() == f"stopped: {output} is unfinished; the same command continues where it stopped"
    assert printed == ""
    assert not list(output.rglob("manifest.json"))
    tokenize(large / "in", output, tokenizer_path, 0.1, shard_size=200_000)
    assert contents(output) == contents(large / "whole")


@pytest.mark.slow
def test_worker_death_is_one_sentence(large, tokenizer_path, tmp_path):
    output = tmp_path / "out"
    process = started(command(large / "in", output, tokenizer_path, "--workers", 2), output)
    psutil.Process(process.pid).children()[-1].kill()
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert error.startswith("error: a worker process was killed")
    assert error.count("\n") == 1
    tokenize(large / "in", output, tokenizer_path, 0.1, shard_size=200_000)
    assert contents(output) == contents(large / "whole")


@pytest.mark.slow
def test_full_disk_is_one_sentence(large, tokenizer_path, tmp_path):
    """A limit on the size of a file stands in for the disk; what fits is kept and continued."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    output = tmp_path / "out"
    arguments = command(large / "in", output, tokenizer_path)
    done = subprocess.run(arguments, capture_output=True, text=True, preexec_fn=limit, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {output}")
    assert "File too large; no unfinished file has a final name" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(output.rglob("*.shard")) + list(output.rglob("manifest.json"))
    tokenize(large / "in", output, tokenizer_path, 0.1, shard_size=200_000)
    assert contents(output) == contents(large / "whole")
