"""Flags of the training scripts: one field each, with its type, default, help, group and rules.

All that is known of a single flag stands here, in its field's metadata: `help`, `group`, `kind` (what makes a value of
its text), `choices`, `rules`, `fixed` (the run's result depends on it: a resumed run must not change it), `path` (it
names a place, which may differ from host to host) and `later` (for a flag that runs of before do not know). What holds
between flags is in training/config.py.
"""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from data.flag_rules import (
    DECAY,
    DECAYS,
    DECAYS_BY_ROLE,
    FACTORS,
    FOLDER_NAME,
    FRACTION,
    GROUPS,
    LENGTH,
    POSITIVE,
    REQUIRED,
    RISING,
    SPAN,
    STEPS,
    Later,
    Rule,
    amount,
    amounts_of,
    at_least,
    decays,
    flag,
    float_list,
    int_list,
    length,
    problem,
    rows,
    text_list,
)
from data.flag_rules import budget as _budget
from data.mask_rates import LONGEST_SPAN
from training.errors import UserError
from training.schedules import SCHEDULES

# A flag of each group: default, help, rules and what else there is.
_files, _objective, _batches, _optimization, _logs, _jobs, _hardware = (partial(flag, group) for group in GROUPS)


class ConfigError(UserError):
    """A setting cannot be used; the message names the flag, its value and what would be right."""


@cache
def _optimizer_names() -> tuple[str, ...]:
    """The names in the table of training/optimizers.py: read and not imported, since flags are also parsed where there
    is no torch (slurm/requeue.py)."""
    source = ast.parse((Path(__file__).parent / "optimizers.py").read_text(encoding="utf-8"))
    tables = {ast.unparse(node.targets[0]): node.value for node in source.body if isinstance(node, ast.Assign)}
    table = tables["OPTIMIZERS"]
    assert isinstance(table, ast.Dict)
    return tuple(ast.literal_eval(key) for key in table.keys if key is not None)


@dataclass(frozen=True)
class Flags:
    """Values of all flags, each within its own rules. Defaults are those of the GPT-BERT paper's base model."""

    # files
    train_path: str = _files(
        "", "training shards: a folder, a file, a glob, or a mix file (.json)", REQUIRED, path=True
    )
    valid_path: str = _files(
        "", "held-out shards, in the same forms, or several sets by name, web=PATH,books=PATH, each with its own "
        "curves (valid/web/masked_loss; those of the first are valid/masked_loss, too); no validation where left out",
        path=True,
    )  # fmt: skip
    config_file: str = _files("", "model configuration (JSON), e.g. configs/base.json", REQUIRED, path=True)
    tokenizer_path: str = _files("", "tokenizer.json that the shards were made with", REQUIRED, path=True)
    output_dir: str = _files("runs", "folder of run folders", path=True)
    name: str = _files("", "name of the run: its folder is OUTPUT_DIR/NAME", REQUIRED, FOLDER_NAME)
    data_cache_dir: str = _files(
        "", "folder on each node for copies of shards from https://, s3://, gs://, ...", path=True, fixed=False
    )
    data_cache_gb: float = _files(100.0, "GB of them that it may hold", POSITIVE, fixed=False)
    resume: str = _files(
        "auto", "auto: resume from the newest valid checkpoint of the run folder, or start; never: start in an unused "
        "folder; PATH: a checkpoint or run folder to resume from; newer checkpoints of the run itself are set aside",
        path=True,
    )  # fmt: skip
    checkpoint_filename: str = _files("", "same as --resume PATH (the published script's name)", path=True)
    reset: tuple[str, ...] = _optimization(
        (), "what a run that branches off from a checkpoint begins anew: optimizer (its state), schedule (of rates and "
        "the average, over the steps left), step (counts from 0, and with it schedule and position in the data)",
        Rule(lambda names: {*names} <= {"optimizer", "schedule", "position", "step"}, "choose optimizer,schedule,step"),
        kind=text_list,
    )  # fmt: skip
    anneal_from: str = _files(
        "", "branch off from this checkpoint of another run and let its learning rate fall to 0 over --anneal_steps, "
        "by --decay_shape; rows and all else go on as there (repeat that run's flags)", path=True,
    )  # fmt: skip
    initial_weights: str = _files(
        "", "start from these weights: a run folder, checkpoint or imported model (.safetensors)", path=True
    )

    # objective
    hybrid_numerator: int = _objective(15, "masked rows out of hybrid_denominator rows; see causal_rows")
    hybrid_denominator: int = _objective(16, "see hybrid_numerator", at_least(1))
    hybrid_numerator_end: int = _objective(
        -1, "where given, the numerator moves linearly to this value over the run (-1: constant)"
    )
    hybrid_schedule: str = _objective(
        "", "the masked fraction of rows over the run, in place of the three flags above: POSITION:NUM/DEN, ..., such "
        'as "0:1/1, 25%:0/1" (masked, then causal); "linear" behind or instead of NUM/DEN leads evenly to the next '
        'point; "0:1/1, 1e:0/1, 2e:repeat" alternates epochs; auto: from how often the run repeats its corpus. A '
        "POSITION is a fraction (0.25 or 25%), steps (500), tokens (10Mt), words (1Mw) or epochs of both objectives "
        "together (2e)",
    )  # fmt: skip
    causal_rows: str = _objective(
        "causal", "the rows that are not masked. causal; prefix: a prefix of each document, drawn by row, is read in "
        "both directions, what follows are the targets; blocks:SIZE: both directions within blocks, which have masks; "
        "meap: causal with masked inputs; or several with their parts, as causal=2,blocks:16=1",
    )  # fmt: skip
    hybrid_split: str = _objective(
        "auto", "ranks: one objective per rank, as published, and fewer rows where they cost more, so that a rank may "
        "have both; rows: both on every rank; auto: ranks where the world size allows. Same results either way",
        choices=("auto", "ranks", "rows"), fixed=False,
    )  # fmt: skip
    mask_p_start: float = _objective(0.3, "fraction of tokens masked at the start", FRACTION)
    mask_p_end: float = _objective(0.15, "fraction of tokens masked at the end (linear in between)", FRACTION)
    mask_random_p: float = _objective(0.1, "fraction of masked spans shown as random tokens", FRACTION)
    mask_keep_p: float = _objective(0.1, "fraction of masked spans shown unchanged", FRACTION)
    masking: str = _objective(
        "random", "random: fresh spans for every row; even: spans fixed in the corpus, each masked about once per 1/p "
        "epochs; words: whole words, as far as a row's number of masked tokens comes out",
        choices=("random", "even", "words"),
    )  # fmt: skip
    mask_rate: str = _objective(
        "fixed", "how much of a masked row is masked. fixed: as mask_p_start and mask_p_end say; drawn for each row: "
        "uniform, uniform:LOW,HIGH, cosine (mean 0.36), beta:A,B, or bimodal:F,LOW (LOW in the fraction F of rows, in "
        "the others as mask_p_start and mask_p_end say)",
    )  # fmt: skip
    mask_rate_loss_power: float = _objective(
        0.0, "gamma: a masked token weighs (masked fraction of its row) ** -gamma in the masked loss; 1 with uniform "
        "rates, --mask_span_length 1 and no random or kept tokens is masked diffusion", FRACTION,
    )  # fmt: skip
    mask_span_length: int = _objective(
        3, "longest span that is masked as one; lengths from 1 on are equally frequent",
        Rule(lambda length: 1 <= length <= LONGEST_SPAN, f"spans have 1 to {LONGEST_SPAN} tokens"),
    )  # fmt: skip
    special_tokens: str | None = _objective(
        None, "bos=TOKEN,eos=TOKEN,... (also pad, mask, unk) where the tokenizer's files do not tell (default: as the "
        "run that is resumed, else as the files tell)", kind=str,
        later=Later("bos=<s>,eos=</s>,pad=<pad>,mask=<mask>,unk=<unk>", "", ""),
    )  # fmt: skip
    n_special_tokens: int | None = _objective(
        None, "special, so never masked nor drawn, are the ids below this, as published (0: the tokens that the "
        "tokenizer marks; default: as the run that is resumed, else 0)",
        Rule(lambda value: value is None or value >= 0, "it must be at least 0"), kind=int, later=Later(16, 0, ""),
    )  # fmt: skip
    document_end: bool = _objective(True, "close each document with </s> (off: the published behaviour)")
    row_start: bool | None = _objective(
        None, "begin each row with <s>, also one that continues a document (default: as the run that is resumed, else "
        "yes)", kind=bool,
        later=Later(False, True, "rows do not begin with <s>, as this run began (a new run's do; --no-row_start)"),
    )  # fmt: skip
    token_weighted_loss: bool = _objective(
        False, "weigh every target equally instead of every objective by its fraction of rows"
    )
    z_loss_weight: float = _objective(1e-4, "weight of the mean squared log-partition function", at_least(0))

    # batches
    seq_length: int = _batches(128, "tokens per row at the start", at_least(2, "a row needs a next token"))
    length_milestones: tuple[float, ...] = _batches(
        (0.7, 0.9), "fractions of the run at which rows double in length; '' keeps them", RISING, kind=float_list
    )
    earlier_ends: tuple[int, ...] = _batches(
        (), "steps at which runs that this one goes on from were to end, whose order of rows it keeps; --resume "
        "CHECKPOINT with a new --name finds them", STEPS, kind=int_list,
    )  # fmt: skip
    order: str = _batches(
        "documents", "what an epoch takes in random order: documents, read here and there; or blocks, each read from "
        "front to back, for corpora that are not in memory, or with 100 M documents and more",
        choices=("documents", "blocks"),
    )  # fmt: skip
    block_tokens: int = _batches(1 << 20, "with --order blocks: stored tokens of a block", at_least(1))
    shuffle_tokens: int = _batches(
        1 << 29, "with --order blocks: rows are shuffled within so many tokens; these and the next are read ahead into "
        "memory, of each objective", at_least(1),
    )  # fmt: skip
    global_batch_size: int = _batches(32768, "rows of seq_length tokens per step at the end", at_least(1))
    batch_reduction: float = _batches(4.0, "the batch starts this much smaller and grows linearly", at_least(1))
    local_batch_size: int = _batches(
        128, "rows of seq_length tokens per micro-batch and device; any value gives the same run (auto: as many as fit "
        "into a CUDA device, tried before the first step)", at_least(0), kind=rows, fixed=False,
    )  # fmt: skip

    # optimization
    max_steps: int = _optimization(15625, "optimizer steps of the whole run", at_least(1))
    max_tokens: str = _budget(
        "tokens", "length of the run in tokens of all objectives' rows instead of steps, such as 10G: the fewest steps "
        "that use them up",
    )  # fmt: skip
    max_words: str = _budget("words", "the same in words, such as 100M, as tokenize_corpus.py counts them")
    max_epochs: str = _budget("epochs", "the same in epochs: the corpus' tokens once, whichever objective reads them")
    max_hours: float = _optimization(
        0.0, "hours, of all starts together, after which the run saves and ends early (0: none); schedules follow the "
        "length in steps, tokens, words or epochs", at_least(0), fixed=False,
    )  # fmt: skip
    learning_rate: float = _optimization(1e-2, "peak learning rate", POSITIVE)
    schedule: str = _optimization(
        "cosine", "course of the learning rate: cosine to a tenth with --cooldown_proportion, as published; linear; "
        "polynomial, its square; constant; wsd: constant, then --decay_proportion; one_cycle: cosines up and down; or "
        'points, fractions of the peak: "0:0 linear, 500:1, 80%:1 linear, 100%:0" (a value holds, or leads to the next '
        "where linear or exponential stands behind it; positions as of --warmup_proportion)",
        Rule(lambda text: text in SCHEDULES or ":" in text, f"choose {', '.join(SCHEDULES)}, or points such as 0:1"),
    )  # fmt: skip
    value_schedules: str = _optimization(
        "", "courses of weight_decay, momentum, beta1, beta2, ema_decay, in place of their flags: points, a shape of "
        '--schedule between two values: "momentum=0:0.85 linear, 300:0.95; weight_decay=cosine:0..0.1" (as the '
        "learning rate goes from 0 to its peak, weight decay goes from 0 to 0.1)",
    )  # fmt: skip
    warmup_proportion: float | str = _optimization(
        0.016, "part of the run with a rising rate: a fraction, steps (500), tokens (10Mt), words (1Mw) or epochs (1e)",
        LENGTH, kind=length,
    )  # fmt: skip
    cooldown_proportion: float | str = _optimization(
        0.016, "part of the run with linear decay to 0 at its end (cosine alone)", LENGTH, kind=length
    )
    decay_proportion: float | str = _optimization(
        0.2, "part of the run with decay to 0 at its end (wsd alone)", LENGTH, kind=length
    )
    decay_shape: str = _optimization(
        "linear", "of that decay; sqrt: 1 - sqrt(x), x from 0 to 1", choices=("linear", "sqrt")
    )
    anneal_steps: float | str = _optimization(
        0.0, "with --anneal_from, how many: a fraction of the whole run, steps, tokens, words or epochs (0: 20 %)",
        LENGTH, kind=length,
    )  # fmt: skip
    planned_steps: int = _optimization(
        0, "plan rows and schedules for so many steps, whatever --max_steps (0: for these); --anneal_from sets it",
        at_least(0),
    )  # fmt: skip
    optimizer: str = _optimization(
        "lamb", f"update rule: {', '.join(_optimizer_names())}, or any by its dotted name, such as torch.optim.NAdam; "
        "muon and normuon are for the matrices of hidden layers, beside --rest_optimizer",
        Rule(lambda name: name in _optimizer_names() or "." in name,
             f"choose {', '.join(_optimizer_names())} or a dotted name such as torch.optim.NAdam"),
    )  # fmt: skip
    learning_rate_by_role: tuple[str, ...] = _optimization(
        (), "factors of the learning rate by part of the model (embedding, attention, mlp, dwa, head): embedding=0.5",
        FACTORS, kind=text_list,
    )  # fmt: skip
    weight_decay_by_role: tuple[str, ...] = _optimization(
        (), "the same of weight decay, such as attention=2,mlp=2", FACTORS, kind=text_list
    )
    beta1_by_role: tuple[str, ...] = _optimization(
        (), "in place of --optimizer_beta1 in parts of the model, such as embedding=0.8 (not of matrices that muon and "
        "normuon update, by their momentum)", DECAYS_BY_ROLE, kind=text_list,
    )  # fmt: skip
    beta2_by_role: tuple[str, ...] = _optimization(
        (), "the same of --optimizer_beta2, as embedding=0.95", DECAYS_BY_ROLE, kind=text_list
    )
    rest_optimizer: str = _optimization(
        "adamw", "update rule of all but those matrices (embeddings, head, norms, biases) with muon and normuon",
        choices=("adamw", "lamb"),
    )  # fmt: skip
    matrix_learning_rate: float = _optimization(
        0.0025, "peak learning rate of those matrices (0: that of all, --learning_rate); entries of their updates have "
        "the root mean square 0.2 at rate 1, so that rates of AdamW suit them (the default: "
        "benchmarks/speedrun/README.md)", at_least(0),
    )  # fmt: skip
    matrix_momentum: float = _optimization(0.95, "Nesterov momentum of muon and normuon", DECAY)
    cautious_weight_decay: bool = _optimization(False, "muon and normuon: only entries moved towards 0 decay")
    weight_decay: float = _optimization(0.1, "decoupled weight decay of matrices and tables", at_least(0))
    weight_decay_end: float = _optimization(
        -1.0, "if not negative, weight decay moves linearly to it over the run", at_least(-1)
    )
    optimizer_beta1: float = _optimization(0.9, "decay of the first moment", DECAY)
    optimizer_beta2: float = _optimization(0.98, "decay of the second moment", DECAY)
    optimizer_eps: float = _optimization(1e-8, "added to the denominator of the update", POSITIVE)
    max_gradient: float = _optimization(2.0, "gradients are clipped to this norm (0: not clipped)", at_least(0))
    spike_policy: str = _optimization(
        "none", "what becomes of a step whose loss, of any objective, or gradient norm is not finite or exceeds the "
        "median of the last 128 updates by more than --spike_threshold deviations (1.4826 x the median absolute one, "
        "at least 1 % of the median; from 32 updates of the row length on). skip: its update is left out; rollback: so "
        "are those since the last checkpoint, and the run goes on with the data after the spike. Steps then wait for "
        "the device. none: only what is not finite counts, and ends the run", choices=("none", "skip", "rollback"),
    )  # fmt: skip
    spike_threshold: float = _optimization(8.0, "see --spike_policy", POSITIVE)
    ema_decay: float | tuple[float, ...] = _optimization(
        0.999, "decay per step of the exponential moving average of the weights. 0.999,0.9999 keeps an average of each "
        "(4 bytes a parameter): samples and suites take the first, each is validated (valid/ema-0.9999_masked_loss) "
        "and saved, for --average 0.9999 of evaluation and export", DECAYS, kind=decays,
    )  # fmt: skip
    tail_average: float | str = _optimization(
        0.0, "also keep the mean of the weights after each step of the run's last part (4 bytes a parameter): a "
        "fraction, steps, tokens, words or epochs; validated as valid/ema-tail_masked_loss, for --average tail", LENGTH,
        kind=length,
    )  # fmt: skip
    ema_warmup: bool | None = _optimization(
        None, "let that decay rise from 2/11 as (1 + step) / (10 + step), so that the initial weights are soon "
        "forgotten (default: as the run that is resumed, else yes)", kind=bool,
        later=Later(False, True, "the average of the weights has no warm-up, as this run began (a new run's has; "
                    "--no-ema_warmup)"),
    )  # fmt: skip
    allreduce_dtype: str = _optimization(
        "float32", "precision of the all_reduce of gradients; bfloat16 halves the traffic and rounds a sum to 8 bits",
        choices=("float32", "bfloat16"),
    )  # fmt: skip
    mixed_precision: bool | None = _optimization(
        None, "bf16 autocast with fp32 weights (default: on CUDA yes, on the CPU no)", kind=bool
    )
    seed: int = _optimization(42, "seed of initialisation, data order, masks and dropout", at_least(0))

    # validation, checkpoints, logs
    validate_every: int = _logs(1000, "steps between validations (0: only at the end)", at_least(0))
    validation_steps: int = _logs(
        0, "validation batches of local_batch_size rows per objective (0: the whole held-out set)", at_least(0)
    )
    validation_samples: int = _logs(
        3, "held-out documents that the averaged weights continue, and as many whose gaps they fill, at each "
        "validation (0: none); see samples.jsonl and report.html in the run folder", at_least(0),
    )  # fmt: skip
    evaluate_data: str = _logs(
        "", "zero-shot suites to evaluate the averaged weights on: a file, or a folder of files and folders, of "
        "minimal pairs (sentence_good, sentence_bad), EWoK, entity tracking, COMPS, WUG, reading times, SyntaxGym or "
        "LAMBADA", path=True,
    )  # fmt: skip
    evaluate_every: int = _logs(0, "steps between evaluations on --evaluate_data (0: only at the end)", at_least(0))
    evaluate_mode: str = _logs(
        "all", "how these are scored: masked (each token masked in turn), causal, fused (the mean of both) or all",
        choices=("all", "masked", "causal", "fused"),
    )  # fmt: skip
    save_every: int = _logs(1000, "steps between checkpoints (0: only at the end)", at_least(0))
    save_minutes: float = _logs(
        0.0, "minutes after a save at which the next is due, whatever the step (0: never)", at_least(0)
    )
    save_steps: tuple[int, ...] = _logs(
        (), "further steps at which to save and keep a checkpoint, e.g. 100,1000", STEPS, kind=int_list
    )
    save_words: str = _logs(
        "", "words seen after which to save and keep a checkpoint by name, such as 1M..10M/1M,10M..100M/10M for "
        "chck_1M, chck_2M, ... chck_100M, each after the first step that reaches it", amounts_of("words"), kind=amount,
    )  # fmt: skip
    save_tokens: str = _logs("", "the same in tokens: chck_10Mt", amounts_of("tokens"), kind=amount)
    save_epochs: str = _logs("", "the same in epochs: chck_2e", amounts_of("epochs"), kind=amount)
    save_weights_only: bool = _logs(
        False, "keep only weights and their average of named checkpoints: half the size, nothing to resume"
    )
    keep_last: int = _logs(
        0, "regular checkpoints to keep (0: all); those of --save_steps and with a name stay", at_least(0)
    )
    spare_checkpoint_dir: str = _logs(
        "", "folder on another disk of all hosts for checkpoints that the run folder cannot take; a resume finds them",
        path=True,
    )  # fmt: skip
    max_failed_saves: int = _logs(
        3, "failed saves in a row after which the run ends; before, it continues without", at_least(1)
    )
    log_stats_every: int = _logs(100, "steps between norms of parameters and gradients by role (0: never)", at_least(0))
    data_fingerprint: bool = _logs(
        False, "log a hash of every global batch as data/fingerprint (without CUDA graphs: steps take some percent "
        "longer)",
    )  # fmt: skip
    wandb_project: str = _logs("", "wandb project (default: hybrid-pretraining)")
    wandb_entity: str = _logs("", "wandb user or team")
    wandb_mode: str = _logs(
        "auto", "auto: online with a login, offline without, disabled where wandb is not installed",
        choices=("auto", "online", "offline", "disabled"),
    )  # fmt: skip
    profile: str = _logs(
        "", "FIRST:LAST, such as 10:13: of these steps each rank writes a trace (torch.profiler) and, on CUDA, a "
        "history of its memory into profile/ of the run folder", SPAN,
    )  # fmt: skip
    tensorboard: bool = _logs(False, "write TensorBoard's files into the run folder (needs the package tensorboard)")
    plugin: tuple[str, ...] = _logs(
        (), "Python files, comma-separated, with metrics, evaluations and sinks of your own, such as "
        "examples/plugin.py", kind=text_list, path=True,
    )  # fmt: skip

    # jobs
    requeue: str = _jobs(
        "auto", "auto: a run that has to stop early (signal, preemption, time limit) saves and has SLURM start its job "
        "again; never: it saves and ends", choices=("auto", "never"),
    )  # fmt: skip
    max_restarts: int = _jobs(200, "restarts of one job after which it fails instead of starting again", at_least(0))
    max_fruitless_starts: int = _jobs(
        2, "starts of one job in a row that leave no new checkpoint behind, after which it fails instead of starting "
        "again; those that a signal ended do not count", at_least(1),
    )  # fmt: skip
    time_limit_margin: float = _jobs(
        60.0, "seconds that stay free before the job's time limit, besides the measured time of a save, when the run "
        "saves and requeues on its own", at_least(0),
    )  # fmt: skip
    collective_timeout: float = _jobs(
        20.0, "minutes that a rank waits for the others before the run ends; longer than the slowest save or "
        "validation", POSITIVE,
    )  # fmt: skip
    step_timeout: float = _jobs(
        5.0, "the same within training steps; the rank that the others wait for is named, and stack traces are left in "
        "failures/ of the run folder", POSITIVE,
    )  # fmt: skip
    heartbeat_timeout: float = _jobs(
        30.0, "seconds without a sign of a rank's process for which the others wait, after which it counts as gone and "
        "the run ends; its heartbeats go on while it computes", POSITIVE,
    )  # fmt: skip
    check_ranks_every: int = _jobs(
        1000, "steps between comparisons of weights, average and moments between ranks, bit for bit; ranks that differ "
        "end the run, and nothing is saved (0: only before each save)", at_least(0),
    )  # fmt: skip

    # hardware
    device: str = _hardware("auto", "auto: CUDA where there is a GPU", choices=("auto", "cuda", "cpu"))
    compile: bool | None = _hardware(None, "torch.compile the model (default: on CUDA yes, on the CPU no)", kind=bool)
    sharding: str = _hardware(
        "none", "zero1: each rank keeps moments and average of a part of the weights, updates these and sends them to "
        "the others: 12 bytes a parameter less memory, but for the rank's part; full: weights and gradients of layers, "
        "too, 20 bytes less, for more messages and no CUDA graphs; the same result to rounding",
        choices=("none", "zero1", "full"),
    )  # fmt: skip
    sharding_ranks: int = _hardware(
        0, "ranks in a row that share a copy of the state with --sharding, such as those of a node, between which sums "
        "of gradients alone travel (0: all ranks)", at_least(0),
    )  # fmt: skip
    activation_checkpointing: str = _hardware(
        "none", "activations that the backward pass computes anew instead of keeping them: mlp, of feed-forwards; "
        "layer, of attention, too; the same result with less memory and more time", choices=("none", "mlp", "layer"),
        fixed=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            if words := problem(spec.name, spec, getattr(self, spec.name)):
                raise ConfigError(words)
