"""Stories from a small grammar of English, and minimal pairs of the same grammar whose word combinations they lack.

    python preprocessing/make_story_corpus.py --output stories.jsonl --pairs pairs/ --stories 24000

The grammar has agreement across attractors and relative clauses, reflexive and personal pronouns, numerals and other
words of quantity, the order of words and of adjectives, and tense. One combination of content words in five is held
out: no sentence of the stories is made of these words, in any form and order, and the sentence of a minimal pair, or
the first of its two, is. The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data.atomic_io import write_atomically
from data.cli import Parser
from preprocessing.cli import CommandError, add_overwrite_flag, positive_int, run
from preprocessing.story_grammar import (
    ANIMALS,
    BE,
    COUNTS,
    FEELINGS,
    NAMES,
    ON_BEINGS,
    ON_THINGS,
    PAST,
    PEOPLE,
    PREPOSITIONS,
    PRESENT,
    PRONOUNS,
    RESTING,
    SINGULAR,
    THINGS,
    Grammar,
    combination,
    is_held_out,
    lexicon,
    other_number,
    sentence,
)  # fmt: skip

Draw = tuple[str, str]  # the good text and the bad one


def _agreement(grammar: Grammar, behind: Callable[[str], str]) -> Draw:
    """A subject with something of the other number between it and its verb."""
    noun, verb, number = grammar.rng.choice(PEOPLE + ANIMALS), grammar.rng.choice(RESTING), grammar.number()
    start = (grammar.phrase(noun, number).words, behind(other_number(number)))
    good, bad = (sentence(*start, verb.form(n, PRESENT)) for n in (number, other_number(number)))
    return good, bad


def agreement_attractor(grammar: Grammar) -> Draw:
    """The dog near the boys sleeps, not sleep."""
    return _agreement(grammar, grammar.attractor)


def agreement_relative(grammar: Grammar) -> Draw:
    """The dog that the boys see sleeps, not sleep."""
    return _agreement(grammar, grammar.relative)


def reflexive(grammar: Grammar) -> Draw:
    """The girl near the boys washes herself, not themselves."""
    subject, other = grammar.being(names=False), grammar.being(names=False)
    while other.pronoun(2) == subject.pronoun(2):
        other = grammar.being(names=False)
    verb = grammar.rng.choice(ON_BEINGS)
    between = f"{grammar.rng.choice(PREPOSITIONS)} {grammar.phrase(other.noun, other.number).words}"
    start = (grammar.phrase(subject.noun, subject.number).words, between, verb.form(subject.number, PRESENT))
    good, bad = (sentence(*start, each.pronoun(2)) for each in (subject, other))
    return good, bad


def pronoun_subject(grammar: Grammar) -> Draw:
    """Anna finds the key. She is happy, not he."""
    tense = grammar.rng.choice((PRESENT, PAST))
    noun, verb = grammar.rng.choice(NAMES), grammar.rng.choice(ON_THINGS)
    subject = grammar.phrase(noun, SINGULAR)
    first = sentence(subject.words, verb.form(SINGULAR, tense), grammar.thing().words)
    feeling = grammar.rng.choice(FEELINGS)
    wrong = PRONOUNS["m" if noun.gender == "f" else "f"][0]
    good, bad = (
        f"{first} {sentence(pronoun, BE[tense][SINGULAR], feeling)}" for pronoun in (subject.pronoun(0), wrong)
    )
    return good, bad


def pronoun_object(grammar: Grammar) -> Draw:
    """Anna finds the keys. She likes them, not it."""
    noun, verb, number = grammar.rng.choice(THINGS), grammar.rng.choice(ON_THINGS), grammar.number()
    hero = grammar.phrase(grammar.rng.choice(NAMES), SINGULAR)
    first = sentence(hero.words, verb.form(SINGULAR, PRESENT), grammar.phrase(noun, number).words)
    start = (hero.pronoun(0), grammar.rng.choice(ON_THINGS).form(SINGULAR, PRESENT))
    good, bad = (
        f"{first} {sentence(*start, grammar.phrase(noun, n).pronoun(1))}" for n in (number, other_number(number))
    )
    return good, bad


def quantity(grammar: Grammar) -> Draw:
    """Anna finds these red apples, not apple."""
    noun, number, hero = grammar.rng.choice(THINGS), grammar.number(), grammar.rng.choice(NAMES)
    word, verb = grammar.quantity(number), grammar.rng.choice(ON_THINGS).form(SINGULAR, PRESENT)
    start = (hero.singular, verb, word, *grammar.adjectives(1))
    good, bad = (sentence(*start, noun.form(n)) for n in (number, other_number(number)))
    return good, bad


def adjective_order(grammar: Grammar) -> Draw:
    """There are two big red balls, not two red big balls."""
    pair = grammar.adjectives(2)
    while len(pair) < 2:
        pair = grammar.adjectives(2)
    number = grammar.number()
    word, noun, place = grammar.rng.choice(COUNTS[number]), grammar.rng.choice(THINGS).form(number), grammar.place()
    good, bad = (sentence("there", BE[PRESENT][number], word, *order, noun, place) for order in (pair, pair[::-1]))
    return good, bad


def word_order(grammar: Grammar) -> Draw:
    """The dog finds the ball, not the dog the ball finds."""
    subject, thing, verb = grammar.being(), grammar.thing().words, grammar.rng.choice(ON_THINGS)
    tense = grammar.rng.choice((PRESENT, PAST))
    form = verb.form(subject.number, tense)
    return sentence(subject.words, form, thing), sentence(subject.words, thing, form)


def tense(grammar: Grammar) -> Draw:
    """Yesterday the dog slept, not sleeps."""
    subject, verb, now = grammar.being(), grammar.rng.choice(RESTING), grammar.rng.choice((PRESENT, PAST))
    start = (grammar.time(now, 1), subject.words)
    then = PAST if now == PRESENT else PRESENT
    good, bad = (sentence(*start, verb.form(subject.number, each)) for each in (now, then))
    return good, bad


PHENOMENA: tuple[Callable[[Grammar], Draw], ...] = (
    agreement_attractor, agreement_relative, reflexive, pronoun_subject, pronoun_object, quantity, adjective_order,
    word_order, tense,
)  # fmt: skip


_MOST_DRAWS = 50  # for each pair, of which there are so many


def minimal_pairs(phenomenon: Callable[[Grammar], Draw], count: int, seed: int) -> list[dict[str, str]]:
    """Different pairs of a phenomenon, each of a combination of content words that is held out."""
    grammar, found, draws = Grammar(seed), {}, 0
    while len(found) < count:
        draws += 1
        if draws > _MOST_DRAWS * (1 + len(found)):
            raise CommandError(
                f"--count {count} is more than the {len(found)} pairs of {phenomenon.__name__} there are"
            )
        good, bad = phenomenon(grammar)
        first = good.split(".")[0]
        if is_held_out(first):
            found[good] = {"sentence_good": good, "sentence_bad": bad, "held_out": " ".join(combination(first))}
    return list(found.values())


# Command line


def command(arguments: argparse.Namespace) -> int:
    if arguments.output.suffix != ".jsonl":
        raise CommandError(f"--output {arguments.output} must end in .jsonl")
    grammar = Grammar(arguments.seed)
    stories = [grammar.story() for _ in range(arguments.stories)]
    files: dict[Path, list[dict[str, str]]] = {arguments.output: [{"text": story} for story in stories]}
    for phenomenon in PHENOMENA:
        path = arguments.pairs / f"{phenomenon.__name__}.jsonl"
        files[path] = minimal_pairs(phenomenon, arguments.count, arguments.seed)
    contents = {path: "".join(json.dumps(line) + "\n" for line in lines).encode() for path, lines in files.items()}
    for path, content in contents.items():
        if path.exists() and path.read_bytes() != content and not arguments.overwrite:
            raise CommandError(f"{path} holds something else; give another name or add --overwrite")
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    words = sum(len(story.split()) for story in stories)
    print(
        f"{arguments.output}: {len(stories):,} stories, {words:,} words, {len(lexicon())} word forms that carry meaning"
    )
    print(f"{arguments.pairs}: {arguments.count} minimal pairs of each of {len(PHENOMENA)} phenomena")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("Write stories from a small grammar of English, and minimal pairs that they do not give away.")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE.jsonl", help="the stories")
    parser.add_argument(
        "--pairs", required=True, type=Path, metavar="FOLDER", help="minimal pairs, a file a phenomenon"
    )
    parser.add_argument("--stories", type=positive_int, default=24_000, metavar="N", help="how many")
    parser.add_argument("--count", type=positive_int, default=50, metavar="N", help="minimal pairs of each phenomenon")
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="of the random numbers")
    add_overwrite_flag(parser, "different files")
    return run(command, parser.parse_args(argv), "no stories were written")


if __name__ == "__main__":
    sys.exit(main())
