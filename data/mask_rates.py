"""Mask rates: the fraction of a masked row's tokens that is hidden, the same for all rows or drawn for each row.

fixed           all rows of a step have the scheduled probability (--mask_p_start, --mask_p_end)
uniform         U(0, 1); uniform:LOW,HIGH between other bounds
cosine          1 - cos(pi u / 2) with u of U(0, 1), mean 0.36
beta:A,B        Beta(A, B)
bimodal:F,LOW   LOW for the fraction F of rows, the scheduled probability for the others

A row's rate is a pure function of its key. Of rates from a continuous distribution a row with n tokens hides
ceil(rate * n): with `uniform`, every number from 1 to n is equally likely. Then the mean of (n / hidden) * (summed loss
of the hidden tokens) is exactly the bound that masked diffusion minimises, a mean over all orders of its tokens (LLaDA,
arXiv 2502.09992; MDLM, arXiv 2406.07524), where hidden tokens are drawn one by one (spans of 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LONGEST_SPAN = 6  # that --mask_span_length may ask for: its lengths come in so many factorial orders
FORMS = "it must be fixed, uniform, uniform:LOW,HIGH, cosine, beta:A,B or bimodal:FRACTION,LOW"
_VALUES = {"fixed": (0,), "uniform": (0, 2), "cosine": (0,), "beta": (2,), "bimodal": (2,)}  # numbers behind the name


class MaskRateError(ValueError):
    """No distribution of mask rates; the message says why, to be read behind the flag and its value."""


@dataclass(frozen=True)
class MaskRates:
    """A distribution of mask rates: its name and numbers. Raises MaskRateError."""

    kind: str = "fixed"
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.values) not in _VALUES.get(self.kind, ()) or not all(map(math.isfinite, self.values)):
            raise MaskRateError(FORMS)
        if self.kind == "beta" and min(self.values) <= 0:
            raise MaskRateError("the numbers of a beta distribution must be above 0")
        if self.kind in ("uniform", "bimodal") and not all(0 <= value <= 1 for value in self.values):
            raise MaskRateError("rates and fractions must be between 0 and 1")
        if self.kind == "uniform" and self.values and self.values[0] >= self.values[1]:
            raise MaskRateError("the lower bound must lie below the upper one")

    @classmethod
    def parse(cls, text: str) -> MaskRates:
        """The distribution that --mask_rate names. Raises MaskRateError."""
        kind, _, numbers = text.partition(":")
        try:
            return cls(kind.strip(), tuple(float(number) for number in numbers.split(",") if number.strip()))
        except ValueError as error:
            raise error if isinstance(error, MaskRateError) else MaskRateError(FORMS) from None

    @property
    def continuous(self) -> bool:
        return self.kind in ("uniform", "cosine", "beta")

    def mean(self, p: float) -> float:
        """The expected rate where the scheduled probability is `p`."""
        values = self.values
        if self.kind == "uniform":
            return sum(values) / 2 if values else 0.5
        if self.kind == "beta":
            return values[0] / sum(values)
        if self.kind == "bimodal":
            return values[0] * values[1] + (1 - values[0]) * p
        return 1 - 2 / math.pi if self.kind == "cosine" else p

    def __str__(self) -> str:
        return self.kind + ":" * bool(self.values) + ",".join(f"{value:g}" for value in self.values)


SCHEDULED = MaskRates()
