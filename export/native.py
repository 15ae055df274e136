"""Models as classes of the transformers library's own: what each of them needs to be read and written."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, cast

from torch import Tensor

from model_config import ModelConfig

# model_type, which is the same there and here -> the module that knows it.
_MODULES = {"modernbert": "export.modernbert"}


class NativeForm(Protocol):
    """What a module of `_MODULES` has."""

    TRANSFORMERS_CLASS: str
    NOTE: str  # what an importer should know, one sentence

    def read_configuration(self, values: Mapping[str, Any], /) -> ModelConfig:
        """ModelConfig of the class's config.json. Raises ModelConfigError."""
        ...

    def our_parameters(self, tensors: Mapping[str, Tensor], config: ModelConfig, /) -> dict[str, Tensor]:
        """Parameters under our names, in float32; what is unknown keeps its name."""
        ...

    def native_problem(self, config: ModelConfig, /) -> str:
        """Why the class cannot be this model, in a clause; "" where it can."""
        ...

    def native_configuration(self, config: ModelConfig, /) -> dict[str, Any]:
        """config.json of the class, without ids of special tokens."""
        ...

    def their_parameters(self, tensors: Mapping[str, Tensor], config: ModelConfig, /) -> dict[str, Tensor]:
        """Parameters under the class's names."""
        ...


def native_form(model_type: str) -> NativeForm | None:
    """How to read and write models of this type; None where transformers has no class for them."""
    name = _MODULES.get(model_type)
    return cast(NativeForm, import_module(name)) if name else None
