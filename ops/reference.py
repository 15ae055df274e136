"""Reference implementations by choice: HYBRID_REFERENCE=attention,loss names parts that run without their kernels.

For comparing and debugging. `norm` are the gated norms of attention and feed-forward, `graphs` micro-steps captured as
CUDA graphs. This is the one place that reads the variable; it needs nothing but Python.
"""

from __future__ import annotations

import os

VARIABLE = "HYBRID_REFERENCE"
PARTS = ("attention", "residual", "norm", "loss", "optimizer", "graphs")
_FORMER = {f"HYBRID_FUSED_{part.upper()}": part for part in PARTS[:-1]} | {"HYBRID_CUDA_GRAPHS": "graphs"}


class SwitchError(ValueError):
    """The environment asks for what there is not; the message is one sentence with the remedy."""


def reference_parts() -> list[str]:
    """The parts that run by their reference implementation, in the order of PARTS. Raises SwitchError."""
    text = os.environ.get(VARIABLE, "")
    named = [part.strip() for part in text.split(",") if part.strip()]
    for part in named:
        if part not in PARTS:
            raise SwitchError(f"{VARIABLE}={text}: there is no {part!r}; name some of {','.join(PARTS)}")
    return [part for part in PARTS if part in named]


def reference_chosen(part: str) -> str:
    """Why `part` runs by its reference implementation, as "HYBRID_REFERENCE=loss"; "" where nobody asks for that."""
    parts = reference_parts()
    return f"{VARIABLE}={','.join(parts)}" if part in parts else ""


def check_environment() -> None:
    """Raises SwitchError where the variable cannot be read, or where one is set that it has replaced."""
    reference_parts()
    for name, part in _FORMER.items():
        if name in os.environ:
            raise SwitchError(f"{name} is not read any more; unset it, and set {VARIABLE}={part} for what {name}=0 did")
