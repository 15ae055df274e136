"""BabyLM's official pipeline on an exported model, by a stand-in of ours: its backends choose as our own script does.

The pipeline loads an AutoModelForCausalLM (`causal`) or an AutoModelForMaskedLM whose logits i are those of token i
(`mlm`), pads on the right, and takes the log-probabilities of the tokens whose characters lie in what is scored. Its
fine-tuning reads AutoModel's states, with a mask [B, T] or, for causal ones, [B, T, T].
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_evaluation import PLACES, write_pipeline
from helpers.tiny_exports import BOS, EOS, MASK, library, load, make_checkpoint, make_exported, random_model

from evaluation import babylm, minimal_pairs

WORDS = ("the", "list", "function", "returns", "holds", "naïve", "東京", "The", "length", "of")


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    library()
    return make_exported(tmp_path_factory.mktemp("exported"), "gpt-bert")[1]


@pytest.fixture(autouse=True)
def _foreign_warnings():
    """Deprecations inside other libraries are not ours to fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def sentence_pairs(count: int) -> list[tuple[str, str]]:
    """Sentences of one to seven words, and the same words in another order with one more."""
    found = []
    for number in range(count):
        words = [WORDS[(number * 7 + place * place) % len(WORDS)] for place in range(1 + number % 7)]
        found.append((" ".join(words), " ".join([words[-1], *words[:-1], WORDS[number % 3]])))
    return found


@torch.no_grad()
def completion_score(model: Any, processor: Any, prefix: str, completion: str, backend: str) -> float:
    """Sum of the log-probabilities of the completion's tokens; with no prefix, of the whole sentence's."""
    text = prefix + completion
    encoded = processor(text, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    scored = [i for i, (begin, end) in enumerate(offsets) if end > len(prefix) and end > begin]
    if backend == "causal":
        inputs = torch.tensor([ids])
        logits = model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits[0].log_softmax(-1)
        return sum(float(logits[i - 1, ids[i]]) for i in scored)
    rows = torch.tensor([ids] * len(scored))
    rows[range(len(scored)), scored] = processor.mask_token_id
    logits = model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits.log_softmax(-1)
    return sum(float(logits[row, i, ids[i]]) for row, i in enumerate(scored))


@pytest.mark.parametrize(("backend", "auto"), [("causal", "AutoModelForCausalLM"), ("mlm", "AutoModelForMaskedLM")])
def test_zero_shot_backends_choose_as_our_script_does(exported, tmp_path, backend, auto):
    pairs = sentence_pairs(30)
    lines = [json.dumps({"sentence_good": good, "sentence_bad": bad}) + "\n" for good, bad in pairs]
    (tmp_path / "pairs.jsonl").write_text("".join(lines))
    mode = "masked" if backend == "mlm" else backend
    # The run had closed its documents with </s>, which is the default; a sentence is none.
    checkpoint = make_checkpoint(tmp_path, random_model("gpt-bert"))
    given = [str(checkpoint), "--data", str(tmp_path / "pairs.jsonl"), "--device", "cpu", "--mode", mode]
    assert minimal_pairs.main([*given, "--scores", str(tmp_path / "s.jsonl")]) == 0
    processor = library().AutoProcessor.from_pretrained(exported, trust_remote_code=True, padding_side="right")
    model = load(auto, exported)
    for line in map(json.loads, (tmp_path / "s.jsonl").read_text().splitlines()):
        good, bad = (completion_score(model, processor, "", line[f"sentence_{k}"], backend) for k in ("good", "bad"))
        assert line[f"{mode}_good"] == pytest.approx(good, rel=1e-5, abs=1e-4)
        assert (line[f"{mode}_good"] > line[f"{mode}_bad"]) == (good > bad)


def completions(folder: Path) -> dict[str, list[list[tuple[str, str]]]]:
    """Files of the tasks other than reading; by task the (prefix, completion) of each item's choices."""
    files: dict[str, list[tuple[dict[str, Any], list[tuple[str, str]]]]] = {}
    for number, (good, bad) in enumerate(sentence_pairs(12)):
        context, options = f"The {WORDS[number % 10]} of", [f" {text}" for text in (good, bad, f"{bad}.", "a", "of it")]
        ewok = {"Domain": "d", "Context1": context, "Target1": good, "Target2": bad}
        comps = {"prefix_acceptable": good, "prefix_unacceptable": bad, "property_phrase": "holds it."}
        files.setdefault("ewok", []).append((ewok, [(context, f" {good}"), (context, f" {bad}")]))
        files.setdefault("comps", []).append((comps, [(good, " holds it."), (bad, " holds it.")]))
        tracking = {"input_prefix": context, "options": options, "numops": number % 3}
        files.setdefault("entity_tracking", []).append((tracking, [(context, option) for option in options]))
        wug = {"sentences": f"{good}\t{bad}", "ratio": number / 12}
        pair = {"sentence_good": good, "sentence_bad": bad, "UID": "x", "field": "f", "linguistics_term": "t"}
        files.setdefault("blimp", []).append((pair, [("", good), ("", bad)]))
        files.setdefault("wug_past", []).append((wug, [("", good), ("", bad)]))
    for name, lines in files.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line, _ in lines))
    return {name: [choices for _, choices in lines] for name, lines in files.items()}


@pytest.mark.parametrize(("backend", "auto"), [("causal", "AutoModelForCausalLM"), ("mlm", "AutoModelForMaskedLM")])
def test_every_suite_chooses_as_the_backends_do(exported, tmp_path, backend, auto):
    tasks = completions(tmp_path / "data")
    checkpoint = make_checkpoint(tmp_path / "run", random_model("gpt-bert"))
    command = [str(checkpoint), "--data", str(tmp_path / "data"), "--device", "cpu", "--output", str(tmp_path / "out")]
    assert babylm.main([*command, "--mode", "masked" if backend == "mlm" else backend]) == 0
    processor = library().AutoProcessor.from_pretrained(exported, trust_remote_code=True, padding_side="right")
    model = load(auto, exported)
    for task, items in tasks.items():
        [file] = (tmp_path / "out").glob(f"run/*/zero_shot/{backend}/{task}/*/predictions.json")
        lines: dict[str, list[str]] = {}
        for uid, of in json.loads(file.read_text()).items():
            lines[uid] = [line["pred"] for line in of["predictions"]]
        for number, choices in enumerate(items):
            scores = [completion_score(model, processor, *choice, backend) for choice in choices]
            first, second = sorted(scores, reverse=True)[:2]
            uid = {"ewok": "d", "entity_tracking": f"x_{number % 3}_ops"}.get(task, "x")
            predicted = lines[uid][number // 3 if task == "entity_tracking" else number]
            assert first - second < 1e-4 or predicted == "".join(choices[scores.index(first)])


@torch.no_grad()
def word_surprisal(model: Any, processor: Any, text: str, word: str, backend: str) -> float:
    """Nats of a word behind a text: causal as a completion; masked its tokens one by one, the first of three masks."""
    word = f" {word}" if text else word
    if backend == "causal":
        return -completion_score(model, processor, text, word, backend)
    row, total = processor(text)["input_ids"], 0.0
    for token in processor(word, add_special_tokens=False)["input_ids"]:
        inputs = torch.tensor([[*row, *[processor.mask_token_id] * 3]])
        logits = model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits[0, len(row)]
        total -= float(logits.log_softmax(-1)[token])
        row = [*row, token]
    return total


@pytest.mark.parametrize(("backend", "auto"), [("causal", "AutoModelForCausalLM"), ("mlm", "AutoModelForMaskedLM")])
def test_reading_gives_the_surprisals_that_the_backends_give(exported, tmp_path, backend, auto):
    data = write_pipeline(tmp_path / "data") / "reading"
    checkpoint = make_checkpoint(tmp_path / "run", random_model("gpt-bert"))
    command = [str(checkpoint), "--data", str(data), "--device", "cpu", "--output", str(tmp_path / "out")]
    assert babylm.main([*command, "--mode", "masked" if backend == "mlm" else backend]) == 0
    [file] = (tmp_path / "out").glob(f"run/*/zero_shot/{backend}/reading/reading_data/predictions.json")
    lines = json.loads(file.read_text())["reading"]["predictions"]
    processor = library().AutoProcessor.from_pretrained(exported, trust_remote_code=True, padding_side="right")
    model = load(auto, exported)
    for line, (text, word, text_before, word_before) in zip(lines, PLACES, strict=False):
        expected = word_surprisal(model, processor, text, word, backend)
        assert line["pred"] == pytest.approx(expected, rel=1e-4, abs=1e-4)
        if word_before:
            expected = word_surprisal(model, processor, text_before, word_before, backend)
            assert line["prev_pred"] == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_completions_of_a_context_add_up_to_the_sentence(exported):
    """EWoK and its like score " target" after a context: the space belongs to the target's first token."""
    processor = library().AutoProcessor.from_pretrained(exported, trust_remote_code=True, padding_side="right")
    model = load("AutoModelForCausalLM", exported)
    parts = [
        completion_score(model, processor, *split, "causal") for split in (("", "The list"), ("The list", " holds"))
    ]
    assert sum(parts) == pytest.approx(completion_score(model, processor, "", "The list holds", "causal"), rel=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_fine_tuning_learns_with_either_mask(exported, causal):
    """A head on <s>, or with the causal option on the last token, over right-padded rows."""
    torch.manual_seed(0)
    processor = library().AutoProcessor.from_pretrained(exported, trust_remote_code=True, padding_side="right")
    model = load("AutoModel", exported).eval()
    batch = processor([good for good, _ in sentence_pairs(6)], padding=True, return_tensors="pt")
    ids, mask = batch["input_ids"], batch["attention_mask"]
    given = mask.unsqueeze(1).repeat(1, ids.size(1), 1).tril() if causal else mask
    place = mask.sum(dim=1) - 1 if causal else torch.zeros(6, dtype=torch.int64)
    head, labels = torch.nn.Linear(32, 2), torch.arange(6) % 2
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], 3e-3)
    for _ in range(30):
        states = model(input_ids=ids, attention_mask=given).last_hidden_state
        logits = head(states[torch.arange(6), place])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()
    assert logits.argmax(dim=1).tolist() == labels.tolist()


def test_the_card_names_the_backends(exported):
    card = (exported / "README.md").read_text()
    assert "backends `causal` and `mlm`. Not `mntp`" in card
    ids = load("AutoTokenizer", exported)("The <mask>").input_ids
    assert (ids[0], ids[-1], EOS in ids) == (BOS, MASK, False)
