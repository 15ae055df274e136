"""A model with another vocabulary: tokens that it had are predicted as before, new ones begin as a mean."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.tiny_exports import make_checkpoint, random_model, tokenizer_text
from helpers.tiny_runs import TEXT, train_on
from tokenizers import AddedToken, Tokenizer

from export import extend_vocabulary
from export.load_model import load_model
from training.checkpoint import locate

WORDS = "embedding.word_embedding.weight"


@pytest.mark.parametrize("rows", ["pieces", "mean"])
def test_tokens_of_before_keep_their_rows_whatever_their_ids(tmp_path: Path, capsys, rows: str):
    model = random_model("gpt-bert")
    checkpoint = make_checkpoint(tmp_path, model)
    old = Tokenizer.from_str(tokenizer_text())
    new = train_on("A sentence of other words follows another one; " * 9 + TEXT, 400)
    new.add_special_tokens([AddedToken("<lang_no>", special=True)])
    new.save(str(tmp_path / "new.json"))
    arguments = [str(checkpoint), str(tmp_path / "new.json"), str(tmp_path / "out"), f"--new_rows={rows}"]
    assert extend_vocabulary.main(arguments) == 0
    told = capsys.readouterr().out

    wider, tokenizer, config = load_model(tmp_path / "out")
    ids, before = new.get_vocab(), old.get_vocab()
    shared = sorted(ids.keys() & before.keys(), key=ids.__getitem__)
    assert tokenizer.get_vocab() == ids
    assert config.vocab_size == len(ids)
    assert f"of {len(ids)} tokens {len(shared)} keep their rows" in told
    assert f"{len(before) - len(shared)} old ones are gone" in told
    assert [ids[token] for token in shared] != [before[token] for token in shared]

    ours, theirs = ([vocabulary[token] for token in shared] for vocabulary in (ids, before))
    text = torch.arange(20)[None] + 5
    documents = torch.zeros_like(text)
    logits = wider(torch.tensor(ours)[text], documents, False)[..., ours]
    torch.testing.assert_close(logits, model(torch.tensor(theirs)[text], documents, False)[..., theirs])

    made, table = wider.state_dict(), model.state_dict()[WORDS]
    assert "Ġsentence" in ids.keys() - before.keys()
    token, pieces = "Ġsentence", old.encode(" sentence", add_special_tokens=False).ids
    expected = table[pieces if rows == "pieces" else slice(None)].mean(0)
    torch.testing.assert_close(made[WORDS][ids[token]], expected)
    torch.testing.assert_close(made[WORDS][ids["<lang_no>"]], table.mean(0))
    bias = "classifier.nonlinearity.5.bias"
    torch.testing.assert_close(made[bias][ids["<lang_no>"]], model.state_dict()[bias].mean())
    assert locate(tmp_path / "out").step == 0


def test_what_cannot_be_extended_is_refused(tmp_path: Path, capsys):
    checkpoint = make_checkpoint(tmp_path, random_model("gpt-bert"))
    (tmp_path / "new.json").write_text("{}")
    assert extend_vocabulary.main([str(checkpoint), str(tmp_path / "new.json"), str(tmp_path / "out")]) == 2
    assert "give a tokenizer.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
