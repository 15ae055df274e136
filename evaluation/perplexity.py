"""Perplexity of held-out text, causal and masked.

    python evaluation/perplexity.py MODEL --data held_out/*.txt --mode all --output perplexity.json

Text files have a blank line between documents; .jsonl, .ndjson and .json files hold a string or an object with
--text_field a line; shards are those of preprocessing/tokenize_corpus.py. Text is read in rows as in training.

- causal: every token but `<s>` is predicted from those before it.
- masked: 15 % of the tokens are masked, always the same: shards and row length being equal, as `valid/masked_loss`;
  with --elbo N also the bound of masked diffusion from N drawings of masks (evaluation/elbo.py); with --every_token
  each token is masked in turn (pseudo-perplexity: Salazar et al., 2020).

Per word and per byte, the loss of a token is multiplied by the number of tokens; words are what white space separates.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from data.cli import Parser
from data.corpus import Corpus, CorpusError
from data.loader import ValidationSet
from data.masking import MaskingOptions
from data.shards import MANIFEST_NAME, SHARD_SUFFIX, ShardError, tokenizer_hash, write_shard
from data.wording import aligned, count
from evaluation.elbo import measure_bound
from evaluation.generation import LoadedModel, UsageError, check, run
from evaluation.pair_accuracy import OBJECTIVES, chosen_modes, json_values, read_text
from evaluation.scoring import (
    ScoringModel,
    add_scoring_flags,
    check_scoring_flags,
    enough_memory,
    load_for_scoring,
    write_results,
)
from evaluation.token_log_probs import SpecialIds, TokenizedSentences
from evaluation.validation import validate
from model_protocol import PretrainingModel
from training.checkpoint import rows_begin_with_bos, training_flags

_LARGEST_EXPONENT = 700.0
_DECODED_AT_ONCE = 256
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".parquet")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser("Perplexity of held-out text, causal and masked.")
    add_scoring_flags(parser, document_end=None, modes=OBJECTIVES)
    parser.add_argument(
        "--data", nargs="+", required=True, metavar="PATH",
        help="text files, .jsonl files, folders of them, shards or shard folders; one result for each",
    )  # fmt: skip
    parser.add_argument(
        "--every_token", action="store_true", help="masked: mask each token in turn (slow: a row for every token)"
    )
    parser.add_argument(
        "--elbo", type=int, default=0, metavar="N",
        help="masked: measure the bound of masked diffusion, too, with N masks of each row, 2 or more (default: 0: no)",
    )  # fmt: skip
    parser.add_argument("--seq_length", type=int, default=512, metavar="N", help="tokens per row")
    parser.add_argument("--mask_p", type=float, default=0.15, metavar="X", help="masked fraction")
    parser.add_argument("--text_field", default="text", metavar="NAME", help="of objects in .jsonl files")
    parser.add_argument("--output", metavar="FILE.json", help="write the results here")
    return run(evaluate, parser.parse_args(arguments))


def evaluate(options: argparse.Namespace) -> None:
    """Print the results of every text, and write what the flags ask for."""
    check_scoring_flags(options)
    check(options, "seq_length", lambda n: n >= 8, "give 8 or more")
    check(options, "mask_p", lambda x: 0 < x <= 1, "give a fraction above 0 and up to 1")
    check(options, "elbo", lambda n: n == 0 or n >= 2, "give 2 or more, of which the error is estimated, or 0")
    texts = {path: None if is_shards(Path(path)) else read_documents(path, options.text_field) for path in options.data}
    model = load_for_scoring(options)
    results: dict[str, Any] = {"document_end": model.document_end, "seq_length": options.seq_length, "texts": {}}
    with tempfile.TemporaryDirectory() as folder, enough_memory():
        for path, documents in texts.items():
            found = measure(model, open_corpus(model, path, documents, Path(folder), options), options, documents)
            results["texts"][path] = found
            print("\n".join(table(path, found)), flush=True)
    write_results(options, results)


# Reading


def is_shards(path: Path) -> bool:
    """Whether a path names token shards."""
    return path.suffix == SHARD_SUFFIX or (path / MANIFEST_NAME).exists() or any(path.glob(f"*{SHARD_SUFFIX}"))


def read_documents(path: str, text_field: str) -> list[str]:
    """The documents of a file or of all files in a folder. Raises UsageError, naming file and line."""
    source = Path(path)
    files = [source]
    if source.is_dir():
        inside = sorted(source.iterdir())
        files = [file for file in inside if file.is_file() and not file.name.startswith(".")]
        if left := sorted(set(inside).difference(files)):
            print(f"note: in --data {path} folders and hidden files are not read: {len(left)}, such as {left[0].name}")
    documents = [document for file in files for document in _read_file(file, text_field)]
    if not documents:
        raise UsageError(f"--data: {path} holds no text.")
    return documents


def _read_file(path: Path, text_field: str) -> Iterator[str]:
    if path.suffix.lower() in _PACKED:
        raise UsageError(
            f"--data: {path} is not read here; unpack it or give the shards that preprocessing/tokenize_corpus.py "
            "makes of it with the model's tokenizer.json."
        )
    if path.suffix.lower() not in (".jsonl", ".ndjson", ".json"):
        parts = re.split(r"\n(?:[^\S\n]*\n)+", f"\n\n{read_text(path, '--data')}")  # as preprocessing does
        yield from (part.rstrip("\n") for part in parts if part.strip())
        return
    for where, value in json_values(path, "--data"):
        document = value.get(text_field) if isinstance(value, dict) else value
        if not isinstance(document, str):
            raise UsageError(f'{where}: no text in field "{text_field}" (--text_field).')
        if document.strip():
            yield document


def open_corpus(
    model: ScoringModel, path: str, documents: list[str] | None, folder: Path, options: argparse.Namespace
) -> Corpus:
    """Shards as they are; documents through a shard of their own in `folder`. Raises UsageError."""
    tokenizer, special = model.loaded.tokenizer, model.special
    words = model.loaded.special.vocab_size
    saved = folder / "tokenizer.json"
    tokenizer.save(str(saved))
    known = {tokenizer_hash(file) for file in (saved, Path(options.model) / "tokenizer.json") if file.is_file()}
    try:
        if documents is not None:
            encoded = [np.array(e.ids) for e in tokenizer.encode_batch(documents, add_special_tokens=False)]
            shard = folder / f"text{SHARD_SUFFIX}"
            shard.unlink(missing_ok=True)
            write_shard(shard, encoded, tokenizer_hash=min(known), vocab_size=words)
            return Corpus(shard, tokenizer_hash=None, bos_id=special.bos, eos_id=special.eos)
        corpus = Corpus(path, tokenizer_hash=None, bos_id=special.bos, eos_id=special.eos)
    except (ShardError, CorpusError) as error:
        raise UsageError(f"--data: {error}") from None
    if corpus.shards[0].tokenizer_hash not in known:
        raise UsageError(f"--data: {path} was made with another tokenizer than the model's; tokenise its text again.")
    return corpus


# Measuring


def measure(
    model: ScoringModel, corpus: Corpus, options: argparse.Namespace, documents: list[str] | None
) -> dict[str, Any]:
    """All results of a corpus as JSON; `documents`: its text where that is at hand."""
    words, size = count_text(documents) if documents is not None else count_decoded(model.loaded, corpus)
    found: dict[str, Any] = {
        "documents": corpus.num_documents,
        "tokens": corpus.num_tokens,
        "words": words,
        "bytes": size,
    }
    modes = chosen_modes(options.mode, OBJECTIVES)
    flags, special = training_flags(Path(options.model)), model.loaded.special
    masks = MaskingOptions(
        vocab_size=special.vocab_size,
        mask_id=model.special.mask,
        bos_id=model.special.bos,
        pad_id=model.special.pad,
        special_ids=special.special_ids,
        bos_ends=model.document_end and special.one_boundary,
        random_p=float(flags.get("mask_random_p", 0.1)),
        keep_p=float(flags.get("mask_keep_p", 0.1)),
        row_start=rows_begin_with_bos(flags),
    )
    held_out = ValidationSet(corpus, masks, options.seq_length, mask_p=options.mask_p)
    rows = max(1, model.shape.rows * model.shape.length // options.seq_length)
    metrics = {}
    if modes != ("masked",) or not options.every_token:
        metrics = validate(cast(PretrainingModel, model.loaded.model), held_out, model.world, rows, model.autocast, "")
    for mode in modes:
        predicted = corpus.num_tokens
        if mode == "masked" and options.every_token:
            scores = model.score({mode: windows(corpus, model.special, options.seq_length, masks.row_start)})[mode]
            loss, accuracy = -float(scores.sum(dtype=np.float64)) / corpus.num_tokens, None
        elif f"{mode}_loss" not in metrics:
            raise UsageError(f"--data: the text has no token to predict in mode {mode}; give a longer one.")
        else:
            loss, accuracy = metrics[f"{mode}_loss"], metrics[f"{mode}_accuracy"]
        if mode == "causal" and model.document_end:  # one that ends as the next begins has no end if it is the last
            predicted += corpus.num_documents - masks.bos_ends
        found[mode] = _per_unit(loss, predicted, words, size) | ({} if accuracy is None else {"accuracy": accuracy})
    if options.elbo and "masked" in modes:
        bound = measure_bound(model, held_out, rows, options.elbo)
        more = {"standard_error": bound.error, "tokens": bound.tokens}
        found["elbo"] = _per_unit(bound.loss, bound.tokens, words, size) | more
    return found


def _per_unit(loss: float, tokens: int, words: int, size: int) -> dict[str, float]:
    """A loss in nats a token, per token, word and byte."""
    return {
        "loss": loss,
        "perplexity": _exp(loss),
        "word_perplexity": _exp(loss * tokens / max(1, words)),
        "bits_per_byte": loss * tokens / math.log(2) / max(1, size),
    }


def count_text(documents: Sequence[str]) -> tuple[int, int]:
    """Words and UTF-8 bytes."""
    return sum(len(text.split()) for text in documents), sum(len(text.encode()) for text in documents)


def count_decoded(loaded: LoadedModel, corpus: Corpus) -> tuple[int, int]:
    """The same for a tokenised corpus."""
    words = size = 0
    for shard in corpus.shards:
        for first in range(0, shard.num_documents, _DECODED_AT_ONCE):
            some = range(first, min(first + _DECODED_AT_ONCE, shard.num_documents))
            ids = [shard.document(index).tolist() for index in some]
            more = count_text(loaded.tokenizer.decode_batch(ids, skip_special_tokens=False))
            words, size = words + more[0], size + more[1]
    return words, size


def windows(corpus: Corpus, special: SpecialIds, seq_length: int, row_start: bool) -> TokenizedSentences:
    """Documents cut into windows of at most seq_length tokens: the first begins with `<s>`, the others as rows of
    training do, with `<s>` too or with the last token of the window before; the last ends with `</s>`."""
    end = [] if special.eos is None else [special.eos]
    step = seq_length - 1 - len(end)
    parts: list[np.ndarray] = []
    scored: list[int] = []
    for shard in corpus.shards:
        for index in range(shard.num_documents):
            ids = shard.document(index).astype(np.int64)
            for begin in range(0, len(ids), step):
                window = ids[begin : begin + step]
                before = [special.bos] if row_start or begin == 0 else ids[begin - 1 : begin]
                parts.append(np.concatenate([before, window, end if begin + step >= len(ids) else []]).astype(np.int64))
                scored.append(len(window))
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(part) for part in parts])])
    flat = np.concatenate(parts)
    counts = np.array(scored, np.int64)
    return TokenizedSentences(flat, np.arange(len(flat)), starts, np.ones_like(counts), counts)


def _exp(loss: float) -> float:
    return math.exp(min(loss, _LARGEST_EXPONENT))


def table(path: str, found: dict[str, Any]) -> list[str]:
    """The results of a text as lines."""
    sizes = (f"{found[noun]:,} {noun}" for noun in ("words", "tokens", "bytes"))
    rows = [["", "loss", "perplexity", "per word", "bits/byte", "accuracy"]]
    for mode in ("masked", "elbo", "causal"):
        if mode in found:
            of = found[mode]
            last = f"{100 * of['accuracy']:.1f} %" if "accuracy" in of else ""
            last = f"at most, +- {of['standard_error']:.4f}" if mode == "elbo" else last
            numbers = (f"{of['loss']:.4f}", f"{of['perplexity']:,.2f}", f"{of['word_perplexity']:,.1f}")
            rows.append([mode, *numbers, f"{of['bits_per_byte']:.4f}", last])
    return [f"{path}: {count(found['documents'], 'document')}, {', '.join(sizes)}", *aligned(rows), ""]


if __name__ == "__main__":
    sys.exit(main())
