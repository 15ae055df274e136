"""Tokenizers in the layouts of other models, the whole way: text to shards, training, evaluation, export and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.foreign_tokenizers import write_tokenizer
from helpers.tiny_runs import flags, make_texts

import train_single_gpu
from data.masking import IGNORE_INDEX
from data.objectives import CAUSAL
from data.shards import tokenizer_hash
from data.special_tokens import plain, read_special_tokens
from evaluation import fill_mask, generate, generation, minimal_pairs, perplexity
from evaluation.finetune_forms import encode
from evaluation.finetune_task import Examples
from export.from_huggingface import convert
from export.hf_format import adapt_tokenizer, restore_tokenizer
from export.load_model import load_model, load_special_tokens
from export.to_huggingface import export
from preprocessing import special_tokens, tokenize_corpus
from training.checkpoint import locate, training_flags
from training.config import parse_config
from training.inputs import read_inputs

ROLES = {  # what each is trained with: its own, given ones, or appended ones
    "bert": (None, "", "bos=[CLS],eos=[SEP],pad=[PAD],mask=[MASK],unk=[UNK]"),
    "gpt2": (["pad", "mask"], "", "bos=<|endoftext|>,eos=<|endoftext|>,pad=<pad>,mask=<mask>,unk=<|endoftext|>"),
    "llama2": (["pad", "mask"], "", "bos=<s>,eos=</s>,pad=<pad>,mask=<mask>,unk=<unk>"),
    "llama3": (["pad", "mask"], "", "bos=<|begin_of_text|>,eos=<|end_of_text|>,pad=<pad>,mask=<mask>"),
    "modernbert": (None, "", "bos=[CLS],eos=[SEP],pad=[PAD],mask=[MASK],unk=[UNK]"),
    "roberta": (None, "", "bos=<s>,eos=</s>,pad=<pad>,mask=<mask>,unk=<unk>"),
    "t5": (None, "bos=</s>,mask=<extra_id_0>", "bos=</s>,eos=</s>,pad=<pad>,mask=<extra_id_0>,unk=<unk>"),
}
NAMES = ["bert", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in [*ROLES][2:])]


@pytest.fixture(scope="module", params=NAMES)
def trained(request, tmp_path_factory) -> tuple[str, Path]:
    """Layout and folder of a run of a few steps: tokenizer/, shards/, model.json, pairs/ and run/."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    add, given, _ = ROLES[name]
    tokenizer = write_tokenizer(name, folder / "theirs")
    if add is not None:
        assert special_tokens.main([str(tokenizer), "--output", str(folder / "tokenizer"), "--add", *add]) == 0
        tokenizer = folder / "tokenizer"
    (folder / "x.txt").write_text("\n\n".join(make_texts(400, seed=1)))
    arguments = ["--input", folder / "x.txt", "--output", folder / "shards", "--validation_fraction", 0.1]
    arguments += ["--tokenizer_path", tokenizer, "--special_tokens", given]
    assert tokenize_corpus.main(list(map(str, arguments))) == 0
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    vocab_size = read_special_tokens(tokenizer).vocab_size
    config = {**sizes, "vocab_size": vocab_size, "max_position_embeddings": 64, "position_bucket_size": 8}
    (folder / "model.json").write_text(json.dumps(config))
    (folder / "pairs").mkdir()
    pair = {"sentence_good": "the cat sees the dog", "sentence_bad": "the cat dog sees the"}
    (folder / "pairs" / "a.jsonl").write_text(json.dumps(pair) + "\n")
    paths = {"train_path": folder / "shards" / "train", "valid_path": folder / "shards" / "validation"}
    # The copy of the tokenizer beside the shards, with their manifest, tells the roles too.
    paths |= {"tokenizer_path": folder / "shards" / "train" / "tokenizer.json", "evaluate_data": folder / "pairs"}
    options = {**paths, "max_steps": 8, "save_every": 4, "validation_samples": 2}
    assert train_single_gpu.main(flags(folder, folder, **options)) == 0
    (folder / "options.json").write_text(json.dumps(options, default=str))
    return name, folder


def command(folder: Path, **changes: object) -> list[str]:
    """The flags of the run."""
    return flags(folder, folder, **{**json.loads((folder / "options.json").read_text()), **changes})


def test_the_run_records_its_roles_and_resumes_with_them(trained, capsys):
    name, folder = trained
    expected, run = ROLES[name][2], folder / "run"
    assert training_flags(run)["special_tokens"] == training_flags(locate(run).path)["special_tokens"] == expected
    _, tokenizer, _ = load_model(run)
    assert str(load_special_tokens(run, tokenizer)) == expected
    assert train_single_gpu.main(command(folder)) == 0
    other = "mask=[unused2]" if "[CLS]" in expected else "unk=<pad>"
    assert train_single_gpu.main(command(folder, special_tokens=other)) == 2
    assert "--special_tokens was" in capsys.readouterr().err


def test_words_are_masked_and_every_end_is_learned(trained):
    """In causal rows a document's end is a target: its own token, or the beginning of the next document."""
    name, folder = trained
    inputs = read_inputs(parse_config(command(folder, masking="random"), "a run"))
    options, special = inputs.builder.options, read_special_tokens(folder / "shards" / "train")
    batch = inputs.builder.step(7, 0, 1, "rows", 64).batch
    built, owned = batch.inputs(options), batch.tokens[:, 1:]
    causal, ends = batch.objective == CAUSAL, owned == special.ids["eos"]
    assert ends[causal].any()
    assert (built.labels[causal][ends[causal]] == special.ids["eos"]).all()
    assert special.one_boundary == options.bos_ends == (name in ("gpt2", "t5"))
    scored = built.labels[~causal] != IGNORE_INDEX
    assert not set(owned[~causal][scored].tolist()) & set(special.special_ids)
    assert (built.input_ids == special.ids["mask"]).any()
    assert int(scored.sum()) == batch.targets[0].sum() > 0


def test_evaluation_and_samples_need_no_flag(trained, capsys):
    name, folder = trained
    run = str(folder / "run")
    assert minimal_pairs.main([run, "--device=cpu", f"--data={folder / 'pairs'}"]) == 0
    assert perplexity.main([run, "--device=cpu", "--seq_length=16", f"--data={folder / 'shards' / 'validation'}"]) == 0
    assert fill_mask.main([run, "--device=cpu", "--text=the cat <mask> a tree"]) == 0
    assert generate.main([run, "--device=cpu", "--prompt=the cat", "--max_new_tokens=5"]) == 0
    written = capsys.readouterr().out
    assert "the cat" in written
    assert "-> the cat" in written
    loaded = generation.load(run, ema=False, device="cpu")
    pair = Examples([("the cat sees a tree near the old house", "a dog")], np.zeros(1))
    [row] = encode(pair, loaded.tokenizer, 64, loaded.special).rows
    ids = [loaded.encode(text) for text in pair.texts[0]]
    bos, eos = loaded.special.ids["bos"], loaded.special.ids["eos"]
    assert row == [bos, *ids[0], eos, *ids[1], eos]
    lines = [json.loads(line) for line in (folder / "run" / "samples.jsonl").read_text().splitlines()]
    # The little Unigram vocabulary has no word of three letters or more in one piece, for a gap.
    assert {line["kind"] for line in lines} == ({"causal"} if name == "t5" else {"causal", "masked"})
    words = set(" ".join(make_texts(400, seed=1)).split())
    for line in lines:
        for gap in line.get("gaps", ()):
            assert gap["truth"].strip() in words
        if line["kind"] == "masked":
            assert line["text"].count(" <mask> ") == 2


def test_the_exported_folder_has_the_tokens_and_gives_them_back(trained, tmp_path):
    transformers = pytest.importorskip("transformers")
    name, folder = trained
    export(folder / "run", tmp_path / "hf")
    found = read_special_tokens(folder / "shards" / "train")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    assert {role: getattr(theirs, f"{role}_token_id") for role in found.ids} == found.ids
    text = "the cat sees a tree"
    _, tokenizer, _ = load_model(folder / "run")
    ids = plain(tokenizer).encode(text, add_special_tokens=False).ids
    assert theirs(text).input_ids == [found.ids["bos"], *ids]
    gap = theirs(f"the cat {theirs.mask_token} a tree").input_ids
    assert gap.count(found.ids["mask"]) == 1
    assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True).strip() == text
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert set(generation["suppress_tokens"]) == set(found.special_ids) - {found.ids["eos"]}
    assert f"The {found.tokens['mask']} sat" in (tmp_path / "hf" / "README.md").read_text()
    for model in (tmp_path / "hf", folder / "run"):
        assert str(load_special_tokens(model, load_model(model)[1])) == ROLES[name][2]
    convert(tmp_path / "hf", tmp_path / "back")
    used = tokenizer_hash(folder / "shards" / "train" / "tokenizer.json")
    assert tokenizer_hash(tmp_path / "back" / "tokenizer.json") == used
    assert read_special_tokens(tmp_path / "back").tokens == found.tokens


def test_folders_exported_before_are_read(tmp_path):
    """Their note tells the mask by another key."""
    text = (write_tokenizer("ours", tmp_path / "used") / "tokenizer.json").read_text()
    adapted, note = adapt_tokenizer(text, read_special_tokens(tmp_path / "used"))
    old = {"post_processor": note["post_processor"], "mask_lstrip": note["added_tokens"]["<mask>"]["lstrip"]}
    for each in (note, old):
        (tmp_path / "restored.json").write_text(restore_tokenizer(adapted, each))
        assert tokenizer_hash(tmp_path / "restored.json") == tokenizer_hash(tmp_path / "used" / "tokenizer.json")
