"""Ways to read a row (data/reading.py): prefixes, blocks and masked inputs against their definitions, in one batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.tiny_models import make_model
from helpers.tiny_runs import ROOT
from torch import Tensor

from data.mask_rates import SCHEDULED, MaskRates
from data.masking import IGNORE_INDEX, PADDING, MaskingOptions, ModelInputs, RowRates, build_inputs, row_counts
from data.objectives import CAUSAL, MASKED, run_objectives
from data.reading import row_ends
from model_extra import GPTBert
from ops.attention_metadata import attention_allowed
from training import inputs as training_inputs
from training.config import ConfigError, TrainingConfig

BOS, MASK, LENGTH, SIZE = 1, 4, 24, 5
PREFIX, BLOCKS, MEAP = 2, 3, 4
KEYS = np.arange(60, dtype=np.int64) * 7919


def options(causal_rows: str = f"causal,prefix,blocks:{SIZE},meap", **changes) -> MaskingOptions:
    """Of a vocabulary of 60 in which all that is masked is shown as `<mask>`."""
    plain = {"random_p": 0.0, "keep_p": 0.0} | changes
    return MaskingOptions(60, objectives=run_objectives(causal_rows), **plain)


def make_rows(count: int = 60, seed: int = 0) -> np.ndarray:
    """Rows of 24 inputs with documents that begin anywhere, some of a single token, and padding behind some."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(16, 60, (count, LENGTH + 1)).astype(np.int32)
    tokens[generator.random(tokens.shape) < 0.1] = BOS
    tokens[:, 0] = BOS
    tokens[: count // 4, 17:] = PADDING
    return tokens


def read(tokens: np.ndarray, objective: np.ndarray, of: MaskingOptions, rates=SCHEDULED) -> tuple[ModelInputs, Tensor]:
    """Inputs of rows with so numbered objectives, and the number of targets of each that the host knows of."""
    ends = np.zeros((len(tokens), LENGTH), np.int32)
    masked, targets = np.zeros((2, len(tokens)), np.int64)
    for number, each in enumerate(of.objectives):
        rows = objective == number
        ends[rows] = row_ends(each, tokens[rows], KEYS[rows], of)
        counts = row_counts(each, tokens[rows], KEYS[rows], RowRates(rates, 0.4), of, ends=ends[rows])
        masked[rows], targets[rows] = counts
    arrays = map(torch.from_numpy, (tokens, KEYS[: len(tokens)], objective, masked))
    return build_inputs(*arrays, of, ends=torch.from_numpy(ends)), torch.from_numpy(targets)


def pieces(row: np.ndarray) -> list[tuple[int, int]]:
    """First input and end of each document of a row's inputs, without padding."""
    inputs = row[:LENGTH]
    end = int((inputs != PADDING).sum())
    starts = [i for i in range(end) if i == 0 or inputs[i] == BOS]
    return list(zip(starts, [*starts[1:], end], strict=True))


def sees(objective: int, place: tuple[int, int], prefix: int, i: int, j: int) -> bool:
    """Whether input i sees input j of its document, which lies at `place` and has a prefix of so many tokens."""
    if objective == MASKED or j <= i:
        return True
    if objective == PREFIX:
        return j < place[0] + prefix
    return objective == BLOCKS and i // SIZE == j // SIZE


@pytest.mark.parametrize("rates", [SCHEDULED, MaskRates("uniform")], ids=str)
def test_rows_of_all_kinds_in_a_batch_match_their_definitions(rates: MaskRates):
    """Who sees whom, what is masked and what is a target, token by token."""
    tokens, objective = make_rows(), np.arange(60) % 5
    inputs, counts = read(tokens, objective, options(), rates)
    allowed = attention_allowed(inputs.document_ids, inputs.causal)
    prefixes = []
    for b, (row, number) in enumerate(zip(tokens, objective.tolist(), strict=True)):
        expected, targets = torch.zeros(LENGTH, LENGTH, dtype=torch.bool), 0
        for place in pieces(row):
            # Any prefix from the first token to the last but one is right, as long as it is the document's.
            prefix = max(1, int(allowed[b, place[0]].sum()))
            assert number != PREFIX or 1 <= prefix <= max(1, place[1] - place[0] - 1)
            prefixes += [(prefix, place[1] - place[0])] * (number == PREFIX)
            for i in range(*place):
                for j in range(*place):
                    expected[i, j] = sees(number, place, prefix, i, j)
                token, label = int(row[i + 1]), int(inputs.labels[b, i])
                hidden = i + 1 < place[1] and inputs.input_ids[b, i + 1] == MASK
                last = i + 1 == LENGTH  # the token behind the row is a target as if it were a part of it
                unseen = number not in (MASKED, BLOCKS) or (number == BLOCKS and (i + 1) % SIZE == 0)
                if number == PREFIX:
                    unseen = i + 1 >= place[0] + prefix
                word = token not in (BOS, PADDING)
                assert not hidden or number in (MASKED, BLOCKS, MEAP)
                assert not (hidden and number == BLOCKS and unseen), "the first of a block is never masked"
                if not (last and number in (MASKED, BLOCKS)):
                    assert label == (token if word and (unseen or hidden) else IGNORE_INDEX), (b, i)
                assert label in (token, IGNORE_INDEX)
                targets += label != IGNORE_INDEX
        size = int((row[:LENGTH] != PADDING).sum())
        assert torch.equal(allowed[b, :size, :size], expected[:size, :size])
        assert (inputs.labels[b] != IGNORE_INDEX).sum() == targets == counts[b]
    assert len({prefix / length for prefix, length in prefixes}) > 10, "they differ"
    assert (inputs.input_ids[objective == PREFIX] != MASK).all()
    for number in (MASKED, BLOCKS, MEAP):
        assert (inputs.input_ids[objective == number] == MASK).any()


def test_prefixes_are_uniform_and_keyed_by_row_and_document():
    of, tokens = options("prefix"), np.full((4000, LENGTH + 1), 20, np.int32)
    tokens[:, [0, 12]] = BOS
    keys = np.arange(4000)
    ends = row_ends(of.objectives[PREFIX], tokens, keys, of)
    for first, last in ((0, 12), (12, 24)):
        lengths = ends[:, first] - first
        assert (ends[:, first:last] == ends[:, [first]]).all()
        assert np.bincount(lengths, minlength=13)[1:12] == pytest.approx(4000 / 11, rel=0.2)
        assert set(lengths) == set(range(1, 12))
    assert abs(np.corrcoef(ends[:, 0], ends[:, 12])[0, 1]) < 0.06
    assert (row_ends(of.objectives[PREFIX], tokens[::-1], keys[::-1], of) == ends[::-1]).all()


@pytest.mark.parametrize(("size", "objective"), [(1, CAUSAL), (LENGTH, MASKED), (10 * LENGTH, MASKED)])
def test_blocks_of_one_token_are_causal_rows_and_blocks_of_a_row_masked_ones(size: int, objective: int):
    tokens, of = make_rows(), options(f"blocks:{size}")
    ours, counts = read(tokens, np.full(60, 2), of)
    plain, expected = read(tokens, np.full(60, objective), of)
    for name in ("input_ids", "labels", "document_ids"):
        assert torch.equal(getattr(ours, name), getattr(plain, name)), name
    allowed, same = (attention_allowed(ours.document_ids, inputs.causal) for inputs in (ours, plain))
    assert torch.equal(allowed, same)
    assert torch.equal(counts, expected)


@pytest.mark.parametrize("positions", ["relative", "rope"])
def test_no_output_sees_what_it_is_scored_against(positions: str):
    """Of unmasked targets; through two layers. Rows are what they would be alone."""
    model, of = make_model(("gpt-bert", positions)).eval(), options()
    tokens, objective = make_rows(), np.arange(60) % 5
    inputs, _ = read(tokens, objective, of)
    with torch.no_grad():
        together = model(inputs.input_ids, inputs.document_ids, inputs.causal)
    for b in range(15, 20):
        place = torch.arange(LENGTH - 1)
        unmasked = (inputs.labels[b, :-1] != IGNORE_INDEX) & (inputs.input_ids[b, 1:] != MASK)
        place = place[unmasked]
        changed = inputs.input_ids[b].repeat(len(place) + 1, 1)
        changed[range(len(place)), place + 1] = (changed[range(len(place)), place + 1] + 22) % 44 + 16
        rows = (inputs.document_ids[[b]].expand_as(changed), inputs.causal[[b]].expand_as(changed))
        with torch.no_grad():
            outputs = model(changed, *rows)
        real = inputs.document_ids[b] >= 0
        torch.testing.assert_close(outputs[-1][real], together[b][real], rtol=1e-4, atol=1e-5)
        for number, i in enumerate(place.tolist()):
            torch.testing.assert_close(outputs[number, i], outputs[-1, i], rtol=1e-4, atol=1e-5)
        assert len(place) > 2 or objective[b] == MASKED


def test_chance_of_a_target_is_what_the_estimates_take_it_for():
    of, tokens = options(), np.full((60, LENGTH + 1), 20, np.int32)
    tokens[:, 0] = BOS
    for number in (PREFIX, BLOCKS, MEAP):
        _, counts = read(tokens, np.full(60, number), of)
        expected = of.objectives[number].target_fraction(0.4)
        assert counts.double().mean().item() / LENGTH == pytest.approx(expected, abs=0.08)


def test_models_that_read_whole_rows_one_way_refuse_rows_that_look_ahead(monkeypatch: pytest.MonkeyPatch):
    file = str(ROOT / "configs" / "small.json")
    config = TrainingConfig(train_path="x", config_file=file, tokenizer_path="x", name="x", causal_rows="prefix,meap")
    training_inputs._read_model_config(config)
    monkeypatch.setattr(GPTBert, "takes_ends", False)
    with pytest.raises(ConfigError, match=r"'prefix,meap' but a model of type 'gpt-bert' .* no prefix;"):
        training_inputs._read_model_config(config)
    training_inputs._read_model_config(replace(config, causal_rows="meap"))
