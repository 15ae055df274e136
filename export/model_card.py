"""Model card: the README.md of an exported model, written from what the run that trained it has logged."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.atomic_io import json_object
from data.ledger import ledger_rows
from data.results import Result, ResultFile, find_results, read_results
from export.footprint import Footprint, footprint
from training.checkpoint import Checkpoint
from training.config import FIELDS
from training.ema import weights_file
from training.metric_logger import read_metrics
from training.status import checkpoint_folders, newest_step

# Measures and tasks by the Hub's names; tasks of fine-tuning by their forms in evaluation/finetune.py.
_METRICS = {"Spearman's rho": "spearmanr", "gain in R2": "r_squared", "word perplexity": "perplexity",
            "matthews": "matthews_correlation", "spearman": "spearmanr", "pearson": "pearsonr"}  # fmt: skip
_TASKS = {"masked": "fill-mask", "causal": "text-generation", "fused": "text-generation"}
_FORMS = {"tags": "token-classification", "embeddings": "sentence-similarity", "choices": "multiple-choice"}


@dataclass(frozen=True)
class Records:
    """What a run has noted about the exported model.

    run: the run folder's config.json. metrics: the last value of each result up to the checkpoint's step.
    evaluations: what result files of evaluation/ in the run folder hold of this checkpoint. footprint: of the steps up
    to it. All empty without a run.
    """

    checkpoint: Mapping[str, Any]
    run: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluations: Sequence[ResultFile] = ()
    footprint: Footprint | None = None


@dataclass(frozen=True)
class Stated:
    """What only the model's makers know.

    license: the Hub's name of it. languages: ISO 639 codes. authors: names. watts: what a device drew, 0: what it draws
    at most. grams: of CO2-equivalent a kWh, 0: the world's mean. results: more files of results of evaluation/.
    """

    license: str = ""
    languages: tuple[str, ...] = ()
    authors: tuple[str, ...] = ()
    watts: float = 0.0
    grams: float = 0.0
    results: tuple[Path, ...] = ()


NOTHING_STATED = Stated()


def read_records(checkpoint: Checkpoint, stated: Stated = NOTHING_STATED) -> Records:
    """The records of a checkpoint and of the run folder that it lies in."""
    folder = checkpoint.path.parent.parent
    run = json_object(folder / "config.json") if checkpoint.path.parent.name == "checkpoints" else {}
    newest = "flags" not in run or checkpoint.step == newest_step(*checkpoint_folders(folder))
    paths = [*(find_results(folder) if "flags" in run else ()), *stated.results]
    found = [file for file in map(read_results, paths) if file and file.is_of(checkpoint.path, newest)]
    if "flags" not in run:
        return Records(checkpoint.record, evaluations=found)
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line.get("step", 0) <= checkpoint.step]
    metrics = {}
    for line in lines:
        metrics |= {k: v for k, v in line.items() if k.startswith(("valid/", "eval/")) and isinstance(v, int | float)}
    used = footprint(lines, run.get("launches", ()), stated.watts, stated.grams)
    return Records(checkpoint.record, run, metrics, found, used)


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
    results = _results_of(records, ema)
    sections = [
        f"---\n{_yaml(_metadata(name, kind, records, stated, results))}---",
        f"# {name}",
        f"{kind} with {parameters:,} parameters ({config['num_hidden_layers']} layers of {config['hidden_size']} "
        f"features, {config['num_attention_heads']} heads, vocabulary {config['vocab_size']:,}, "
        f"{config['position_embedding']} positions), pretrained on a mix of masked and causal language modelling "
        "([GPT-BERT, Charpentier and Samuel 2024](https://arxiv.org/abs/2410.24159)). The same weights read "
        "bidirectionally (embeddings, filling masks, classification) and causally (scoring and continuing texts)."
        + f" These are averaged weights ({weights_file(ema)} of the checkpoint)."
        * bool(ema),
        _makers(stated),
        _native_usage(place, native) if native else _usage(place, tokens),
        _limits(records, tokens),
        _training(records),
        _ledger(records.checkpoint.get("ledger")),
        _results(results),
        _during_training(records, ema),
        records.footprint.section() if records.footprint else "",
        _citation(name, place, kind, stated),
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

Attention is PyTorch's SDPA, with relative positions one T x T tensor a head; `attn_implementation="flex_attention"`
needs memory linear in a text's length (CUDA, no dropout), and `"eager"` is the reference, which all others equal. On a
GPU `model.compile()` pays; with the repository that trained this model on `PYTHONPATH`, its kernels are faster still
(`export/attention_kernels.py` there).

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
    others = flags.get("causal_rows", "causal")
    ratio = f"{flags['hybrid_numerator']}/{flags['hybrid_denominator']} of the rows masked, the rest {others}"
    if flags.get("hybrid_schedule"):
        ratio = f"rows masked or {others} by the schedule `{flags['hybrid_schedule']}`"
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


def _results_of(records: Records, ema: bool | str) -> list[tuple[str, Result]]:
    """The results of these weights with the kind of each evaluation; of equal ones the last."""
    found, weights = {}, weights_file(ema) if ema else "trained"
    for file in records.evaluations:
        if (file.weights or weights) == weights:
            found |= {(file.kind, each.name, each.mode, each.measure): (file.kind, each) for each in file.results}
    return list(found.values())


def _results(found: Sequence[tuple[str, Result]]) -> str:
    """What the scripts of evaluation/ have measured: whole suites, then their parts, folded."""
    if not found:
        return ""
    head = ("evaluation", "measured", "mode", "measure", "value", "95 % interval", "items")
    rows: dict[bool, list[tuple[str, ...]]] = {True: [], False: []}
    for kind, each in found:
        interval = each.interval or "not computed"
        items = f"{each.items:,}" if each.items else "?"
        rows[each.whole].append(
            (kind, each.name, each.mode or "fine-tuned", each.measure, each.text(), interval, items)
        )
    parts = rows[False]
    folded = f"<details><summary>{len(parts)} parts of these</summary>\n\n{_table(head, parts)}\n\n</details>"
    return (
        "## Results\n\nIn percent, but for perplexities. A tie between k choices counts as 1 / k. Intervals are "
        "Wilson's and means of these, of rho by Fisher's z, of gains in R2 by the bootstrap over words; of fine-tuned "
        "tasks the standard deviation over seeds stands in their place. Masked scores are pseudo-log-likelihoods, "
        f"fused ones the mean of both.\n\n{_table(head, rows[True])}" + f"\n\n{folded}" * bool(parts)
    )


def _during_training(records: Records, ema: bool | str) -> str:
    """The last validation of these weights, and scores of the averaged ones."""
    kept = f"valid/{weights_file(ema).replace('_', '-')}_" if ema else "valid/"
    rows = []
    for key, value in records.metrics.items():
        if key.startswith("valid/") and (ema or not re.match("valid/ema[_-]", key)) and key.startswith(kept):
            rows.append((f"validation: {key.removeprefix(kept).replace('_', ' ')}", f"{value:.4g}"))
        elif key.startswith("eval/"):
            rows.append((f"averaged weights: {key.removeprefix('eval/').replace('_', ' ')}", f"{value:.4g}"))
    return "### While it trained\n\n" + _table(("measured", "value"), rows) if rows else ""


def _makers(stated: Stated) -> str:
    """Whose model it is, and who may use it."""
    named = f"- Made by: {', '.join(stated.authors)}." if stated.authors else ""
    language = ", ".join(f"`{code}`" for code in stated.languages) or "not stated"
    license_line = f"`{stated.license}`" if stated.license else "none is stated, so ask its makers before you use it"
    return "\n".join(filter(None, (named, f"- Language: {language}.", f"- License: {license_line}.")))


def _citation(name: str, place: str, kind: str, stated: Stated) -> str:
    """BibTeX of the model and of what it is made by."""
    key = "".join(c if c.isalnum() else "_" for c in name)
    author = f"  author = {{{' and '.join(stated.authors)}}},\n" if stated.authors else ""
    url = f"  url = {{https://huggingface.co/{place}}},\n" if place.count("/") == 1 else ""
    paper = """@inproceedings{charpentier2024gptbert,
  author = {Lucas Georges Gabriel Charpentier and David Samuel},
  title = {{GPT} or {BERT}: why not both?},
  booktitle = {The 2nd {BabyLM} Challenge at {CoNLL}},
  year = {2024},
  url = {https://arxiv.org/abs/2410.24159},
}"""
    model = f"@misc{{{key},\n{author}  title = {{{name}}},\n  note = {{{kind}, a language model}},\n{url}}}"
    return f"## Citation\n\nThe model, and the method of its training:\n\n```bibtex\n{model}\n{paper}\n```"


# Metadata


def _metadata(
    name: str, kind: str, records: Records, stated: Stated, results: Sequence[tuple[str, Result]]
) -> dict[str, Any]:
    """What the Hub reads of a card, and huggingface_hub's ModelCard."""
    index = [{"name": name, "results": [_indexed(kind_of, each) for kind_of, each in results if each.whole]}]
    return {
        **({"license": stated.license} if stated.license else {}),
        **({"language": list(stated.languages)} if stated.languages else {}),
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "tags": [kind.lower() if kind.endswith("BERT") else "hybrid", "masked-lm", "causal-lm", "pretraining"],
        **(records.footprint.metadata() if records.footprint else {}),
        **({"model-index": index} if index[0]["results"] else {}),
    }


def _indexed(kind: str, each: Result) -> dict[str, Any]:
    """A result in the form of `model-index`; the interval is among the metric's arguments."""
    task = _TASKS[each.mode] if each.mode else _FORMS.get(each.form, "text-classification")
    bounds = {"mode": each.mode, "low": each.low, "high": each.high, "standard_deviation": each.spread}
    arguments = {key: value for key, value in bounds.items() if value not in (None, "")}
    metric = {
        "type": _METRICS.get(each.measure, each.measure),
        "value": each.value,
        "name": f"{each.measure}, {each.mode or 'fine-tuned'}",
        **({"args": arguments} if arguments else {}),
    }
    called = "".join(c if c.isalnum() or c in "-_." else "-" for c in each.name)
    return {"task": {"type": task}, "dataset": {"name": f"{each.name} ({kind})", "type": called}, "metrics": [metric]}


def _scalar(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text


def _yaml(value: Any, indent: str = "") -> str:
    """Objects and lists as block YAML; scalars as JSON, which is YAML and keeps `no`, Norwegian, from meaning false."""
    lines = []
    for key, each in value.items() if isinstance(value, dict) else ((None, each) for each in value):
        inside = _yaml(each, indent + "  ") if isinstance(each, dict | list) else ""
        if key is None:
            lines.append(f"{indent}- {inside.lstrip() if inside else _scalar(each)}")
        else:
            lines.append(f"{indent}{key}:" + (f"\n{inside}" if inside else f" {_scalar(each)}"))
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def longest_row(flags: Mapping[str, Any]) -> int:
    """Tokens of the longest row of training; 0 where nothing was recorded."""
    return int(flags.get("seq_length", 0)) * 2 ** len(flags.get("length_milestones", ()))


def _limits(records: Records, tokens: Mapping[str, str]) -> str:
    flags = records.run.get("flags") or records.checkpoint.get("flags") or {}
    longest = longest_row(flags)
    lines = [
        "## Uses and limits",
        "",
        "- Meant for research and as a start for fine-tuning. It follows no instructions, knows no facts to rely on, "
        "and was not tested for uses that decide about people.",
        "- It repeats what its corpus holds, errors and prejudices included.",
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
