"""tokenize_corpus in parts: any number of them, in any order, gives the bytes of one process; and what is refused."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from helpers.tiny_corpora import contents, make_texts, run, tokenize
from hypothesis import given, settings
from hypothesis import strategies as st
from test_preprocessing_refused import refused

from data.shards import read_manifest
from data.wording import ranks_text
from preprocessing import tokenize_corpus, tokenize_pool
from preprocessing.inputs import InputFile, files_of_part, find_inputs
from preprocessing.resumable_output import OutputFolder
from preprocessing.tokenize_corpus import Summary, merge_parts, tokenize_files
from preprocessing.tokenize_pool import EncoderSettings
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
def flags(corpus, tokenizer_path, tmp_path):
    return ["--input", corpus, "--output", tmp_path / "out", "--tokenizer_path", tokenizer_path, "--shard_size", 5000]


# The files of a part


@settings(max_examples=200)
@given(sizes=st.lists(st.integers(0, 1000), max_size=30), count=st.integers(1, 12))
def test_files_of_parts_are_neighbours_and_of_about_equal_size(sizes, count):
    files = [InputFile(Path(str(n)), str(n), "text", "", size, 0) for n, size in enumerate(sizes)]
    parts = [files_of_part(files, part, count) for part in range(count)]
    assert [file for part in parts for file in part] == files
    for part in parts:
        assert sum(file.size for file in part) <= sum(sizes) / count + max(sizes, default=0)
    if len(set(sizes)) == 1 and sizes[0] and len(sizes) % count == 0:
        assert {len(part) for part in parts} == {len(sizes) // count}


def test_missing_parts_are_named_as_sbatch_takes_them():
    found = [ranks_text(numbers, ",") for numbers in ([3], [0, 1, 2, 5], [1, 3, 4, 9])]
    assert found == ["3", "0-2,5", "1,3-4,9"]


# The same bytes


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.0, 0.2])
def test_output_is_the_same_for_any_number_of_parts_in_any_order(
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
    monkeypatch.setattr(tokenize_pool.DocumentEncoder, "encode", without_digits(tokenize_pool.DocumentEncoder.encode))
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
    assert "skipped 3 malformed lines; add --skip_bad_lines" in refused(capsys, *flags, "--part", 0)
    assert run(*flags, "--merge", "--skip_bad_lines") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


# At the same time


def test_parts_that_end_at_once_are_merged_once(corpus, tokenizer_path, tmp_path, monkeypatch):
    """All parts are complete before the first is recorded; and afterwards everybody tries to merge."""
    tokenize(corpus, tmp_path / "whole", tokenizer_path, shard_size=5000)
    files, encoder = find_inputs([corpus]), EncoderSettings(tokenizer_path)
    barrier, real = threading.Barrier(4), OutputFolder.record
    monkeypatch.setattr(OutputFolder, "record", lambda self, part: (barrier.wait(60), real(self, part))[1])
    with ThreadPoolExecutor(4) as pool:
        for attempt in range(3):
            output = tmp_path / str(attempt)
            options = {"parts": 4, "shard_size": 5000}
            jobs = [pool.submit(tokenize_files, files, output, encoder, part=n, **options) for n in range(4)]
            results = [job.result(100) for job in jobs]
            assert sum(isinstance(result, Summary) for result in results) == 1
            assert contents(output) == contents(tmp_path / "whole")
        monkeypatch.setattr(OutputFolder, "record", real)
        with monkeypatch.context() as patch:
            patch.setattr(tokenize_corpus, "_merge", lambda *_: "not yet")
            for part in range(4):
                tokenize_files(files, tmp_path / "out", encoder, part=part, parts=4, shard_size=5000)
        jobs = [pool.submit(merge_parts, files, tmp_path / "out", encoder, shard_size=5000) for _ in range(4)]
        results = [job.result(100) for job in jobs]
    assert sum(isinstance(result, Summary) for result in results) == 1
    assert sum("is complete already" in str(result) for result in results) == 3
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_complete_part_is_not_made_again(corpus, flags, tokenizer_path, tmp_path, monkeypatch, capsys):
    tokenize(corpus, tmp_path / "whole", tokenizer_path, shard_size=5000)
    for part in (1, 2):
        assert run(*flags, "--part", part, "--parts", 3) == 0
    made = contents(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_pool.ChunkEncoder, "__call__", lambda self, chunk: pytest.fail("encoded again"))
        assert run(*flags, "--part", 1, "--parts", 3) == 0
    assert "is complete, as are 2 of 3 parts" in capsys.readouterr().out.splitlines()[-1]
    assert contents(tmp_path / "out") == made
    assert run(*flags, "--part", 0, "--parts", 3) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_part_is_locked_by_one_process(flags, tmp_path, capsys):
    assert run(*flags, "--part", 0, "--parts", 2) == 0
    descriptor = os.open(tmp_path / "out" / ".parts" / "part_00001.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert "--part 1 of --output" in refused(capsys, *flags, "--part", 1, "--parts", 2)
    os.close(descriptor)
    assert run(*flags, "--part", 1, "--parts", 2) == 0


def test_merge_needs_file_locks_or_the_flag(corpus, flags, tokenizer_path, tmp_path, monkeypatch, capsys):
    def none(descriptor, operation):
        raise OSError(95, "Operation not supported")

    tokenize(corpus, tmp_path / "whole", tokenizer_path, shard_size=5000)
    monkeypatch.setattr(fcntl, "flock", none)
    for part in range(2):
        assert run(*flags, "--part", part, "--parts", 2) == 0
    assert "has no locks, so run the same with --merge instead of --part" in capsys.readouterr().out
    assert run(*flags, "--merge") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


# What is refused


def test_contradicting_flags_are_refused(flags, tmp_path, capsys):
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


def test_parts_with_other_inputs_or_options_are_refused(corpus, flags, tmp_path, capsys):
    shutil.copytree(corpus, tmp_path / "in")
    flags[1] = tmp_path / "in"
    other = tmp_path / "other.json"
    train_tokenizer(iter(make_texts(300)), 330, 2).save(str(other))
    assert run(*flags, "--part", 1, "--parts", 3) == 0
    made = contents(tmp_path / "out")
    place = ["--part", 0, "--parts", 3]
    for change, sentence in (
        (["--part", 0, "--parts", 4], "differs in --parts (3 there, 4 here)"),
        ([*place, "--shard_size", 6000], "unfinished work that differs in --shard_size (5000 there, 6000 here); give"),
        ([*place, "--shard_size", 6000], "give the same to continue it, choose another folder, or remove"),
        ([*place, "--validation_fraction", "0.1"], "differs in --validation_fraction"),
        ([*place, "--text_field", "body"], "differs in --text_field"),
        ([*place, "--tokenizer_path", other], "differs in --tokenizer_path;"),
        ([*place, "--input", corpus], "differs in --input;"),
        (["--merge", "--parts", 2], "differs in --parts (3 there, 2 here)"),
        (["--merge"], "lacks 2 of its 3 parts, or they are unfinished; before --merge, run again --parts 3 with"),
        (["--merge"], "with --part 0,2"),
        ([], "--parts (3 there, 1 here); give the same"),
        (["--overwrite"], "holds 3 parts; run all of them to their end, choose another folder, or remove"),
    ):
        assert sentence in refused(capsys, *flags, *change)
        assert contents(tmp_path / "out") == made
    with open(tmp_path / "in" / "g.txt", "a") as file:
        file.write("more")
    assert "differs in --input;" in refused(capsys, *flags, *place)


def test_output_folder_with_other_content_is_left_alone(corpus, flags, tmp_path, capsys, monkeypatch):
    real = tokenize_pool.ChunkEncoder.__call__

    def interrupted(self, chunk):
        if "c.txt" in chunk.path:
            raise KeyboardInterrupt
        return real(self, chunk)

    place, output = ["--part", 0, "--parts", 2], tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_pool.ChunkEncoder, "__call__", interrupted)
        assert run(*flags) == 130
    before = contents(output)
    error = refused(capsys, *flags, *place)
    assert "unfinished work that differs in --parts (1 there, 2 here); give the same to continue it, choose" in error
    assert f"remove {output} by hand to start again" in error
    assert contents(output) == before
    assert run(*flags) == 0
    before = contents(output)
    assert run(*flags, *place) == 0  # it is what the parts would have made
    assert run(*flags, "--merge") == 0
    assert "differs in --shard_size" in refused(capsys, *flags, *place, "--shard_size", 1)
    assert contents(output) == before
    (output / "thesis.txt").write_text("years of work")
    assert "holds other files, such as thesis.txt" in refused(capsys, *flags, *place)
    assert "is a file; give a folder" in refused(capsys, *flags, *place, "--output", output / "thesis.txt")


def test_damaged_slices_are_named_and_made_again(corpus, flags, tokenizer_path, tmp_path, monkeypatch, capsys):
    tokenize(corpus, tmp_path / "whole", tokenizer_path, shard_size=5000)
    with monkeypatch.context() as patch:
        patch.setattr(tokenize_corpus, "_merge", lambda *_: "not yet")
        for part in range(2):
            assert run(*flags, "--part", part, "--parts", 2) == 0
    folder = tmp_path / "out" / ".parts" / "part_00001"
    path = folder / "slice_00000000.npz"
    content = path.read_bytes()
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    for damaged in (content[:-8], bytes(changed), b""):
        path.write_bytes(damaged)
        error = refused(capsys, *flags, "--merge")
        assert f"{path} is damaged" in error
        assert f"remove {folder} by hand and make that part again" in error
    shutil.rmtree(folder)
    assert "with --part 1" in refused(capsys, *flags, "--part", 0, "--parts", 2)
    assert run(*flags, "--part", 1, "--parts", 2) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    (tmp_path / "out" / "manifest.json").unlink()  # as good as never made: everything begins again
    (tmp_path / "out" / "journal.json").write_text("{")
    assert "journal.json is damaged; add --overwrite, or remove" in refused(capsys, *flags, "--part", 0, "--parts", 2)
