"""Surprisal by word: every word against brute force in float64, words and their tokens, what is refused."""

import copy
import csv
import math

import pytest
from helpers.tiny_evaluation import checkpoint_of, enlarged, reference

from evaluation import surprisal

TEXTS = ["The function  returns the 東京 list.", "", "  unbelievable\tfunctionality ", "a"]


@pytest.mark.parametrize("word_l2r", [False, True])
def test_words_against_brute_force(tmp_path, capsys, word_l2r):
    model, tokenizer = enlarged()
    checkpoint = checkpoint_of(tmp_path / "run", model, tokenizer)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    output = tmp_path / "out" / "words.csv"
    command = [str(checkpoint), "--data", str(tmp_path / "texts.txt"), "--device", "cpu", "--output", str(output)]
    assert surprisal.main([*command, *["--word_l2r"] * word_l2r]) == 0
    assert "9 words in 3 texts; bits a word: masked " in capsys.readouterr().out

    exact, expected = copy.deepcopy(model).double(), []
    for number, text in enumerate(TEXTS, 1):
        encoding = tokenizer.encode(text.strip(), add_special_tokens=False)
        words = [len(text.strip()[:end].split()) for _, end in encoding.offsets]  # that each token ends in
        for i, (_, end) in enumerate(encoding.offsets):
            words[i] += text.strip()[:end][-1].isspace()  # spaces belong to what follows
        for place, word in enumerate(text.split(), 1):
            own = [i for i, of in enumerate(words) if of == place]
            line = [str(number), str(place), word, str(len(own))]
            for mode in ("word_l2r" if word_l2r else "masked", "causal"):
                [total] = reference(exact, encoding.ids, words, mode, eos=False, only=own)
                line.append(-total / math.log(2))
            expected.append(line)
    with output.open() as file:
        head, *lines = csv.reader(file)
    assert head == ["line", "place", "word", "tokens", "masked", "causal"]
    assert [line[:4] for line in lines] == [line[:4] for line in expected]
    for line, of in zip(lines, expected, strict=True):
        assert [float(value) for value in line[4:]] == pytest.approx(of[4:], rel=1e-4, abs=1e-4)


def test_refusals_are_one_sentence(tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("\n \n")
    for data, words in (("empty.txt", "holds no text"), ("none.txt", "cannot be read")):
        command = ["model", "--data", str(tmp_path / data), "--output", str(tmp_path / "x.csv")]
        assert surprisal.main(command) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: --data")
        assert words in error
        assert error.count("\n") == 1
