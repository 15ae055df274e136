"""make_story_corpus: the stories never give a minimal pair away, know all of its words, and are the same every time."""

import json
import re

import pytest

from preprocessing import make_story_corpus
from preprocessing.make_story_corpus import PHENOMENA, minimal_pairs
from preprocessing.story_grammar import Grammar, lexicon

STORIES = 400


@pytest.fixture(scope="module")
def stories() -> list[str]:
    grammar = Grammar(1)
    return [grammar.story() for _ in range(STORIES)]


def content(sentence: str) -> frozenset[str]:
    """The dictionary forms of the content words of a sentence."""
    words = re.findall(r"\w+", sentence)
    return frozenset(lexicon().get(word) or lexicon().get(word.lower(), "the") for word in words) - {"the"}


def test_no_sentence_of_the_stories_is_made_of_the_words_of_a_pair(stories):
    read = {content(sentence) for story in stories for sentence in story.split(".")}
    assert len(read) > STORIES
    for phenomenon in PHENOMENA:
        pairs = minimal_pairs(phenomenon, 30, seed=2)
        held_out = {content(pair["sentence_good"].split(".")[0]) for pair in pairs}
        assert len(held_out) >= 10, phenomenon
        assert held_out == {frozenset(pair["held_out"].split()) for pair in pairs}
        assert not held_out & read, phenomenon
    grammar = Grammar(5)
    drawn = {content(PHENOMENA[0](grammar)[0]) for _ in range(300)}
    assert drawn & read  # were nothing held out, stories and pairs would share combinations


def test_pairs_differ_in_nothing_but_the_grammar(stories):
    """Right and wrong have the same number of words, all of which the stories have."""
    known = {word for story in stories for word in re.findall(r"\w+", story)}
    for phenomenon in PHENOMENA:
        pairs = minimal_pairs(phenomenon, 60, seed=3)
        assert len({pair["sentence_good"] for pair in pairs}) == 60
        shown = [[pair[key].split() for pair in pairs] for key in ("sentence_good", "sentence_bad")]
        for good, bad in zip(*shown, strict=True):
            assert good != bad
            assert len(good) == len(bad)
            unknown = set(re.findall(r"\w+", " ".join((*good, *bad)))) - known
            assert all(word.lower() in known or word.capitalize() in known for word in unknown), unknown


def test_no_form_of_the_verb_is_right_more_often():
    pairs = minimal_pairs(make_story_corpus.agreement_attractor, 100, seed=4)
    singular = [pair for pair in pairs if pair["sentence_good"].endswith("s.")]
    assert 30 <= len(singular) <= 70


def command(folder, *more: object) -> int:
    flags = ("--output", folder / "stories.jsonl", "--pairs", folder / "pairs", "--stories", 20, "--count", 5, *more)
    return make_story_corpus.main([str(flag) for flag in flags])


def test_the_command_is_deterministic_and_overwrites_nothing(tmp_path, capsys):
    assert command(tmp_path) == 0
    first = (tmp_path / "stories.jsonl").read_text()
    assert [json.loads(line)["text"][-1] for line in first.splitlines()] == ["."] * 20
    assert sorted(path.stem for path in (tmp_path / "pairs").iterdir()) == sorted(p.__name__ for p in PHENOMENA)
    assert command(tmp_path) == 0
    assert (tmp_path / "stories.jsonl").read_text() == first
    capsys.readouterr()
    assert command(tmp_path, "--seed", 7) == 2
    assert "holds something else; give another name or add --overwrite" in capsys.readouterr().err
    assert (tmp_path / "stories.jsonl").read_text() == first
    assert command(tmp_path, "--seed", 7, "--overwrite") == 0
    assert (tmp_path / "stories.jsonl").read_text() != first


def test_what_cannot_be_made_is_said(tmp_path, capsys):
    assert command(tmp_path, "--count", 100_000) == 2
    assert "--count 100000 is more than the" in capsys.readouterr().err
    assert make_story_corpus.main(["--output", str(tmp_path / "x.txt"), "--pairs", str(tmp_path)]) == 2
    assert "must end in .jsonl" in capsys.readouterr().err
