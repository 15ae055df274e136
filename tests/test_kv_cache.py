"""Reading token by token gives what the whole model gives over the whole row, and does not compute the prefix again."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from evaluation import kv_cache
from evaluation.kv_cache import CachedDecoder, UncachedDecoder
from model import LTGBert, ModelConfig
from model_extra import build_model

VOCABULARY = 40


def random_model(model_type: str, position_embedding: str, **sizes: int) -> LTGBert:
    """A model all of whose parameters are random, so that no term is absent or trivial."""
    values = {
        "hidden_size": 24, "intermediate_size": 20, "num_attention_heads": 3, "num_hidden_layers": 3,
        "vocab_size": VOCABULARY, "max_position_embeddings": 24, "position_bucket_size": 8,
        "model_type": model_type, "position_embedding": position_embedding, **sizes,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    model = build_model(ModelConfig.from_dict(values), generator).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(std=0.2, generator=generator))
    return model


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def no_padding(rows: int) -> torch.Tensor:
    return torch.zeros(rows, dtype=torch.int64)


KINDS = [(m, p) for m in ("gpt-bert", "ltg-bert") for p in ("relative", "rope")]


@pytest.mark.parametrize(("model_type", "position_embedding"), KINDS)
@torch.inference_mode()
def test_every_state_is_that_of_the_whole_row(model_type, position_embedding):
    """A prompt at once, then single tokens, to twice max_position_embeddings; two rows."""
    model = random_model(model_type, position_embedding)
    ids = tokens(2, 60)
    whole = model.encode(ids, torch.zeros_like(ids), True)
    reader = CachedDecoder(model, no_padding(2))
    torch.testing.assert_close(reader.read(ids[:, :7]), whole[:, 6], rtol=1e-4, atol=1e-5)
    for place in range(7, 60):
        torch.testing.assert_close(reader.read(ids[:, place : place + 1]), whole[:, place], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("model_type", "position_embedding"), KINDS)
@torch.inference_mode()
def test_float64_agrees_to_the_last_digits(model_type, position_embedding):
    """Where rounding is far smaller, so are the differences: they are rounding and nothing else."""
    model = random_model(model_type, position_embedding).double()
    ids = tokens(1, 40)
    whole = model.encode(ids, torch.zeros_like(ids), True)
    reader = CachedDecoder(model, no_padding(1))
    found = torch.stack([reader.read(ids[:, place : place + 1]) for place in range(40)], dim=1)
    # The whole model adds up attention scores in float32 whatever the weights are, and so does the reader.
    assert (found - whole).abs().max() < 2e-6 * whole.abs().max()


@pytest.mark.parametrize(("model_type", "position_embedding"), KINDS)
@torch.inference_mode()
def test_rows_of_different_length_begin_with_padding(model_type, position_embedding, monkeypatch):
    """Each row has the states that its text has alone; long prompts are read in chunks, some of which hold no text."""
    monkeypatch.setattr(kv_cache, "_CHUNK", 5)
    model = random_model(model_type, position_embedding)
    ids, padding = tokens(3, 30), torch.tensor([0, 12, 19])
    alone = []
    for row, start in enumerate(padding.tolist()):
        text = ids[row : row + 1, start:]
        alone.append(model.encode(text, torch.zeros_like(text), True)[0])
    for reader in (CachedDecoder(model, padding), UncachedDecoder(model, padding)):
        for first, last in ((0, 22), (22, 23), (23, 30)):
            hidden = reader.read(ids[:, first:last])
            expected = torch.stack([states[last - start - 1] for states, start in zip(alone, padding, strict=True)])
            torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_rows_can_be_dropped_and_repeated():
    model = random_model("gpt-bert", "relative")
    ids, padding, rows = tokens(3, 12), torch.tensor([0, 4, 2]), torch.tensor([2, 1, 1])
    more = tokens(3, 5, seed=1)
    for kind in (CachedDecoder, UncachedDecoder):
        reader, expected = kind(model, padding), UncachedDecoder(model, padding[rows])
        reader.read(ids)
        reader.keep(rows)
        expected.read(ids[rows])
        torch.testing.assert_close(reader.read(more), expected.read(more), rtol=1e-4, atol=1e-5)


@torch.no_grad()  # the counter cannot work in inference mode
def test_one_token_costs_one_token():
    """Products for the next token: as good as constant, where recomputing costs as much as the whole row."""
    model = random_model("gpt-bert", "relative", hidden_size=96, intermediate_size=256)
    ids = tokens(1, 400)

    def cost(kind, length):
        reader = kind(model, no_padding(1))
        reader.read(ids[:, :length])
        with FlopCounterMode(display=False) as counter:
            reader.read(ids[:, length : length + 1])
        return counter.get_total_flops()

    short, long = cost(CachedDecoder, 20), cost(CachedDecoder, 399)
    assert long < 1.8 * short  # attention to 20 times as many keys; nothing else grows
    assert long < cost(UncachedDecoder, 399) / 100


@pytest.mark.gpu
@pytest.mark.parametrize(("model_type", "position_embedding"), KINDS)
@torch.inference_mode()
def test_states_on_cuda_are_those_of_the_whole_row(model_type, position_embedding):
    model = random_model(model_type, position_embedding).cuda()
    ids = tokens(2, 60).cuda()
    whole = model.encode(ids, torch.zeros_like(ids), True)
    reader = CachedDecoder(model, no_padding(2).cuda())
    for first, last in ((0, 7), *((place, place + 1) for place in range(7, 60))):
        torch.testing.assert_close(reader.read(ids[:, first:last]), whole[:, last - 1], rtol=1e-4, atol=1e-4)
