"""The bound of masked diffusion and sampling by unmasking, against everything that can be masked or written."""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.exact_diffusion import corpus_of, exact_bound, loss_of_hidden, sharp_model
from helpers.tiny_runs import TEXT, train_on
from tokenizers import Tokenizer

from data.loader import ValidationSet
from data.masking import MaskingOptions
from data.special_tokens import SpecialTokens
from evaluation import generate, perplexity
from evaluation.elbo import measure_bound
from evaluation.generation import LoadedModel, Sampling, unmask
from evaluation.scoring import ScoringModel
from evaluation.token_log_probs import BatchShape, SpecialIds
from training.checkpoint import write_checkpoint
from training.distributed import World
from training.environment import Environment

CPU = torch.device("cpu")
ROLES = {"unk": 0, "bos": 1, "eos": 2, "pad": 3, "mask": 4}
SPECIAL = SpecialTokens({role: f"<{role}>" for role in ROLES}, ROLES, tuple(range(16)), 24)
SHARP = LoadedModel(sharp_model(24), Tokenizer.from_str(train_on(TEXT, 320).to_str()), CPU, SPECIAL)


def test_the_bound_is_that_of_all_sets_of_hidden_tokens(tmp_path):
    """Fifty equal documents, a row each, the last of them padded."""
    document = [20, 17, 22, 19]
    corpus = corpus_of(tmp_path, *[document] * 50)
    held_out = ValidationSet(corpus, MaskingOptions(24), len(document) + 2)
    ids, world = SpecialIds(1, 2, 3, 4), World(0, 1, CPU, Environment("none"))
    model = ScoringModel(SHARP.model, ids, world, BatchShape(8, 8), loaded=SHARP, document_end=True)
    bound = measure_bound(model, held_out, 64, 60)
    exact = exact_bound(sharp_model(24), document) / len(document)
    assert bound.tokens == 200
    assert bound.error < 0.02 * exact
    assert abs(bound.loss - exact) < 4 * bound.error
    few, other_batches = measure_bound(model, held_out, 64, 3), measure_bound(model, held_out, 7, 3)
    assert other_batches.loss == pytest.approx(few.loss, rel=1e-6)


@cache
@torch.no_grad()
def distribution(row: tuple[int, ...], place: int) -> torch.Tensor:
    """Of the tokens from 16 on."""
    ids = torch.tensor([row])
    return (
        SHARP.model.predict(SHARP.model.encode(ids, torch.zeros_like(ids), False))[0, place, 16:].double().softmax(-1)
    )


def exact_probabilities(document: tuple[int, ...]) -> float:
    """Of `<s> a b </s>` written in either order, special tokens left out of the distributions."""
    total = 0.0
    for order in ((0, 1), (1, 0)):
        row, chance = [1, 4, 4, 2], 1.0
        for place in order:
            chance *= float(distribution(tuple(row), place)[document[place] - 16])
            row[place + 1] = document[place]
        total += chance / 2
    return total


def test_one_token_a_step_samples_from_the_model_in_random_order():
    samples, words = 500, range(16, 24)
    generator = torch.Generator().manual_seed(5)
    found = [tuple(unmask(SHARP, [], 2, 2, Sampling(), generator)) for _ in range(samples)]
    expected = {pair: exact_probabilities(pair) for pair in product(words, words)}
    assert sum(expected.values()) == pytest.approx(1)
    assert max(expected.values()) > 3 / 64, "hardly anything could be told from chance"
    frequent = [pair for pair, p in expected.items() if p * samples > 5]
    rest = 1 - sum(expected[pair] for pair in frequent)
    counts = [found.count(pair) for pair in frequent]
    squares = [
        (n - samples * expected[pair]) ** 2 / (samples * expected[pair])
        for n, pair in zip(counts, frequent, strict=True)
    ]
    squares.append((samples - sum(counts) - samples * rest) ** 2 / max(1e-9, samples * rest))
    degrees = len(squares) - 1
    assert sum(squares) < degrees + 4 * math.sqrt(2 * degrees)


def test_fewer_steps_fill_all_and_keep_the_prompt():
    hidden = loss_of_hidden(sharp_model(24), [20, 21, 22], (2,))
    assert hidden[2] > 0
    for steps in (1, 2, 3, 7):
        written = unmask(SHARP, [20, 21], 7, steps, Sampling(), torch.Generator().manual_seed(1))
        assert len(written) == 7
        assert all(token >= 16 for token in written)
    first = [unmask(SHARP, [20, 21], 5, 5, Sampling(), torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert first[0] == first[1] != first[2]
    sure = [unmask(SHARP, [20], 1, 1, Sampling(0), torch.Generator().manual_seed(s)) for s in range(5)]
    logits = SHARP.logits([1, 20, 4, 2], [1], causal=False)[0]
    assert sure == [[16 + int(logits[16:].argmax())]] * 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("model"), train_on(TEXT, 320)
    model = sharp_model(tokenizer.get_vocab_size())
    files = {"config.json": json.dumps(model.config.to_dict()).encode(), "tokenizer.json": tokenizer.to_str().encode()}
    return write_checkpoint(folder, 1, {"model": model.state_dict()}, {}, files)


def test_perplexity_reports_the_bound(checkpoint, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("The function returns the length of the list.")
    output = tmp_path / "out.json"
    command = [str(checkpoint), "--data", str(text), "--device", "cpu", "--mode", "masked", "--mask_p", "0.5"]
    assert perplexity.main([*command, "--elbo", "3", "--output", str(output)]) == 0
    found = json.loads(output.read_text())["texts"][str(text)]
    bound = found["elbo"]
    assert bound["tokens"] == found["tokens"]
    assert bound["perplexity"] == pytest.approx(math.exp(min(bound["loss"], 700)))
    assert bound["bits_per_byte"] == pytest.approx(bound["loss"] * bound["tokens"] / math.log(2) / found["bytes"])
    assert f"at most, +- {bound['standard_error']:.4f}" in capsys.readouterr().out
    assert perplexity.main([*command, "--elbo", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: --elbo is 1: give 2 or more")


def test_generate_writes_by_unmasking(checkpoint, capsys):
    command = [str(checkpoint), "--device", "cpu", "--prompt", "The list", "--mode", "unmask", "--max_new_tokens", "6"]
    assert generate.main([*command, "--num_samples", "2"]) == 0
    both = capsys.readouterr().out
    assert both.count("The list") >= 2
    assert generate.main([*command, "--seed", "1"]) == 0
    assert both.endswith(capsys.readouterr().out)
    assert generate.main([*command, "--steps", "2"]) == 0
    capsys.readouterr()
    assert generate.main([*command, "--steps", "7"]) == 2
    assert "--steps is 7: give 0 to 6 (--max_new_tokens)" in capsys.readouterr().err


def test_weights_of_a_row_are_those_of_the_bound():
    assert np.isclose(exact_bound(sharp_model(24), [20]), loss_of_hidden(sharp_model(24), [20], (0,))[0])
