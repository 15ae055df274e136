"""Exported models in transformers against ours: outputs, generation, pipelines, saving; without this repository."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.tiny_exports import BOS, EOS, FORMS, MASK, PAD, environment, library, load, make_exported, padded_rows

from model import LTGBert

SENTENCES = ["The function returns the length of the list. The list holds é", "The list", "returns naïve words"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, tuple[LTGBert, Path]]:
    place = tmp_path_factory.mktemp("exported")
    return {form: make_exported(place, form) for form in FORMS}


@pytest.fixture(autouse=True)
def _foreign_warnings():
    """Deprecations inside transformers are not ours to fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@torch.no_grad()
def ours(model: LTGBert, ids: torch.Tensor, mask: torch.Tensor, causal: bool) -> torch.Tensor:
    return model.encode(ids, torch.where(mask.bool(), 0, -1), causal)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_all_files_have_the_rights_that_the_umask_gives(folders):
    assert len({path.stat().st_mode for path in folders["gpt-bert"][1].iterdir() if path.is_file()}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_outputs_are_ours(folders, form, attention, side):
    model, folder = folders[form]
    ids, mask = padded_rows(side)
    inputs = {"input_ids": ids, "attention_mask": mask}
    real = mask.bool()
    base = load("AutoModel", folder, attn_implementation=attention)
    for causal in (False, True):
        close(base(**inputs, is_causal=causal).last_hidden_state, ours(model, ids, mask, causal))
    assert torch.equal(base(**inputs)[0], base(**inputs, is_causal=False)[0])
    causal = load("AutoModelForCausalLM", folder, attn_implementation=attention)(**inputs).logits
    close(causal[real], model.predict(ours(model, ids, mask, True))[real])
    masked = load("AutoModelForMaskedLM", folder, attn_implementation=attention)(**inputs).logits
    expected = model.predict(ours(model, ids, mask, False))
    preceded = real[:, 1:] & real[:, :-1]
    close(masked[:, 1:][preceded], expected[:, :-1][preceded])  # position i scores token i
    assert not masked[:, 1:][real[:, 1:] & ~real[:, :-1]].any()  # nothing precedes the first token
    assert not masked[:, 0].any()


@pytest.mark.parametrize("form", ["gpt-bert", "ltg-bert-rope"])
@torch.no_grad()
def test_no_mask_and_embeddings_as_input(folders, form):
    model, folder = folders[form]
    ids, mask = padded_rows("left")
    ids, mask = ids[:1], mask[:1]
    base = load("AutoModel", folder)
    expected = ours(model, ids, mask, False)
    close(base(ids).last_hidden_state, expected)
    close(base(inputs_embeds=base.get_input_embeddings()(ids)).last_hidden_state, expected)
    assert isinstance(base(ids, return_dict=False), tuple)
    outputs = base(ids, output_hidden_states=True, output_attentions=True)
    assert len(outputs.hidden_states) == 4
    assert torch.equal(outputs.hidden_states[-1], outputs.last_hidden_state)
    assert len(outputs.attentions) == 3
    close(outputs.attentions[0].sum(-1), torch.ones(1, 2, 40))
    base.config.is_decoder = True
    close(base(ids).last_hidden_state, ours(model, ids, mask, True))


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_reading_in_pieces_through_the_cache_changes_nothing(folders, form):
    _, folder = folders[form]
    causal = load("AutoModelForCausalLM", folder)
    ids, mask = padded_rows("left")
    whole = causal(ids, attention_mask=mask, use_cache=False).logits
    cache, pieces = None, []
    for begin, end in ((0, 25), (25, 26), (26, 37), (37, 38), (38, 40)):
        outputs = causal(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        pieces.append(outputs.logits)
    assert cache.get_seq_length() == 40
    close(torch.cat(pieces, dim=1)[mask.bool()], whole[mask.bool()])
    close(causal(ids, attention_mask=mask, logits_to_keep=1).logits, whole[:, -1:])


@pytest.mark.parametrize("form", ["gpt-bert", "ltg-bert-rope"])
@torch.no_grad()
def test_masks_that_say_who_attends_whom(folders, form):
    """[B, T, T] as BabyLM's fine-tuning gives them, and [B, 1, T, T]; no kind of 0 and 1 is taken for another."""
    model, folder = folders[form]
    base = load("AutoModel", folder)
    ids, mask = padded_rows("right")
    pairs = mask[:, None, :].repeat(1, 40, 1).tril()  # causal, padding as keys alone
    real = mask.bool()
    expected = ours(model, ids, mask, True)[real]
    added = torch.zeros(3, 1, 40, 40).masked_fill(pairs[:, None] == 0, -torch.inf)
    for given in (pairs, pairs.bool(), pairs[:, None], pairs[:, None].bool(), added):
        close(base(ids, attention_mask=given).last_hidden_state[real], expected)
    close(base(ids, attention_mask=pairs[:1]).last_hidden_state[0], expected[:40])  # one mask for all
    for given, words in (
        (pairs[:, :7], "does not say which of 40 tokens"),
        (pairs[:, None].float(), "give a mask of 0 and 1 as integers"),
        (pairs[:, None].repeat(1, 2, 1, 1), "does not say"),
    ):
        with pytest.raises(ValueError, match=words):
            base(ids, attention_mask=given)
    classifier = load("AutoModelForSequenceClassification", folder)
    ids, mask = padded_rows("left")
    both = mask[:, None, :] * mask[:, :, None]
    close(classifier(ids, attention_mask=both).logits, classifier(ids, attention_mask=mask).logits)


@torch.no_grad()
def test_padding_inside_a_text_hides_itself_and_ends_nothing(folders):
    """As all of transformers has it, unlike our document ids: a prompt that grew sees what came before the padding."""
    base = load("AutoModel", folders["gpt-bert"][1])
    ids, mask = padded_rows("right")
    mask[0, 10:15] = 0
    changed = ids.clone()
    changed[0, 10:15] = 17
    hidden = base(ids, attention_mask=mask).last_hidden_state[0]
    real = mask[0].bool()
    close(base(changed, attention_mask=mask).last_hidden_state[0][real], hidden[real])
    changed[0, 3] = 18
    assert (base(changed, attention_mask=mask).last_hidden_state[0, 20] - hidden[20]).abs().max() > 1e-3


@pytest.mark.parametrize("form", ["gpt-bert", "ltg-bert-rope"])
@torch.no_grad()
def test_position_ids_tell_packed_texts_apart(folders, form):
    """As DataCollatorWithFlattening packs them: a row of several texts, positions from 0 in each."""
    _, folder = folders[form]
    ids = torch.randint(16, 300, (1, 20), generator=torch.Generator().manual_seed(4))
    parts = ids.split([5, 12, 3], dim=1)
    positions = torch.cat([torch.arange(part.size(1)) for part in parts])[None]
    for auto in ("AutoModel", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForTokenClassification"):
        model = load(auto, folder)
        expected = torch.cat([model(part)[0] for part in parts], dim=1)
        close(model(ids, position_ids=positions)[0], expected)
        close(model(ids, position_ids=torch.arange(7, 27)[None])[0], model(ids)[0])
        with pytest.raises(ValueError, match="may only count up, or begin again at 0"):
            model(ids, position_ids=positions * 2)
    packed_classifiers(folder, ids, positions, parts)
    causal = load("AutoModelForCausalLM", folder)
    cache = causal(ids[:, :9], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="may only count up"):
        causal(ids[:, 9:12], position_ids=torch.tensor([[0, 1, 0]]), past_key_values=cache)


def packed_classifiers(folder: Path, ids: torch.Tensor, positions: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Classes of texts are those of the texts alone, each with its label; padding in front, behind and between."""
    torch.manual_seed(0)
    model, labels = load("AutoModelForSequenceClassification", folder, num_labels=3), torch.tensor([2, 0, 1, 1])
    row, places, mask = (F.pad(x, (2, 1)) for x in (ids, positions, torch.ones_like(ids)))
    row, places = torch.cat([row, row]), torch.cat([places, torch.arange(23)[None]])
    mask = torch.cat([mask, torch.ones(1, 23, dtype=torch.int64)])
    found = model(row, attention_mask=mask, position_ids=places, labels=labels)
    close(found.logits, torch.cat([model(part).logits for part in (*parts, row[1:])]))
    close(found.loss, F.cross_entropy(found.logits, labels))
    with pytest.raises(ValueError, match="labels has 2 entries for 4 texts"):
        model(row, attention_mask=mask, position_ids=places, labels=labels[:2])
    with pytest.raises(ValueError, match="Multiple choice takes one text a row"):
        load("AutoModelForMultipleChoice", folder)(ids[None], position_ids=positions[None])
    answers = load("AutoModelForQuestionAnswering", folder)
    assert answers(ids, position_ids=positions).start_logits.shape == ids.shape
    with pytest.raises(ValueError, match="A loss of answers takes one text a row"):
        answers(ids, position_ids=positions, start_positions=torch.tensor([1]), end_positions=torch.tensor([2]))


@pytest.mark.parametrize("form", ["gpt-bert", "ltg-bert"])
@torch.no_grad()
def test_nothing_in_a_cache_outlives_its_tokens(folders, form):
    """A cache that is emptied and used again after the weights have changed: a step, or another adapter."""
    causal = load("AutoModelForCausalLM", folders[form][1])
    ids = torch.randint(16, 300, (2, 10), generator=torch.Generator().manual_seed(4))
    static, growing = library().StaticCache(config=causal.config, max_cache_len=16), library().DynamicCache()
    for cache in (static, growing):
        causal(ids, past_key_values=cache, use_cache=True)
    for parameter in causal.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))
    static.reset()
    growing.crop(-10)
    expected = causal(ids, use_cache=False).logits
    for cache in (static, growing):
        close(causal(ids, past_key_values=cache, use_cache=True).logits, expected)


def greedy(model: LTGBert, row: list[int], count: int) -> list[int]:
    """The most probable continuation by our model, without special tokens but </s>."""
    row = list(row)
    for _ in range(count):
        ids = torch.tensor([row])
        logits = model.predict(ours(model, ids, torch.ones_like(ids), True)[0, -1])
        logits[[*range(EOS), *range(EOS + 1, 16)]] = -torch.inf
        row.append(int(logits.argmax()))
        if row[-1] == EOS:
            break
    return row


@pytest.mark.parametrize("form", FORMS)
def test_generation_with_and_without_cache_and_padding(folders, form):
    model, folder = folders[form]
    causal = load("AutoModelForCausalLM", folder)
    tokenizer = load("AutoTokenizer", folder)
    inputs = tokenizer(SENTENCES, return_tensors="pt", padding=True, padding_side="left")  # where generation needs it
    options = {"max_new_tokens": 30, "do_sample": False}
    cached = causal.generate(**inputs, **options)
    assert torch.equal(causal.generate(**inputs, **options, use_cache=False), cached)
    assert torch.equal(
        causal.generate(**inputs, **options, cache_implementation="static", disable_compile=True), cached
    )
    with torch.no_grad():
        for text, found in zip(SENTENCES, cached.tolist(), strict=True):
            expected = greedy(model, tokenizer(text).input_ids, 30)
            assert [token for token in found if token != PAD] == expected
    with pytest.raises(ValueError, match='padding_side="left"'):
        causal.generate(**tokenizer(SENTENCES, return_tensors="pt", padding=True), **options)
    beams = causal.generate(**inputs, max_new_tokens=8, num_beams=3, do_sample=False)
    assert torch.equal(
        causal.generate(**inputs, max_new_tokens=8, num_beams=3, do_sample=False, use_cache=False), beams
    )
    drawn = causal.generate(**inputs, do_sample=True, max_new_tokens=40, temperature=5.0)
    new = drawn[:, inputs["input_ids"].size(1) :]
    assert not ((new < 16) & (new != EOS) & (new != PAD)).any()


def test_tokenizer(folders):
    tokenizer = load("AutoTokenizer", folders["gpt-bert"][1])
    assert tokenizer.special_tokens_map == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>",
    }  # fmt: skip
    words = tokenizer("The list", add_special_tokens=False).input_ids
    assert tokenizer("The list").input_ids == [BOS, *words]
    assert tokenizer("The list", "The list").input_ids == [BOS, *words, EOS, *words, EOS]
    assert list(tokenizer("The list")) == ["input_ids", "attention_mask"]
    # The space before a gap belongs to what fills it, as in evaluation/fill_mask.py.
    end = tokenizer(" list", add_special_tokens=False).input_ids
    assert tokenizer("The <mask> list").input_ids == [BOS, *words[:1], MASK, *end]
    for text in ("naïve 東京\n\n  x ,  y .", "it 's"):
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    assert tokenizer.chat_template is None
    # Words keep the spaces before them, whoever cuts them: so they are the text's own tokens.
    words = tokenizer(["The", " list", " holds"], is_split_into_words=True)
    assert words.input_ids == tokenizer("The list holds").input_ids
    assert words.word_ids()[:3] == [None, 0, 1]
    assert tokenizer(["The list", "A"], padding=True, return_tensors="pt").input_ids[:, 0].tolist() == [BOS, BOS]


def test_fill_mask_pipeline(folders):
    model, folder = folders["gpt-bert"]
    tokenizer = load("AutoTokenizer", folder)
    pipe = library().pipeline("fill-mask", model=str(folder), tokenizer=tokenizer, trust_remote_code=True, top_k=4)
    texts = ["The <mask> returns the length", "The list holds <mask>."]
    for text, found in zip(texts, pipe(texts, batch_size=2), strict=True):
        ids = torch.tensor([tokenizer(text).input_ids])
        gap = ids[0].tolist().index(MASK)
        with torch.no_grad():
            hidden = ours(model, ids, torch.ones_like(ids), False)
            probabilities = model.predict(hidden[0, gap - 1]).softmax(-1)
        values, tokens = probabilities.topk(4)
        assert [candidate["token"] for candidate in found] == tokens.tolist()
        close(torch.tensor([candidate["score"] for candidate in found]), values)


def test_text_generation_pipeline(folders):
    model, folder = folders["gpt-bert"]
    tokenizer = load("AutoTokenizer", folder)
    pipe = library().pipeline("text-generation", model=str(folder), tokenizer=tokenizer, trust_remote_code=True)
    for text, (found,) in zip(SENTENCES, pipe(SENTENCES, batch_size=3, max_new_tokens=9, do_sample=False), strict=True):
        with torch.no_grad():
            row = greedy(model, tokenizer(text).input_ids, 9)
        assert found["generated_text"] == tokenizer.decode(row, skip_special_tokens=True)


@pytest.mark.parametrize("form", ["gpt-bert", "ltg-bert-rope"])
def test_losses_and_gradients(folders, form):
    model, folder = folders[form]
    ids, mask = padded_rows("left")
    labels = torch.where(mask.bool() & (ids != BOS), ids, -100)
    targets = labels[labels >= 0]
    for auto, causal in (("AutoModelForMaskedLM", False), ("AutoModelForCausalLM", True)):
        theirs = load(auto, folder)
        outputs = theirs(ids, attention_mask=mask, labels=labels)
        hidden = model.encode(ids, torch.where(mask.bool(), 0, -1), causal)
        predicted = model.predict(hidden[:, :-1][labels[:, 1:] >= 0])
        loss = torch.nn.functional.cross_entropy(predicted, targets)
        close(outputs.loss, loss)
        outputs.loss.backward()
        names, parameters = zip(*model.named_parameters(), strict=True)
        expected = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
        found = dict(theirs.named_parameters())
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name].grad, gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_a_label_that_nothing_precedes_is_left_out_of_the_loss(folders, side):
    masked = load("AutoModelForMaskedLM", folders["gpt-bert"][1])
    ids, mask = padded_rows(side)
    ids, mask = ids[:2], mask[:2]
    begins = mask.argmax(dim=1, keepdim=True)
    labels = torch.where(mask.bool(), ids, -100)
    alone = labels.scatter(1, begins, -100)
    expected = masked(ids, attention_mask=mask, labels=alone).loss
    assert masked(ids, attention_mask=mask, labels=labels).loss == expected
    assert expected > 5


def test_layers_are_spread_over_devices_and_not_split(folders):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate (requirements.lock has it)")
    causal = load("AutoModelForCausalLM", folders["gpt-bert"][1])
    room = sum(parameter.numel() * 4 for parameter in causal.parameters()) * 3 // 4
    found = accelerate.infer_auto_device_map(
        causal, max_memory={0: room, 1: room, "cpu": 10**9}, no_split_module_classes=causal._no_split_modules
    )
    assert set(found.values()) == {0, 1}
    assert all(name.count(".") <= 2 for name in found)  # transformer.attention_layers.1, and nothing inside it


def test_classification_learns_and_ignores_padding(folders):
    torch.manual_seed(0)
    _, folder = folders["gpt-bert"]
    classifier = load("AutoModelForSequenceClassification", folder, num_labels=3)
    ids, mask = padded_rows("left")
    right, right_mask = padded_rows("right")
    with torch.no_grad():
        found = classifier(ids, attention_mask=mask).logits
        assert found.shape == (3, 3)
        close(classifier(right, attention_mask=right_mask).logits, found)
    labels = torch.tensor([2, 0, 1])
    optimizer = torch.optim.Adam(classifier.parameters(), 3e-3)
    classifier.train()
    for _ in range(30):
        loss = classifier(ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    classifier.eval()
    assert classifier(ids, attention_mask=mask).logits.argmax(-1).tolist() == labels.tolist()
    regression = load("AutoModelForSequenceClassification", folder, num_labels=1)
    assert regression(ids, attention_mask=mask, labels=torch.tensor([0.5, 1.0, 2.0])).loss.ndim == 0


def test_a_model_from_its_configuration_begins_as_ours_do(folders):
    """Weights drawn anew: truncated normal, deeper feed-forwards smaller, averages that pass on the newest state."""
    config = load("AutoConfig", folders["gpt-bert"][1])
    fresh = library().AutoModelForMaskedLM.from_config(config, trust_remote_code=True)
    std = (2 / (5 * 32)) ** 0.5
    for name, parameter in fresh.state_dict().items():
        if name.endswith(".bias"):
            assert not parameter.any(), name
        elif "alphas" in name:
            assert parameter.tolist() == [0.0] * (len(parameter) - 1) + [1.0]
        elif "layer_norm" in name:
            assert (parameter == 1).all()
        else:
            deep = (1 / (2 * (1 + int(name.split(".")[2])))) ** 0.5 if "mlp_layers" in name else 1.0
            assert parameter.abs().max() <= 2 * std * deep * 1.0001, name
            assert parameter.std().item() == pytest.approx(0.88 * std * deep, rel=0.15), name


def test_the_vocabulary_can_grow(folders):
    causal = load("AutoModelForCausalLM", folders["gpt-bert"][1])
    causal.resize_token_embeddings(330, mean_resizing=False)
    assert causal(torch.tensor([[BOS, 329]])).logits.shape == (1, 2, 330)
    assert causal.get_output_embeddings().weight is causal.get_input_embeddings().weight


WITHOUT_US = """
import sys, torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer
folder, saved, out = sys.argv[1:]
assert not any("/work" in p and "site-packages" not in p and "lib/python" not in p for p in sys.path if p), sys.path
autos = (AutoModel, AutoModelForMaskedLM, AutoModelForCausalLM)
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = tokenizer(["The list holds", "The"], return_tensors="pt", padding=True)
with torch.no_grad():
    first = [auto.from_pretrained(folder, trust_remote_code=True)(**ids)[0] for auto in autos]
    AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    again = AutoTokenizer.from_pretrained(saved, trust_remote_code=True)
    assert again("The <mask> list").input_ids == tokenizer("The <mask> list").input_ids
    second = [auto.from_pretrained(saved, trust_remote_code=True)(**ids)[0] for auto in autos]
assert all(torch.equal(a, b) for a, b in zip(first, second))
assert not {"model", "model_extra", "ops", "training", "export"} & set(sys.modules), "our modules were loaded"
torch.save([ids["input_ids"], ids["attention_mask"], *first], out)
"""


@pytest.mark.slow
def test_loads_saves_and_reloads_without_this_repository(folders, tmp_path):
    model, folder = folders["gpt-bert"]
    arguments = [str(folder), str(tmp_path / "saved-again"), str(tmp_path / "out.pt")]
    command = [sys.executable, "-c", WITHOUT_US, *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ids, mask, hidden, masked, causal = torch.load(tmp_path / "out.pt")
    with torch.no_grad():
        close(hidden, ours(model, ids, mask, False))
        close(causal[mask.bool()], model.predict(ours(model, ids, mask, True))[mask.bool()])
        close(masked[0, 1:], model.predict(hidden[0])[:-1])
    assert os.listdir(tmp_path / "saved-again")
