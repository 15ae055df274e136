"""Models as classes of the transformers library's own: what each of them needs to be read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from export import llama, modernbert
from model_config import ModelConfig


class NativeForm(Protocol):
    """What export/modernbert.py and the classes in export/llama.py know of one class."""

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
    forms: dict[str, NativeForm] = {modernbert.MODEL_TYPE: modernbert, **llama.FORMS}  # by its name there and here
    return forms.get(model_type)
