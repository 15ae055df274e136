"""Kinds and forms of tokenizers: the default keeps its bytes, each kind trains and decodes, samples and reports."""

from __future__ import annotations

import hashlib
import json
import random
import unicodedata

import pytest
import torch
from helpers.tiny_corpora import decoded
from helpers.tiny_runs import flags, make_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import train_single_gpu
from evaluation.generation import Sampling, generate, load
from preprocessing import tokenize_corpus
from preprocessing import train_tokenizer as script
from preprocessing.tokenizer import (
    CONTINUED,
    DocumentEncoder,
    TokenizerForm,
    load_tokenizer,
    new_tokenizer,
    special_ids,
    vocabulary_size,
)

KINDS = ("bpe", "wordpiece", "unigram")
WORDS = "the of and don't it's THAT'S naïve café 2024 3.14 e-mail http://x.org/a_b isn’t Größe नमस्ते 你好世界 — … <b>"
TEXT = " ".join(random.Random(0).choices(WORDS.split(), k=4000)) + "\n\n  def f(x):\n\treturn x\r\n" * 20
SYLLABLES = ["an", "the", "ing", "ter", "stra", "ma", "lo", "kü", "東京", "ver", "ed"]
# Unigram takes pieces from different words alone, of which TEXT has few.
MANY_WORDS = " ".join("".join(random.Random(n).choices(SYLLABLES, k=1 + n % 4)) for n in range(1500))
# What is lost where tokenizers are careless: spaces before punctuation, marks of continued words, special strings.
ODD = f" \n\t\r\x0b\xa0\u3000aZé\u0301'’stm0½٣!,.<_>/#{CONTINUED}你🙂\U0001f468\u200d\x00"
TEXTS = st.one_of(st.text(st.sampled_from(ODD), max_size=60), st.text(max_size=40))
# Of the tokenizer.json for TEXT with 360 entries and a least frequency of 2, before there were other kinds.
DEFAULT_SHA256 = "075c9aa42b05e1f4262c3de3162ecb2d0e675584ba2b8201d31c3297c733edef"


def trained(form: TokenizerForm, text: str = TEXT, vocab_size: int = 620) -> Tokenizer:
    tokenizer = script.train_tokenizer(iter([text]), vocab_size, 2, form)
    tokenizer.encode_special_tokens = True
    return tokenizer


def ids_of(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request) -> Tokenizer:
    return trained(TokenizerForm(request.param), TEXT + MANY_WORDS)


def run(*arguments: object) -> int:
    return script.main([str(argument) for argument in arguments])


def test_default_tokenizer_keeps_its_bytes(tmp_path):
    content = script.train_tokenizer(iter([TEXT]), 360, 2).to_str(pretty=True)
    assert hashlib.sha256(content.encode()).hexdigest() == DEFAULT_SHA256
    (tmp_path / "c.jsonl").write_text(json.dumps(TEXT))
    flags = ("--output", tmp_path / "t.json", "--vocab_size", 360, "--min_frequency", 2)
    assert run("--input", tmp_path / "c.jsonl", *flags) == 0
    assert (tmp_path / "t.json").read_text() == content


@settings(max_examples=150)
@given(text=TEXTS)
def test_every_kind_round_trips_any_text(tokenizer, text):
    ids, _ = DocumentEncoder(tokenizer).encode([text])
    assert ids.tolist() == ids_of(tokenizer, [text])[0]
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text
    assert all(number >= 16 for number in ids)


def test_every_kind_learns_words_and_round_trips_long_ones(tokenizer):
    assert vocabulary_size(tokenizer) == tokenizer.get_vocab_size() <= 620
    assert special_ids(tokenizer) == list(range(16))
    assert vocabulary_size(tokenizer) > 600
    assert len(ids_of(tokenizer, [" thestraing"])[0]) <= 4
    long = "你好" * 2000 + "x" * 3000 + " ,"
    assert tokenizer.decode(ids_of(tokenizer, [long])[0], skip_special_tokens=False) == long


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_training_again_gives_the_same_tokenizer(kind):
    first, second = (trained(TokenizerForm(kind), TEXT + MANY_WORDS).to_str() for _ in range(2))
    assert first == second


def test_unigram_trained_again_has_the_same_scores():
    """Up to the last digit that is written: the library adds in no fixed order."""
    vocabularies = [
        dict(json.loads(trained(TokenizerForm("unigram"), TEXT + MANY_WORDS).to_str())["model"]["vocab"])
        for _ in range(2)
    ]
    assert vocabularies[0] == pytest.approx(vocabularies[1], abs=1.1e-4)
    assert list(vocabularies[0])[:272] == list(vocabularies[1])[:272]


@pytest.mark.parametrize("kind", KINDS)
def test_smallest_vocabulary_holds_all_bytes(kind):
    form = TokenizerForm(kind)
    tokenizer = trained(form, vocab_size=form.smallest_vocabulary)
    assert tokenizer.get_vocab_size() == form.smallest_vocabulary
    assert tokenizer.decode(ids_of(tokenizer, [TEXT[:3000]])[0], skip_special_tokens=False) == TEXT[:3000]


@pytest.mark.parametrize("kind", KINDS)
def test_normalization_and_case_are_in_the_file(kind, tmp_path):
    text = "e\u0301 ﬁ² ÀB"
    for normalization in ("none", "nfc", "nfkc"):
        for lowercase in (False, True):
            form = TokenizerForm(kind, normalization, lowercase)
            trained(form, text, 600).save(str(tmp_path / "t.json"))
            expected = text if normalization == "none" else unicodedata.normalize(normalization.upper(), text)
            tokenizer = load_tokenizer(tmp_path / "t.json")
            ids, _ = DocumentEncoder(tokenizer).encode([text])
            found = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            assert found == (expected.lower() if lowercase else expected)


@settings(max_examples=100)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3))
def test_cache_does_not_change_ids_where_digits_are_kept(kept_digits, texts):
    encoder = DocumentEncoder(kept_digits)
    assert encoder._cache is not None
    ids, _ = encoder.encode(texts)
    assert ids.tolist() == [number for found in ids_of(kept_digits, texts) for number in found]


@pytest.fixture(scope="module", params=KINDS)
def kept_digits(request) -> Tokenizer:
    return trained(TokenizerForm(request.param, digits="keep"))


def test_kept_digits_make_a_number_one_piece():
    def pieces(digits: str) -> list[str]:
        text = "in 2024, 3.14"
        cut = new_tokenizer(TokenizerForm(digits=digits)).pre_tokenizer.pre_tokenize_str(text)
        return [text[start:end] for _, (start, end) in cut]

    assert pieces("keep") == ["in", " 2024", ",", " 3", ".", "14"]
    assert pieces("split") == ["in", " 2", "0", "2", "4", ",", " 3", ".", "1", "4"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_tokenizes_trains_and_generates(kind, tmp_path):
    inputs = make_inputs(tmp_path / "inputs")  # its model.json; corpus and tokenizer are replaced
    words = MANY_WORDS.split()
    texts = [f"The old cat, {' '.join(words[5 * n : 5 * n + 5])} . And naïve ( {n} ) !" for n in range(300)]
    corpus, path = tmp_path / "c.jsonl", tmp_path / "tokenizer.json"
    corpus.write_text("".join(json.dumps(text) + "\n" for text in texts))
    assert run("--input", corpus, "--output", path, "--kind", kind, "--vocab_size", 600) == 0
    shards = tmp_path / "shards"
    files = ["--input", str(corpus), "--output", str(shards), "--tokenizer_path", str(path)]
    assert tokenize_corpus.main([*files, "--validation_fraction", "0.1"]) == 0
    assert sorted(decoded(shards / "train") + decoded(shards / "validation")) == sorted(texts)

    tokenizer = load_tokenizer(path)
    sizes = json.loads((inputs / "model.json").read_text()) | {"vocab_size": vocabulary_size(tokenizer)}
    (inputs / "model.json").write_text(json.dumps(sizes))
    options = {"train_path": shards / "train", "valid_path": shards / "validation", "tokenizer_path": path}
    schedule = {"max_steps": 2, "validate_every": 2, "save_every": 2, "warmup_proportion": 0}
    assert train_single_gpu.main(flags(inputs, tmp_path, **options, **schedule)) == 0
    model = load(tmp_path / "run", False, "cpu")
    prompt = model.encode("The old cat ,")
    assert model.decode(prompt) == "The old cat ,"
    found = list(generate(model, [prompt], 5, Sampling(), [torch.Generator().manual_seed(0)]))
    new = [token for _, token in found if token is not None]
    assert found[-1] == (0, None)
    assert model.decode([*prompt, *new]).startswith("The old cat ,")


# Samples


def test_sample_is_the_same_in_any_order():
    texts = [f"document {number} " + "word " * (number % 17) for number in range(500)] + ["twice"] * 5
    total = sum(map(len, texts))
    samples = set()
    for seed in range(5):
        random.Random(seed).shuffle(texts)
        samples.add(script.choose_sample(iter(texts), total // 4))
    (sample,) = samples
    held = [text for text in texts if sample.holds(text)]
    assert (sample.documents, sample.bytes) == (len(held), sum(map(len, held)))
    assert (sample.of_documents, sample.of_bytes) == (505, total)
    assert 0.2 * total < sample.bytes <= total // 4
    numbers = [int(text.split()[1]) for text in held if text != "twice"]
    assert min(numbers) < 50 < 450 < max(numbers)  # over all of it
    assert all(script.choose_sample(iter(texts), total).holds(text) for text in texts)


def test_sampled_training_does_not_depend_on_the_order_of_inputs(tmp_path, capsys):
    for part in range(2):
        documents = (f"part {part} tells of {number} things" for number in range(300))
        (tmp_path / f"{part}.txt").write_text("\n\n".join(documents))
    contents = set()
    for order in ((0, 1), (1, 0)):
        flags = ("--output", tmp_path / "t.json", "--vocab_size", 320, "--sample_bytes", "4,000", "--overwrite")
        assert run("--input", *(tmp_path / f"{part}.txt" for part in order), *flags) == 0
        contents.add((tmp_path / "t.json").read_bytes())
        assert "of 600 documents" in capsys.readouterr().out
    assert len(contents) == 1


# Reports


def test_report_has_the_figures_of_each_input(tmp_path, capsys):
    texts = {"english": "the cat sees the dog", "greek": "η γάτα βλέπει"}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text("\n\n".join([text] * (40 if name == "english" else 3)))
    paths = [str(tmp_path / f"{name}.txt") for name in texts]
    flags = ("--output", tmp_path / "t.json", "--vocab_size", 300, "--report", tmp_path / "r.json", "--lowercase")
    assert run("--input", *paths, *flags) == 0
    output = capsys.readouterr().out
    tokenizer = load_tokenizer(tmp_path / "t.json")
    found = json.loads((tmp_path / "r.json").read_text())
    size = tokenizer.get_vocab_size()
    assert found["tokenizer"] == {
        **{"kind": "bpe", "normalization": "none", "lowercase": True, "digits": "split"},
        "vocab_size": size,
    }
    used = set()
    for figures, path, text, times in zip(found["sources"], paths, texts.values(), (40, 3), strict=True):
        ids = ids_of(tokenizer, [text])[0]
        used |= set(ids)
        assert figures == {
            **{"source": path, "sampled": 1.0, "words": times * len(text.split()), "tokens": times * len(ids)},
            **{"bytes": times * len(text.encode()), "unknown_fraction": 0.0, "unused_ids": size - 16 - len(set(ids))},
            "tokens_per_word": len(ids) / len(text.split()),
            "bytes_per_token": len(text.encode()) / len(ids),
        }
        assert [line.split()[0] for line in output.splitlines()].count(path) == 1
    assert found["total"]["unused_ids"] == size - 16 - len(used)
    assert found["total"]["tokens"] == sum(figures["tokens"] for figures in found["sources"])


def test_unknown_tokens_are_counted():
    tokenizer = trained(TokenizerForm("wordpiece"))
    content = json.loads(tokenizer.to_str())
    content["model"]["max_input_chars_per_word"] = 3
    result = script.report(Tokenizer.from_str(json.dumps(content)), iter(["abc abcdef"]), 1)
    assert (result.unknown, result.words) == (1, 2)
    assert result.figures()["unknown_fraction"] == result.unknown / result.tokens > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--kind", "wordpiece", "--vocab_size", 527], "as they begin and continue a word take 528 entries"),
        (["--kind", "unigram", "--min_frequency", 2], "--min_frequency has no meaning for --kind unigram"),
        (["--kind", "unigram", "--input", "empty.txt"], "no text"),
        (["--kind", "wordpiece", "--vocab_size", 600, "--input", "empty.txt"], "no text"),
        (["--sample_bytes", 3, "--input", "empty.txt"], "no text"),
        (["--sample_bytes", 3], "--sample_bytes 3 is too small"),
        (["--report", "none/r.json"], "--report none/r.json cannot be written"),
        (["--report", "t.json"], "--report t.json is the file of --output too"),
    ],
)
def test_script_refuses(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.txt").write_text("some text")
    (tmp_path / "empty.txt").write_text("\n \n")
    assert run("--input", "c.txt", "--output", "t.json", "--vocab_size", 300, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert sentence in error
    assert not (tmp_path / "t.json").exists()
