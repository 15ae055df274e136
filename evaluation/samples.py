"""Sample completions: held-out documents that a model continues (causal) and whose words it fills in (masked).

    python evaluation/samples.py RUN... [--prompt "The committee"] [--gap "The <mask> sat down."]

Training takes samples at each validation, this command from the averaged weights of the newest checkpoint, or of one
that is named. The run's samples.jsonl has an object a line: `step`, `weights` ("ema") and `kind`, "causal" with
`prompt`, `text` and `truth` (what the document says), or "masked" with `text` (holding <mask>) and, for each gap, its
`candidates` (words with probabilities) and its `truth`; `truth` is null where the text came from the user.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch
from tokenizers import Tokenizer

from data.atomic_io import json_objects, write_atomically
from data.cli import Parser
from data.corpus import Corpus, CorpusError
from data.mix import named_paths
from data.shards import ShardError
from data.special_tokens import special_tokens
from evaluation.fill_mask import MASK, check_text, mask_row, predict_gaps
from evaluation.generation import LoadedModel, Sampling, UsageError, generate, load, run
from evaluation.validation import evaluation_mode
from training.checkpoint import locate, training_flags
from training.config import TrainingConfig
from training.state import TrainState
from training.status import SAMPLES
from training.stopping import Abandoned

_PROMPT, _NEW, _CLOZE = 16, 40, 40  # tokens: of a prompt, of its continuation, of a text with gaps
_CANDIDATES = 5
_SAMPLING = Sampling(temperature=0.8, top_p=0.95)
_SEARCHED = 400  # documents looked at for some that fit
_COUNT = 3  # samples of each kind that the command takes of held-out documents
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue, and those that follow them in the document ([]: not known)."""

    ids: list[int]
    truth: list[int]


@dataclass(frozen=True)
class Cloze:
    """Token ids with masks at the positions `gaps`, and the ids that belong there (None: not known)."""

    ids: list[int]
    gaps: list[int]
    truth: list[int] | None = None


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser("Let the averaged weights of a run's newest checkpoint continue texts and fill gaps.")
    parser.add_argument(
        "runs", nargs="+", metavar="RUN",
        help="a run folder, or one of its checkpoints; the samples.jsonl of the run is added to",
    )  # fmt: skip
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT",
        help="text to continue; may be given several times (default: beginnings of held-out documents)",
    )  # fmt: skip
    parser.add_argument(
        "--gap", action="append", default=[], metavar="TEXT",
        help=f"text with {MASK} where tokens are missing; may be given several times (default: held-out documents)",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: CUDA where there is a GPU"
    )
    return run(sample_runs, parser.parse_args(arguments))


def sample_runs(options: argparse.Namespace) -> None:
    """Add samples to the samples.jsonl of every run; those of the same step are replaced."""
    for text in options.gap:
        check_text(text)
    for folder in map(Path, options.runs):
        checkpoint = locate(folder)
        model = load(checkpoint.path, ema=True, device=options.device)
        if options.prompt or options.gap:
            prompts = [Prompt(model.encode(text), []) for text in options.prompt]
            rows = [mask_row(model, text) for text in options.gap]
            clozes = [Cloze(row[1 : len(row) - len(model.closing)], [gap - 1 for gap in gaps]) for row, gaps in rows]
        else:
            prompts, clozes = corpus_texts(model, held_out_corpus(folder, model), _COUNT)
        samples = complete(model, prompts, clozes, checkpoint.step)
        path = (folder.resolve().parent.parent if checkpoint.path == folder else folder) / SAMPLES
        others = [sample for sample in json_objects(path) if sample.get("step") != checkpoint.step]
        lines = (json.dumps(sample, ensure_ascii=False) + "\n" for sample in (*others, *samples))
        try:
            write_atomically(path, "".join(lines).encode())
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
        print(f"{path}: {len(samples)} samples of step {checkpoint.step}", flush=True)


def held_out_corpus(folder: Path, model: LoadedModel) -> Corpus:
    """The validation corpus that a run's config.json names. Raises UsageError where it is not there any more."""
    path = training_flags(folder).get("valid_path", "")
    remedy = "give texts with --prompt and --gap"
    if not path:
        raise UsageError(f"{folder} was trained without --valid_path: {remedy}.")
    try:
        path = next(iter(named_paths(path).values()))
        return Corpus(path, tokenizer_hash=None, bos_id=model.special_id("bos"), eos_id=None)
    except (CorpusError, ShardError, OSError) as error:
        raise UsageError(f"the held-out data of {folder} cannot be read ({error}): {remedy}.") from error


def sample_texts(
    state: TrainState,
    corpus: Corpus,
    tokenizer_text: str,
    config: TrainingConfig,
    wanted: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Samples of a run's averaged weights, which its model has, --validation_samples of each kind, of documents of a
    held-out corpus. For one rank, on its own; the model is left as it was. wanted: whether the run is to stop, which
    leaves no samples."""
    count, model = config.validation_samples, state.model
    if not count:
        return []
    roles = special_tokens(tokenizer_text, config.special_tokens or "", config.n_special_tokens or 0)
    loaded = LoadedModel.of(model, Tokenizer.from_str(tokenizer_text), roles)
    # A shape of its own for a few texts is not worth a compilation.
    stance = torch.compiler.set_stance("force_eager") if config.compile else contextlib.nullcontext()
    with contextlib.suppress(Abandoned), stance, evaluation_mode(model):
        prompts, clozes = corpus_texts(loaded, corpus, count)
        return complete(loaded, prompts, clozes, state.step, wanted)
    return []


# Texts


def corpus_texts(model: LoadedModel, corpus: Corpus, count: int) -> tuple[list[Prompt], list[Cloze]]:
    """`count` documents to continue and `count` others with two gaps each, spread evenly over the corpus. Gaps are
    words of one token and at least three letters; too short documents are passed over."""
    mask = model.special_id("mask")
    prompts: list[Prompt] = []
    clozes: list[Cloze] = []
    for tokens in _documents(corpus):
        if len(prompts) == count and len(clozes) == count:
            break
        if len(prompts) <= len(clozes) and len(tokens) >= _PROMPT + _NEW:
            prompts.append(Prompt(tokens[:_PROMPT], tokens[_PROMPT : _PROMPT + _NEW]))
        elif len(tokens) >= _CLOZE // 2 and len(clozes) < count:
            ids = tokens[:_CLOZE]
            if gaps := _choose_gaps(_pieces(model, ids)):
                masked = [mask if n in gaps else token for n, token in enumerate(ids)]
                clozes.append(Cloze(masked, gaps, [ids[gap] for gap in gaps]))
    return prompts[:count], clozes


def _documents(corpus: Corpus) -> Iterable[list[int]]:
    """The beginnings of documents evenly spread over a corpus."""
    ends = np.cumsum([shard.num_documents for shard in corpus.shards])
    for number in np.unique(np.linspace(0, ends[-1] - 1, _SEARCHED).astype(int)):
        shard = int(np.searchsorted(ends, number, side="right"))
        first = int(ends[shard - 1]) if shard else 0
        yield corpus.shards[shard].document(int(number) - first)[: _PROMPT + _NEW].tolist()


def _pieces(model: LoadedModel, ids: list[int]) -> list[str]:
    """What each token adds to the text of those before it: its word with the space before, whatever the tokenizer."""
    texts = ["", *(model.decode(ids[: n + 1]) for n in range(len(ids)))]
    return [text[len(before) :] for before, text in pairwise(texts)]


def _choose_gaps(texts: list[str]) -> list[int]:
    """Positions of two words of one token each, at about a third and two thirds of the text; [] without them. texts:
    what each token adds to the text."""
    ends = [*(not text[:1].isalpha() for text in texts[1:]), True]  # whether the next token begins something new
    words = [
        n
        for n, (text, ended) in enumerate(zip(texts, ends, strict=True))
        if n > 2 and ended and text.startswith(" ") and text[1:].isalpha() and len(text) > 3
    ]
    if len(words) < 2:
        return []
    first = min(words, key=lambda n: abs(n - len(texts) / 3))
    second = min((n for n in words if n != first), key=lambda n: abs(n - 2 * len(texts) / 3))
    return sorted((first, second))


# What the model makes of them


def _until(wanted: Callable[[], bool], items: Iterable[_Item]) -> Iterator[_Item]:
    """`items`; raises Abandoned before the next one once `wanted` holds."""
    for item in items:
        if wanted():
            raise Abandoned
        yield item


def continue_prompts(
    model: LoadedModel, prompts: Sequence[Prompt], wanted: Callable[[], bool] = lambda: False
) -> list[dict[str, Any]]:
    """A continuation of each prompt, from the same random numbers each time; " ..." where it was going on. wanted:
    whether to give up, which is asked after each token and raises Abandoned."""
    written: list[list[int]] = [[] for _ in prompts]
    generators = [torch.Generator().manual_seed(number) for number in range(len(prompts))]
    if prompts:
        tokens = generate(model, [prompt.ids for prompt in prompts], _NEW, _SAMPLING, generators)
        for row, token in _until(wanted, tokens):
            written[row] += [] if token is None else [token]
    found = []
    for prompt, new in zip(prompts, written, strict=True):
        start = model.decode(prompt.ids)
        text = model.decode([*prompt.ids, *new])[len(start) :] + (" ..." if len(new) == _NEW else "")
        truth = model.decode([*prompt.ids, *prompt.truth])[len(start) :] if prompt.truth else None
        found.append({"kind": "causal", "prompt": start, "text": text, "truth": truth})
    return found


def complete(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    clozes: Sequence[Cloze],
    step: int,
    wanted: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Samples of averaged weights: continuations, and the most probable words for each gap of each text."""
    filled = (_fill(model, cloze) for cloze in _until(wanted, clozes))
    return [{"step": step, "weights": "ema", **each} for each in (*continue_prompts(model, prompts, wanted), *filled)]


def _fill(model: LoadedModel, cloze: Cloze) -> dict[str, Any]:
    fillings = predict_gaps(model, model.document(cloze.ids), [gap + 1 for gap in cloze.gaps], _CANDIDATES)  # after <s>
    answers = []
    for n, filling in enumerate(fillings):
        words = [model.decode([token]) for token in filling.ids]
        candidates = [[word, round(p, 5)] for word, p in zip(words, filling.probabilities, strict=True)]
        answers.append({"truth": model.decode([cloze.truth[n]]) if cloze.truth else None, "candidates": candidates})
    pieces, starts = _pieces(model, cloze.ids), [0, *(gap + 1 for gap in cloze.gaps)]
    parts = ["".join(pieces[a:b]) for a, b in zip(starts, [*cloze.gaps, len(cloze.ids)], strict=True)]
    return {"kind": "masked", "text": f" {MASK}".join(parts), "gaps": answers}


if __name__ == "__main__":
    sys.exit(main())
