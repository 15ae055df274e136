"""Frequencies of rotary positions, and how rows longer than a model was trained on stretch them.

`scaling` is Hugging Face's `rope_scaling` dict: "rope_type" (or "type", its older name) and that type's numbers.

    linear   all frequencies divided by `factor`: positions are interpolated (Chen et al., 2023, arXiv 2306.15595)
    ntk      the base multiplied by factor^(d / (d-2)): high frequencies stay, low ones are interpolated ("NTK-aware",
             arXiv 2309.00071, section 3.1). Hugging Face has no name for it: there it is another `rope_theta`
    yarn     between the two by wavelength, and a temperature of attention: queries and keys times
             0.1 ln(factor) + 1 (arXiv 2309.00071, sections 3.2 and 3.4)
    llama3   by wavelength too, between low_freq_factor and high_freq_factor (Llama 3.1)

"dynamic" is none of them: it changes the base with the length of each text, a device of inference.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Of each type: keys that it needs, and those that it may have.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "ntk": (("factor",), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
}


@dataclass(frozen=True)
class Rotary:
    """Rotary positions of a kind of layers: theta is the base of frequencies, scaling as in ops/rope_scaling.py, window
    how far apart query and key may be (None: any distance)."""

    head_dim: int
    theta: float
    scaling: Mapping[str, Any] | None = None
    window: int | None = None


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """The kind of scaling; "default" where there is none."""
    return "default" if scaling is None else str(scaling.get("rope_type", scaling.get("type", "")))


def scaling_problem(scaling: Mapping[str, Any]) -> str:
    """What is wrong with a `rope_scaling`, in one sentence; "" where it can be used."""
    kind = rope_type(scaling)
    if kind == "dynamic":
        return (
            'rope_scaling "dynamic" changes the base with the length of each text, which a model in training cannot '
            'follow; take "ntk" with the factor by which rows grow'
        )
    if kind not in _KEYS:
        return f'rope_scaling has rope_type "{kind}"; choose {", ".join(_KEYS)}'
    needed, optional = _KEYS[kind]
    given = [key for key in scaling if key not in ("rope_type", "type")]
    if unknown := [key for key in given if key not in (*needed, *optional)]:
        return f'rope_scaling "{kind}" knows no key "{unknown[0]}"; its keys are {", ".join((*needed, *optional))}'
    if missing := [key for key in needed if key not in scaling]:
        return f'rope_scaling "{kind}" needs the key "{missing[0]}"'
    for key in given:
        value = scaling[key]
        if key == "truncate":
            if not isinstance(value, bool):
                return f"rope_scaling's truncate is {value!r}; it must be true or false"
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            return f"rope_scaling's {key} is {value!r}; it must be a number above 0"
    if scaling["factor"] < 1:
        return f"rope_scaling's factor is {scaling['factor']}; it must be at least 1"
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        return (
            f"rope_scaling's low_freq_factor {scaling['low_freq_factor']} must be below its high_freq_factor "
            f"{scaling['high_freq_factor']}"
        )
    return ""


def ntk_theta(head_dim: int, theta: float, factor: float) -> float:
    """The base that "ntk" scaling comes to."""
    return theta * factor ** (head_dim / (head_dim - 2)) if head_dim > 2 else theta


def attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """What rotated queries and rotated keys are each multiplied by: 1 but for "yarn"."""
    if rope_type(scaling) != "yarn" or scaling is None:
        return 1.0
    if given := scaling.get("attention_factor"):
        return float(given)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0

    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return temperature(scaling["mscale"]) / temperature(scaling["mscale_all_dim"])
    return temperature(1.0)


def frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None, device: torch.device) -> Tensor:
    """Radians a token that each pair of features turns: float64 [head_dim / 2], the fastest first."""
    kind = rope_type(scaling)
    if scaling is not None and kind == "ntk":
        theta = ntk_theta(head_dim, theta, scaling["factor"])
    plain = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    if scaling is None or kind in ("default", "ntk"):
        return plain
    slow = plain / scaling["factor"]
    if kind == "linear":
        return slow
    if kind == "yarn":
        keep = _yarn_share(head_dim, theta, scaling, device)
    else:
        # Turns within the length trained on: above high_freq_factor all is kept, below low_freq_factor nothing.
        turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * slow


def _yarn_share(head_dim: int, theta: float, scaling: Mapping[str, Any], device: torch.device) -> Tensor:
    """How much of each frequency stays unscaled: 1 for pairs that turn beta_fast times within the length trained on, 0
    for those that turn beta_slow times, a straight line in the pair's number between them."""

    def pair(turns: float) -> float:  # the number, not always whole, of the pair that turns so often
        length = scaling["original_max_position_embeddings"]
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair(scaling.get("beta_fast", 32)), pair(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    last += 0.001 * (first == last)  # as Hugging Face does: no division by 0
    numbers = torch.arange(head_dim // 2, device=device, dtype=torch.float64)
    return 1 - ((numbers - first) / (last - first)).clamp(0, 1)
