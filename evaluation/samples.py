"""What a model writes: held-out documents that it continues (causal) and whose words it fills in (masked).

The training loop takes samples at each validation, `python -m report.html_report --samples` from the newest checkpoint.
They lie in the run folder's samples.jsonl, an object a line with `step`, `weights` ("ema") and `kind`: "causal" with
`prompt`, `text` and `truth` (what the document says), or "masked" with `text` (holding <mask>) and, for each gap, its
`candidates` (words with probabilities) and its `truth`. `truth` is null where the text came from the user.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from data.atomic_io import write_atomically
from data.corpus import Corpus, CorpusError
from data.shards import ShardError
from model import LTGBert
from report.plot import PlotError
from report.runs import SAMPLES, read_lines, read_object
from training.checkpoint import CheckpointError, load_model, locate
from training.config import ConfigError, TrainingConfig
from training.distributed import choose_device
from training.state import TrainState

MASK = "<mask>"
_PROMPT, _NEW, _ROW = 16, 40, 40  # tokens: of a prompt, of its continuation, of a row with gaps
_CANDIDATES = 5
_TEMPERATURE, _TOP_P = 0.8, 0.95
_SPECIAL = 16  # ids below are special in every vocabulary of this project
_SEARCHED = 400  # documents looked at for some that fit


@dataclass(frozen=True)
class Material:
    """What a model is given. Ids are those of the tokenizer, without special ones.

    beginnings: a prompt and what follows it in the document. rows: the tokens of a text, positions of gaps among them,
    and whether the token there is known (else it is a mask that the user wrote).
    """

    beginnings: list[tuple[list[int], list[int]]]
    rows: list[tuple[list[int], list[int], bool]]


def from_corpus(corpus: Corpus, tokenizer: Tokenizer, count: int) -> Material:
    """`count` documents to continue and `count` others with two gaps each, spread evenly over the corpus.

    Gaps are words of one token and at least three letters; too short documents are passed over.
    """
    beginnings: list[tuple[list[int], list[int]]] = []
    rows: list[tuple[list[int], list[int], bool]] = []
    for tokens in _documents(corpus):
        if len(beginnings) == count and len(rows) == count:
            break
        if len(beginnings) <= len(rows) and len(tokens) >= _PROMPT + _NEW:
            beginnings.append((tokens[:_PROMPT], tokens[_PROMPT : _PROMPT + _NEW]))
        elif len(tokens) >= _ROW // 2:
            gaps = _gaps(tokens[:_ROW], tokenizer)
            if gaps and len(rows) < count:
                rows.append((tokens[:_ROW], gaps, True))
    return Material(beginnings[:count], rows)


def _documents(corpus: Corpus) -> Iterable[list[int]]:
    """The beginnings of documents evenly spread over a corpus."""
    ends = np.cumsum([shard.num_documents for shard in corpus.shards])
    for number in np.unique(np.linspace(0, ends[-1] - 1, _SEARCHED).astype(int)):
        shard = int(np.searchsorted(ends, number, side="right"))
        first = int(ends[shard - 1]) if shard else 0
        yield corpus.shards[shard].document(int(number) - first)[: _PROMPT + _NEW].tolist()


def _gaps(tokens: list[int], tokenizer: Tokenizer) -> list[int]:
    """Positions of two words of one token each, at about a third and two thirds of the text; [] without them."""
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
    ends = [*(not text[:1].isalpha() for text in texts[1:]), True]  # whether the next token begins something new
    words = [
        n
        for n, (text, ended) in enumerate(zip(texts, ends, strict=True))
        if n > 2 and ended and text.startswith(" ") and text[1:].isalpha() and len(text) > 3
    ]
    if len(words) < 2:
        return []
    first = min(words, key=lambda n: abs(n - len(tokens) / 3))
    second = min((n for n in words if n != first), key=lambda n: abs(n - 2 * len(tokens) / 3))
    return sorted((first, second))


def from_texts(prompts: Sequence[str], gaps: Sequence[str], tokenizer: Tokenizer) -> Material:
    """The user's own texts; one space before a gap belongs to what fills it, as in evaluation/fill_mask.py."""
    mask, rows = _token_id(tokenizer, MASK), []
    for text in gaps:
        row: list[int] = []
        places = []
        pieces = text.split(MASK)
        for piece in pieces[:-1]:
            row += tokenizer.encode(piece.removesuffix(" "), add_special_tokens=False).ids
            places.append(len(row))
            row.append(mask)
        row += tokenizer.encode(pieces[-1], add_special_tokens=False).ids
        rows.append((row, places, False))
    beginnings = [(tokenizer.encode(prompt, add_special_tokens=False).ids, []) for prompt in prompts]
    return Material(beginnings, rows)


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token, which training has found in the tokenizer before."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise PlotError(f"the run's tokenizer has no {token}, which samples need.")
    return number


class Sampler:
    """A model in use, in float32. eager: whether to run a compiled model as written."""

    def __init__(self, model: LTGBert, tokenizer: Tokenizer, eager: bool = False):
        self._model, self._tokenizer, self._eager = model, tokenizer, eager
        self._device = next(model.parameters()).device
        marked = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._special = torch.tensor(sorted(marked | set(range(_SPECIAL))))
        names = ("<s>", "</s>", MASK, "<pad>")
        self._bos, self._eos, self._mask, self._pad = (_token_id(tokenizer, name) for name in names)

    @torch.no_grad()
    def take(self, material: Material) -> list[dict[str, Any]]:
        """Samples as in samples.jsonl, without `step` and `weights`. The model's mode is restored."""
        was_training = self._model.training
        self._model.eval()
        # A shape of its own for a few texts is not worth a compilation.
        stance = torch.compiler.set_stance("force_eager") if self._eager else contextlib.nullcontext()
        with stance:
            found = [*self._continue(material.beginnings), *(self._fill(*row) for row in material.rows)]
        self._model.train(was_training)
        return found

    def _logits(self, rows: list[list[int]], positions: list[list[int]], causal: bool) -> list[Tensor]:
        """For each row its logits, float64 [positions, V] on the CPU, special tokens but </s> left out."""
        longest = max(map(len, rows))
        ids = torch.tensor([row + [self._pad] * (longest - len(row)) for row in rows])
        documents = torch.tensor([[0] * len(row) + [-1] * (longest - len(row)) for row in rows])
        hidden = self._model.encode(ids.to(self._device), documents.to(self._device), causal)
        forbidden = self._special if not causal else self._special[self._special != self._eos]
        return [
            self._model.predict(hidden[n, places]).to("cpu", torch.float64).index_fill(-1, forbidden, -torch.inf)
            for n, places in enumerate(positions)
        ]

    def _continue(self, beginnings: list[tuple[list[int], list[int]]]) -> list[dict[str, Any]]:
        """Draw a continuation of each prompt, from the same random numbers each time."""
        rows = [[self._bos, *prompt] for prompt, _ in beginnings]
        going = [True] * len(rows)
        generator = torch.Generator().manual_seed(0)
        for _ in range(_NEW if rows else 0):
            logits = self._logits(rows, [[len(row) - 1] for row in rows], causal=True)
            for n, line in enumerate(logits):
                token = self._draw(line[0], generator)
                going[n] &= token != self._eos
                if going[n]:
                    rows[n].append(token)
            if not any(going):
                break
        found = []
        for (prompt, truth), row, cut in zip(beginnings, rows, going, strict=True):
            start = self._decode(prompt)
            text = self._decode(row[1:])[len(start) :] + (" ..." if cut else "")
            told = self._decode([*prompt, *truth])[len(start) :] if truth else None
            found.append({"kind": "causal", "prompt": start, "text": text, "truth": told})
        return found

    @staticmethod
    def _draw(logits: Tensor, generator: torch.Generator) -> int:
        """A token [V] drawn with top-p sampling (Holtzman et al., 2020)."""
        probabilities, ids = torch.sort(torch.softmax(logits / _TEMPERATURE, 0), descending=True, stable=True)
        kept = probabilities * (probabilities.cumsum(0) - probabilities < _TOP_P)
        return int(ids[torch.multinomial(kept, 1, generator=generator)])

    def _fill(self, tokens: list[int], gaps: list[int], known: bool) -> dict[str, Any]:
        """The most probable words for each gap of a text; the model predicts position i from output i - 1."""
        row = [self._bos, *tokens, self._eos]
        for gap in gaps:
            row[gap + 1] = self._mask
        logits = self._logits([row], [gaps], causal=False)[0]  # gap g stands at g + 1, after <s>
        pieces, start, answers = [], 0, []
        for gap, line in zip(gaps, logits, strict=True):
            pieces.append(self._decode(tokens[start:gap]))
            start = gap + 1
            top = torch.softmax(line, 0).topk(min(_CANDIDATES, len(line)))
            words = [self._decode([token]) for token in top.indices.tolist()]
            shares = [round(share, 5) for share in top.values.tolist()]
            truth = self._decode([tokens[gap]]) if known else None
            answers.append({"truth": truth, "candidates": [list(pair) for pair in zip(words, shares, strict=True)]})
        text = f" {MASK}".join([*pieces, self._decode(tokens[start:])])
        return {"kind": "masked", "text": text, "gaps": answers}

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def held_out(folder: Path, tokenizer: Tokenizer) -> Corpus:
    """The validation corpus that a run's config.json names. Raises PlotError where it is not there any more."""
    path = read_object(folder / "config.json").get("flags", {}).get("valid_path", "")
    remedy = "give texts with --prompt and --gap"
    if not path:
        raise PlotError(f"--samples: {folder} was trained without --valid_path; {remedy}.")
    try:
        return Corpus(path, tokenizer_hash=None, bos_id=_token_id(tokenizer, "<s>"), eos_id=None)
    except (CorpusError, ShardError, OSError) as error:
        raise PlotError(f"--samples: the run's held-out data cannot be read ({error}); {remedy}.") from error


def write_samples(folder: Path, prompts: Sequence[str], gaps: Sequence[str], device: str, count: int = 3) -> None:
    """Add samples of a run's newest checkpoint, averaged weights, to its samples.jsonl. Raises PlotError."""
    try:
        step = locate(folder).step
        model, tokenizer, _ = load_model(folder, ema=True, device=choose_device(device))
    except (CheckpointError, ConfigError) as error:
        raise PlotError(f"--samples: {error}") from error
    tokenizer.encode_special_tokens = True  # "</s>" in a text is text, as it was in training
    given = prompts or gaps
    material = (
        from_texts(prompts, gaps, tokenizer) if given else from_corpus(held_out(folder, tokenizer), tokenizer, count)
    )
    found = Sampler(model, tokenizer).take(material)
    kept = [sample for sample in read_lines(folder / SAMPLES) if sample.get("step") != step]
    write_atomically(folder / SAMPLES, sample_lines([*kept, *labelled(found, step)]).encode())


def sample_texts(
    state: TrainState, held_out: Corpus, tokenizer_text: str, config: TrainingConfig
) -> list[dict[str, Any]]:
    """What the averaged weights make of --validation_samples held-out documents; for one rank, on its own."""
    if not config.validation_samples:
        return []
    tokenizer = Tokenizer.from_str(tokenizer_text)
    material = from_corpus(held_out, tokenizer, config.validation_samples)
    with state.ema.swapped_in(state.model):
        try:
            return labelled(Sampler(state.model, tokenizer, eager=bool(config.compile)).take(material), state.step)
        finally:
            state.model.train()  # also where it failed half-way: samples must not change the run


def labelled(found: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """Samples with the step and the weights that they are of."""
    return [{"step": step, "weights": "ema", **sample} for sample in found]


def sample_lines(found: list[dict[str, Any]]) -> str:
    """Samples as lines of JSON."""
    return "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in found)
