"""Fine-tuning runs: batches, one training run, and the choice of learning rate and number of epochs.

Everything random is a function of a seed: the head's first weights, the order of examples, and dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from data.counter_rng import fold, fold_numpy, signed
from data.special_tokens import SpecialTokens
from evaluation.finetune_forms import Encoded, Outputs, encode, loss_of, outputs_of, task_measures
from evaluation.finetune_model import TaskModel, pad
from evaluation.finetune_progress import Progress
from evaluation.finetune_task import TAGS, TEXTS, Examples, Task, split
from evaluation.generation import UsageError
from model import LTGBert
from ops.dropout import DropoutKeys
from training.optimizers import clip_gradients, make_optimizer

_POOL = 16  # batches among which examples are sorted by length
_CUDA_TOKENS, _CPU_TOKENS = 32768, 2048  # of a batch in which nothing is learned


@dataclass(frozen=True)
class Settings:
    """How tasks are fine-tuned. Learning rates and epochs up to `epochs` are candidates; seeds are `seed` and on.

    warmup is a fraction of all steps, held_out one of train. bf16: autocast, on CUDA. patience: a candidate ends after
    so many epochs without a better held-out score; 0 for never."""

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
    patience: int = 0


@dataclass(frozen=True)
class Choice:
    """The settings that did best on the held-out part. scores: [learning rate][epoch], NaN where training diverged
    or was stopped early."""

    learning_rate: float
    epochs: int
    score: float
    scores: list[list[float]]


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
        self.progress: Progress | None = None  # of all trainings, where they are to survive the process
        self._pretrained = {name: tensor.detach().clone() for name, tensor in encoder.state_dict().items()}

    def encode(self, examples: Examples, task: Task | None = None) -> Encoded:
        """Rows of at most --max_length tokens, of a task's form. Raises UsageError as `encode`."""
        form, separator = (task.form, task.separator) if task else (TEXTS, " ")
        return encode(examples, self._tokenizer, self.settings.max_length, self._special, form, separator)

    def choose(self, task: Task, report: Callable[[str], None]) -> Choice:
        """The learning rate and number of epochs that are best on a held-out part of train; of equals the first. Raises
        UsageError where every candidate diverges."""
        settings = self.settings
        classes = 0 if task.form == TAGS else len(task.classes)
        rest, held_out = split(task.train, classes, settings.held_out, settings.seed)
        train, test = (self.encode(part, task) for part in (rest, held_out))
        scores = np.zeros((len(settings.learning_rates), settings.epochs))
        for number, rate in enumerate(settings.learning_rates):
            for seed in range(settings.seed, settings.seed + settings.selection_seeds):
                patience = settings.patience
                trained = self.train(task, train, test, rate, settings.epochs, seed, held_out, patience=patience)
                found = [measured[task.chosen_by] for measured in trained]
                scores[number] += [*found, *[math.nan] * (settings.epochs - len(found))]
            scores[number] /= settings.selection_seeds
            best = "diverged" if np.isnan(scores[number]).all() else f"{100 * np.nanmax(scores[number]):.1f}"
            report(f"{task.name}: learning rate {rate:g}: {task.chosen_by} {best} on {len(held_out)} held-out examples")
        if np.isnan(scores).all():
            raise UsageError(
                f"task {task.name}: training diverges at every rate of --learning_rates; give lower ones, now they are "
                f"{', '.join(f'{rate:g}' for rate in settings.learning_rates)}."
            )
        row, epoch = np.unravel_index(np.nanargmax(scores), scores.shape)
        rates = settings.learning_rates
        return Choice(rates[row], int(epoch) + 1, float(scores[row, epoch]), scores.tolist())

    def train(
        self,
        task: Task,
        train: Encoded,
        test: Encoded,
        rate: float,
        epochs: int,
        seed: int,
        measured: Examples | None = None,
        last_only: bool = False,
        patience: int = 0,
    ) -> list[dict[str, float]]:
        """Train on `train` for the first `epochs` epochs of a schedule over settings.epochs; measure `test`.

        measured: the examples of test (default: the task's validation file). Returns the measures after each epoch
        (with `last_only` after the last alone); fewer where the loss stopped being finite, or `patience` epochs (0: any
        number) brought no better measure. The trained model is `self.model`."""
        kind = f"{task.name}, {'held out' if measured else 'all of train'}, rate {rate!r}, seed {seed}"
        if self.progress is not None and (done := self.progress.results(kind)) is not None:
            return done
        settings = self.settings
        targets, optimizer = self._start(task, train, rate, seed)
        model = self.model
        weights = torch.tensor(task.weights, device=self.device) if task.weights else None
        per_epoch = -(-len(train) // settings.batch_size)
        begin, results, best = 0, [], (-math.inf, 0)
        if self.progress is not None and (state := self.progress.load(kind, self.device)) is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            begin, results, best = state["epochs"], state["results"], state["best"]
        for epoch in range(begin, epochs):
            model.train()
            total = torch.zeros((), device=self.device)
            batches = epoch_batches(train.lengths, settings.batch_size, fold(fold(seed, 2), epoch))
            for step, indices in enumerate(batches, epoch * per_epoch):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, per_epoch * settings.epochs, rate, settings.warmup)
                outputs = self._outputs(model, train, indices, self._dropout_keys(indices, train.per, seed, step))
                loss = loss_of(task, outputs, targets[indices].to(self.device), weights)
                loss.backward()
                clip_gradients([p for p in model.parameters() if p.grad is not None], settings.max_gradient)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                total += loss.detach()
            if not math.isfinite(total.item()):
                break
            if epoch == epochs - 1 or not last_only:
                found = task_measures(task, self.predict(model, test), test, measured or task.valid)
                results.append(found)
                best = max(best, (found.get(task.chosen_by, 0.0), -epoch))
                if patience and epoch + best[1] >= patience:
                    break
            if self.progress is not None:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                self.progress.save(kind, {**state, "epochs": epoch + 1, "results": results, "best": best})
        if self.progress is not None:
            self.progress.finish(kind, results)
        return results

    def _start(self, task: Task, train: Encoded, rate: float, seed: int) -> tuple[Tensor, torch.optim.Optimizer]:
        """Make `self.model` and its optimizer; returns the targets [n], standardised where they are numbers."""
        self.model = model = self._fresh_model(task, seed)
        targets = train.labels
        if targets.dtype == torch.float64:
            center, spread = train.labels.mean(), train.labels.std()
            targets, model.center, model.spread = ((targets - center) / spread).float(), float(center), float(spread)
        # Betas and eps are AdamW's usual ones.
        return targets, make_optimizer(model, "adamw", rate, (0.9, 0.999), 1e-8, self.settings.weight_decay)

    @torch.inference_mode()
    def predict(self, model: TaskModel, test: Encoded) -> Outputs:
        """Scores of each example, float64, in their order and in the units of the labels."""
        model.eval()
        limit = _CUDA_TOKENS if self.device.type == "cuda" else _CPU_TOKENS
        found: Outputs = [np.empty(0)] * len(test)
        for batch in token_batches(test.lengths, limit):
            scores = self._outputs(model, test, batch, None).double() * model.spread + model.center
            for index, each in zip(batch, scores.cpu().numpy(), strict=True):
                found[index] = each
        return found

    def _fresh_model(self, task: Task, seed: int) -> TaskModel:
        self.encoder.load_state_dict(self._pretrained)
        return TaskModel.of(self.encoder, task, outputs_of(task), seed)

    def _outputs(self, model: TaskModel, encoded: Encoded, indices: np.ndarray, keys: DropoutKeys | None) -> Tensor:
        """What the model gives for examples, float32 [B, ...]; [B, per, ...] of several rows each."""
        bf16, per = self.settings.bf16 and self.device.type == "cuda", encoded.per
        rows = [encoded.rows[index * per + number] for index in indices for number in range(per)]
        input_ids, document_ids = pad(rows, self.device)
        spans = None
        if encoded.spans:
            inside = np.zeros((len(rows), 2, input_ids.shape[1]), dtype=bool)
            for row, index in enumerate(indices):
                for number, (begin, end) in enumerate(encoded.spans[index]):
                    inside[row, number, begin:end] = True
            spans = torch.from_numpy(inside).to(self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bf16):
            outputs = model(input_ids, document_ids, keys, spans)
        return outputs if per == 1 else outputs.unflatten(0, (-1, per))

    def _dropout_keys(self, indices: np.ndarray, per: int, seed: int, step: int) -> DropoutKeys:
        numbers = (indices[:, None] * per + np.arange(per)).ravel()
        rows = fold_numpy(fold(fold(seed, 3), step), numbers).view(np.int64)
        step_key = torch.tensor(signed(fold(fold(seed, 4), step)), device=self.device)
        return DropoutKeys(torch.from_numpy(rows).to(self.device), step_key)
