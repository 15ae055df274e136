"""The inputs of a run, read and checked before any device is touched: tokenizer, model sizes, shards, data plan."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from data.batch_schedule import BatchSchedule
from data.blocks import BlockOrder
from data.corpus import Corpus, CorpusError
from data.ledger import make_ledger
from data.loader import BatchBuilder, Loader, ValidationSet
from data.mask_rates import MaskRates
from data.masking import MaskingOptions
from data.mix import named_paths
from data.mix_plan import MixPlan
from data.objectives import run_objectives
from data.plan import DataPlan, resolve_split
from data.positions import (
    BehindTheEnd,
    Exposure,
    Position,
    PositionError,
    checkpoint_name,
    length_in_steps,
    parse_amounts,
    parse_position,
    step_of,
    steps_for,
)
from data.ratio_schedule import RatioPoint, RatioSchedule, parse_schedule, ratio_for, resolve_schedule
from data.remote_shards import ShardCache
from data.shards import tokenizer_hash
from data.special_tokens import SpecialTokens, read_special_tokens, tokenizer_file
from data.words import NoWordsError, word_beginnings
from model import ModelConfig, ModelConfigError
from model_extra import model_class
from training.checkpoint import training_flags
from training.config import LATER_FLAGS, ConfigError, TrainingConfig, later_flag
from training.distributed import World
from training.optimizers import optimizer_kind
from training.run_dir import RunView, annealed, extended
from training.schedules import OPEN_ENDED, courses_in_steps, due, steps_of

_VOCABULARY_PADDING = 128  # a vocabulary rounded up to a multiple of this is no mistake


@dataclass(frozen=True)
class Inputs:
    """What the files named on the command line hold. held_out_identity: "" without --valid_path.

    named_checkpoints: names of the checkpoints of --save_words, --save_tokens and --save_epochs, by the step that they
    follow; at -1 those behind the end of the run.
    """

    config: TrainingConfig
    model_config: ModelConfig
    tokenizer_text: str
    corpus: Corpus
    plan: DataPlan
    builder: BatchBuilder
    data_identity: str
    held_out_identity: str
    named_checkpoints: Mapping[int, list[str]]
    held_out_sets: Mapping[str, ValidationSet]

    @property
    def held_out(self) -> ValidationSet | None:
        """The first held-out set; None without --valid_path."""
        return next(iter(self.held_out_sets.values()), None)

    @property
    def grown_rows(self) -> int | None:
        """The run's final row length, for held-out sets in rows of it; None where rows do not grow."""
        longest = self.plan.longest_row
        return None if longest == self.config.seq_length else longest

    def on_device(self, device: torch.device) -> Inputs:
        """These inputs with the flags filled in whose default depends on the device."""
        return dataclasses.replace(self, config=resolve_device_defaults(self.config, device))

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps that the run can resume from."""
        config = self.config
        named = step in self.named_checkpoints and not config.save_weights_only
        return due(step, config.save_every, config.max_steps) or step in config.save_steps or named

    def ledger(self, step: int) -> dict[str, Any]:
        """What the first `step` steps use of each source (data/ledger.py)."""
        positions = self.plan.objective_tokens_before(step)
        return make_ledger(self.corpus, self.builder.mix.epochs, positions, step, self.plan.objectives)

    def exposure_after(self, step: int) -> dict[str, float]:
        """What was seen after `step` steps: `stats/words` and `stats/OBJECTIVE_words`, where words are known, and of a
        mix `data/SOURCE_tokens` and `data/SOURCE_epochs`."""
        found = self.builder.mix.metrics(step)
        if not self.corpus.exposure.words_per_token:
            return found
        words, parts = self.builder.mix.words(step)
        names = (f"stats/{each.name}_words" for each in self.plan.objectives)
        by_objective = dict(zip(names, parts, strict=True))
        return found | {"stats/words": words, **by_objective}

    def loader(self, world: World, split: str, start_step: int) -> Loader:
        """The batches of this rank from `start_step` on."""
        return Loader(
            self.builder,
            rank=world.rank,
            world_size=world.size,
            split=split,
            local_batch_size=self.config.local_batch_size,
            start_step=start_step,
            pin_memory=world.device.type == "cuda",
        )

    def as_json(self) -> dict[str, Any]:
        """What the run folder's config.json says of them."""
        return {
            "flags": self.config.to_dict(),
            "model": self.model_config.to_dict(),
            "data": {
                "identity": self.data_identity,
                "held_out_identity": self.held_out_identity,
                "documents": self.corpus.num_documents,
                "tokens": self.corpus.tokens_before_epoch(1),
                "sources": [dataclasses.asdict(source) for source in self.corpus.sources],
            },
        }


def _read_tokenizer(config: TrainingConfig) -> tuple[str, SpecialTokens]:
    """The tokenizer.json as a text, and its special tokens."""
    path = config.tokenizer_path
    try:
        text = tokenizer_file(path).read_text(encoding="utf-8")
        Tokenizer.from_str(text)
    except OSError as error:
        raise ConfigError(f"--tokenizer_path {path!r} cannot be read: {error.strerror}") from error
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ConfigError(f"--tokenizer_path {path!r} is not a tokenizer.json: {error}") from error
    special = read_special_tokens(path, config.special_tokens or "", config.n_special_tokens or 0)
    needed = {"bos", "pad", "mask"} | ({"eos"} if config.document_end else set())
    special.require(needed, f"--tokenizer_path {path!r}")
    return text, special


def _ratio_schedule(config: TrainingConfig, exposure: Exposure) -> RatioSchedule | None:
    """What --hybrid_schedule asks for. Raises ConfigError where it does not fit into the run."""
    if not config.hybrid_schedule:
        return None
    sizes = (config.max_steps, config.seq_length, config.global_batch_size, config.batch_reduction)
    batches = BatchSchedule(*sizes, config.length_milestones)
    if config.hybrid_schedule == "auto":
        repetitions = batches.tokens_before(config.max_steps) / exposure.tokens_per_epoch
        return RatioSchedule((RatioPoint(0, ratio_for(repetitions)),))
    entries = parse_schedule(config.hybrid_schedule)
    try:
        return resolve_schedule(entries, config.max_steps, lambda position: step_of(position, batches, exposure))
    except ValueError as error:
        raise ConfigError(f"--hybrid_schedule is {config.hybrid_schedule!r}; {error}") from None


def make_plan(config: TrainingConfig, exposure: Exposure, model: ModelConfig | None = None) -> DataPlan:
    """The data schedule that a configuration asks for, on a corpus of which `exposure` says how tokens are counted, and
    with a model by whose cost rows are divided among ranks."""
    config = dataclasses.replace(config, max_steps=config.planned_length, planned_steps=0)
    return DataPlan(
        max_steps=config.max_steps,
        seq_length=config.seq_length,
        global_batch_size=config.global_batch_size,
        batch_reduction=config.batch_reduction,
        hybrid_numerator=config.hybrid_numerator,
        hybrid_denominator=config.hybrid_denominator,
        hybrid_numerator_end=config.numerator_end,
        mask_p_start=config.mask_p_start,
        mask_p_end=config.mask_p_end,
        milestones=config.length_milestones,
        seed=config.seed,
        hybrid_schedule=_ratio_schedule(config, exposure),
        open_end=config.schedule in OPEN_ENDED,
        earlier_ends=config.earlier_ends,
        mask_rates=MaskRates.parse(config.mask_rate),
        objectives=run_objectives(config.causal_rows),
        target_cost=_target_cost(model, config.seq_length) if model is not None else 0.0,
    )


def _target_cost(model: ModelConfig, row_length: int) -> float:
    """DataPlan.target_cost of a model, by what it counts."""
    flops = model_class(model.model_type).flops_per_token
    with_none, with_all = (flops(model, row_length, part) for part in (0.0, 1.0))
    return with_all / with_none - 1 if with_none > 0 else 0.0


def _with_steps(config: TrainingConfig, corpus: Corpus) -> TrainingConfig:
    """`config` with the number of steps that spends its budget in tokens, words or epochs. Raises ConfigError."""
    if config.budget is None:
        return config
    flag, amount = config.budget
    sizes = (config.seq_length, config.global_batch_size, config.batch_reduction, config.length_milestones)
    try:
        if amount.unit == "words" and corpus.mix.planned:
            steps = _steps_of_words(config, corpus, amount.value, lambda steps: BatchSchedule(steps, *sizes))
        else:
            steps = steps_for(corpus.exposure.tokens_of(amount), lambda steps: BatchSchedule(steps, *sizes))
    except PositionError as error:
        raise ConfigError(f"--{flag} {getattr(config, flag)}: {error}") from error
    return dataclasses.replace(config, max_steps=steps)


def _steps_of_words(
    config: TrainingConfig, corpus: Corpus, words: Fraction, schedule: Callable[[int], BatchSchedule]
) -> int:
    """The fewest steps in which a mix gives so many words, whose sources have more or fewer of them a token."""
    corpus.exposure.known_words_per_token()
    rates = [Fraction(each.words, size) for each, size in zip(corpus.sources, corpus.source_tokens, strict=True)]
    fewest, most = (steps_for(ceil(words / rate), schedule) for rate in (max(rates), min(rates)))

    def words_in(steps: int) -> int:
        plan = make_plan(dataclasses.replace(config, max_steps=steps), corpus.exposure)
        try:
            return MixPlan(corpus, plan).words(steps)[0]
        except CorpusError:  # stages need a longer run; what still is wrong at the end is said when that is planned
            return 0

    return fewest + bisect_left(range(fewest, most), words, key=words_in)


def _step_of(amount: Position, mix: MixPlan, plan: DataPlan, corpus: Corpus) -> int:
    """The first step before which so much was used. Raises BehindTheEnd and PositionError."""
    if amount.unit != "words":
        return step_of(amount, plan.schedule, corpus.exposure)
    step = bisect_left(range(plan.max_steps + 1), amount.value, key=lambda step: mix.words(step)[0])
    if step > plan.max_steps:
        raise BehindTheEnd(f"{amount} lies behind the end of the run")
    return step


def _named_checkpoints(config: TrainingConfig, mix: MixPlan, plan: DataPlan, corpus: Corpus) -> dict[int, list[str]]:
    """Inputs.named_checkpoints. Raises ConfigError where words are not known."""
    found: dict[int, list[str]] = {}
    for unit in ("words", "tokens", "epochs"):
        text = getattr(config, f"save_{unit}")
        for amount in parse_amounts(text, unit):
            try:
                step = _step_of(amount, mix, plan, corpus)
            except BehindTheEnd:
                step = -1
            except PositionError as error:
                raise ConfigError(f"--save_{unit} {text}: {error}") from error
            found.setdefault(step, []).append(checkpoint_name(amount))
    return found


def _with_lengths(config: TrainingConfig, plan: DataPlan, corpus: Corpus) -> TrainingConfig:
    """`config` with the parts of its rate's schedule in steps where they are no fractions. Raises ConfigError."""
    steps: dict[str, str] = {}
    for name in ("warmup_proportion", "cooldown_proportion", "decay_proportion", "tail_average"):
        if isinstance(value := getattr(config, name), str):
            try:
                at_end = name != "warmup_proportion"
                found = length_in_steps(parse_position(value), plan.schedule, corpus.exposure, at_end)
            except PositionError as error:
                raise ConfigError(f"--{name} is {value}; {error}") from error
            steps[name] = str(found)
    try:
        courses = courses_in_steps(config, lambda at: step_of(at, plan.schedule, corpus.exposure))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    config = dataclasses.replace(config, **steps, **courses)
    end = {"cosine": "cooldown_proportion", "wsd": "decay_proportion"}.get(config.schedule)
    lengths = {name: steps_of(getattr(config, name), plan.max_steps) for name in ("warmup_proportion", end) if name}
    if sum(lengths.values()) > plan.max_steps:
        words = " and ".join(f"--{name} is {length:,} steps" for name, length in lengths.items())
        raise ConfigError(f"{words} of a run of {plan.max_steps:,}; together they must not be longer than it")
    return config


def _with_later_flags(config: TrainingConfig) -> TrainingConfig:
    """`config` with LATER_FLAGS filled in where they were not given: as the run to resume has them."""
    left = [name for name in LATER_FLAGS if getattr(config, name) is None]
    folder = RunView(config.run_folder)
    start = folder.path if folder.used else Path(config.anneal_from or config.checkpoint_filename or config.resume)
    flags = training_flags(start) if left else {}
    return dataclasses.replace(config, **{name: later_flag(flags, name) for name in left})


def read_inputs(config: TrainingConfig, trusted: bool = False) -> Inputs:
    """Open and check all files. Raises ValueError (ConfigError, CorpusError, ShardError), each one sentence. trusted:
    another rank checks the shards that manifests list."""
    config = _with_later_flags(config)
    try:
        optimizer_kind(config.optimizer)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    text, special = _read_tokenizer(config)
    config = dataclasses.replace(config, special_tokens=str(special))
    model_config = _read_model_config(config)
    options = MaskingOptions(
        vocab_size=special.vocab_size,
        mask_id=special.ids["mask"],
        bos_id=special.ids["bos"],
        pad_id=special.ids["pad"],
        special_ids=special.special_ids,
        bos_ends=config.document_end and special.one_boundary,
        random_p=config.mask_random_p,
        keep_p=config.mask_keep_p,
        even=config.masking == "even",
        span_length=config.mask_span_length,
        rate_power=config.mask_rate_loss_power,
        word_beginnings=_word_beginnings(config, text, special.vocab_size) if config.masking == "words" else b"",
        row_start=bool(config.row_start),
        seed=config.seed,
        objectives=run_objectives(config.causal_rows),
    )
    eos = special.ids["eos"] if config.document_end and not special.one_boundary else None
    identity = tokenizer_hash(tokenizer_file(config.tokenizer_path))
    order = BlockOrder(config.block_tokens, config.shuffle_tokens) if config.order == "blocks" else None
    cache = ShardCache(Path(config.data_cache_dir), config.data_cache_gb) if config.data_cache_dir else None
    files: dict[str, Any] = {"trusted": trusted, "cache": cache}
    ids = {"bos_id": options.bos_id, "eos_id": eos}
    corpus = Corpus(config.train_path, tokenizer_hash=identity, **ids, **files, seed=config.seed, order=order)
    options = dataclasses.replace(options, sources=tuple(source.name for source in corpus.sources))
    words = special.vocab_size
    if not words <= model_config.vocab_size < words + _VOCABULARY_PADDING:
        added = f", of which {special.added} were added to those of its model" * bool(special.added)
        raise ConfigError(
            f"--config_file {config.config_file!r} has vocab_size {model_config.vocab_size} but --tokenizer_path "
            f"{config.tokenizer_path!r} has {words} tokens{added}; set vocab_size to {words} (or to the next multiple "
            "of 64)"
        )
    sets = _held_out_sets(config, options, identity, eos, corpus, files)
    config = extended(annealed(_with_steps(config, corpus), corpus.exposure))
    plan = make_plan(config, corpus.exposure, model_config)
    config = _with_lengths(config, plan, corpus)
    if plan.smallest_batch < 1:
        raise ConfigError(
            f"--global_batch_size is {config.global_batch_size}, which leaves a step without rows once "
            f"--batch_reduction ({config.batch_reduction:g}) and longer rows have divided it; raise it or lower those"
        )
    builder = BatchBuilder(corpus, plan, options)
    identities = (corpus.identity(), _identity_of(sets))
    named = _named_checkpoints(config, builder.mix, plan, corpus)
    return Inputs(config, model_config, text, corpus, plan, builder, *identities, named, sets)


def _read_model_config(config: TrainingConfig) -> ModelConfig:
    """That of --config_file. Raises ConfigError, also where such a model cannot read the rows of the run."""
    try:
        model = ModelConfig.from_json(config.config_file)
    except ModelConfigError as error:
        raise ConfigError(f"--config_file: {error}") from error
    ahead = [each.name for each in run_objectives(config.causal_rows) if each.looks_ahead]
    if ahead and not model_class(model.model_type).takes_ends:
        raise ConfigError(
            f"--causal_rows is {config.causal_rows!r} but a model of type {model.model_type!r} (--config_file) reads "
            f"rows causally or whole and knows no {' or '.join(ahead)}; choose causal or meap"
        )
    return model


def _held_out_sets(
    config: TrainingConfig,
    options: MaskingOptions,
    tokenizer: str,
    eos: int | None,
    corpus: Corpus,
    files: dict[str, Any],
) -> dict[str, ValidationSet]:
    """The sets of --valid_path by name, "" that of a single path."""
    rows = config.validation_steps * config.local_batch_size or None
    # The published spans and no weights, so that runs with other masks compare.
    published = {"even": False, "rate_power": 0.0, "span_length": MaskingOptions.span_length, "word_beginnings": b""}
    masks = dataclasses.replace(options, **published)
    found = {}
    for name, path in named_paths(config.valid_path).items():
        valid = Corpus(path, tokenizer_hash=tokenizer, bos_id=options.bos_id, eos_id=eos, **files)
        _refuse_shared(config, corpus, valid)
        found[name] = ValidationSet(valid, masks, config.seq_length, rows=rows)
    return found


def _identity_of(sets: Mapping[str, ValidationSet]) -> str:
    """What changes with the content of the held-out sets; "" without any."""
    if not sets or "" in sets:
        return "".join(held_out.corpus.identity() for held_out in sets.values())
    named = {name: held_out.corpus.identity() for name, held_out in sets.items()}
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


def _word_beginnings(config: TrainingConfig, tokenizer_text: str, vocab_size: int) -> bytes:
    try:
        return word_beginnings(tokenizer_text, vocab_size).tobytes()
    except NoWordsError as error:
        raise ConfigError(f"--masking is 'words' but --tokenizer_path {config.tokenizer_path!r} {error}") from None


def _refuse_shared(config: TrainingConfig, corpus: Corpus, valid: Corpus) -> None:
    """Refuse shards that are trained on and held out. Raises ConfigError."""
    known = {shard.content_hash: shard for shard in corpus.shards}
    shared = next((shard for shard in valid.shards if shard.content_hash in known), None)
    if shared is not None:
        raise ConfigError(
            f"--valid_path {config.valid_path!r} holds {shared.path}, but --train_path {config.train_path!r} holds it, "
            f"too, as {known[shared.content_hash].path}; give shards that are held out (tokenize_corpus.py "
            "--validation_fraction makes them)"
        )


def resolve_device_defaults(config: TrainingConfig, device: torch.device) -> TrainingConfig:
    """`config` with the flags filled in whose default depends on the device. Raises ConfigError."""
    on_cuda = device.type == "cuda"
    if not (config.local_batch_size or on_cuda):
        raise ConfigError(
            "--local_batch_size is auto, which fills the memory of a CUDA device, and a CPU has none of its own: give "
            "a number of rows"
        )
    return dataclasses.replace(
        config,
        mixed_precision=on_cuda if config.mixed_precision is None else config.mixed_precision,
        compile=on_cuda if config.compile is None else config.compile,
    )


def choose_split(config: TrainingConfig, plan: DataPlan, world_size: int) -> str:
    """The resolved --hybrid_split for `world_size` ranks. Raises ConfigError where the batch cannot be shared out."""
    try:
        split = resolve_split(config.hybrid_split, world_size, plan.ratios.phases(), plan.objectives)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    # With `ranks`, every rank needs a row of its objective; their numbers differ by at most one from rows / ranks.
    if plan.smallest_batch < world_size:
        raise ConfigError(
            f"--global_batch_size is {config.global_batch_size}: the run's smallest batch has {plan.smallest_batch} "
            f"rows, too few for {world_size} ranks; raise it, lower --batch_reduction or use fewer ranks"
        )
    return split
