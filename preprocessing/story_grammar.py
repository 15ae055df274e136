"""A small grammar of English: words, phrases, sentences and stories, and which combinations of words stories lack.

preprocessing/make_story_corpus.py writes its stories and minimal pairs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import chain

SINGULAR, PLURAL = "singular", "plural"
PRESENT, PAST = "present", "past"


@dataclass(frozen=True)
class Noun:
    """A noun by its forms; names have no plural. gender: f, m or n."""

    singular: str
    plural: str
    gender: str

    def form(self, number: str) -> str:
        return self.singular if number == SINGULAR else self.plural


@dataclass(frozen=True)
class Verb:
    """A verb by its forms: they sleep, it sleeps, it slept."""

    base: str
    third: str
    past: str

    def form(self, number: str, tense: str) -> str:
        return self.past if tense == PAST else self.third if number == SINGULAR else self.base


def _nouns(gender: str, words: str) -> list[Noun]:
    """Nouns of "dog mouse/mice": regular unless both forms are given."""
    found = []
    for word in words.split():
        singular, _, plural = word.partition("/")
        found.append(Noun(singular, plural or f"{singular}s", gender))
    return found


def _verbs(words: str) -> list[Verb]:
    """Verbs of "walk see/saw carry/carries/carried"."""
    found = []
    for word in words.split():
        base, *forms = word.split("/")
        past = forms[-1] if forms else f"{base.removesuffix('e')}ed"
        found.append(Verb(base, forms[0] if len(forms) > 1 else f"{base}s", past))
    return found


PEOPLE = [*_nouns("f", "girl woman/women"), *_nouns("m", "boy man/men")]
NAMES = [Noun("Anna", "", "f"), Noun("Lucy", "", "f"), Noun("Tom", "", "m"), Noun("Peter", "", "m")]
ANIMALS = _nouns("n", "dog cat mouse/mice")
THINGS = _nouns("n", "apple ball box/boxes key")
PLACES = ("garden", "river", "house")
MOTION = _verbs("walk run/ran")
RESTING = _verbs("sleep/slept sing/sang dance swim/swam")
ON_ALL = _verbs("see/saw like wash/washes/washed")
ON_THINGS = [*ON_ALL, *_verbs("find/found hold/held")]
ON_BEINGS = [*ON_ALL, *_verbs("help follow")]
ADJECTIVES = (("pretty", "strange"), ("big", "small"), ("red", "blue"))  # opinion, size, colour: in this order
COUNTS = {SINGULAR: ("one",), PLURAL: ("two", "three", "many")}
QUANTITIES = {SINGULAR: ("one", "this", "every"), PLURAL: ("two", "many", "these")}
FEELINGS = ("happy", "tired", "sad")
TIMES = {PRESENT: ("Today", "Now"), PAST: ("Yesterday", "Once")}
PREPOSITIONS = ("near", "behind")
BE = {PRESENT: {SINGULAR: "is", PLURAL: "are"}, PAST: {SINGULAR: "was", PLURAL: "were"}}
# By gender and number: she, her, herself.
PRONOUNS = {
    "f": ("she", "her", "herself"),
    "m": ("he", "him", "himself"),
    "n": ("it", "it", "itself"),
    PLURAL: ("they", "them", "themselves"),
}


def other_number(number: str) -> str:
    return PLURAL if number == SINGULAR else SINGULAR


# What is held out

_HELD_OUT = 5  # one combination in so many
_SMALLEST = 3  # content words of a combination; sentences of fewer are not held out


@cache
def lexicon() -> dict[str, str]:
    """The dictionary form of every content word, by every form of it."""
    found = {}
    for noun in (*PEOPLE, *NAMES, *ANIMALS, *THINGS):
        found |= {form: noun.singular for form in (noun.singular, noun.plural) if form}
    for verb in (*MOTION, *RESTING, *ON_THINGS, *ON_BEINGS):
        found |= dict.fromkeys((verb.base, verb.third, verb.past), verb.base)
    others = (*QUANTITIES.values(), *COUNTS.values(), *ADJECTIVES, PLACES, FEELINGS, *TIMES.values())
    return found | {word: word for word in chain.from_iterable(others)}


def combination(sentence: str) -> tuple[str, ...]:
    """The content words of a sentence in their dictionary form, each once, sorted."""
    words = (lexicon().get(word) or lexicon().get(word.lower()) for word in sentence.rstrip(".").split())
    return tuple(sorted(set(filter(None, words))))


def is_held_out(sentence: str) -> bool:
    """Whether stories have no sentence of these content words, in any form and order."""
    words = combination(sentence)
    drawn = sha256(" ".join(words).encode()).digest()
    return len(words) >= _SMALLEST and int.from_bytes(drawn[:4], "big") % _HELD_OUT == 0


# The grammar


@dataclass(frozen=True)
class Phrase:
    """A noun phrase: its words, and its head with the number, which verbs and pronouns agree with."""

    words: str
    noun: Noun
    number: str

    def pronoun(self, case: int) -> str:
        """case: 0 she, 1 her, 2 herself."""
        return PRONOUNS[PLURAL if self.number == PLURAL else self.noun.gender][case]


def sentence(*parts: str) -> str:
    """Parts as a sentence; empty ones are left out."""
    text = " ".join(part for part in parts if part)
    return f"{text[0].upper()}{text[1:]}."


class Grammar:
    """Draws phrases, sentences and stories from a generator of random numbers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def one_of(self, *groups: Sequence) -> object:
        """A member of a group, each group being as probable as the others."""
        return self.rng.choice(self.rng.choice(groups))

    def number(self) -> str:
        return self.rng.choice((SINGULAR, PLURAL))

    def adjectives(self, most: int = 2) -> list[str]:
        """Up to `most` adjectives in their order: opinion, size, colour."""
        kinds = sorted(self.rng.sample(range(3), self.rng.randint(0, most)))
        return [self.rng.choice(ADJECTIVES[kind]) for kind in kinds]

    def phrase(self, noun: Noun, number: str, determiner: str = "the", adjectives: int = 0) -> Phrase:
        if not noun.plural:
            return Phrase(noun.singular, noun, SINGULAR)
        return Phrase(" ".join([determiner, *self.adjectives(adjectives), noun.form(number)]), noun, number)

    def quantity(self, number: str) -> str:
        return self.rng.choice(QUANTITIES[number])

    def being(self, names: bool = True) -> Phrase:
        """Somebody, with or without a word of quantity."""
        noun, number = self.one_of(*([NAMES, NAMES] if names else []), PEOPLE, ANIMALS), self.number()
        assert isinstance(noun, Noun)
        return self.phrase(noun, number, self.quantity(number) if self.rng.random() < 0.25 else "the")

    def thing(self) -> Phrase:
        """A thing, half of the time with a word of quantity."""
        number = self.number()
        determiner = self.quantity(number) if self.rng.random() < 0.5 else "the"
        return self.phrase(self.rng.choice(THINGS), number, determiner, adjectives=1)

    def place(self) -> str:
        return f"{self.rng.choice(PREPOSITIONS)} the {self.rng.choice(PLACES)}"

    def attractor(self, number: str | None = None) -> str:
        """A prepositional phrase behind a noun, with a noun of its own."""
        noun = self.one_of(PEOPLE, ANIMALS, THINGS)
        assert isinstance(noun, Noun)
        return f"{self.rng.choice(PREPOSITIONS)} {self.phrase(noun, number or self.number()).words}"

    def relative(self, number: str | None = None, tense: str = PRESENT) -> str:
        """A relative clause behind a noun, whose subject is somebody else."""
        noun, number = self.rng.choice(PEOPLE + ANIMALS), number or self.number()
        verb = self.rng.choice(ON_BEINGS).form(number, tense)
        return f"that {self.phrase(noun, number).words} {verb}"

    def predicate(self, subject: Phrase, tense: str) -> str:
        """A verb that agrees with its subject, and what belongs to it."""
        kind = self.rng.random()
        if kind < 0.45:
            place = f" {self.place()}" if self.rng.random() < 0.2 else ""
            return f"{self.rng.choice(RESTING).form(subject.number, tense)}{place}"
        if kind < 0.6:
            return f"{self.rng.choice(ON_THINGS).form(subject.number, tense)} {self.thing().words}"
        if kind < 0.7:
            return f"{self.rng.choice(ON_BEINGS).form(subject.number, tense)} {self.being().words}"
        if kind < 0.93:
            return f"{self.rng.choice(ON_BEINGS).form(subject.number, tense)} {subject.pronoun(2)}"
        return f"{BE[tense][subject.number]} {self.rng.choice(FEELINGS)}"

    def time(self, tense: str, probability: float) -> str:
        return self.rng.choice(TIMES[tense]) if self.rng.random() < probability else ""

    # Parts of a story

    def allowed(self, draw: Callable[..., str], *arguments: object) -> str:
        """What a function draws, without a sentence that is held out."""
        while any(map(is_held_out, re.findall(r"[^.]+", found := draw(*arguments)))):
            pass
        return found

    def bystander(self, tense: str) -> str:
        """Somebody else does something; a second sentence may say more about them."""
        subject, kind = self.being(names=False), self.rng.random()
        behind = self.attractor() if kind < 0.4 else self.relative(tense=tense) if kind < 0.8 else ""
        text = sentence(self.time(tense, 0.35), subject.words, behind, self.predicate(subject, tense))
        return f"{text} {self.state(subject, tense)}" if self.rng.random() < 0.4 else text

    def state(self, being: Phrase, tense: str) -> str:
        return sentence(being.pronoun(0), BE[tense][being.number], self.rng.choice(FEELINGS))

    def discovery(self, hero: Phrase, tense: str) -> str:
        """There are things, somebody does something with them; pronouns take up both."""
        noun, number = self.rng.choice(THINGS), self.number()
        found = self.phrase(noun, number, self.rng.choice(COUNTS[number]), adjectives=2)
        things = self.phrase(noun, number)
        first, second = (self.rng.choice(ON_THINGS).form(hero.number, tense) for _ in range(2))
        return " ".join((
            sentence("there", BE[tense][number], found.words, self.place()),
            sentence(self.time(tense, 0.35), hero.words, first, things.words),
            sentence(hero.pronoun(0), second, things.pronoun(1)),
        ))  # fmt: skip

    def habit(self, hero: Phrase, tense: str) -> str:
        """The hero does something; a pronoun takes it up."""
        text = sentence(self.time(tense, 0.35), hero.words, self.predicate(hero, tense))
        return f"{text} {self.state(hero, tense)}"

    def opening(self, hero: Phrase, tense: str) -> str:
        verb = self.rng.choice(MOTION).form(hero.number, tense)
        return sentence(self.time(tense, 0.7), hero.words, verb, "to the", self.rng.choice(PLACES))

    def story(self) -> str:
        """Some of what may happen to a hero and beside them, in any order."""
        tense = self.rng.choice((PRESENT, PRESENT, PAST))
        being = self.being()
        hero = self.phrase(being.noun, being.number)
        parts = (self.opening, self.discovery, self.habit, *[lambda _hero, tense: self.bystander(tense)] * 3)
        chosen = self.rng.sample(parts, self.rng.randint(1, 4))
        return " ".join(self.allowed(part, hero, tense) for part in chosen)
