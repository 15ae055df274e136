"""tokenize_corpus in parts: whatever happens to the processes, they end with the bytes that one would have written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.tiny_corpora import ROOT, command, contents, make_texts, tokenize
from test_preprocessing_interrupted import Crash, crash_at, started
from test_preprocessing_tokenize import PEAK

from data.shards import ShardWriter, read_manifest
from preprocessing import tokenize_corpus
from preprocessing.inputs import find_inputs
from preprocessing.tokenize_corpus import Summary, merge_parts, tokenize_files
from preprocessing.tokenize_pool import EncoderSettings


@pytest.mark.slow
def test_parallel_parts_are_merged_by_the_last(large, tokenizer_path, tmp_path):
    output = tmp_path / "out"
    arguments = [command(large / "in", output, tokenizer_path, "--parts", 3, "--part", part) for part in range(3)]
    arguments[1] += ["--workers", "2"]
    running = [subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for one in arguments]
    printed = [process.communicate(timeout=100) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], printed
    assert sum("train: " in out for out, _ in printed) == 1
    assert sum("whoever completes the last merges them" in out for out, _ in printed) == 2
    assert contents(output) == contents(large / "whole")


@pytest.mark.slow
def test_parts_survive_a_crash_at_any_moment(tokenizer_path, tmp_path, monkeypatch, small_chunks, cheap_tokenizing):
    """Parts and merge, continued after a death at each single fsync, rename, deletion and note of a complete part."""
    (tmp_path / "in").mkdir()
    for number, texts in enumerate((make_texts(18), ["\n".join(make_texts(30))])):
        (tmp_path / "in" / f"{number}.txt").write_text("\n\n".join(texts))
    files, encoder = find_inputs([tmp_path / "in"]), EncoderSettings(tokenizer_path, validation_fraction=0.4)

    def attempt(output: Path, first: int) -> None:
        for part in (first, 1 - first):
            tokenize_files(files, output, encoder, part=part, parts=2, shard_size=2000, journal_seconds=0)

    tokenize(tmp_path / "in", tmp_path / "whole", tokenizer_path, 0.4, shard_size=2000)
    expected = contents(tmp_path / "whole")
    number, output = 0, tmp_path / "out"
    while True:
        with monkeypatch.context() as patch:
            crash_at(patch, number)
            patch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: remove_one_by_one(path))
            try:
                attempt(output, number % 2)
                break  # the number is beyond the last operation
            except Crash:
                pass
        found = contents(output)
        manifests = [name for name in found if name.endswith("manifest.json") and not name.startswith(".parts")]
        assert all(found[name] == expected[name] for name in manifests)  # complete or not there
        attempt(output, (number // 2) % 2)
        assert contents(output) == expected
        assert not (output / ".parts").exists()
        shutil.rmtree(output)
        number += 2  # after one operation is before the next
    assert number > 80


def remove_one_by_one(folder: Path) -> None:
    """rmtree, so that crash_at can stop it in the middle."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGUSR1, 143)])
def test_stopped_part_continues(large, tokenizer_path, tmp_path, number, code):
    """The whole group gets SIGUSR1, as from SLURM before a time limit; killed is only the process itself."""
    output = tmp_path / "out"
    arguments = command(large / "in", output, tokenizer_path, "--parts", 2, "--part", 0, "--workers", 2)
    process = started(arguments, output / ".parts" / "part_00000")
    process.kill() if number == signal.SIGKILL else os.killpg(process.pid, number)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == code, error
    if code == 143:
        assert error.strip() == f"stopped: {output} is unfinished; the same command continues where it stopped"
    files, encoder = find_inputs([large / "in"]), EncoderSettings(tokenizer_path, validation_fraction=0.1)
    for part in (1, 0):
        assert not list(output.glob("*/manifest.json"))
        tokenize_files(files, output, encoder, part=part, parts=2, shard_size=200_000)
    assert contents(output) == contents(large / "whole")


def make_parts(large: Path, tokenizer_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> tuple:
    """Complete parts that are not merged; and the arguments of merge_parts."""
    files, encoder = find_inputs([large / "in"]), EncoderSettings(tokenizer_path, validation_fraction=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_corpus, "_merge", lambda *_: "not yet")
        for part in range(3):
            assert isinstance(tokenize_files(files, output, encoder, part=part, parts=3, shard_size=200_000), str)
    return files, output, encoder


@pytest.mark.slow
def test_stopped_merge_continues(large, tokenizer_path, tmp_path, monkeypatch):
    arguments = make_parts(large, tokenizer_path, tmp_path / "out", monkeypatch)
    real, written, stops = ShardWriter.append, [], [10, 14]

    def interrupted(self, tokens, *arguments):
        real(self, tokens, *arguments)
        written.append(len(tokens))
        if len(written) in stops:
            raise KeyboardInterrupt

    monkeypatch.setattr(ShardWriter, "append", interrupted)
    for _ in stops:
        with pytest.raises(KeyboardInterrupt):
            merge_parts(*arguments, shard_size=200_000)
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "train").glob("*.shard")}
    assert len(finished) > 5
    assert isinstance(merge_parts(*arguments, shard_size=200_000), Summary)
    assert all(path.stat().st_mtime_ns == modified for path, modified in finished.items())
    manifests = [read_manifest(tmp_path / "out" / split) for split in ("train", "validation")]
    again = len(stops) * len(manifests) * 201_000  # at most the unfinished shard of each split is written again
    assert sum(written) < sum(manifest["num_tokens"] for manifest in manifests) + again
    assert contents(tmp_path / "out") == contents(large / "whole")


SLEEPING = """import sys, time
sys.path[0] = sys.argv[1]
from preprocessing import resumable_output, tokenize_corpus
def slow(folder, splits, read=resumable_output.read_slices):
    yield from read(folder, splits)
    print("in the middle", flush=True)
    time.sleep(600)
resumable_output.read_slices = slow
tokenize_corpus.main(sys.argv[2:])"""


@pytest.mark.slow
def test_merge_is_taken_over_from_a_killed_process(large, tokenizer_path, tmp_path, monkeypatch):
    """It waits while the first is at work, and goes on when that is killed."""
    make_parts(large, tokenizer_path, tmp_path / "out", monkeypatch)
    merge = command(large / "in", tmp_path / "out", tokenizer_path, "--merge")
    arguments = [sys.executable, "-c", SLEEPING, str(ROOT), *merge[2:]]
    first = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "in the middle\n"
    second = subprocess.Popen(merge, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(2)
    assert second.poll() is None
    first.kill()
    first.communicate()
    printed, error = second.communicate(timeout=60)
    assert second.returncode == 0, error
    assert "train: " in printed
    assert contents(tmp_path / "out") == contents(large / "whole")


@pytest.mark.slow
def test_merge_memory_does_not_grow_with_the_corpus(tokenizer_path, tmp_path):
    """Documents of all sizes, one of them most of the corpus."""
    block, peaks = "\n\n".join(make_texts(2000, seed=4)), []
    for repeat in (4, 16):
        (tmp_path / "in").mkdir(exist_ok=True)
        for name, text in (("a", block), ("b", block.replace("\n\n", "\n"))):
            (tmp_path / "in" / f"{name}.txt").write_text(text * repeat)
        arguments = command(tmp_path / "in", tmp_path / f"out{repeat}", tokenizer_path, "--shard_size", 10**9)
        assert tokenize_corpus.main([*arguments[2:], "--parts", "2", "--part", "1"]) == 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenize_corpus, "_merge", lambda *_: "not yet")
            assert tokenize_corpus.main([*arguments[2:], "--parts", "2", "--part", "0"]) == 0
        code = [sys.executable, "-c", PEAK, str(ROOT), *arguments[2:], "--merge"]
        done = subprocess.run(code, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-2]))
    assert peaks[1] < peaks[0] + 9_000  # KiB
    assert peaks[1] < 300_000
