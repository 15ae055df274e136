"""Model card: the README.md of an exported model, written from what the run that trained it has logged."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.atomic_io import json_object
from data.ledger import ledger_rows
from training.checkpoint import Checkpoint
from training.config import FIELDS
from training.ema import weights_file
from training.metric_logger import read_metrics

_MOST_RESULTS = 60


@dataclass(frozen=True)
class Records:
    """What a run has noted about the exported model.

    run: the run folder's config.json. metrics: the last value of each result up to the checkpoint's step.
    evaluations: contents of result files of evaluation/minimal_pairs.py in the run folder. All empty without a run.
    """

    checkpoint: Mapping[str, Any]
    run: Mapping[str, Any]
    metrics: Mapping[str, float]
    evaluations: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Stated:
    """What only the model's makers know: the Hub's name of its license, and ISO 639 codes of its languages."""

    license: str = ""
    languages: tuple[str, ...] = ()

    def metadata(self) -> str:
        """Lines of the card's metadata."""
        license_line = f"license: {self.license}\n" if self.license else ""
        # In quotes: without them YAML reads "no", Norwegian, as false.
        return license_line + "".join(
            ["language:\n", *(f"- '{code}'\n" for code in self.languages)] * bool(self.languages)
        )


NOTHING_STATED = Stated()


def read_records(checkpoint: Checkpoint) -> Records:
    """The records of a checkpoint and of the run folder that it lies in."""
    folder = checkpoint.path.parent.parent
    run = json_object(folder / "config.json") if checkpoint.path.parent.name == "checkpoints" else {}
    if "flags" not in run:
        return Records(checkpoint.record, {}, {}, ())
    metrics = {}
    for line in read_metrics(folder / "metrics.jsonl"):
        if line.get("step", 0) <= checkpoint.step:
            metrics |= {
                k: v for k, v in line.items() if k.startswith(("valid/", "eval/")) and isinstance(v, int | float)
            }
    paths = sorted(path for pattern in ("*.json", "evaluation/*.json") for path in folder.glob(pattern))
    found = [content for content in map(json_object, paths) if isinstance(content.get("sets"), dict)]
    return Records(checkpoint.record, run, metrics, found)


def model_card(
    name: str,
    place: str,
    config: Mapping[str, Any],
    parameters: int,
    tokens: Mapping[str, str],
    ema: bool | str,
    records: Records,
    stated: Stated,
    native: str = "",
) -> str:
    """README.md with the metadata that the Hugging Face Hub reads.

    place: what from_pretrained is given in the examples. config: ModelConfig's values. tokens: special tokens by role.
    native: the class of transformers' own that it is, if it is one.
    """
    kind = native or ("GPT-BERT" if config["model_type"] == "gpt-bert" else "LTG-BERT")
    sections = [
        f"---\n{stated.metadata()}library_name: transformers\npipeline_tag: fill-mask\ntags:\n- gpt-bert\n- masked-lm\n"
        "- causal-lm\n- pretraining\n---",
        f"# {name}",
        f"{kind} with {parameters:,} parameters ({config['num_hidden_layers']} layers of {config['hidden_size']} "
        f"features, {config['num_attention_heads']} heads, vocabulary {config['vocab_size']:,}, "
        f"{config['position_embedding']} positions), pretrained on a mix of masked and causal language modelling "
        "([GPT-BERT, Charpentier and Samuel 2024](https://arxiv.org/abs/2410.24159)). The same weights read "
        "bidirectionally (embeddings, filling masks, classification) and causally (scoring and continuing texts)."
        + f" These are averaged weights ({weights_file(ema)} of the checkpoint)."
        * bool(ema),
        _native_usage(place, native) if native else _usage(place, tokens),
        _training(records),
        _ledger(records.checkpoint.get("ledger")),
        _results(records, ema),
        _limits(records, tokens),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _native_usage(place: str, native: str) -> str:
    return f"""## Use

```python
from transformers import AutoTokenizer, {native}

tokenizer = AutoTokenizer.from_pretrained("{place}")
model = {native}.from_pretrained("{place}")
```"""


def _usage(place: str, tokens: Mapping[str, str]) -> str:
    return f"""## Use

```python
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, pipeline

tokenizer = AutoTokenizer.from_pretrained("{place}", trust_remote_code=True)
masked = AutoModelForMaskedLM.from_pretrained("{place}", trust_remote_code=True)
causal = AutoModelForCausalLM.from_pretrained("{place}", trust_remote_code=True)

pipeline("fill-mask", model=masked, tokenizer=tokenizer)("The {tokens["mask"]} sat on the mat.")
pipeline("text-generation", model=causal, tokenizer=tokenizer)("Once upon a time", max_new_tokens=32)
```

`AutoModel` gives hidden states (bidirectional; causal with `is_causal=True`), `AutoModelForSequenceClassification` and
`AutoModelForTokenClassification` a new head on `{tokens["bos"]}` or on every token; there are also
`AutoModelForQuestionAnswering` and `AutoModelForMultipleChoice`. The tokenizer opens a text with
`{tokens["bos"]}`, does not close it (it may go on), and pads on the right; `generate()` for several texts needs
`padding_side="left"`. Words cut beforehand keep the space before them: `tokenizer(["The", " cat"],
is_split_into_words=True)`. The masked model's logits are aligned with its input: position i scores token i. (The
network predicts the next token under both objectives; the shift is inside, and the first token of a row, which nothing
precedes, gets logits 0.)

**BabyLM's evaluation pipeline:** backends `causal` and `mlm`. Not `mntp`, which would shift the logits a second time:
it gives no error, and scores that mean nothing. Fine-tuning works with and without its causal option."""


def _training(records: Records) -> str:
    flags = records.run.get("flags") or records.checkpoint.get("flags")
    if not flags or "hybrid_numerator" not in flags:  # an import knows how its texts were read, and no more
        origin = records.checkpoint.get("imported_from") or records.checkpoint.get("extended_from")
        return f"## Training\n\nImported from `{origin}`; its makers describe the training." if origin else ""
    lines = ["## Training", ""]
    data = records.run.get("data", {})
    if data:
        sources = ", ".join(
            f"`{'/'.join(Path(source['path']).parts[-2:])}`"
            + f" x {source['repeat']:g}" * (source.get("repeat", 1) != 1)
            for source in data.get("sources", ())
        )
        lines.append(
            f"- Data: {data['documents']:,} documents, {data['tokens']:,} tokens an epoch"
            + f" ({sources})." * bool(sources)
        )
    steps, tokens = records.checkpoint.get("step"), records.checkpoint.get("tokens")
    ratio = f"{flags['hybrid_numerator']}/{flags['hybrid_denominator']} of the rows masked, the rest causal"
    if flags.get("hybrid_schedule"):
        ratio = f"rows masked or causal by the schedule `{flags['hybrid_schedule']}`"
    trained = f"{tokens:,} tokens in " if isinstance(tokens, int) else ""
    lines.append(f"- Trained: {trained}{steps:,} of {flags['max_steps']:,} steps; {ratio}.")
    devices = sorted({f"{launch['world_size']} x {launch['device']}" for launch in records.run.get("launches", ())})
    if devices:
        lines.append(f"- Hardware: {', '.join(devices)}.")
    versions = records.run.get("versions") or records.checkpoint.get("versions") or {}
    if versions:
        lines.append(f"- Software: {', '.join(f'{key} {value}' for key, value in versions.items())}.")
    if records.run.get("git_commit"):
        lines.append(f"- Code: commit `{records.run['git_commit']}`.")
    # Flags that a resumed run may change say where files lie or how a run is watched, and nothing about the model.
    rows = [(key, json.dumps(value)) for key, value in flags.items() if key in FIELDS and FIELDS[key].metadata["fixed"]]
    return "\n".join(lines) + "\n\n" + _table(("hyperparameter", "value"), rows)


def _ledger(ledger: Mapping[str, Any] | None) -> str:
    """What training had used of each source."""
    if not ledger:
        return ""
    note = "The last columns are repetitions by objective; tokens include those that open and close documents."
    return f"## Data used\n\n{_table(*ledger_rows(ledger))}\n\n{note}"


def _results(records: Records, ema: bool | str) -> str:
    """Validation and scores during training, then finished evaluations; only those of these weights."""
    kept = f"valid/{weights_file(ema).replace('_', '-')}_" if ema else "valid/"
    rows, weights = [], weights_file(ema) if ema else "trained"
    for key, value in records.metrics.items():
        if key.startswith("valid/") and (ema or not re.match("valid/ema[_-]", key)) and key.startswith(kept):
            rows.append((f"validation: {key.removeprefix(kept).replace('_', ' ')}", f"{value:.4g}"))
        elif key.startswith("eval/"):
            rows.append((f"during training: {key.removeprefix('eval/').replace('_', ' ')}", f"{value:.4g}"))
    for content in records.evaluations:
        if content.get("weights", weights) != weights:
            continue
        rows += _pair_rows(content["sets"])
    return "## Results\n\n" + _table(("measured", "value"), rows[:_MOST_RESULTS]) if rows else ""


def _pair_rows(sets: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The scores in a result file; none where another program's file happens to have "sets"."""
    try:
        return [
            (f"minimal pairs: {name}, {mode}", f"{100 * entry['mean']['accuracy']:.1f} %")
            for name, found in sets.items()
            for mode, entry in found["modes"].items()
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


def longest_row(flags: Mapping[str, Any]) -> int:
    """Tokens of the longest row of training; 0 where nothing was recorded."""
    return int(flags.get("seq_length", 0)) * 2 ** len(flags.get("length_milestones", ()))


def _limits(records: Records, tokens: Mapping[str, str]) -> str:
    flags = records.run.get("flags") or records.checkpoint.get("flags") or {}
    longest = longest_row(flags)
    lines = [
        "## Limits",
        "",
        "- The model repeats what its corpus holds, errors and prejudices included; it follows no instructions.",
    ]
    if longest:
        lines.append(f"- Rows of training had at most {longest} tokens; longer texts are possible and untested.")
    if flags.get("document_end") is False:
        end = f" with `{tokens['eos']}`" * ("eos" in tokens)
        lines.append(f"- Training closed no document{end}, so generation does not stop by itself.")
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
