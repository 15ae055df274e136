"""Fine-tuning runs: the head, batches, one training run, and the choice of learning rate and number of epochs.

Everything random is a function of a seed: the head's first weights, the order of examples, and dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from data.counter_rng import fold, fold_numpy, signed
from data.special_tokens import SpecialTokens, special_tokens
from evaluation.finetune_data import Examples, Task, split
from evaluation.finetune_metrics import measures
from evaluation.generation import UsageError
from model import LTGBert, ModelConfig
from ops.dropout import DropoutKeys, dropout, dropout_states, token_keys
from training.optimizers import clip_gradients, make_optimizer

_HEAD_SITE = 1  # dropout's site in the language modelling head, which fine-tuning does not use
_POOL = 16  # batches among which examples are sorted by length
_CUDA_LENGTH, _CPU_LENGTH = 32, 4  # row lengths are multiples of this: few shapes for kernels, little padding on a CPU
_CUDA_TOKENS, _CPU_TOKENS = 32768, 2048  # of a batch in which nothing is learned


@dataclass(frozen=True)
class Settings:
    """How tasks are fine-tuned. Learning rates and epochs up to `epochs` are candidates; seeds are `seed` and on.

    warmup is a fraction of all steps, held_out one of train. bf16: autocast, on CUDA.
    """

    learning_rates: tuple[float, ...]
    epochs: int
    batch_size: int
    max_length: int
    num_seeds: int
    selection_seeds: int
    seed: int
    held_out: float
    weight_decay: float
    warmup: float
    max_gradient: float
    bf16: bool


@dataclass(frozen=True)
class Choice:
    """The settings that did best on the held-out part. scores: [learning rate][epoch], NaN where training diverged."""

    learning_rate: float
    epochs: int
    score: float
    scores: list[list[float]]


@dataclass(frozen=True)
class Encoded:
    """Rows of token ids, their labels on the CPU, and how many rows had to be cut to fit."""

    rows: list[list[int]]
    labels: Tensor
    cut: int


class SentenceHead(nn.Module):
    """From the state of `<s>` to scores: GPT-BERT's head for fine-tuning.

    LayerNorm (no affine), Linear D -> D, GELU, LayerNorm (no affine), dropout, Linear D -> outputs; drawn anew.
    """

    def __init__(self, config: ModelConfig, outputs: int) -> None:
        super().__init__()
        self.config = config
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
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
        """States [B, D] -> scores [B, outputs]. keys: what dropout is keyed by; None drops nothing."""
        shape, eps = (self.config.hidden_size,), self.config.layer_norm_eps
        x = F.gelu(self.transform(F.layer_norm(x, shape, eps=eps)))
        x = F.layer_norm(x, shape, eps=eps)
        if keys is not None:
            states = dropout_states(keys, 1, self.config.hidden_size)
            x = dropout(x, self.config.hidden_dropout_prob, token_keys(states.tokens[:, 0], _HEAD_SITE), states.columns)
        return self.scores(x)


class SentenceModel(nn.Module):
    """A pretrained encoder with a head, both directions, one document per row."""

    def __init__(self, encoder: LTGBert, outputs: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = SentenceHead(encoder.config, outputs).to(encoder.embedding.word_embedding.weight.device)

    def forward(self, input_ids: Tensor, document_ids: Tensor, keys: DropoutKeys | None) -> Tensor:
        """input_ids, document_ids int64 [B, T] (-1: padding) -> float32 scores [B, outputs]."""
        hidden = self.encoder.encode(input_ids, document_ids, False, keys)
        return self.head(hidden[:, 0], keys).float()


def encode(examples: Examples, tokenizer: Tokenizer, max_length: int, special: SpecialTokens | None = None) -> Encoded:
    """Rows `<s> text </s>` or `<s> first </s> second </s>`; the longer text of a row that does not fit loses its end.

    Raises UsageError where the tokenizer lacks these tokens.
    """
    ids = (special or special_tokens(tokenizer.to_str())).ids
    if "bos" not in ids or "eos" not in ids:
        raise UsageError(
            "the model's tokenizer has no tokens for bos and eos, which rows of fine-tuning begin and end with."
        )
    start, end = ids["bos"], ids["eos"]
    rows, cut = [], 0
    flat = [text for texts in examples.texts for text in texts]
    encodings = iter(tokenizer.encode_batch(flat, add_special_tokens=False))
    for texts in examples.texts:
        parts = [next(encodings).ids for _ in texts]
        room = max_length - 1 - len(parts)
        cut += sum(map(len, parts)) > room
        if len(parts) == 2:
            parts[0] = parts[0][: max(room - len(parts[1]), room - room // 2)]
            parts[1] = parts[1][: room - len(parts[0])]
        else:
            parts[0] = parts[0][:room]
        rows.append([start, *(token for part in parts for token in (*part, end))])
    return Encoded(rows, torch.from_numpy(examples.labels), cut)


def epoch_batches(lengths: Sequence[int], batch_size: int, key: int) -> list[np.ndarray]:
    """Indices of the examples of each batch: a random order in which batches hold examples of similar length."""
    order = np.argsort(fold_numpy(key, np.arange(len(lengths))), kind="stable")
    pool = _POOL * batch_size
    pools = [order[start : start + pool] for start in range(0, len(order), pool)]
    by_length = [part[np.argsort(np.asarray(lengths)[part], kind="stable")] for part in pools]
    batches = [part[start : start + batch_size] for part in by_length for start in range(0, len(part), batch_size)]
    return [batches[index] for index in np.argsort(fold_numpy(fold(key, -1), np.arange(len(batches))), kind="stable")]


def token_batches(lengths: Sequence[int], tokens: int) -> list[np.ndarray]:
    """Indices of the examples of each batch, by length, of at most so many tokens with padding (or one example)."""
    batches: list[np.ndarray] = []
    begin, order = 0, np.argsort(np.asarray(lengths), kind="stable")
    for index in range(1, len(order) + 1):
        if index == len(order) or (index + 1 - begin) * lengths[order[index]] > tokens:
            batches.append(order[begin:index])
            begin = index
    return batches


def pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """input_ids and document_ids int64 [B, T] of rows of token ids: document 0, and -1 for padding at the end."""
    multiple = _CUDA_LENGTH if device.type == "cuda" else _CPU_LENGTH
    length = -(-max(map(len, rows)) // multiple) * multiple
    input_ids, document_ids = np.zeros((len(rows), length), np.int64), np.full((len(rows), length), -1, np.int64)
    for number, row in enumerate(rows):
        input_ids[number, : len(row)], document_ids[number, : len(row)] = row, 0
    return torch.from_numpy(input_ids).to(device), torch.from_numpy(document_ids).to(device)


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """Rate of a step, counted from 0: linear up to `peak` over the fraction `warmup` of all steps, then down to 0."""
    first = max(1, round(steps * warmup))
    return peak * min((step + 1) / first, (steps - step) / max(1, steps - first + 1))


class Finetuner:
    """A pretrained model that tasks are trained on, each time from its first weights. `device` is where it is."""

    def __init__(
        self, encoder: LTGBert, tokenizer: Tokenizer, settings: Settings, special: SpecialTokens | None = None
    ) -> None:
        """special: the tokenizer's special tokens, where its own file does not tell."""
        self.encoder, self.settings = encoder, settings
        self._tokenizer, self._special = tokenizer, special
        self.device = encoder.embedding.word_embedding.weight.device
        self._pretrained = {name: tensor.detach().clone() for name, tensor in encoder.state_dict().items()}

    def encode(self, examples: Examples) -> Encoded:
        """Rows of at most --max_length tokens. Raises UsageError as `encode`."""
        return encode(examples, self._tokenizer, self.settings.max_length, self._special)

    def choose(self, task: Task, report: Callable[[str], None]) -> Choice:
        """The learning rate and number of epochs that are best on a held-out part of train; of equals the first.

        Raises UsageError where every candidate diverges.
        """
        settings = self.settings
        rest, held_out = split(task.train, len(task.classes), settings.held_out, settings.seed)
        train, test = (self.encode(part) for part in (rest, held_out))
        scores = np.zeros((len(settings.learning_rates), settings.epochs))
        for number, rate in enumerate(settings.learning_rates):
            for seed in range(settings.seed, settings.seed + settings.selection_seeds):
                found = [
                    measured[task.metric] for measured in self.train(task, train, test, rate, settings.epochs, seed)
                ]
                scores[number] += [*found, *[math.nan] * (settings.epochs - len(found))]
            scores[number] /= settings.selection_seeds
            best = "diverged" if np.isnan(scores[number]).all() else f"{100 * np.nanmax(scores[number]):.1f}"
            report(f"{task.name}: learning rate {rate:g}: {task.metric} {best} on {len(held_out)} held-out examples")
        if np.isnan(scores).all():
            raise UsageError(
                f"task {task.name}: training diverges at every rate of --learning_rates; give lower ones, now they are "
                f"{', '.join(f'{rate:g}' for rate in settings.learning_rates)}."
            )
        row, epoch = np.unravel_index(np.nanargmax(scores), scores.shape)
        rates = settings.learning_rates
        return Choice(rates[row], int(epoch) + 1, float(scores[row, epoch]), scores.tolist())

    def train(
        self, task: Task, train: Encoded, test: Encoded, rate: float, epochs: int, seed: int, last_only: bool = False
    ) -> list[dict[str, float]]:
        """Train on `train` for the first `epochs` epochs of a schedule over settings.epochs; measure `test`.

        Returns the measures after each epoch (with `last_only` after the last alone); fewer where the loss stopped
        being finite.
        """
        settings, regression = self.settings, not task.classes
        center, spread = (train.labels.mean(), train.labels.std()) if regression else (torch.zeros(()), torch.ones(()))
        targets = ((train.labels - center) / spread).float() if regression else train.labels
        model = self._fresh_model(max(1, len(task.classes)), seed)
        # Betas and eps are AdamW's usual ones.
        optimizer = make_optimizer(model, "adamw", rate, (0.9, 0.999), 1e-8, settings.weight_decay)
        lengths = [len(row) for row in train.rows]
        per_epoch = -(-len(lengths) // settings.batch_size)
        step, results = 0, []
        for epoch in range(epochs):
            model.train()
            total = torch.zeros((), device=self.device)
            for indices in epoch_batches(lengths, settings.batch_size, fold(fold(seed, 2), epoch)):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, per_epoch * settings.epochs, rate, settings.warmup)
                keys = self._dropout_keys(indices, seed, step)
                outputs = self._outputs(model, [train.rows[index] for index in indices], keys)
                labels = targets[indices].to(self.device)
                loss = F.mse_loss(outputs[:, 0], labels) if regression else F.cross_entropy(outputs, labels)
                loss.backward()
                clip_gradients([p for p in model.parameters() if p.grad is not None], settings.max_gradient)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                total += loss.detach()
                step += 1
            if not math.isfinite(total.item()):
                return results
            if epoch == epochs - 1 or not last_only:
                outputs = self.predict(model, test)
                outputs = outputs[:, 0] * float(spread) + float(center) if regression else outputs
                results.append(measures(outputs, test.labels.numpy(), len(task.classes), task.positive))
        return results

    @torch.inference_mode()
    def predict(self, model: SentenceModel, test: Encoded) -> np.ndarray:
        """Scores float64 [n, outputs], in the order of the examples."""
        model.eval()
        limit = _CUDA_TOKENS if self.device.type == "cuda" else _CPU_TOKENS
        batches = token_batches([len(row) for row in test.rows], limit)
        parts = [self._outputs(model, [test.rows[index] for index in batch], None) for batch in batches]
        scores = torch.cat(parts).double().cpu().numpy()
        return scores[np.argsort(np.concatenate(batches), kind="stable")]

    def _fresh_model(self, outputs: int, seed: int) -> SentenceModel:
        self.encoder.load_state_dict(self._pretrained)
        model = SentenceModel(self.encoder, outputs)
        model.head.initialize(torch.Generator().manual_seed(seed))
        return model

    def _outputs(self, model: SentenceModel, rows: list[list[int]], keys: DropoutKeys | None) -> Tensor:
        bf16 = self.settings.bf16 and self.device.type == "cuda"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bf16):
            return model(*pad(rows, self.device), keys)

    def _dropout_keys(self, indices: np.ndarray, seed: int, step: int) -> DropoutKeys:
        rows = fold_numpy(fold(fold(seed, 3), step), indices).view(np.int64)
        step_key = torch.tensor(signed(fold(fold(seed, 4), step)), device=self.device)
        return DropoutKeys(torch.from_numpy(rows).to(self.device), step_key)
