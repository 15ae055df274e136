"""tokenize_corpus in parts: whatever happens to the processes, they end with the bytes that one would have written."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_preprocessing_interrupted import Crash, crash_at, started
from test_preprocessing_refused import refused
from test_preprocessing_tokenize import PEAK
from tokenizing import ROOT, command, contents, make_texts, run, tokenize

import data.shards
from data.shards import ShardWriter, read_manifest, tokenizer_hash
from preprocessing import encoding, parts, tokenize_corpus
from preprocessing.corpora import InputFile, find_inputs
from preprocessing.encoding import EncoderSettings
from preprocessing.parts import PartsFolder, ranges, share
from preprocessing.tokenize_corpus import Summary, merge_parts, tokenize_part
from preprocessing.tokenizer import load_tokenizer
from preprocessing.train_tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def corpus(corpus):
    """Nine files of all formats and very different sizes, one without text, one a single long document."""
    folder = corpus
    (folder / "e.txt").write_text(" \n\n")
    (folder / "f").mkdir()
    (folder / "f" / "long.txt").write_text("\n".join(make_texts(500, seed=5)))
    rows = pyarrow.table({"text": make_texts(150, seed=6)})
    pyarrow.parquet.write_table(rows, folder / "f" / "rows.parquet")
    (folder / "g.txt").write_text("a few words")
    (folder / "h.jsonl").write_text("".join(json.dumps(text) + "\n" for text in make_texts(50, seed=7)))
    return folder


@pytest.fixture
def small_chunks(small_chunks, monkeypatch):
    """And merged in small blocks."""
    monkeypatch.setattr(parts, "MERGED_TOKENS", 700)


@pytest.fixture
def flags(corpus, tokenizer_path, tmp_path):
    return ["--input", corpus, "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path, "--shard_size", 5000]


# The shares


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(0, 1000), max_size=30), count=st.integers(1, 12))
def test_shares_are_neighbours_and_of_about_equal_size(sizes, count):
    files = [InputFile(Path(str(n)), str(n), "text", "", size, 0) for n, size in enumerate(sizes)]
    shares = [share(files, part, count) for part in range(count)]
    assert [file for part in shares for file in part] == files
    for part in shares:
        assert sum(file.size for file in part) <= sum(sizes) / count + max(sizes, default=0)
    if len(set(sizes)) == 1 and sizes[0] and len(sizes) % count == 0:
        assert {len(part) for part in shares} == {len(sizes) // count}


def test_ranges_are_written_as_sbatch_takes_them():
    assert [ranges(numbers) for numbers in ([3], [0, 1, 2, 5], [1, 3, 4, 9])] == ["3", "0-2,5", "1,3-4,9"]


# The same bytes


@pytest.mark.parametrize("fraction", [0.0, 0.2])
def test_same_bytes_for_any_number_of_parts_in_any_order(
    corpus, tokenizer_path, tmp_path, flags, small_chunks, fraction, capsys
):
    tokenize(corpus, tmp_path / "whole", tokenizer_path, fraction, shard_size=5000)
    expected = contents(tmp_path / "whole")
    assert sum(name.endswith(".shard") for name in expected) > 10
    flags += ["--validation_fraction", fraction]
    run(*flags[:3], tmp_path / "one", *flags[4:])
    words_of_one = capsys.readouterr().out.split(" in ")[0]
    for count in (1, 2, 3, 5, 14):
        for part in random.Random(count).sample(range(count), count):
            assert not (tmp_path / "out" / "manifest.json").exists()
            assert run(*flags, "--part", part, "--parts", count) == 0
        assert contents(tmp_path / "out") == expected
        assert words_of_one in capsys.readouterr().out  # the last part ends with the totals of all
        assert not (tmp_path / "out" / ".parts").exists()
        assert run(*flags, "--part", 0, "--parts", count) == 0
        assert "is complete already, from the same inputs and options" in capsys.readouterr().out
        shutil.rmtree(tmp_path / "out")


def test_cut_documents_without_tokens(tokenizer_path, tmp_path, small_chunks, monkeypatch):
    """A tokenizer may know nothing of a long text: it is dropped, and so are its words."""
    monkeypatch.setattr(encoding.DocumentEncoder, "encode", without_digits(encoding.DocumentEncoder.encode))
    (tmp_path / "in").mkdir()
    nothing = "\n".join(["12 34 56"] * 1000)
    for number, text in enumerate(("first", nothing, f"second\n\n{nothing}\n\nthird", nothing)):
        (tmp_path / "in" / f"{number}.txt").write_text(text)
    tokenize(tmp_path / "in", tmp_path / "whole", tokenizer_path)
    manifest = read_manifest(tmp_path / "whole")
    assert (manifest["num_documents"], manifest["num_words"]) == (3, 3)
    assert manifest["created_by"]["empty_documents"] == 3
    flags = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    for part in range(3):
        assert run(*flags, "--part", part, "--parts", 3) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def without_digits(encode):
    return lambda self, texts: encode(self, ["".join(c for c in text if c.isalpha()) for text in texts])


def test_parts_without_any_text(tokenizer_path, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for number in range(2):
        (tmp_path / "in" / f"{number}.txt").write_text("\n\n")
    flags = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    assert run(*flags, "--part", 1, "--parts", 2) == 0
    assert "--input holds no text in 2 files" in refused(capsys, *flags, "--part", 0, "--parts", 2)
    assert not list((tmp_path / "out").iterdir())


def test_malformed_lines_are_counted_over_all_parts(tokenizer_path, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.jsonl").write_text(("nonsense\n" * number + '"text"').ljust(100))
    tokenize(tmp_path / "in", tmp_path / "whole", tokenizer_path, skip=True)
    flags = ["--input", tmp_path / "in", "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path]
    flags += ["--parts", 3]
    assert "1.jsonl, line 1: not valid JSON" in refused(capsys, *flags, "--part", 1)
    for part in (1, 2):
        assert run(*flags, "--part", part, "--skip_bad_lines") == 0
    assert "passed over 3 malformed lines; add --skip_bad_lines" in refused(capsys, *flags, "--part", 0)
    assert run(*flags, "--merge", "--skip_bad_lines") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


# At the same time


def test_parts_side_by_side(large, tokenizer_path, tmp_path):
    output = tmp_path / "out"
    arguments = [command(large / "in", output, tokenizer_path, "--parts", 3, "--part", part) for part in range(3)]
    arguments[1] += ["--workers", "2"]
    running = [subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for one in arguments]
    printed = [process.communicate(timeout=100) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], printed
    assert sum("train: " in out for out, _ in printed) == 1
    assert sum("whoever completes the last merges them" in out for out, _ in printed) == 2
    assert contents(output) == contents(large / "whole")


def test_ending_at_the_same_moment(corpus, tokenizer_path, tmp_path, monkeypatch):
    """All parts are complete before the first is recorded; and afterwards everybody tries to merge."""
    tokenize(corpus, tmp_path / "whole", tokenizer_path, shard_size=5000)
    files, encoder = find_inputs([corpus]), EncoderSettings(tokenizer_path)
    together, real = threading.Barrier(4), PartsFolder.record
    monkeypatch.setattr(PartsFolder, "record", lambda self, part: (together.wait(60), real(self, part))[1])
    with ThreadPoolExecutor(4) as pool:
        for attempt in range(3):
            output = tmp_path / str(attempt)
            jobs = [pool.submit(tokenize_part, files, output, encoder, n, 4, shard_size=5000) for n in range(4)]
            results = [job.result(100) for job in jobs]
            assert sum(isinstance(result, Summary) for result in results) == 1
            assert contents(output) == contents(tmp_path / "whole")
        monkeypatch.setattr(PartsFolder, "record", real)
        monkeypatch.setattr(tokenize_corpus, "_merge", lambda folder, seconds: "not yet")
        for part in range(4):
            tokenize_part(files, tmp_path / "out", encoder, part, 4, shard_size=5000)
        monkeypatch.undo()
        jobs = [pool.submit(merge_parts, files, tmp_path / "out", encoder, shard_size=5000) for _ in range(4)]
        results = [job.result(100) for job in jobs]
    assert sum(isinstance(result, Summary) for result in results) == 1
    assert sum("is complete already" in str(result) for result in results) == 3
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_part_that_runs_again_is_not_made_again(corpus, flags, tokenizer_path, tmp_path, monkeypatch, capsys):
    tokenize(corpus, tmp_path / "whole", tokenizer_path, shard_size=5000)
    for part in (1, 2):
        assert run(*flags, "--part", part, "--parts", 3) == 0
    made = contents(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(encoding.ChunkEncoder, "__call__", lambda self, chunk: pytest.fail("encoded again"))
        assert run(*flags, "--part", 1, "--parts", 3) == 0
    assert "is complete, as are 2 of 3 parts" in capsys.readouterr().out.splitlines()[-1]
    assert contents(tmp_path / "out") == made
    assert run(*flags, "--part", 0, "--parts", 3) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_part_has_one_process(flags, tmp_path, capsys):
    assert run(*flags, "--part", 0, "--parts", 2) == 0
    descriptor = os.open(tmp_path / "out" / ".parts" / "part_00001.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert "--part 1 of --output" in refused(capsys, *flags, "--part", 1, "--parts", 2)
    os.close(descriptor)
    assert run(*flags, "--part", 1, "--parts", 2) == 0


def test_without_locks_nobody_merges_unasked(corpus, flags, tokenizer_path, tmp_path, monkeypatch, capsys):
    def none(descriptor, operation):
        raise OSError(95, "Operation not supported")

    tokenize(corpus, tmp_path / "whole", tokenizer_path, shard_size=5000)
    monkeypatch.setattr(fcntl, "flock", none)
    for part in range(2):
        assert run(*flags, "--part", part, "--parts", 2) == 0
    assert "has no locks, so run the same with --merge instead of --part" in capsys.readouterr().out
    assert run(*flags, "--merge") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


# Interruptions


def test_a_crash_at_any_moment_changes_nothing(tokenizer_path, tmp_path, monkeypatch, small_chunks):
    """Parts and merge, continued after a death at each single fsync, rename, deletion and note of a complete part."""
    tokenizer, digest = load_tokenizer(tokenizer_path), tokenizer_hash(tokenizer_path)
    for module in (tokenize_corpus, encoding):  # once is enough for some hundred runs
        monkeypatch.setattr(module, "load_tokenizer", lambda path: tokenizer)
    monkeypatch.setattr(tokenize_corpus, "tokenizer_hash", lambda path: digest)
    monkeypatch.setattr(data.shards.os, "fsync", lambda descriptor: None)  # slow, and nothing here loses its power
    (tmp_path / "in").mkdir()
    for number, texts in enumerate((make_texts(18), ["\n".join(make_texts(30))])):
        (tmp_path / "in" / f"{number}.txt").write_text("\n\n".join(texts))
    files, encoder = find_inputs([tmp_path / "in"]), EncoderSettings(tokenizer_path, validation_fraction=0.4)

    def attempt(output: Path, first: int) -> None:
        for part in (first, 1 - first):
            tokenize_part(files, output, encoder, part, 2, shard_size=2000, journal_seconds=0)

    tokenize(tmp_path / "in", tmp_path / "whole", tokenizer_path, 0.4, shard_size=2000)
    expected = contents(tmp_path / "whole")
    number, output = 0, tmp_path / "out"
    while True:
        with monkeypatch.context() as patch:
            crash_at(patch, number)
            patch.setattr(shutil, "rmtree", lambda path, ignore_errors: remove_one_by_one(path))
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
    assert number > 250


def remove_one_by_one(folder: Path) -> None:
    """rmtree, so that crash_at can stop it in the middle."""
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGUSR1, 143)])
def test_a_part_that_is_stopped(large, tokenizer_path, tmp_path, number, code):
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
        tokenize_part(files, output, encoder, part, 2, shard_size=200_000)
    assert contents(output) == contents(large / "whole")


def make_parts(large: Path, tokenizer_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> tuple:
    """Complete parts that are not merged; and the arguments of merge_parts."""
    files, encoder = find_inputs([large / "in"]), EncoderSettings(tokenizer_path, validation_fraction=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_corpus, "_merge", lambda folder, seconds: "not yet")
        for part in range(3):
            assert isinstance(tokenize_part(files, output, encoder, part, 3, shard_size=200_000), str)
    return files, output, encoder


def test_a_merge_that_is_stopped_goes_on(large, tokenizer_path, tmp_path, monkeypatch):
    arguments = make_parts(large, tokenizer_path, tmp_path / "out", monkeypatch)
    monkeypatch.setattr(parts, "MERGED_TOKENS", 10_000)
    real, written, stops = ShardWriter.append, [], [80, 150]

    def interrupted(self, tokens, lengths=None):
        real(self, tokens, lengths)
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
    assert sum(written) < sum(manifest["num_tokens"] for manifest in manifests) + 500_000  # little was written twice
    assert contents(tmp_path / "out") == contents(large / "whole")


SLEEPING = """import sys, time
sys.path[0] = sys.argv[1]
from preprocessing import parts, tokenize_corpus
def slow(folder, sources, copy=parts._copy):
    for number, step in enumerate(copy(folder, sources)):
        yield
        if number == 2:
            print("in the middle", flush=True)
            time.sleep(600)
parts._copy, parts.MERGED_TOKENS = slow, 100_000
tokenize_corpus.main(sys.argv[2:])"""


def test_another_process_takes_over_a_merge(large, tokenizer_path, tmp_path, monkeypatch):
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


def test_memory_of_a_merge_does_not_grow_with_the_corpus(tokenizer_path, tmp_path):
    """Documents of all sizes, one of them most of the corpus."""
    block, peaks = "\n\n".join(make_texts(2000, seed=4)), []
    for repeat in (4, 16):
        (tmp_path / "in").mkdir(exist_ok=True)
        for name, text in (("a", block), ("b", block.replace("\n\n", "\n"))):
            (tmp_path / "in" / f"{name}.txt").write_text(text * repeat)
        arguments = command(tmp_path / "in", tmp_path / f"out{repeat}", tokenizer_path, "--shard_size", 10**9)
        assert tokenize_corpus.main([*arguments[2:], "--parts", "2", "--part", "1"]) == 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenize_corpus, "_merge", lambda folder, seconds: "not yet")
            assert tokenize_corpus.main([*arguments[2:], "--parts", "2", "--part", "0"]) == 0
        code = [sys.executable, "-c", PEAK, str(ROOT), *arguments[2:], "--merge"]
        done = subprocess.run(code, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-2]))
    assert peaks[1] < peaks[0] + 9_000  # KiB
    assert peaks[1] < 300_000


# What is refused


def test_flags_that_do_not_go_together(flags, tmp_path, capsys):
    for change, sentence in (
        (["--part", 3, "--parts", 3], "--part 3 lies outside 0..2, the parts of --parts 3; count parts from 0"),
        (["--part", -1, "--parts", 3], "--part -1 lies outside 0..2"),
        (["--part", 1], "--part 1 lies outside 0..0, the parts of --parts 1; say how many there are with --parts"),
        (["--parts", 3], "--parts 3 needs --part, 0 to 2"),
        (["--part", 0, "--parts", 3, "--overwrite"], "--overwrite with --parts 3 would remove what other processes"),
        (["--merge", "--overwrite"], "--overwrite with --merge would remove"),
        (["--part", 2, "--parts", 3, "--merge"], "--merge makes no part, so --part 2 has no meaning"),
        (["--merge"], "holds no parts; make them first"),
        (["--merge", "--parts", 3], "holds no parts; make them first"),
    ):
        assert sentence in refused(capsys, *flags, *change)
        assert not (tmp_path / "out").exists()


def test_parts_agree(corpus, flags, tmp_path, capsys):
    shutil.copytree(corpus, tmp_path / "in")
    flags[1] = tmp_path / "in"
    other = tmp_path / "other.json"
    train_tokenizer(iter(make_texts(300)), 330, 2).save(str(other))
    assert run(*flags, "--part", 1, "--parts", 3) == 0
    made = contents(tmp_path / "out")
    place = ["--part", 0, "--parts", 3]
    for change, sentence in (
        (["--part", 0, "--parts", 4], "--parts differs from what the parts in"),
        ([*place, "--shard_size", 6000], "--shard_size differs from what the parts in"),
        ([*place, "--shard_size", 6000], "are made with (5000 there, 6000 here); give all parts the same"),
        ([*place, "--validation_fraction", "0.1"], "--validation_fraction differs"),
        ([*place, "--text_field", "body"], "--text_field differs"),
        ([*place, "--tokenizer_path", other], "--tokenizer_path differs"),
        ([*place, "--input", corpus], "--input differs"),
        (["--merge", "--parts", 2], "--parts differs"),
        (["--merge"], "lacks 2 of its 3 parts, or they are unfinished; before --merge, run again --parts 3 with"),
        (["--merge"], "with --part 0,2"),
        ([], "holds parts of a job with --parts; run that to its end"),
        (["--overwrite"], "holds parts of a job with --parts; run that to its end"),
    ):
        assert sentence in refused(capsys, *flags, *change)
        assert contents(tmp_path / "out") == made
    with open(tmp_path / "in" / "g.txt", "a") as file:
        file.write("more")
    assert "--input differs" in refused(capsys, *flags, *place)


def test_other_content_of_the_output_folder_is_safe(corpus, flags, tmp_path, capsys, monkeypatch):
    def interrupted(self, chunk):
        raise KeyboardInterrupt

    place, output = ["--part", 0, "--parts", 2], tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(encoding.ChunkEncoder, "__call__", interrupted)
        assert run(*flags) == 130
    before = contents(output)
    error = refused(capsys, *flags, *place)
    assert "unfinished work that differs in parts; run that to its end, choose another folder, or remove" in error
    assert f"remove {output} by hand to start again" in error
    assert contents(output) == before
    assert run(*flags) == 0
    before = contents(output)
    assert run(*flags, *place) == 0  # it is what the parts would have made
    assert run(*flags, "--merge") == 0
    assert "differs in shard_size" in refused(capsys, *flags, *place, "--shard_size", 1)
    assert contents(output) == before
    (output / "thesis.txt").write_text("years of work")
    assert "holds other files, such as thesis.txt" in refused(capsys, *flags, *place)
    assert "is a file; give a folder" in refused(capsys, *flags, *place, "--output", output / "thesis.txt")


def test_damaged_parts_are_noticed_and_can_be_made_again(corpus, flags, tokenizer_path, tmp_path, monkeypatch, capsys):
    tokenize(corpus, tmp_path / "whole", tokenizer_path, shard_size=5000)
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_corpus, "_merge", lambda folder, seconds: "not yet")
        for part in range(2):
            assert run(*flags, "--part", part, "--parts", 2) == 0
    folder = tmp_path / "out" / ".parts" / "part_00001"
    content = (folder / "document_words").read_bytes()
    (folder / "document_words").write_bytes(content[:-8])
    error = refused(capsys, *flags, "--merge")
    assert f"document_words has {len(content) - 8:,} bytes where" in error
    assert f"remove {folder} by hand and make that part again" in error
    (folder / "document_words").write_bytes(content)
    (folder / "shard_00000.shard").write_bytes(b"")
    assert "shard_00000.shard has 0 bytes" in refused(capsys, *flags, "--merge")
    shutil.rmtree(folder)
    assert "with --part 1" in refused(capsys, *flags, "--part", 0, "--parts", 2)
    assert run(*flags, "--part", 1, "--parts", 2) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    (tmp_path / "out" / "manifest.json").unlink()  # as good as never made: everything begins again
    (tmp_path / "out" / ".parts").mkdir()
    (tmp_path / "out" / ".parts" / "plan.json").write_text("{")
    assert "plan.json is damaged; remove" in refused(capsys, *flags, "--part", 0, "--parts", 2)
