"""Generation and mask filling with a model: sampling, the shift by one, bytes, special tokens, batches of rows."""

import math

import pytest
import torch
from helpers.tiny_evaluation import tiny_model
from helpers.tiny_runs import TEXT, train_on
from tokenizers import Tokenizer

from evaluation import fill_mask
from evaluation.generation import LoadedModel, Sampling, TextStream, UsageError, generate, sample, top_k_top_p

BOS, EOS, MASK = 1, 2, 4
NOTHING = torch.empty(0, dtype=torch.int64)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_on(TEXT, 320)


@pytest.fixture(scope="module")
def tiny(tokenizer: Tokenizer) -> LoadedModel:
    """What it writes is noise, but what it may read and write is exact."""
    return LoadedModel(tiny_model(tokenizer.get_vocab_size()), tokenizer, CPU)


class Script:
    """A model whose output at position i is known: it scores the token that `plan` names for position i + 1.

    It notes what it was asked, and answers only for the row that it was given in `encode`.
    """

    def __init__(self, plan: dict[int, int], vocab_size: int, elsewhere: int = EOS) -> None:
        self.plan, self.vocab_size, self.elsewhere = plan, vocab_size, elsewhere
        self.rows: list[list[int]] = []
        self.causal: list[bool] = []

    def encode(self, input_ids: torch.Tensor, document_ids: torch.Tensor, causal: bool, /) -> torch.Tensor:
        assert input_ids.dtype == document_ids.dtype == torch.int64
        assert not document_ids.any()  # one document, no padding
        self.rows.append(input_ids[0].tolist())
        self.causal.append(causal)
        return torch.arange(input_ids.size(1), dtype=torch.float32).view(1, -1, 1)  # hidden state: the position itself

    def predict(self, hidden: torch.Tensor, /) -> torch.Tensor:
        logits = torch.zeros(*hidden.shape[:-1], self.vocab_size)
        for n, position in enumerate(hidden[:, 0].long().tolist()):
            logits[n, self.plan.get(position + 1, self.elsewhere)] = 5.0
        return logits

    def __call__(self, input_ids, document_ids, causal, positions, /) -> torch.Tensor:
        return self.predict(self.encode(input_ids, document_ids, causal)[0, positions])


def continuation(loaded, prompt, max_new_tokens, sampling, generator):
    """The tokens that follow one prompt."""
    pairs = list(generate(loaded, [prompt], max_new_tokens, sampling, [generator]))
    assert pairs[-1] == (0, None)
    return [token for _, token in pairs[:-1]]


def test_temperature_0_takes_the_most_probable_token_and_the_first_of_equals():
    ids, probabilities = top_k_top_p(torch.tensor([0.0, 3.0, 3.0, 1.0]), NOTHING, Sampling(temperature=0))
    assert ids.tolist() == [1]
    assert probabilities.tolist() == [1.0]


def test_temperature_divides_the_logits():
    logits = torch.tensor([0.0, 1.0, 2.0])
    ids, probabilities = top_k_top_p(logits, NOTHING, Sampling(temperature=0.5))
    weights = [math.exp(4), math.exp(2), 1.0]
    assert ids.tolist() == [2, 1, 0]
    torch.testing.assert_close(probabilities.tolist(), [w / sum(weights) for w in weights])


def test_top_k_and_top_p_keep_the_most_probable_and_renormalise():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    ids, probabilities = top_k_top_p(logits, NOTHING, Sampling(top_k=2))
    assert ids.tolist() == [3, 2]
    torch.testing.assert_close(probabilities.tolist(), [4 / 7, 3 / 7])
    # 0.4 alone does not reach 0.5, 0.4 + 0.3 does: the token that crosses top_p is kept.
    ids, probabilities = top_k_top_p(logits, NOTHING, Sampling(top_p=0.5))
    assert ids.tolist() == [3, 2]
    assert top_k_top_p(logits, NOTHING, Sampling(top_p=0.39))[0].tolist() == [3]
    assert top_k_top_p(logits, NOTHING, Sampling(top_p=0.95, top_k=3))[0].tolist() == [3, 2, 1]


def test_forbidden_tokens_are_never_sampled():
    logits = torch.tensor([50.0, 0.0, 40.0, -50.0])
    ids, probabilities = top_k_top_p(logits, torch.tensor([0, 2]), Sampling())
    assert ids.tolist() == [1, 3]
    assert probabilities.sum() == pytest.approx(1.0)
    assert top_k_top_p(logits, torch.tensor([0, 2]), Sampling(temperature=0))[0].tolist() == [1]


def test_samples_follow_the_probabilities():
    ids, probabilities = torch.tensor([7, 3, 9]), torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    drawn = [sample(ids, probabilities, generator) for _ in range(4000)]
    for token, p in zip(ids.tolist(), probabilities.tolist(), strict=True):
        assert drawn.count(token) / 4000 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 4000))


def test_sample_of_probabilities_that_add_up_to_less_than_one_is_a_token():
    probabilities = torch.full((3,), 1e-9, dtype=torch.float64)  # any uniform number lies beyond their sum
    assert sample(torch.tensor([5, 6, 7]), probabilities, torch.Generator()) == 7


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_sampling_refuses_values_out_of_range(wrong):
    with pytest.raises(UsageError, match=f"--{next(iter(wrong))} is "):
        Sampling(**wrong)


def test_generation_reads_the_last_output_causally_and_stops_at_eos(tokenizer):
    prompt = tokenizer.encode("The list").ids
    words = tokenizer.encode(" returns the length").ids
    start = 1 + len(prompt)
    model = Script({start + n: word for n, word in enumerate(words)}, tokenizer.get_vocab_size())
    loaded = LoadedModel(model, tokenizer, CPU)
    written = list(continuation(loaded, prompt, 50, Sampling(temperature=0), torch.Generator()))
    assert written == words  # each read one output before its own position; then </s>, which is not part of it
    assert model.rows[0] == [BOS, *prompt]
    assert model.rows[-1] == [BOS, *prompt, *words]
    assert set(model.causal) == {True}


def test_generation_behind_a_prefix_reads_prompts_in_both_directions(tiny, tokenizer):
    prompts = [tokenizer.encode(text).ids for text in ("The list returns the length", "The")]
    written: list[list[int]] = [[], []]
    generators = [torch.Generator(), torch.Generator()]
    for row, token in generate(tiny, prompts, 5, Sampling(temperature=0), generators, prefix=True):
        written[row] += [] if token is None else [token]
    for prompt, ours in zip(prompts, written, strict=True):
        ids, start = [BOS, *prompt], 1 + len(prompt)
        for token in ours:
            row = torch.tensor([ids])
            logits = tiny.model(row, torch.zeros_like(row), torch.full_like(row, start), torch.tensor([len(ids) - 1]))
            assert token == max(range(16, logits.size(1)), key=logits[0].tolist().__getitem__)
            ids.append(token)
        assert len(ours) == 5
    with pytest.raises(UsageError, match="--mode prefix: this model reads rows causally or whole"):
        LoadedModel(Script({}, 320), tokenizer, CPU).decoder([0], prefix=True)


def test_generation_stops_at_the_limit(tokenizer):
    word = tokenizer.encode(" list").ids[0]
    loaded = LoadedModel(Script({}, tokenizer.get_vocab_size(), elsewhere=word), tokenizer, CPU)
    assert list(continuation(loaded, [], 7, Sampling(temperature=0), torch.Generator())) == [word] * 7


def test_generation_never_writes_another_special_token(tokenizer):
    """Every special token is far more likely than every word, and only </s> may come."""

    class Shouting(Script):
        def predict(self, hidden, /):
            logits = torch.zeros(len(hidden), self.vocab_size)
            logits[:, :16] = 30.0
            logits[:, EOS] = -1.0
            return logits

    loaded = LoadedModel(Shouting({}, tokenizer.get_vocab_size()), tokenizer, CPU)
    written = [
        t for seed in range(20) for t in continuation(loaded, [], 20, Sampling(), torch.Generator().manual_seed(seed))
    ]
    assert len(written) > 200
    assert min(written) >= 16


def test_mask_is_filled_from_the_output_before_it_bidirectionally(tokenizer):
    encode = tokenizer.encode
    left, right = encode("The").ids, encode(" returns the list").ids
    answer, decoy = encode(" function").ids[0], encode(" list").ids[0]
    gap = 1 + len(left)
    # The output *at* the gap scores the token after it: taking that one would give the decoy.
    model = Script({gap: answer, gap + 1: decoy}, tokenizer.get_vocab_size())
    loaded = LoadedModel(model, tokenizer, CPU)
    row, gaps = fill_mask.mask_row(loaded, "The <mask> returns the list")
    assert row == [BOS, *left, MASK, *right, EOS]
    assert gaps == [gap]
    (filling,) = fill_mask.predict_gaps(loaded, row, gaps, 3)
    assert filling.ids[0] == answer
    assert len(filling.ids) == 3
    assert model.causal == [False]
    words = tokenizer.get_vocab_size() - 16
    assert filling.probabilities[0] == pytest.approx(math.exp(5) / (math.exp(5) + words - 1))


def test_masks_anywhere_and_side_by_side(tokenizer):
    loaded = LoadedModel(Script({}, tokenizer.get_vocab_size()), tokenizer, CPU)
    word = tokenizer.encode(" list").ids
    row, gaps = fill_mask.mask_row(loaded, "<mask> list<mask><mask> list <mask>")
    assert row == [BOS, MASK, *word, MASK, MASK, *word, MASK, EOS]
    assert gaps == [1, 2 + len(word), 3 + len(word), 4 + 2 * len(word)]


def test_special_token_names_in_a_text_are_text(tokenizer):
    loaded = LoadedModel(Script({}, tokenizer.get_vocab_size()), tokenizer, CPU)
    row, gaps = fill_mask.mask_row(loaded, "</s> <mask> <pad>")
    assert len(gaps) == 1
    assert [t for t in row if t < 16] == [BOS, MASK, EOS]


def test_filled_text_restores_the_words_and_their_spaces(tokenizer):
    answer = tokenizer.encode(" function").ids[0]
    model = Script({}, tokenizer.get_vocab_size(), elsewhere=answer)
    loaded = LoadedModel(model, tokenizer, CPU)
    for text in ("The <mask> returns 東京.", "<mask> é", "a <mask>"):
        row, gaps = fill_mask.mask_row(loaded, text)
        fillings = fill_mask.predict_gaps(loaded, row, gaps, 1)
        word = loaded.decode([answer])
        expected = text.replace(" <mask>", word).replace("<mask>", word)
        assert fill_mask.filled_text(loaded, row, gaps, fillings) == expected


def test_byte_alphabet_is_the_one_of_the_tokenizer(tokenizer):
    alphabet = fill_mask.byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    for text in ("a", " ", "\n", "é", "東", "\x00", "\x7f"):
        ids = tokenizer.encode(text).ids
        written = "".join(tokenizer.id_to_token(i) for i in ids)
        assert bytes(alphabet[char] for char in written) == text.encode()


def test_tokens_are_shown_readably(tokenizer):
    loaded = LoadedModel(Script({}, tokenizer.get_vocab_size()), tokenizer, CPU)
    (newline,) = tokenizer.encode("\n").ids
    assert fill_mask.show_token(loaded, newline) == '"\\n"'
    half = tokenizer.token_to_id("Ã")  # the byte 0xC3, the first half of é
    assert fill_mask.show_token(loaded, half) == '"\\xc3"'
    (word,) = tokenizer.encode(" list").ids
    assert fill_mask.show_token(loaded, word) == '" list"'


def test_stream_gives_whole_characters_and_everything_in_the_end(tokenizer):
    loaded = LoadedModel(Script({}, tokenizer.get_vocab_size()), tokenizer, CPU)
    text = " naïve 京都 😀 end"
    prompt = loaded.encode("The 東京")
    stream = TextStream(loaded, prompt)
    pieces = [stream.push(token) for token in loaded.encode(text)]
    assert all("\ufffd" not in piece for piece in pieces)
    assert "" in pieces  # the emoji's four bytes are four tokens here
    assert "".join(pieces) + stream.rest() == text
    assert stream.num_tokens == len(loaded.encode(text))

    cut = TextStream(loaded, prompt)
    assert cut.push(tokenizer.token_to_id("Ã")) == ""
    assert cut.rest() == "\ufffd"
    assert cut.rest() == ""


def test_model_generates_causally(tiny):
    """What stands before a position decides its logits alone; a bidirectional pass would see the rest."""
    ids = [BOS, *tiny.encode("The function returns the list")]
    whole = tiny.logits(ids, [3], causal=True)
    cut = tiny.logits(ids[:4], [3], causal=True)
    torch.testing.assert_close(whole, cut, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(tiny.logits(ids, [3], causal=False), cut, rtol=1e-3, atol=1e-3)


def test_prompt_may_be_longer_than_max_position_embeddings(tiny):
    prompt = tiny.encode("The function returns the list. " * 30)
    assert len(prompt) > 64
    assert len(list(continuation(tiny, prompt, 3, Sampling(temperature=0), torch.Generator()))) <= 3


def test_generation_in_a_batch_equals_generation_alone(tiny):
    """Prompts of different length; rows end at different steps; each row samples from its own generator."""
    prompts = [tiny.encode(text) for text in ("The list", "", "The function returns the length of the list.", "a")]

    def generators():
        return [torch.Generator().manual_seed(seed) for seed in (3, 4, 5, 3)]

    alone = [
        continuation(tiny, prompt, 40, Sampling(), generator)
        for prompt, generator in zip(prompts, generators(), strict=True)
    ]
    together: list[list[int]] = [[] for _ in prompts]
    finished = []
    for row, token in generate(tiny, prompts, 40, Sampling(), generators()):
        if token is None:
            finished.append(row)
        else:
            together[row].append(token)
    assert together == alone
    assert sorted(finished) == [0, 1, 2, 3]


def test_generation_drops_finished_rows_from_the_batch(tokenizer):
    """The model is not asked again for a text that has ended."""

    class Ending(Script):
        def encode(self, input_ids, document_ids, causal, /):
            self.rows.append(input_ids[:, -1].tolist())
            return torch.stack([input_ids[:, -1:], input_ids[:, -1:]], dim=-1).float()

        def predict(self, hidden, /):
            logits = torch.zeros(len(hidden), self.vocab_size)
            for n, token in enumerate(hidden[:, 0].long().tolist()):
                logits[n, token + 1 if token < 105 else EOS] = 9.0
            return logits

    model = Ending({}, tokenizer.get_vocab_size())
    loaded = LoadedModel(model, tokenizer, CPU)
    pairs = list(generate(loaded, [[100], [103], [105]], 9, Sampling(temperature=0), [torch.Generator()] * 3))
    assert [token for row, token in pairs if row == 0] == [101, 102, 103, 104, 105, None]
    assert [token for row, token in pairs if row == 1] == [104, 105, None]
    assert [token for row, token in pairs if row == 2] == [None]
    assert model.rows == [[100, 103, 105], [101, 104], [102, 105], [103], [104], [105]]
