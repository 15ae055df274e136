"""Where words begin, from the tokens of a vocabulary: for masks of whole words.

WordPiece marks what continues a word (`##ing`; the model names its prefix). Byte-level BPE and SentencePiece mark the
space before a word instead (a leading U+0120, that is a space byte, or U+2581): what lacks the mark continues the word
before it, punctuation, too, so that words are what white space separates.
"""

from __future__ import annotations

import json
from collections import Counter

import numpy as np

_BYTE_SPACES = tuple("\u0120\u010a\u010d\u0109")  # how byte-level vocabularies write space, line feed, return and tab
_MARKS = {"\u0120": _BYTE_SPACES, "\u2581": ("\u2581", "\n")}
_LEAST = 0.05  # of the vocabulary have the mark, where it means anything


class NoWordsError(ValueError):
    """A vocabulary does not tell where words begin; the message says so, to be read behind the tokenizer's path."""


def word_beginnings(tokenizer_json: str, vocab_size: int) -> np.ndarray:
    """Whether a word begins with each token of a tokenizer.json; bool [vocab_size]. Raises NoWordsError."""
    model = json.loads(tokenizer_json)["model"]
    vocabulary = model["vocab"]
    if not isinstance(vocabulary, dict):  # Unigram: pairs of token and score
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    tokens = {number: token for token, number in vocabulary.items() if number < vocab_size}
    begins = np.ones(vocab_size, bool)  # added tokens stand alone
    if model["type"] == "WordPiece":
        prefix = model["continuing_subword_prefix"]
        for number, token in tokens.items():
            begins[number] = not token.startswith(prefix)
        return begins
    first = Counter(token[0] for token in tokens.values() if token)
    mark = max(_MARKS, key=lambda mark: first[mark])
    if first[mark] < _LEAST * len(tokens):
        raise NoWordsError(
            "does not tell where words begin: its tokens mark neither the space before a word (byte-level BPE, "
            "SentencePiece) nor what continues one (WordPiece)"
        )
    for number, token in tokens.items():
        begins[number] = token.startswith(_MARKS[mark])
    return begins
