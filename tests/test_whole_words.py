"""Masks of whole words: where words begin in each kind of tokenizer, and exact counts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.tiny_runs import TEXT, flags, make_inputs, refusal, train_on
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from data.counter_rng import fold_numpy
from data.masking import IGNORE_INDEX, MaskingOptions, build_inputs, masked_counts
from data.objectives import MASKED
from data.words import NoWordsError, word_beginnings
from train_single_gpu import main
from training.distributed import single_world

SENTENCES = [
    "the unbelievable cats sat unbelievably, catlike",
    "a cat sits; the sitting cats unsettle the settlers",
] * 5


def byte_level() -> Tokenizer:
    return train_on(TEXT, 320)


def trained(model, trainer, pre_tokenizer, normalizer=None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(SENTENCES, trainer(vocab_size=48, special_tokens=["[UNK]"], show_progress=False))
    return tokenizer


def wordpiece() -> Tokenizer:
    return trained(models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer, pre_tokenizers.BertPreTokenizer())


def unigram() -> Tokenizer:
    def trainer(**options):
        return trainers.UnigramTrainer(unk_token="[UNK]", **options)

    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace())


def llama_2() -> Tokenizer:
    """The space as a mark by the normalizer, and no pre-tokenizer that would say so."""
    marks = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer = trained(models.BPE(), trainers.BpeTrainer, pre_tokenizers.Split("\u2581", "merged_with_next"), marks)
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, wordpiece, unigram, llama_2])
def test_words_begin_where_white_space_ends(make):
    """In WordPiece, punctuation is a word, too, as its pre-tokenizer cuts it."""
    tokenizer = make()
    begins = word_beginnings(tokenizer.to_str(), tokenizer.get_vocab_size())
    parts = 0
    for text in SENTENCES[:2]:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        starts = [i for i, token in enumerate(encoding.ids) if i == 0 or begins[token]]
        ends = [*starts[1:], len(encoding.ids)]
        places = encoding.offsets
        words = [text[places[a][0] : places[b - 1][1]] for a, b in zip(starts, ends, strict=True)]
        expected = text.replace(",", " ,").replace(";", " ;") if make is wordpiece else text
        assert [word.strip() for word in words] == expected.split()
        parts += len(encoding.ids) - len(words)
    assert parts > 3, "no word has several tokens"


def test_a_vocabulary_without_marks_is_refused():
    tokenizer = trained(models.BPE(), trainers.BpeTrainer, pre_tokenizers.Whitespace())
    with pytest.raises(NoWordsError, match="does not tell where words begin"):
        word_beginnings(tokenizer.to_str(), tokenizer.get_vocab_size())


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("p", [0.15, 0.5])
def test_whole_words_are_masked_to_the_exact_number_of_tokens(device, p):
    """All of a word or nothing, but for one word in a row; every word is as likely; its tokens share their fate."""
    rows, length, vocabulary = 2000, 64, 200
    begins = np.zeros(vocabulary, np.uint8)
    begins[100:] = 1
    options = MaskingOptions(vocabulary, word_beginnings=begins.tobytes(), random_p=0.2, keep_p=0)
    generator = np.random.default_rng(0)
    tokens = np.tile(generator.integers(16, vocabulary, length + 1), (rows, 1)).astype(np.int32)
    tokens[:, [0, 30]] = 1
    tokens[:, 29] = 2
    keys = fold_numpy(3, np.arange(rows)).view(np.int64)
    counts = masked_counts(tokens, keys, p, options)
    arrays = (tokens, keys, np.full(rows, MASKED), counts)
    inputs = build_inputs(*(torch.from_numpy(array).to(device) for array in arrays), options)
    hidden = (inputs.labels != IGNORE_INDEX).cpu().numpy()
    np.testing.assert_array_equal(hidden.sum(1), counts)
    owned = tokens[0, 1:]
    special = np.isin(owned, [1, 2])
    starts = (begins[owned] == 1) | np.isin(tokens[0, :-1], [1, 2]) | special
    words = [np.flatnonzero(starts.cumsum() == word) for word in range(1, starts.sum() + 1)]
    words = [word for word in words if not special[word].any()]
    assert max(map(len, words)) >= 4
    whole = np.stack([hidden[:, word].all(1) for word in words], 1)
    some = np.stack([hidden[:, word].any(1) for word in words], 1)
    assert (some & ~whole).sum(1).max() == 1
    assert not hidden[:, special].any()
    for word in words:  # what is cut off at the end of the count is the rest of a word
        assert (hidden[:, word].astype(int) == np.sort(hidden[:, word].astype(int), 1)[:, ::-1]).all()
    begun = some.mean(0)
    assert np.abs(begun - begun.mean()).max() < 5 * (0.25 / rows) ** 0.5
    shown = inputs.input_ids[:, 1:].cpu().numpy()
    for word in words:
        inside = word[word < length - 1]
        masked = (shown[:, inside] == 4) & hidden[:, inside]
        assert (masked == hidden[:, inside] & masked.any(1)[:, None]).all(), "a word is <mask> or random as a whole"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("words") / "inputs", documents=100)


def test_refusals_are_one_sentence(inputs, tmp_path, capsys):
    said = refusal(capsys, main, flags(inputs, tmp_path, masking="words", mask_span_length=2), single_world)
    assert "--mask_span_length is 2 but --masking words masks whole words; leave it out" in said
    text = json.loads((inputs / "tokenizer.json").read_text())
    text["model"]["vocab"] = {token.replace("\u0120", "_"): n for token, n in text["model"]["vocab"].items()}
    text["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    other = flags(inputs, tmp_path, masking="words", tokenizer_path=tmp_path / "tokenizer.json")
    said = refusal(capsys, main, other, single_world)
    assert "does not tell where words begin" in said
