"""Overlap of a corpus with evaluation data: exactly the n-grams that are shared, however they are written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_runs import refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from data.shard_paths import resolve_shards
from data.shards import open_shard, read_manifest, tokenizer_hash, write_manifest, write_shard
from preprocessing import overlap
from preprocessing.overlap import EvaluationNgrams, Item, split_words
from preprocessing.tokenizer import load_tokenizer, vocabulary_size
from preprocessing.train_tokenizer import train_tokenizer

PLANTED = "The quick brown fox jumps over the lazy dog, and then it sleeps until noon."  # 15 words
OTHER = " ".join(f"filler{letter}" for letter in "abcdefghijklmnopqrst")


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(iter([PLANTED, OTHER] * 3), 300, 2).save(str(path))
    return path


def make_shards(folder: Path, tokenizer_path: Path, *shards: Sequence[str]) -> Path:
    folder.mkdir()
    tokenizer, digest = load_tokenizer(tokenizer_path), tokenizer_hash(tokenizer_path)
    size = vocabulary_size(tokenizer)
    files = []
    for number, texts in enumerate(shards):
        documents = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
        files.append(write_shard(folder / f"{number}.shard", documents, digest, size))
    write_manifest(folder, files, digest, size, {})
    (folder / "tokenizer.json").write_bytes(tokenizer_path.read_bytes())
    return folder


def run(*arguments: object) -> int:
    return overlap.main([str(argument) for argument in arguments])


def listed(corpus: Path, *arguments: object) -> list[dict]:
    output = corpus.parent / "overlap.jsonl"
    assert run(corpus, "--against", *arguments, "--output", output) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


def ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    words = split_words(text)
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]


TEXTS = st.lists(st.sampled_from(["a", "A,", "b", "c.", "-"]), max_size=12).map(" ".join)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.lists(TEXTS, max_size=3), max_size=4), st.lists(TEXTS, max_size=4), st.integers(1, 5))
def test_matches_are_those_of_the_definition(items, documents, n):
    evaluation = EvaluationNgrams((Item("file", number, texts) for number, texts in enumerate(items)), n)
    of_items = [{gram for text in texts for gram in ngrams(text, n)} for texts in items]
    every = set().union(*of_items)
    for document in documents:
        matching = [gram in every for gram in ngrams(document, n)]
        match = evaluation.match(split_words(document))
        assert (match.number if match else 0) == sum(matching)
        if match:
            runs = "".join("x" if each else " " for each in matching).split()
            longest = len(max(runs, key=len))
            begin = "".join("x" if each else " " for each in matching).index("x" * longest)
            assert match.text == " ".join(split_words(document)[begin : begin + longest + n - 1])
            assert ngrams(document, n)[begin] in of_items[match.item]
    corpus = {gram for document in documents for gram in ngrams(document, n)}
    touched, usable = sum(bool(grams & corpus) for grams in of_items), sum(map(bool, of_items))
    assert evaluation.items_by_file() == ({"file": (touched, usable, len(items))} if items else {})


def test_planted_overlaps_are_listed(tokenizer_path, tmp_path, capsys):
    shouted = f"Before. {PLANTED.upper().replace(' ', ' -- ')} After"
    short_of_one = " ".join(split_words(PLANTED)[:12])
    corpus = make_shards(tmp_path / "corpus", tokenizer_path, [OTHER, shouted], [short_of_one, "", f"x {PLANTED}"])
    lines = [{"id": 1, "text": "too short"}, {"choices": [{"label": PLANTED}], "text": "words"}]
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    place = {"file": str(tmp_path / "task.jsonl"), "line": 2, "text": " ".join(split_words(PLANTED))}
    assert listed(corpus, tmp_path / "task.jsonl") == [
        {"shard": str(corpus / "0.shard"), "document": 1, "ngrams": 3, "of": 5, **place},
        {"shard": str(corpus / "1.shard"), "document": 2, "ngrams": 3, "of": 4, **place},
    ]
    report = capsys.readouterr().out
    assert "2 of 5 documents (40%) overlap" in report
    assert "6 of 17 n-grams (35.3%) stand in the evaluation data" in report
    assert f"{place['file']}: 1 of 2 items (50%) in the corpus; 1 too short to be found" in report
    assert f"{corpus / '0.shard'}, document 1: 3 of 5 n-grams" in report


def test_held_out_part_and_folders_of_texts(tokenizer_path, tmp_path):
    corpus = make_shards(tmp_path / "corpus", tokenizer_path, [OTHER, PLANTED])
    held_out = make_shards(tmp_path / "held_out", tokenizer_path, ["nothing", f"And {PLANTED}"])
    (found,) = listed(corpus, held_out)
    assert (found["document"], found["file"], found["line"]) == (1, str(held_out / "0.shard"), 1)
    texts = tmp_path / "texts"
    (texts / "below").mkdir(parents=True)
    (texts / "below" / "items.tsv").write_text(f"label\tfirst\n\n7\t{OTHER}\n")
    (texts / "notes.md").write_text(PLANTED)
    (found,) = listed(corpus, texts)
    assert (found["document"], found["file"], found["line"]) == (0, str(texts / "below" / "items.tsv"), 3)


def test_ngrams_do_not_reach_over_texts(tokenizer_path, tmp_path):
    corpus = make_shards(tmp_path / "corpus", tokenizer_path, [PLANTED, OTHER])
    half, rest = PLANTED[:25], PLANTED[25:]
    (tmp_path / "halves.jsonl").write_text(json.dumps([half, rest]) + "\n")
    (tmp_path / "halves.tsv").write_text(f"{half}\t{rest}\n")
    (tmp_path / "halves.txt").write_text(f"{half}\n{rest}\n")
    assert listed(corpus, *(tmp_path / f"halves.{suffix}" for suffix in ("jsonl", "tsv", "txt"))) == []
    assert [each["document"] for each in listed(corpus, tmp_path / "halves.jsonl", "--ngram", 7)] == [0]


def test_collision_of_hashes_is_no_match(monkeypatch):
    monkeypatch.setattr(overlap, "_hash_ngrams", lambda words, n: np.zeros(max(len(words) - n + 1, 0), np.uint64))
    evaluation = EvaluationNgrams([Item("file", 1, ["one two three"])], 3)
    assert evaluation.match(["four", "one", "two", "six"]) is None
    found = evaluation.match(["four", "one", "two", "three", "six"])
    assert found == (1, "one two three", 0)


def test_words_are_normalised():
    assert split_words("Cafe\u0301 CAFÉ, \ufb01n_e") == ["café", "café", "fin", "e"]
    assert split_words("日本のGPU 42") == ["日", "本", "の", "gpu", "42"]


def test_text_of_the_listing_is_bounded(tokenizer_path, tmp_path):
    long = " ".join(f"w{number}" for number in range(500))
    corpus = make_shards(tmp_path / "corpus", tokenizer_path, [long])
    (tmp_path / "long.txt").write_text(long + "\n")
    (found,) = listed(corpus, tmp_path / "long.txt")
    assert found["ngrams"] == found["of"] == 488
    assert found["text"] == " ".join(f"w{number}" for number in range(100))


def test_documented_lines_leave_the_documents_out(tokenizer_path, tmp_path, monkeypatch):
    """The lines of preprocessing/README.md, run as they stand there."""
    page = (Path(overlap.__file__).parent / "README.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    (code,) = (block for block in blocks if "overlap.jsonl" in block)
    monkeypatch.chdir(tmp_path)
    Path("shards").mkdir()
    make_shards(Path("shards/train"), tokenizer_path, [OTHER, PLANTED], ["", PLANTED, "kept"])
    Path("task.txt").write_text(PLANTED)
    assert run("shards/train", "--against", "task.txt", "--output", "overlap.jsonl") == 0
    exec(compile(code, "README.md", "exec"), {})
    tokenizer = load_tokenizer("clean/tokenizer.json")
    shards = [open_shard(path) for path in resolve_shards("clean")]
    documents = [shard.document(number).tolist() for shard in shards for number in range(shard.num_documents)]
    assert tokenizer.decode_batch(documents) == [OTHER, "", "kept"]
    assert read_manifest("clean")["tokenizer_hash"] == tokenizer_hash(tokenizer_path)


def test_errors_name_the_file(tokenizer_path, tmp_path, capsys):
    corpus = make_shards(tmp_path / "corpus", tokenizer_path, [PLANTED])
    for name, content, said in (
        ("torn.jsonl", b'{"a": 1}\n{"a": \n', "torn.jsonl, line 2, is not valid JSON"),
        ("latin.txt", b"caf\xe9\n", "latin.txt, line 1, is not valid UTF-8"),
        ("table.xlsx", b"", "table.xlsx is neither a shard nor one of .jsonl, .txt, .tsv"),
    ):
        (tmp_path / name).write_bytes(content)
        assert said in refusal(capsys, run, corpus, "--against", tmp_path / name)
    (tmp_path / "task.txt").write_text(PLANTED)
    for path in ("no.txt", "no_folder"):
        assert path in refusal(capsys, run, corpus, "--against", tmp_path / path)
    assert "no_corpus" in refusal(capsys, run, tmp_path / "no_corpus", "--against", tmp_path / "task.txt")
    assert "0.shard is in SHARDS and in --against" in refusal(capsys, run, corpus, "--against", corpus)
    output = ("--output", tmp_path / "none" / "overlap.jsonl")
    assert "--output" in refusal(capsys, run, corpus, "--against", tmp_path / "task.txt", *output)
    (corpus / "tokenizer.json").unlink()
    assert "as --tokenizer_path" in refusal(capsys, run, corpus, "--against", tmp_path / "task.txt")
    assert len(listed(corpus, tmp_path / "task.txt", "--tokenizer_path", tokenizer_path)) == 1
