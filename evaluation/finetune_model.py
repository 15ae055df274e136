"""A pretrained encoder with a head drawn anew, and the rows that it reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evaluation.finetune_task import EMBEDDINGS, TAGS, WORDS, Task
from model import LTGBert, ModelConfig
from ops.dropout import DropoutKeys, dropout, dropout_states, token_keys

_HEAD_SITE = 1  # dropout's site in the language modelling head, which fine-tuning does not use
_CUDA_LENGTH, _CPU_LENGTH = 32, 4  # row lengths are multiples of this: few shapes for kernels, little padding on a CPU


class Head(nn.Module):
    """From states to scores: GPT-BERT's head for fine-tuning. LayerNorm (no affine), Linear S x D -> D, GELU, LayerNorm
    (no affine), dropout, Linear D -> outputs; drawn anew."""

    def __init__(self, config: ModelConfig, outputs: int, states: int = 1) -> None:
        super().__init__()
        self.config = config
        self.transform = nn.Linear(states * config.hidden_size, config.hidden_size)
        self.scores = nn.Linear(config.hidden_size, outputs)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Weights as the model's own: truncated normal, biases 0. The generator is a CPU one, whatever the device."""
        std = math.sqrt(2 / (5 * self.config.hidden_size))
        for linear in (self.transform, self.scores):
            drawn = torch.empty(linear.weight.shape)
            nn.init.trunc_normal_(drawn, std=std, a=-2 * std, b=2 * std, generator=generator)
            linear.weight.copy_(drawn)
            linear.bias.zero_()

    def forward(self, x: Tensor, keys: DropoutKeys | None) -> Tensor:
        """States [B, T, S, D] -> scores [B, T, outputs]. keys: what dropout is keyed by; None drops nothing."""
        shape, eps = (self.config.hidden_size,), self.config.layer_norm_eps
        x = F.gelu(self.transform(F.layer_norm(x, shape, eps=eps).flatten(-2)))
        x = F.layer_norm(x, shape, eps=eps)
        if keys is not None:
            states = dropout_states(keys, x.shape[1], self.config.hidden_size)
            x = dropout(x, self.config.hidden_dropout_prob, token_keys(states.tokens, _HEAD_SITE), states.columns)
        return self.scores(x)


class TaskModel(nn.Module):
    """A pretrained encoder that reads in both directions, one document a row, with what a form of task puts on it."""

    def __init__(self, encoder: LTGBert, outputs: int, form: str = "texts") -> None:
        """outputs: of the head; embeddings have none."""
        super().__init__()
        self.encoder, self.form = encoder, form
        states = 3 if form == WORDS else 1
        head = nn.Module() if form == EMBEDDINGS else Head(encoder.config, outputs, states)
        self.head = head.to(encoder.embedding.word_embedding.weight.device)
        self.center, self.spread = 0.0, 1.0  # of the numbers that regression was trained on

    @classmethod
    def of(cls, encoder: LTGBert, task: Task, outputs: int, seed: int) -> TaskModel:
        """A model for a task, its head drawn by a seed."""
        model = cls(encoder, outputs, task.form)
        if isinstance(model.head, Head):
            model.head.initialize(torch.Generator().manual_seed(seed))
        return model

    def forward(
        self, input_ids: Tensor, document_ids: Tensor, keys: DropoutKeys | None, spans: Tensor | None = None
    ) -> Tensor:
        """input_ids, document_ids int64 [B, T] (-1: padding) -> float32 scores [B, outputs] from the state of `<s>`.

        Of words' labels [B, T, outputs]; of embeddings [B, D], the mean over a row. spans: bool [B, 2, T], the tokens
        of WiC's words, whose mean states the head sees beside that of `<s>`."""
        hidden = self.encoder.encode(input_ids, document_ids, False, keys)
        if self.form == EMBEDDINGS:
            inside = (document_ids >= 0).to(hidden.dtype)
            return ((inside[:, None] @ hidden)[:, 0] / inside.sum(1, keepdim=True)).float()
        if self.form == TAGS:
            return self.head(hidden[:, :, None], keys).float()
        states = hidden[:, None, :1]
        if spans is not None:
            inside = spans.to(hidden.dtype)
            states = torch.cat([states, (inside @ hidden / inside.sum(-1, keepdim=True))[:, None]], dim=2)
        return self.head(states, keys)[:, 0].float()


def pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """input_ids and document_ids int64 [B, T] of rows of token ids: document 0, and -1 for padding at the end."""
    multiple = _CUDA_LENGTH if device.type == "cuda" else _CPU_LENGTH
    length = -(-max(map(len, rows)) // multiple) * multiple
    input_ids, document_ids = np.zeros((len(rows), length), np.int64), np.full((len(rows), length), -1, np.int64)
    for number, row in enumerate(rows):
        input_ids[number, : len(row)], document_ids[number, : len(row)] = row, 0
    return torch.from_numpy(input_ids).to(device), torch.from_numpy(document_ids).to(device)
