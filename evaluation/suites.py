"""Zero-shot suites of --evaluate_data, measured during training: minimal pairs, BabyLM's tasks, SyntaxGym, LAMBADA.

A path is a file or a folder of files, which are known by what is in them: JSON lines of pairs, EWoK, entity tracking,
COMPS, WUG or LAMBADA, SyntaxGym's suites (JSON) and reading times (CSV). All texts share batches.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from data.special_tokens import plain
from evaluation import lambada, reading_times, syntax_gym, zero_shot
from evaluation.pair_accuracy import (
    MODES,
    PairSet,
    by_group,
    chosen_modes,
    correctness,
    encode_pairs,
    in_modes,
    mean_of_paradigms,
    objectives,
    pair_sets,
    read_lines,
    refuse_twice,
)
from evaluation.token_log_probs import (
    BatchShape,
    Scorer,
    SpecialIds,
    TokenizedSentences,
    joined,
    sentence_sums,
    token_scores,
)
from evaluation.validation import evaluation_mode
from training.config import ConfigError, TrainingConfig
from training.inputs import Inputs
from training.state import TrainState

_FLAG = "--evaluate_data"
_PAIRS, LAMBADA, SYNTAX = "pairs", "lambada", "syntaxgym"
_FIELDS = {  # that only this kind of file has
    "sentence_good": _PAIRS, "sentence_bad": _PAIRS, "Target1": "ewok", "input_prefix": "entity_tracking",
    "prefix_acceptable": "comps", "ratio": "wug_adj", "text": LAMBADA,
}  # fmt: skip


@dataclass(frozen=True)
class Suite:
    """Texts to score under each objective, and what their tokens' scores come to.

    values: of an objective and its texts' token scores [1, N], an array that can be averaged over objectives; metrics:
    of such an array, fractions and correlations by NAME and NAME/PART. last_words: as LAMBADA is scored, with the best
    tokens in a second line of scores; it has no fused mode."""

    name: str
    items: int
    texts: Mapping[str, TokenizedSentences]
    values: Callable[[str, np.ndarray], np.ndarray]
    metrics: Callable[[np.ndarray], dict[str, float]]
    last_words: bool = False


# Reading


def find_suites(path: Path, flag: str = _FLAG) -> tuple[dict[str, list[Path]], list[str]]:
    """The files of suites at a path by kind, and a line for each file there that is none. Raises ConfigError."""
    files: dict[str, list[Path]] = {}
    notes = []
    for file in _files(path, flag):
        if reason := zero_shot.left_out(file.relative_to(path)):
            notes.append(f"{file.relative_to(path)} is left out: {reason}")
        elif kind := _kind(file, flag):
            files.setdefault(kind, []).append(file)
        elif path.is_dir():
            notes.append(f"{file.relative_to(path)} is no suite and is left out")
        else:
            raise ConfigError(f"{flag}: {path} is neither a suite of SyntaxGym (JSON) nor of reading times (CSV)")
    return files, notes


def read_suites(path: Path, tokenizer: Tokenizer, special: SpecialIds) -> tuple[list[Suite], list[str]]:
    """The suites at a path, and a line for each file there that is none. Raises ConfigError."""
    files, notes = find_suites(path)
    suites: list[Suite] = []
    if pairs := files.pop(_PAIRS, []):
        others = {file.parent for of in files.values() for file in of if file.suffix == ".jsonl"}
        mixed = others & {file.parent for file in pairs}
        if mixed:
            raise ConfigError(f"{_FLAG}: folder {min(mixed)} holds minimal pairs and others; put them into two folders")
        suites += [pair_suite(each, tokenizer, special) for each in pair_sets(path, pairs, _FLAG)]
    for file in files.pop(LAMBADA, []):
        suites.append(_lambada(file, tokenizer, special))
    if found := files.pop(SYNTAX, []):
        suites.append(_syntax_gym(found, tokenizer, special))
    for file in files.pop(zero_shot.READING, []):
        suites.append(_reading(file, tokenizer, special))
    for (name, kind), of in _by_dataset(path, files).items():
        suites.append(_items(name, kind, of, tokenizer, special))
    refuse_twice([suite.name for suite in suites], _FLAG, "suites")
    return suites, notes


def _files(path: Path, flag: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    inside = sorted(file for file in path.rglob("*") if file.suffix in (".jsonl", ".json", ".csv") and file.is_file())
    found = [file for file in inside if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not found:
        raise ConfigError(f"{flag}: folder {path} holds no .jsonl, .json or .csv file; give files with sentence pairs")
    return found


def _kind(file: Path, flag: str) -> str:
    """Which suite a file is of, "" of none. Raises ConfigError for JSON lines of no suite."""
    if file.suffix == ".csv":
        with file.open(encoding="utf-8-sig", errors="replace") as lines:
            return zero_shot.READING if "prev_item" in lines.readline() else ""
    if file.suffix == ".json":
        try:
            content = json.loads(file.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError):
            return ""
        return SYNTAX if isinstance(content, dict) and {"items", "predictions"} <= content.keys() else ""
    where, first = read_lines(file, flag, "pair")[0]
    kinds = [kind for field, kind in _FIELDS.items() if field in first]
    if not kinds:
        fields = ", ".join(first) or "none"
        raise ConfigError(f'{where}: "sentence_good" is missing, and the fields ({fields}) are those of no other suite')
    return kinds[0]


def _by_dataset(path: Path, files: Mapping[str, list[Path]]) -> dict[tuple[str, str], list[Path]]:
    """Files of items by the names of their datasets: the outermost folder that is named by the task, else their own."""
    found: dict[tuple[str, str], list[Path]] = {}
    for kind, of in files.items():
        for file in of:
            begins = kind.removesuffix("_adj")
            above = [part for part in (*file.parts[:-1], file.stem)[len(path.parts) - 1 :] if part.startswith(begins)]
            own = file.stem if file == path else file.parent.name
            found.setdefault((above[0] if above else own, kind), []).append(file)
    return found


def pair_suite(each: PairSet, tokenizer: Tokenizer, special: SpecialIds) -> Suite:
    """A set of minimal pairs."""
    texts = encode_pairs(each.pairs, tokenizer, special)

    def metrics(scores: np.ndarray) -> dict[str, float]:
        right = correctness(scores)
        groups = by_group([pair.phenomenon for pair in each.pairs], right)
        found = {f"{each.name}/{group}": of.value for group, of in groups.items()}
        return {each.name: mean_of_paradigms(each.pairs, right).value, **found}

    def values(_: str, scores: np.ndarray) -> np.ndarray:
        return sentence_sums(texts, scores)[0].reshape(-1, 2)

    return Suite(each.name, len(each.pairs), dict.fromkeys(MODES, texts), values, metrics)


def _items(name: str, kind: str, files: list[Path], tokenizer: Tokenizer, special: SpecialIds) -> Suite:
    items = [item for file in files for item in zero_shot.read_items(kind, file, _FLAG)]
    texts = zero_shot.encode_items(items, tokenizer, special)

    def metrics(scores: np.ndarray) -> dict[str, float]:
        found = zero_shot.results(items, scores)
        if "spearman" in found:
            return {name: found["spearman"]}
        groups = by_group([item.paradigm for item in items], correctness(scores))
        parts = {f"{name}/{group}": of.value for group, of in groups.items()} if len(groups) > 1 else {}
        return {name: found["mean"]["accuracy"], **parts}

    def values(_: str, scores: np.ndarray) -> np.ndarray:
        return zero_shot.by_item(items, sentence_sums(texts, scores)[0])

    return Suite(name, len(items), dict.fromkeys(MODES, texts), values, metrics)


def _reading(file: Path, tokenizer: Tokenizer, special: SpecialIds) -> Suite:
    data = reading_times.read_reading_times(file, _FLAG)
    encoded = {name: reading_times.encode_places(data.places, tokenizer, special, name == "causal") for name in MODES}

    def metrics(surprisals: np.ndarray) -> dict[str, float]:
        found = reading_times.results(data, surprisals, resamples=0)
        parts = [part for part in ("eye_tracking", "self_paced") if part in found]
        return {f"{file.stem}_{part}": found[part]["gain"] for part in parts}

    def values(objective: str, scores: np.ndarray) -> np.ndarray:
        texts, owners = encoded[objective]
        return reading_times.surprisals(sentence_sums(texts, scores)[0], owners, len(data.places))

    texts = {objective: of for objective, (of, _) in encoded.items()}
    return Suite(file.stem, len(data.places) // 2, texts, values, metrics)


def _syntax_gym(files: list[Path], tokenizer: Tokenizer, special: SpecialIds) -> Suite:
    suites = [syntax_gym.read_suite(file, _FLAG) for file in files]
    regions = syntax_gym.Regions(suites, tokenizer, special)

    def metrics(surprisals: np.ndarray) -> dict[str, float]:
        parts = zip(suites, regions.by_item(surprisals), strict=True)
        found = {f"{SYNTAX}/{of.name}": syntax_gym.results(of, items)["mean"]["accuracy"] for of, items in parts}
        return {SYNTAX: float(np.mean(list(found.values()))), **found}

    def values(_: str, scores: np.ndarray) -> np.ndarray:
        return regions.surprisals(scores)

    items = sum(len({each.item for each in suite.sentences}) for suite in suites)
    return Suite(SYNTAX, items, dict.fromkeys(MODES, regions.texts), values, metrics)


def _lambada(file: Path, tokenizer: Tokenizer, special: SpecialIds) -> Suite:
    texts = lambada.encode_last_words(lambada.read_texts(file, _FLAG), tokenizer, special)
    name = file.stem if file.stem.startswith(LAMBADA) else f"{LAMBADA}_{file.stem}"

    def values(_: str, scores: np.ndarray) -> np.ndarray:
        return np.array([lambada.results(texts, scores)["accuracy"]["accuracy"]])

    def metrics(right: np.ndarray) -> dict[str, float]:
        return {name: float(right[0])}

    return Suite(name, len(texts), dict.fromkeys(MODES, texts), values, metrics, last_words=True)


# Scoring


def measure_suites(scorer: Scorer, suites: Sequence[Suite], mode: str) -> dict[str, float]:
    """Metrics `eval/MODE/NAME` and `eval/MODE/NAME/PART` of all suites, in the modes of --evaluate_mode's value. All
    ranks take part."""
    modes = chosen_modes(mode)
    values: dict[str, dict[str, np.ndarray]] = {suite.name: {} for suite in suites}
    for objective in objectives(modes):
        for last_words in (False, True):
            own = [suite for suite in suites if suite.last_words == last_words]
            if not own:
                continue
            parts = [suite.texts[objective] for suite in own]
            causal = objective == "causal"
            scores = token_scores(scorer, joined(parts), causal=causal, word_l2r=last_words, best=last_words)
            ends = np.cumsum([len(part.ids) for part in parts])[:-1]
            for suite, found in zip(own, np.split(scores, ends, axis=1), strict=True):
                values[suite.name][objective] = suite.values(objective, found)
    metrics = {}
    for mode in modes:
        for suite in suites:
            if mode != "fused" or not suite.last_words:
                of = suite.metrics(in_modes(values[suite.name], [mode])[mode])
                metrics |= {f"eval/{mode}/{key}": value for key, value in of.items()}
    return metrics


class ZeroShot:
    """The suites of --evaluate_data, measured during training."""

    def __init__(self, suites: Sequence[Suite], notes: Sequence[str], special: SpecialIds, config: TrainingConfig):
        self._suites, self._notes, self._special, self._config = suites, notes, special, config

    @classmethod
    def read(cls, inputs: Inputs) -> ZeroShot | None:
        """The suites that --evaluate_data names; None where it names none. Raises ConfigError."""
        config, options = inputs.config, inputs.builder.options
        if not config.evaluate_data:
            return None
        tokenizer = plain(Tokenizer.from_str(inputs.tokenizer_text))
        special = SpecialIds(options.bos_id, None, options.pad_id, options.mask_id)  # a sentence is no whole document
        return cls(*read_suites(Path(config.evaluate_data), tokenizer, special), special, config)

    @property
    def summary(self) -> str:
        """What there is, in a line."""
        every = self._config.evaluate_every
        counts = ", ".join(f"{suite.name} {suite.items:,}" for suite in self._suites)
        return "; ".join([counts, f"every {every} steps" if every else "at the end", *self._notes])

    @property
    def content(self) -> str:
        """What identifies all of it, for comparing ranks."""
        files = _files(Path(self._config.evaluate_data), _FLAG)
        return "".join(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n" for file in files)

    def measure(self, state: TrainState, tokens: int, wanted: Callable[[], bool]) -> dict[str, Any]:
        """Metrics of the averaged weights, in batches of the shape that validation uses. tokens: trained on so far.
        wanted: as in `Scorer`."""
        config, autocast = self._config, state.forward_backward.mixed_precision
        shape = BatchShape(config.local_batch_size, config.seq_length)
        scorer = Scorer(state.model, self._special, state.world, shape, autocast, wanted)
        with state.ema.swapped_in(state.model), evaluation_mode(state.model):
            found = measure_suites(scorer, self._suites, config.evaluate_mode)
        return {"step": state.step, "stats/tokens": tokens, **found}

    def line(self, metrics: Mapping[str, Any]) -> str:
        """The console's line of `measure`'s metrics: those of whole suites."""
        values: dict[str, list[str]] = {}
        for key, value in metrics.items():
            _, _, rest = key.partition("eval/")
            mode, _, name = rest.partition("/")
            if name and (name in {suite.name for suite in self._suites} or "/" not in name):
                values.setdefault(name, []).append(f"{mode} {100 * value:.1f} %")
        shown = "; ".join(f"{name} {', '.join(of)}" for name, of in values.items())
        return f"step {metrics['step']:>6}  zero-shot (EMA): {shown}"
