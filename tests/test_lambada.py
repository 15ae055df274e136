"""LAMBADA: the last word against brute force in float64, what is refused."""

import copy
import json
import math

import pytest
import torch
from helpers.tiny_evaluation import checkpoint_of, tiny_model
from helpers.tiny_runs import TEXT, train_on

from data.results import read_results
from evaluation import lambada

MASK = 4
CONTEXTS = ("The list holds", "A  function returns the", "", "words of the length, and")


@torch.no_grad()
def next_tokens(model, row: list[int], place: int, mode: str) -> torch.Tensor:
    """Log-probabilities [V] of the token after `place`."""
    inputs = torch.tensor([row])
    return model.predict(model.encode(inputs, torch.zeros_like(inputs), mode == "causal")[0, place]).log_softmax(-1)


def test_last_words_against_brute_force(tmp_path):
    tokenizer = train_on(TEXT, 300)
    model = tiny_model(tokenizer.get_vocab_size(), scale=2)
    [favourite] = tokenizer.encode(" list", add_special_tokens=False).ids
    with torch.no_grad():
        words = tokenizer.get_vocab_size()
        bias = next(parameter for parameter in model.parameters() if parameter.shape == (words,))
        bias[favourite] += 50  # the model always says so
    exact = copy.deepcopy(model).double()
    texts = [f"{context} {last}".strip() for context in CONTEXTS for last in ("list", "naïve")]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": f"{text}\n"}) + "\n" for text in texts))
    output = tmp_path / "results.json"
    command = [str(checkpoint_of(tmp_path / "run", model, tokenizer)), "--data", str(tmp_path / "x.jsonl")]
    assert lambada.main([*command, "--device", "cpu", "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    for mode in ("causal", "masked"):
        right, total = 0, 0.0
        for text in texts:
            before = len(text) - len(text.split()[-1]) - (" " in text)
            encoding = tokenizer.encode(text, add_special_tokens=False)
            first = next(i for i, (_, end) in enumerate(encoding.offsets) if end > before)
            hits = []
            for i in range(first, len(encoding.ids)):
                row = [1, *encoding.ids[:i], *[MASK] * (len(encoding.ids) - i)]
                scores = next_tokens(exact, row[: i + 1] if mode == "causal" else row, i, mode)
                total += float(scores[encoding.ids[i]])
                hits.append(int(scores.argmax()) == encoding.ids[i])
            right += all(hits)
        assert right == 3  # not where nothing is before it, and no space
        assert results[mode]["accuracy"]["accuracy"] == pytest.approx(right / len(texts))
        assert results[mode]["perplexity"] == pytest.approx(math.exp(-total / len(texts)), rel=1e-4)
    assert results["texts"] == len(texts)
    shown = {(each.mode, each.measure): each.value for each in read_results(output).results}
    assert shown["causal", "word perplexity"] == results["causal"]["perplexity"]
    assert shown["masked", "accuracy"] == results["masked"]["accuracy"]["accuracy"]


def test_refusals_are_one_sentence(tmp_path, capsys):
    for line, words in (({"text": " "}, "line 1: \"text\" is ' '"), ({"x": 1}, 'line 1: "text" is missing')):
        (tmp_path / "x.jsonl").write_text(json.dumps(line))
        assert lambada.main(["model", "--data", str(tmp_path / "x.jsonl")]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
