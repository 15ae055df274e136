"""The tokenizer and its training: any text comes back, special strings stay text, the cache changes nothing."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

import preprocessing.tokenizer
from data.shards import ShardError, tokenizer_hash
from preprocessing import train_tokenizer as script
from preprocessing.tokenizer import (
    ALPHABET,
    SMALLEST_VOCABULARY,
    SPECIAL_TOKENS,
    DocumentEncoder,
    cut_place,
    cut_text,
    load_tokenizer,
    new_tokenizer,
    special_ids,
    vocabulary_size,
)

WORDS = "the of and don't it's THAT'S naïve café 2024 3.14 e-mail http://x.org/a_b isn’t Größe नमस्ते 你好世界 — … <b>"
TEXT = " ".join(random.Random(0).choices(WORDS.split(), k=4000)) + "\n\n  def f(x):\n\treturn x\r\n" * 20
# Characters on which pre-tokenisers disagree: white space of all kinds, marks, apostrophes, digits, astral characters.
ODD = " \n\t\r\x0b\x0c\x1c\x1f\x85\xa0\u2003\u2028\u3000\u200b\0aZé\u0301ſ'’stmdrevl0½٣!<_>/\\-…你🙂\U0001f468\u200d"
TEXTS = st.one_of(st.text(st.sampled_from(ODD), max_size=60), st.text(max_size=40))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    script.train_tokenizer(iter([TEXT]), 360, 2).save(str(path))
    return path


@pytest.fixture(scope="module")
def tokenizer(path):
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def gpt2(tokenizer):
    """The same vocabulary behind GPT-2's pre-tokeniser."""
    other = Tokenizer.from_str(tokenizer.to_str())
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    other.encode_special_tokens = True
    return other


def library(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def by_encoder(encoder: DocumentEncoder, texts: list[str]) -> list[list[int]]:
    tokens, lengths = encoder.encode(texts)
    assert tokens.dtype == np.uint32
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]


def test_special_tokens_have_the_ids_that_training_expects(tokenizer):
    assert len(SPECIAL_TOKENS) == 16
    assert [tokenizer.id_to_token(number) for number in range(5)] == ["<unk>", "<s>", "</s>", "<pad>", "<mask>"]
    assert [tokenizer.id_to_token(number) for number in range(5, 16)] == [f"<special_{n}>" for n in range(11)]
    assert special_ids(tokenizer) == list(range(16))
    assert [tokenizer.id_to_token(number) for number in range(16, 272)] == list(ALPHABET)
    assert vocabulary_size(tokenizer) == tokenizer.get_vocab_size() == 360


@settings(max_examples=150)
@given(text=TEXTS)
def test_round_trip_of_any_text(tokenizer, text):
    ids = by_encoder(DocumentEncoder(tokenizer), [text])[0]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(number >= 16 for number in ids)


def places(tokenizer: Tokenizer, text: str) -> list[tuple[int, int]]:
    """Start and end of each piece that the pre-tokeniser makes."""
    return [place for _, place in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@settings(max_examples=300)
@given(text=TEXTS)
def test_stretches_meet_where_both_pre_tokenisers_cut(tokenizer, gpt2, text):
    """Whatever the merges are: each stretch by itself is cut as it is inside the text."""
    stretches = preprocessing.tokenizer._STRETCH.findall(text)
    assert "".join(stretches) == text
    for each in (tokenizer, gpt2):
        found, start = [], 0
        for stretch in stretches:
            found += [(start + first, start + last) for first, last in places(each, stretch)]
            start += len(stretch)
        assert found == places(each, text)


@pytest.mark.slow
@settings(max_examples=150)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_cache_does_not_change_ids(tokenizer, gpt2, texts):
    for each in (tokenizer, gpt2):
        encoder = DocumentEncoder(each)
        assert encoder._cache is not None
        expected = library(each, texts)
        assert by_encoder(encoder, texts) == expected
        assert by_encoder(encoder, texts) == expected  # now from the cache
        assert by_encoder(DocumentEncoder(each, cache=False), texts) == expected


def test_cache_does_not_change_ids_of_real_text(tokenizer, gpt2, monkeypatch):
    monkeypatch.setattr(preprocessing.tokenizer, "_CACHED_STRETCHES", 30)  # emptied again and again
    texts = [TEXT[start : start + 997] for start in range(0, len(TEXT), 997)]
    for each in (tokenizer, gpt2):
        encoder = DocumentEncoder(each)
        assert by_encoder(encoder, texts) == library(each, texts)
        assert by_encoder(encoder, texts[:3]) == library(each, texts[:3])


def test_no_place_between_visible_characters_is_white_space_for_the_library():
    """The cache cuts where Python sees white space; the library must not see more of it."""
    visible = "".join(chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000 and not chr(code).isspace())
    split = pre_tokenizers.Split(Regex(r"\s"), "isolated")
    assert len(split.pre_tokenize_str(visible)) == 1
    assert len(split.pre_tokenize_str("a b")) == 3


def test_cache_is_bounded_and_forgets_long_stretches(tokenizer, monkeypatch):
    monkeypatch.setattr(preprocessing.tokenizer, "_CACHED_STRETCHES", 100)
    encoder = DocumentEncoder(tokenizer)
    for number in range(50):
        encoder.encode([f"word{number}x another{number}y " + "z" * 100])
        assert encoder._cache is not None
        assert len(encoder._cache) <= 100
        assert all(len(stretch) <= 48 for stretch in encoder._cache)


def test_other_tokenizers_go_through_the_library(tokenizer):
    def changed(change) -> DocumentEncoder:
        other = Tokenizer.from_str(tokenizer.to_str())
        other.encode_special_tokens = True
        change(other)
        encoder = DocumentEncoder(other)
        assert encoder._cache is None
        assert by_encoder(encoder, ["İt is 1", "", " x"]) == library(other, ["İt is 1", "", " x"])
        return encoder

    changed(lambda other: setattr(other, "normalizer", normalizers.Lowercase()))
    changed(lambda other: setattr(other, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)))
    changed(lambda other: setattr(other, "pre_tokenizer", pre_tokenizers.Metaspace()))
    changed(lambda other: other.add_tokens([AddedToken("is", special=False)]))


def test_text_that_spells_special_tokens_is_text(tokenizer):
    text = "a<mask>b </s><s> <pad>" + "".join(SPECIAL_TOKENS)
    plain = Tokenizer.from_str(tokenizer.to_str())
    assert 4 in plain.encode(text).ids  # what the library does by itself
    ids = by_encoder(DocumentEncoder(tokenizer), [text])[0]
    assert min(ids) >= 16
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_training_on_special_strings_makes_no_way_to_them():
    texts = ["<mask></s><special_3> <unk>"] * 500
    tokenizer = script.train_tokenizer(iter(texts), 1000, 2)
    tokenizer.encode_special_tokens = True
    assert min(by_encoder(DocumentEncoder(tokenizer), texts[:1])[0]) >= 16


def pieces(text: str) -> list[str]:
    cut = new_tokenizer().pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in cut]


def test_pre_tokeniser_cuts_text():
    assert pieces("It's 1984, isn’t it?\n\n\tDon't 'till\n  x\r\n") == [
        *("It", "'s", " 1", "9", "8", "4", ",", " isn", "’t", " it", "?", "\n\n", "\t", "Don", "'t", " '", "till"),
        *("\n", " ", " x", "\r\n"),
    ]
    assert pieces("नमस्ते e\u0301te\u0301") == ["नमस्ते", " e\u0301te\u0301"]
    assert pieces("I'LL  'twas") == ["I", "'LL", " ", " '", "twas"]


def test_long_documents_are_encoded_in_pieces_without_a_difference(tokenizer, monkeypatch):
    expected = library(tokenizer, [TEXT])[0]
    monkeypatch.setattr(preprocessing.tokenizer, "_PIECE_CHARACTERS", 300)
    for cache in (True, False):
        assert by_encoder(DocumentEncoder(tokenizer, cache=cache), ["x", TEXT, "", "y"])[1] == expected
    spaceless = "你好" * 1000
    ids = by_encoder(DocumentEncoder(tokenizer), [spaceless])[0]
    assert tokenizer.decode(ids) == spaceless


@settings(max_examples=200)
@given(text=st.text(st.sampled_from("ab \n\t é你🙂"), min_size=1, max_size=80), limit=st.integers(8, 30))
def test_cut_text_keeps_the_text_and_the_limit(text, limit):
    cut = cut_text(text, limit)
    assert "".join(cut) == text
    assert all(0 < len(piece) <= limit for piece in cut)
    rest = text.encode()
    while len(rest) > limit:
        place = cut_place(rest[:limit])
        assert 0 < place <= limit
        rest[:place].decode()  # never inside a character
        rest = rest[place:]


def test_cutting_prefers_line_breaks_and_spaces():
    assert cut_place("one two\nthree four") == 7 + 6  # no line break in the second half
    assert cut_place("one two three\nfour") == 13
    assert cut_place("aaaaaaaaaa") == 10
    assert cut_place("word word \n ") == 9
    assert cut_place("é".encode() * 3 + b"\xc3") == 6
    assert cut_place("word      ") == 4
    assert cut_place(b"wordword\r\n") == 8
    assert cut_place(" " * 10) == 10


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda content: content["model"].update(type="Unknown"), "is not a tokenizer that the tokenizers library"),
        (lambda content: content.pop("model"), "has no 'model'"),
    ],
)
def test_unusable_tokenizers(path, tmp_path, change, sentence):
    content = json.loads(path.read_text())
    change(content)
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(ShardError, match=sentence):
        load_tokenizer(tmp_path / "t.json")


def test_padding_and_truncation_in_the_file_are_not_applied(path, tmp_path):
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "t.json"))
    texts = ["the of and the of and", "x"]
    assert by_encoder(DocumentEncoder(load_tokenizer(tmp_path / "t.json")), texts) == library(
        load_tokenizer(path), texts
    )
    assert tokenizer_hash(path) == tokenizer_hash(tmp_path / "t.json")


def test_a_vocabulary_with_gaps():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 90}, unk_token="a"))
    assert vocabulary_size(tokenizer) == 91


# Training


def test_training_is_deterministic():
    first, second = (script.train_tokenizer(iter([TEXT]), 450, 2).to_str() for _ in range(2))
    assert first == second


def test_min_frequency_is_honoured():
    texts = ["zqzq " * 7 + "jxjx " * 6]
    for minimum, known in ((6, {"zq", "jx"}), (13, {"zq"}), (15, set())):  # each pair occurs twice in its word
        vocabulary = script.train_tokenizer(iter(texts), 2000, minimum).get_vocab()
        assert {"zq", "jx"} & set(vocabulary) == known


def test_no_entry_is_longer_than_32_bytes(monkeypatch):
    def longest() -> int:
        tokenizer = script.train_tokenizer(iter(["-" * 40 + " " + "ü" * 20 + "\n"] * 30), 1000, 2)
        return max(len(entry) for entry in tokenizer.get_vocab() if entry not in SPECIAL_TOKENS)

    assert 16 < longest() <= 32
    monkeypatch.setattr(script, "_LONGEST_TOKEN", 100)
    assert longest() == 41  # a space and all of "ü" * 20


def run(*arguments: object) -> int:
    return script.main([str(argument) for argument in arguments])


def test_script_reads_documents_not_escapes(tmp_path, capsys):
    corpus = tmp_path / "corpus.jsonl"
    texts = [f'Größe {number}\nline \\ "quoted" ünïcode' for number in range(200)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert "\\u00" in corpus.read_text()
    assert run("--input", corpus, "--output", tmp_path / "t.json", "--vocab_size", 400, "--min_frequency", 3) == 0
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert not [entry for entry in tokenizer.get_vocab() if "\\u" in entry or "\\n" in entry]
    assert tokenizer.token_to_id("GrÃ¶ÃŁe") is not None  # bytes of Größe
    words, tokens = 200 * 6, sum(map(len, library(tokenizer, texts)))
    output = capsys.readouterr().out
    assert f"{words:,} words, {tokens:,} tokens, {tokens / words:.3f} tokens per word" in output
    used = {number for ids in library(tokenizer, texts) for number in ids}
    unused = vocabulary_size(tokenizer) - 16 - len(used)
    assert f"{unused} unused ids: " in output
    assert "fewer than the 400 asked for" in output


def test_script_samples_large_input(tmp_path, capsys):
    (tmp_path / "c.txt").write_text("\n\n".join(f"document number {number} of many" for number in range(1000)))
    arguments = ("--input", tmp_path / "c.txt", "--output", tmp_path / "t.json", "--vocab_size", 300)
    assert run(*arguments, "--report_megabytes", "0.014") == 0
    assert "500 words" in capsys.readouterr().out


def test_script_overwrites_only_with_the_flag(tmp_path, capsys):
    (tmp_path / "c.txt").write_text(TEXT)
    output = tmp_path / "t.json"
    arguments = ("--input", tmp_path / "c.txt", "--output", output, "--min_frequency", 2)
    assert run(*arguments, "--vocab_size", 300) == 0
    content = output.read_bytes()
    assert run(*arguments, "--vocab_size", 300) == 0
    assert "is unchanged" in capsys.readouterr().out
    assert run(*arguments, "--vocab_size", 310) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --output {output} holds another tokenizer")
    assert error.count("\n") == 1
    assert output.read_bytes() == content
    assert run(*arguments, "--vocab_size", 310, "--overwrite") == 0
    assert vocabulary_size(load_tokenizer(output)) == 310


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--vocab_size", SMALLEST_VOCABULARY - 1], "--vocab_size 271 is too small"),
        (["--input", "none.txt"], "none.txt does not exist"),
        (["--output", "none/t.json"], "none/t.json cannot be written"),
        (["--input", "empty.txt"], "no text"),
        (["--input", "bad.jsonl"], "bad.jsonl, line 2: not valid JSON"),
    ],
)
def test_script_refuses(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.txt").write_text("some text")
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "bad.jsonl").write_text('"good"\n{"text"\n')
    defaults = ["--input", "c.txt", "--output", "t.json", "--vocab_size", 300]
    assert run(*defaults, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert sentence in error
    assert not (tmp_path / "t.json").exists()


def test_flags_are_checked_by_the_parser(capsys):
    for arguments, sentence in (
        (["--vocab_size", "0"], "--vocab_size: must be at least 1, not 0"),
        (["--min_frequency", "x"], "--min_frequency: 'x' is not a whole number"),
        (["--min_freq", "3"], "unknown flag or value '--min_freq'; did you mean --min_frequency?"),
    ):
        with pytest.raises(SystemExit) as stop:
            script.main(["--input", "a", "--output", "b", *arguments])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1
