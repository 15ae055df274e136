"""Roles of any tokenizer's special tokens, found in its files, given or appended; the set of ids that are special."""

from __future__ import annotations

import json

import pytest
from helpers.foreign_tokenizers import LAYOUTS, write_tokenizer
from helpers.tiny_runs import refusal
from tokenizers import Tokenizer

from data.shards import ShardError
from data.special_tokens import OURS, ROLES, parse_roles, read_special_tokens, special_tokens
from preprocessing import special_tokens as command
from preprocessing.tokenizer import DocumentEncoder, load_tokenizer
from training.config import LATER_FLAGS

END = "<|endoftext|>"
EXPECTED = {
    "bert": "bos=[CLS],eos=[SEP],pad=[PAD],mask=[MASK],unk=[UNK]",
    "roberta": OURS,
    "gpt2": f"bos={END},eos={END},unk={END}",
    "llama2": "bos=<s>,eos=</s>,unk=<unk>",
    "llama3": "bos=<|begin_of_text|>,eos=<|end_of_text|>",
    "t5": "eos=</s>,pad=<pad>,unk=<unk>",
    "modernbert": "bos=[CLS],eos=[SEP],pad=[PAD],mask=[MASK],unk=[UNK]",
    "ours": OURS,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("layouts")
    return {name: write_tokenizer(name, base / name) for name in LAYOUTS}


@pytest.mark.parametrize("name", LAYOUTS)
def test_roles_are_found_in_the_files(folders, name):
    found = read_special_tokens(folders[name])
    assert str(found) == EXPECTED[name]
    tokenizer = Tokenizer.from_file(str(folders[name] / "tokenizer.json"))
    assert {role: tokenizer.id_to_token(number) for role, number in found.ids.items()} == found.tokens
    assert found.vocab_size == tokenizer.get_vocab_size() == max(tokenizer.get_vocab().values()) + 1
    marked = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert set(found.special_ids) == marked
    assert found.one_boundary == (name == "gpt2")
    if name != "gpt2":  # which does not tell its unknown token
        alone = special_tokens((folders[name] / "tokenizer.json").read_text())
        assert (alone.tokens, alone.special_ids) == (found.tokens, found.special_ids)


@pytest.mark.parametrize("name", LAYOUTS)
def test_missing_roles_are_named_and_appended(folders, name, tmp_path, capsys):
    found, needed = read_special_tokens(folders[name]), ("bos", "eos", "pad", "mask")
    missing = [role for role in needed if role not in found.ids]
    if missing:
        with pytest.raises(ShardError, match=f"--special_tokens {','.join(f'{role}=TOKEN' for role in missing)} "):
            found.require(needed, "X")
    else:
        found.require(needed, "X")
    output = tmp_path / "new"
    assert command.main([str(folders[name]), "--output", str(output), "--add", *needed]) == 0
    assert f"give the model's configuration vocab_size {found.vocab_size + len(missing)}" in capsys.readouterr().out
    grown = read_special_tokens(output)
    assert {role: grown.tokens[role] for role in missing} == {role: parse_roles(OURS)[role] for role in missing}
    assert {role: grown.ids[role] for role in found.ids} == found.ids
    assert sorted(grown.ids[role] for role in missing) == [found.vocab_size + n for n in range(len(missing))]
    assert set(grown.special_ids) == {*found.special_ids, *(grown.ids[role] for role in missing)}
    text = "the cat sees [MASK] <mask> the old house"
    before, after = (load_tokenizer(folder) for folder in (folders[name], output))
    assert before.encode(text, add_special_tokens=False).ids == after.encode(text, add_special_tokens=False).ids
    ids, _ = DocumentEncoder(after).encode([text])
    assert not set(ids.tolist()) & (set(grown.special_ids) - {grown.ids.get("unk")})


def test_given_roles_win_and_are_checked(folders, tmp_path, capsys):
    t5 = read_special_tokens(folders["t5"], "bos=</s>,mask=<extra_id_0>")
    assert t5.one_boundary
    assert t5.tokens["mask"] == "<extra_id_0>"
    assert set(t5.special_ids) == set(read_special_tokens(folders["t5"]).special_ids)
    unmarked = read_special_tokens(folders["bert"], "mask=[unused3]")
    assert unmarked.ids["mask"] in unmarked.special_ids
    assert parse_roles("bos=a,b,eos==,mask=c") == {"bos": "a,b", "eos": "=", "mask": "c"}
    for given in ("mask", "mask=", "end=</s>", "mask=a,mask=b"):
        with pytest.raises(ShardError, match="not of the form ROLE=TOKEN"):
            parse_roles(given)
    with pytest.raises(ShardError, match=r"mask=\[MASK\]: the tokenizer .* has no such token"):
        read_special_tokens(folders["gpt2"], "mask=[MASK]")
    with pytest.raises(ShardError, match="<s> is both mask and bos"):
        read_special_tokens(folders["ours"], "mask=<s>")
    says = refusal(capsys, command.main, [str(folders["gpt2"]), "--add", "mask"])
    assert "--add needs --output FOLDER" in says
    output = ["--output", str(tmp_path / "new")]
    assert command.main([str(folders["gpt2"]), *output, "--special_tokens", "mask=<gap>", "--add", "mask", "pad"]) == 0
    assert json.loads((tmp_path / "new" / "special_tokens_map.json").read_text())["mask_token"] == "<gap>"
    assert read_special_tokens(tmp_path / "new").tokens["mask"] == "<gap>"
    assert "holds a tokenizer.json already" in refusal(capsys, command.main, [str(folders["gpt2"]), *output])


def test_ids_below_a_number_or_without_a_token_are_special(folders):
    """The published rule, where it is asked for; and gaps of a vocabulary are no words."""
    assert read_special_tokens(folders["ours"], below=20).special_ids == tuple(range(20))
    with pytest.raises(ShardError, match=r"--n_special_tokens is 16 but <mask> has id .*; give at least"):
        read_special_tokens(folders["roberta"], below=16)
    content = json.loads((folders["ours"] / "tokenizer.json").read_text())
    content["model"]["vocab"] = {t: n + 3 * (n > 300) for t, n in content["model"]["vocab"].items()}
    found = special_tokens(json.dumps(content))
    assert found.special_ids == (*range(16), 301, 302, 303)
    assert set(ROLES) == set(found.ids)


def test_runs_from_before_roles_have_those_of_our_tokenizers():
    assert LATER_FLAGS["special_tokens"].before == OURS
    assert LATER_FLAGS["n_special_tokens"].before == 16
