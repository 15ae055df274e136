"""The mix of a run: the step at which each stage begins, what each objective's stream holds, and what comes of it.

Limits of repetitions count the uses of all objectives together, over the whole run. What a limit takes from a source,
the others of its stage get, in their proportions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np

from data.corpus import Corpus, CorpusError
from data.epochs import Epochs, Stage
from data.plan import DataPlan
from data.positions import PositionError, step_of

_MET = 0.02  # by so much of itself a fraction may differ from what was asked for, without a word


class MixPlan:
    """What the streams of a run hold.

    steps: the first step of each stage, and max_steps. epochs: of each objective's stream. open_end: they do not depend
    on where the run ends, so that a longer one goes on without repeating. Raises CorpusError."""

    def __init__(self, corpus: Corpus, plan: DataPlan):
        self._corpus, self._plan = corpus, plan
        self.steps = (0, plan.max_steps)
        self.limited: list[set[int]] = [set()]  # sources of each stage that max_repeats holds back
        limits = any(source.max_repeats is not None for source in corpus.sources)
        self.open_end = not corpus.mix.planned or (plan.open_end and not limits)
        if not corpus.mix.planned:
            self.epochs = tuple(corpus.epochs for _ in plan.objectives)
            return
        self.steps = (*self._first_steps(), plan.max_steps)
        ends = [plan.objective_tokens_before(step) for step in self.steps]  # of each stage, by objective
        budgets = [sum(after) - sum(before) for before, after in pairwise(ends)]
        repeats, self.limited = self._within_limits(budgets)
        if self.open_end:  # a part of an epoch is a sample, in which no document should be many times ahead of another
            repeats = [tuple(repeat / max(1, *of_stage) for repeat in of_stage) for of_stage in repeats]
        # All objectives walk through a source together, one behind the other, so that no document is used much more
        # often than another: each begins where the one before it ends, where that is known.
        found, used = [], (0,) * len(corpus.sources)
        for number, objective in enumerate(plan.objectives):
            stages = [Stage(end[number], of_stage) for end, of_stage in zip(ends, repeats, strict=False)]
            so_far = Fraction(sum(ends[-1][: number + 1]), max(1, sum(ends[-1])))
            end = None if self.open_end else ends[-1][number]
            try:
                found.append(Epochs(corpus.units, stages, corpus.keyed, end, self._limits(so_far), used))
            except ValueError as error:
                raise CorpusError(f"{self._too_few()} ({objective.name} rows get {error})") from error
            used = used if self.open_end else found[-1].uses_at_end()
        self.epochs = tuple(found)

    @property
    def moves_with_length(self) -> bool:
        """Whether a run of another length has other rows."""
        fractions = any(stage.begin.unit == "fraction" for stage in self._corpus.mix.stages)
        return not self.open_end or fractions

    def _first_steps(self) -> Iterator[int]:
        last = -1
        for number, stage in enumerate(self._corpus.mix.stages):
            try:
                step = step_of(stage.begin, self._plan.schedule, self._corpus.exposure)
            except PositionError as error:
                raise CorpusError(f'--train_path: stages[{number}]: "from": {error}') from error
            if step <= last or step >= self._plan.max_steps:
                raise CorpusError(
                    f'--train_path: stages[{number}] has "from": {stage.begin}, which is step {step} of '
                    f"{self._plan.max_steps}; stages begin one after the other, and before the run ends"
                )
            last = step
            yield step

    # Limits

    def _limits(self, fraction: Fraction) -> tuple[int, ...] | None:
        """Documents (or blocks) of each walk that objectives with such a fraction of all tokens may use."""
        sources = self._corpus.sources
        if all(source.max_repeats is None for source in sources):
            return None
        documents = [
            1 << 62 if s.max_repeats is None else int(Fraction(repr(s.max_repeats)) * int(count) * fraction)
            for s, count in zip(sources, self._corpus.units.counts, strict=True)
        ]
        return tuple(documents)

    def _within_limits(self, budgets: Sequence[int]) -> tuple[list[tuple[Fraction, ...]], list[set[int]]]:
        """Repeats of each stage that keep to the limits, and which sources they hold back."""
        tokens = self._corpus.source_tokens
        left = [
            None if source.max_repeats is None else Fraction(repr(source.max_repeats)) * size
            for source, size in zip(self._corpus.sources, tokens, strict=True)
        ]
        found, limited = [], []
        for repeats, budget in zip(self._corpus.stage_repeats, budgets, strict=True):
            asked = [repeat * size for repeat, size in zip(repeats, tokens, strict=True)]
            shares, held = self._share(asked, budget, left)
            scale = sum(asked)  # an epoch stays as long as it was
            found.append(
                repeats if not held else tuple(share * scale / size for share, size in zip(shares, tokens, strict=True))
            )
            limited.append(held)
            left = [rest if rest is None else rest - share * budget for rest, share in zip(left, shares, strict=True)]
        return found, limited

    def _share(
        self, asked: Sequence[Fraction], budget: int, left: Sequence[Fraction | None]
    ) -> tuple[list[Fraction], set[int]]:
        """Fractions of `budget` tokens in the proportions `asked`, of no source more than is `left` of it."""
        held: set[int] = set()
        while True:
            fixed = sum((left[n] or Fraction(0) for n in held), Fraction(0)) / max(1, budget)
            free = sum(size for n, size in enumerate(asked) if n not in held)
            if not free and fixed < 1:
                raise CorpusError(self._too_few())
            shares = [
                (left[n] or Fraction(0)) / max(1, budget) if n in held else size * (1 - fixed) / (free or 1)
                for n, size in enumerate(asked)
            ]
            over = {
                n for n, rest in enumerate(left) if n not in held and rest is not None and shares[n] * budget > rest
            }
            if not over:
                return shares, held
            held |= over

    def _too_few(self) -> str:
        allowed = sum(
            size * Fraction(repr(source.max_repeats))
            for source, size in zip(self._corpus.sources, self._corpus.source_tokens, strict=True)
            if source.max_repeats is not None
        )
        used = self._plan.tokens_before(self._plan.max_steps)
        return (
            f"--train_path: max_repeats leaves a mix too few tokens: the run uses {used:,}, and sources with a limit "
            f"give {int(allowed):,}; raise max_repeats, add data, or lower --max_steps"
        )

    # What comes of it

    def tokens(self, step: int) -> np.ndarray:
        """Tokens of each source in all global batches before `step`, all objectives together: float64 [sources]. As
        Epochs.source_tokens has them: within an epoch, all sources are as far as the epoch is."""
        positions = self._plan.objective_tokens_before(step)
        return sum((e.source_tokens(p) for e, p in zip(self.epochs, positions, strict=True)), np.zeros(1))

    def words(self, step: int) -> tuple[int, list[int]]:
        """Words in all global batches before `step`, in all and by objective, rounded down. Raises PositionError. Each
        source's tokens count with its own words a token, and inside an epoch all sources as far as the epoch is."""
        positions, rate = self._plan.objective_tokens_before(step), self._corpus.exposure.known_words_per_token()
        if not self._corpus.mix.planned:
            return int(sum(positions) * rate), [int(position * rate) for position in positions]
        rates = np.array([source.words for source in self._corpus.sources]) / np.array(self._corpus.source_tokens)
        of_streams = zip(self.epochs, positions, strict=True)
        found = [float(epochs.source_tokens(position) @ rates) for epochs, position in of_streams]
        return int(sum(found) + 1e-6), [int(words + 1e-6) for words in found]

    def repeats(self, step: int) -> np.ndarray:
        """How often the tokens of each source were used before `step`, on average: float64 [sources]."""
        return self.tokens(step) / np.array(self._corpus.source_tokens)

    def metrics(self, step: int) -> dict[str, float]:
        """`data/NAME_tokens` and `data/NAME_epochs` of each of several sources: tokens used so far, and how often."""
        if len(self._corpus.sources) == 1:
            return {}
        tokens, uses, found = self.tokens(step).tolist(), self.repeats(step).tolist(), {}
        for number, source in enumerate(self._corpus.sources):
            found[f"data/{source.name}_tokens"] = round(tokens[number])
            found[f"data/{source.name}_epochs"] = uses[number]
        return found

    def lines(self) -> list[str]:
        """For people: what each stage reads of each source; none of a single source."""
        if len(self._corpus.sources) == 1:
            return []
        found = []
        for number, (begin, end) in enumerate(pairwise(self.steps)):
            stage, before = self._corpus.mix.stages[number], self.tokens(begin)
            if len(self.steps) > 2:
                found.append(f"stage {number + 1} from step {begin} ({stage.begin}) to {end}:")
            tokens, uses = self.tokens(end) - before, self.repeats(end)
            asked = np.array(list(map(float, self._corpus.stage_repeats[number]))) * self._corpus.source_tokens
            for source in np.flatnonzero(asked).tolist():
                wanted, real = asked[source] / asked.sum(), tokens[source] / max(1.0, tokens.sum())
                found.append(self._line(number, source, *map(float, (wanted, real, tokens[source], uses[source]))))
        return found

    def _line(self, stage: int, number: int, asked: float, real: float, tokens: float, uses: float) -> str:
        source, why = self._corpus.sources[number], ""
        if number in self.limited[stage]:
            why = f" (max_repeats {source.max_repeats:g})"
        elif self.limited[stage]:
            why = " (with what max_repeats takes from others)"
        elif abs(real - asked) > _MET * asked:
            why = " (so far as whole documents allow)"
        so_far = " by then" * (stage + 2 < len(self.steps))
        return (
            f"{source.name}: {asked:.2%} of tokens asked for, {real:.2%} real{why}: {tokens:,.0f} tokens; "
            f"used {uses:.2f} times{so_far}"
        )
