"""KV cache: decoding token by token equals the whole model over the whole row, and computes no prefix again."""

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
        "model_type": model_type, "position_embedding": position_embedding.removesuffix(" windows"), **sizes,
    }  # fmt: skip
    if position_embedding.endswith(" windows"):
        scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 24}
        values |= {"sliding_window": 5, "global_attn_every_n_layers": 2, "rope_scaling": scaling}
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


KINDS = [(m, p) for m in ("gpt-bert", "ltg-bert") for p in ("relative", "rope")] + [("gpt-bert", "rope windows")]


@pytest.mark.parametrize(("model_type", "position_embedding"), KINDS)
@torch.inference_mode()
def test_cached_states_equal_those_of_the_whole_row(model_type, position_embedding):
    """A prompt at once, then single tokens, to twice max_position_embeddings; two rows."""
    model = random_model(model_type, position_embedding)
    ids = tokens(2, 60)
    whole = model.encode(ids, torch.zeros_like(ids), True)
    decoder = CachedDecoder(model, no_padding(2))
    torch.testing.assert_close(decoder.append(ids[:, :7]), whole[:, 6], rtol=1e-4, atol=1e-5)
    for position in range(7, 60):
        torch.testing.assert_close(
            decoder.append(ids[:, position : position + 1]), whole[:, position], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(("model_type", "position_embedding"), KINDS)
@torch.inference_mode()
def test_cached_states_agree_in_float64_to_the_last_digits(model_type, position_embedding):
    """Where rounding is far smaller, so are the differences: they are rounding and nothing else."""
    model = random_model(model_type, position_embedding).double()
    ids = tokens(1, 40)
    whole = model.encode(ids, torch.zeros_like(ids), True)
    decoder = CachedDecoder(model, no_padding(1))
    found = torch.stack([decoder.append(ids[:, position : position + 1]) for position in range(40)], dim=1)
    # The whole model adds up attention scores in float32 whatever the weights are, and so does the decoder.
    assert (found - whole).abs().max() < 2e-6 * whole.abs().max()


@pytest.mark.parametrize(("model_type", "position_embedding"), KINDS)
@torch.inference_mode()
def test_decoder_takes_rows_of_different_length_with_padding_first(model_type, position_embedding, monkeypatch):
    """Each row has the states that its text has alone; long prompts are read in chunks, some of which hold no text."""
    monkeypatch.setattr(kv_cache, "_CHUNK", 5)
    model = random_model(model_type, position_embedding)
    ids, padding = tokens(3, 30), torch.tensor([0, 12, 19])
    alone = []
    for row, start in enumerate(padding.tolist()):
        text = ids[row : row + 1, start:]
        alone.append(model.encode(text, torch.zeros_like(text), True)[0])
    for decoder in (CachedDecoder(model, padding), UncachedDecoder(model, padding)):
        for first, last in ((0, 22), (22, 23), (23, 30)):
            hidden = decoder.append(ids[:, first:last])
            expected = torch.stack([states[last - start - 1] for states, start in zip(alone, padding, strict=True)])
            torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_select_rows_drops_and_repeats_rows():
    model = random_model("gpt-bert", "relative")
    ids, padding, rows = tokens(3, 12), torch.tensor([0, 4, 2]), torch.tensor([2, 1, 1])
    more = tokens(3, 5, seed=1)
    for kind in (CachedDecoder, UncachedDecoder):
        decoder, expected = kind(model, padding), UncachedDecoder(model, padding[rows])
        decoder.append(ids)
        decoder.select_rows(rows)
        expected.append(ids[rows])
        torch.testing.assert_close(decoder.append(more), expected.append(more), rtol=1e-4, atol=1e-5)


@torch.no_grad()  # the counter cannot work in inference mode
def test_cached_decoding_costs_one_token_a_token():
    """Products for the next token: as good as constant, where recomputing costs as much as the whole row."""
    model = random_model("gpt-bert", "relative", hidden_size=96, intermediate_size=256)
    ids = tokens(1, 400)

    def cost(kind, length):
        decoder = kind(model, no_padding(1))
        decoder.append(ids[:, :length])
        with FlopCounterMode(display=False) as counter:
            decoder.append(ids[:, length : length + 1])
        return counter.get_total_flops()

    short, long = cost(CachedDecoder, 20), cost(CachedDecoder, 399)
    assert long < 1.8 * short  # attention to 20 times as many keys; nothing else grows
    assert long < cost(UncachedDecoder, 399) / 100


@pytest.mark.gpu
@pytest.mark.parametrize(("model_type", "position_embedding"), KINDS)
@torch.inference_mode()
def test_cached_states_equal_those_of_the_whole_row_on_cuda(model_type, position_embedding):
    model = random_model(model_type, position_embedding).cuda()
    ids = tokens(2, 60).cuda()
    whole = model.encode(ids, torch.zeros_like(ids), True)
    decoder = CachedDecoder(model, no_padding(2).cuda())
    for first, last in ((0, 7), *((position, position + 1) for position in range(7, 60))):
        torch.testing.assert_close(decoder.append(ids[:, first:last]), whole[:, last - 1], rtol=1e-4, atol=1e-4)
