"""Tokenizer: how a new one is put together, how a file is loaded, and encoding many documents fast.

BPE, WordPiece or Unigram over the bytes of a text: without normalisation, every text that UTF-8 can express comes back
exactly from its ids, and with it the normalised text does. All three have the 256 bytes as entries, so no text is
unknown; WordPiece marks a continued word by a character that no byte is written with, so that it can be taken off.

The pre-tokeniser cuts text before BPE may merge anything. It follows GPT-2's in that a space belongs to the word after
it, with changes that matter for vocabularies of 8-16 k:
- digits stand alone (unless they are to be kept together), so that no entries are spent on frequent numbers and
  arithmetic sees places;
- a run of line breaks is a piece of its own whatever spaces surround it, so that indentation makes no new tokens;
- combining marks stay in their word (GPT-2 tears Devanagari or a decomposed "é" apart);
- English clitics ('s, n't's 't, 're, ...) are cut off in either case and with either apostrophe, but only at a word's
  end ("'till" stays whole).
"<", "mask" and ">" are different classes of characters, so no merge can ever build the text of a special token.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from data.shards import ShardError, tokenizer_hash
from data.special_tokens import MANIFEST_KEY, plain, read_special_tokens, special_tokens, tokenizer_file

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>", "<mask>", *(f"<special_{number}>" for number in range(11)))
ALPHABET = tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))  # one character for each of the 256 bytes
SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + len(ALPHABET)
CONTINUED = "\u2581"  # before what continues a word, in WordPiece; no byte is written with it

_SPLIT = (
    r"['’](?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])(?![\p{L}\p{M}])"
    r"| ?[\p{L}\p{M}]+"
    r"| ?\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+"
    r"|[\r\n]+"
    r"|[^\S\r\n]+(?!\S)"  # all spaces of a run but the one that belongs to the next word
    r"|[^\S\r\n]+"
)

# Stretches of text that meet where our pre-tokeniser always cuts: between an ASCII letter and an ASCII digit or
# punctuation mark, and between anything visible and a space or line break. No alternative of _SPLIT reaches over such a
# place or looks further than it, so the ids of a text are the ids of its stretches, one after the other. The same holds
# for GPT-2's own pattern. (What is visible here is so there: Python's white space includes all of Oniguruma's.)
_STRETCH = re.compile(
    r"\s*[^\sa-zA-Z]*[a-zA-Z]+(?=[!-@\[-`{-~ \n])"
    r"|\s*\S+(?:[^\S \n]\s*\S+)*(?:[^\S \n]\s*\Z)?"
    r"|\s+"
)

_WORDPIECE_CHARACTERS = 32  # WordPiece takes time by the cube of a piece's length
_KEPT_DIGITS = (r"| ?\p{N}" "|", r"| ?\p{N}+" "|")  # of _SPLIT: a digit a piece, all digits in a row

_CACHED_STRETCHES = 1 << 17  # about 30 MB
_CACHED_CHARACTERS = 48
_BATCH_CHARACTERS = 1 << 18  # text given to the library at once: its encodings take some 30 bytes a character
_PIECE_CHARACTERS = 1 << 20  # longer documents are encoded in pieces


@dataclass(frozen=True)
class TokenizerForm:
    """All of a tokenizer that is not learnt; tokenizer.json holds it as its model, normalizer and pre_tokenizer."""

    kind: str = "bpe"  # "bpe", "wordpiece" or "unigram"
    normalization: str = "none"  # "none", "nfc" or "nfkc"
    lowercase: bool = False
    digits: str = "split"  # "split": each a piece; "keep": a number is one piece

    @property
    def byte_entries(self) -> int:
        """Entries for single bytes: WordPiece has each twice, as a word begins and as it continues."""
        return len(ALPHABET) * (2 if self.kind == "wordpiece" else 1)

    @property
    def smallest_vocabulary(self) -> int:
        return len(SPECIAL_TOKENS) + self.byte_entries


DEFAULT_FORM = TokenizerForm()


def new_tokenizer(form: TokenizerForm = DEFAULT_FORM) -> Tokenizer:
    """An untrained tokenizer of the form described above; its model, empty, is BPE unless it is Unigram."""
    tokenizer = Tokenizer(models.Unigram() if form.kind == "unigram" else models.BPE())
    pattern = _SPLIT if form.digits == "split" else _SPLIT.replace(*_KEPT_DIGITS)
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated")]
    if form.kind == "wordpiece":
        steps.append(pre_tokenizers.Split(Regex(rf"[\s\S]{{1,{_WORDPIECE_CHARACTERS}}}"), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if form.kind == "wordpiece":
        tokenizer.decoder = decoders.Sequence([decoders.Replace(CONTINUED, ""), decoders.ByteLevel()])
    unicode_form: dict[str, list[Any]] = {"none": [], "nfc": [normalizers.NFC()], "nfkc": [normalizers.NFKC()]}
    changes = unicode_form[form.normalization] + [normalizers.Lowercase()] * form.lowercase
    if changes:
        tokenizer.normalizer = normalizers.Sequence(changes)
    return tokenizer


def wordpiece_model(vocabulary: dict[str, int]) -> models.WordPiece:
    """WordPiece that takes every piece the pre-tokeniser makes, at most 4 bytes a character."""
    return models.WordPiece(
        vocabulary,
        unk_token=SPECIAL_TOKENS[0],
        max_input_chars_per_word=4 * _WORDPIECE_CHARACTERS,
        continuing_subword_prefix=CONTINUED,
    )


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads a tokenizer.json, or the one in a folder, for encoding corpora: "</s>" in a text is text, nothing is
    padded, nothing is cut. Raises ShardError where the file is no tokenizer."""
    path = tokenizer_file(path)
    tokenizer_hash(path)  # its errors are the clear ones
    try:
        return plain(Tokenizer.from_file(str(path)))
    except Exception as error:  # the library raises bare Exception
        raise ShardError(f"{path} is not a tokenizer that the tokenizers library can read ({error})") from None


def roles_to_record(path: str | Path, given: str = "") -> dict[str, str]:
    """What the manifest of shards says of the special tokens: nothing where their copy of tokenizer.json says it alone.

    Raises ShardError, one sentence, where the tokenizer lacks a token that training needs whatever its flags."""
    found = read_special_tokens(path, given)
    found.require(("bos", "pad", "mask"), f"--tokenizer_path {path}")
    alone = special_tokens(tokenizer_file(path).read_text(encoding="utf-8"))
    return {} if alone.tokens == found.tokens else {MANIFEST_KEY: str(found)}


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Largest id plus one (an imported vocabulary may have gaps)."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def special_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of the tokens that are marked as special, ascending."""
    return sorted(number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special)


class DocumentEncoder:
    """Turns documents into token ids, on one core, in bounded memory.

    Where the tokenizer's pre-tokeniser is ours or GPT-2's, ids are looked up by stretch (about a word) in a bounded
    cache. That is exactly equal to the library, and faster where words come again: in English a few times, in Chinese
    without spaces not at all. Other tokenizers, and `cache=False`, go through the library alone. A document beyond 1 M
    characters is encoded in pieces that end before a line break; ours cuts there anyway, so that changes nothing."""

    def __init__(self, tokenizer: Tokenizer, *, cache: bool = True) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --workers says how many cores to use
        self._tokenizer = tokenizer
        self._cache: dict[str, bytes] | None = {} if cache and _cuts_at_spaces(tokenizer) else None

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts in a row (uint32 [N]) and the length of each (int64 [len(texts)])."""
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        cut = [cut_text(text, _PIECE_CHARACTERS) for text in texts]
        encoded: list[bytes] = []
        for pieces in _batches(chain.from_iterable(cut)):
            encoded += self._library(pieces) if self._cache is None else self._by_stretch(pieces, self._cache)
        first_piece = np.cumsum([0, *map(len, cut[:-1])])
        lengths = np.add.reduceat(np.fromiter(map(len, encoded), np.int64, len(encoded)), first_piece) // 4
        return np.frombuffer(b"".join(encoded), np.uint32), lengths

    def _by_stretch(self, texts: list[str], cache: dict[str, bytes]) -> list[bytes]:
        cut = [_STRETCH.findall(text) for text in texts]
        missing = set(chain.from_iterable(cut)).difference(cache)
        if len(cache) + len(missing) > _CACHED_STRETCHES:
            cache.clear()  # the frequent ones are back at once
            missing = set(chain.from_iterable(cut))
        for batch in _batches(missing):
            cache.update(zip(batch, self._library(batch), strict=True))
        encoded = [b"".join(map(cache.__getitem__, stretches)) for stretches in cut]
        for stretch in missing:
            if len(stretch) > _CACHED_CHARACTERS:  # text without spaces hardly repeats itself
                del cache[stretch]
        return encoded

    def _library(self, texts: list[str]) -> list[bytes]:
        """Ids by the tokenizers library, each text's as bytes of uint32."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32).tobytes() for encoding in encodings]


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts in order, in lists of a bounded number of characters (or of one text)."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        if batch and characters + len(text) > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters += len(text) + 16  # an empty encoding takes memory too
    if batch:
        yield batch


def _cuts_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether the ids of a text are those of its stretches: a known pre-tokeniser, and nothing that sees the whole."""
    content = json.loads(tokenizer.to_str())
    forms = [TokenizerForm(kind, digits=digits) for kind in ("bpe", "wordpiece") for digits in ("split", "keep")]
    ours = [json.loads(new_tokenizer(form).to_str())["pre_tokenizer"] for form in forms]  # Unigram's is that of BPE
    gpt2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    found = content["pre_tokenizer"] or {}
    known = found in ours or {key: found.get(key) for key in gpt2} == gpt2
    plain = content["normalizer"] is None and not content["model"].get("dropout")
    return known and plain and all(token["special"] for token in content["added_tokens"])


def cut_text(text: str, limit: int) -> list[str]:
    """`text` in pieces of at most `limit` characters, which joined give the text; see `cut_place`."""
    pieces, start = [], 0
    while len(text) - start > limit:
        piece = text[start : start + limit]
        end = cut_place(piece)
        pieces.append(piece[:end])
        start += end
    return [*pieces, text[start:]] if start else [text]


def cut_place(piece: str | bytes) -> int:
    """Where to end a piece of a text that goes on; above 0. In its second half, before the last line break that follows
    something visible, else before the last such space; else before the white space at the end, so that no blank line is
    torn apart; else at the end, in UTF-8 before a character that may be incomplete."""
    half = len(piece) // 2
    for separator in ("\n", " "):
        # Of the kind that the piece is, which the type checker cannot follow.
        mark = separator if isinstance(piece, str) else separator.encode()
        cut = piece.rfind(mark, half)  # type: ignore[arg-type]
        while cut > 0 and piece[cut - 1 : cut].isspace():
            cut = piece.rfind(mark, half, cut)  # type: ignore[arg-type]
        if cut > 0:
            return cut
    end = len(piece.rstrip()) or len(piece)
    if isinstance(piece, bytes) and end == len(piece):
        while end > max(1, len(piece) - 3) and piece[end - 1] & 0xC0 == 0x80:
            end -= 1
        end -= piece[end - 1] >= 0xC0 and end > 1
    return end
