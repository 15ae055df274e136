"""Tasks of EleutherAI's harness (lm-eval), scored as this suite scores sentences: masked, too.

    python evaluation/harness.py MODEL --tasks my_pairs --include_path tasks [--mode causal] [--output FILE.json]

For tasks that compare continuations or texts. masked: the sum over the continuation's tokens of each one's
log-probability when it alone is hidden (Salazar et al., 2020); causal: left to right, as `lm_eval --model hf` has it on
the exported folder, which also runs the tasks that generate. A token of both context and continuation is scored.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the repository root importable
    sys.path[0] = str(Path(__file__).resolve().parent.parent)


from data.cli import Parser
from evaluation.generation import UsageError, run
from evaluation.pair_accuracy import OBJECTIVES
from evaluation.scoring import ScoringModel, add_scoring_flags, check_scoring_flags, load_for_scoring, write_results
from evaluation.token_log_probs import encode_sentences, sentence_sums


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = Parser(__doc__)
    add_scoring_flags(parser, document_end=False, modes=())
    parser.add_argument("--mode", choices=OBJECTIVES, default="masked", help="how texts are scored")
    parser.add_argument("--tasks", required=True, nargs="+", metavar="TASK", help="names of the harness's tasks")
    parser.add_argument(
        "--include_path", metavar="FOLDER", help="take tasks from the YAML files there, not those that the harness has"
    )
    parser.add_argument("--word_l2r", action="store_true", help="masked: hide also the following tokens of the word")
    parser.add_argument("--output", metavar="FILE.json", help="results, and each item with its scores")
    return run(measure, parser.parse_args(arguments))


def measure(options: argparse.Namespace) -> None:
    """Run the tasks; print the harness's table and write --output."""
    check_scoring_flags(options)
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
        from lm_eval.utils import make_table
    except ImportError:
        raise UsageError("the harness is not installed: pip install lm-eval.") from None
    tasks = TaskManager(include_path=options.include_path, include_defaults=options.include_path is None)
    if unknown := [name for name in options.tasks if name not in tasks.all_tasks]:
        where = f"in --include_path {options.include_path}" if options.include_path else "in the harness"
        raise UsageError(f"--tasks: there is no {unknown[0]!r} {where}.")
    model = load_for_scoring(options)
    evaluate: Any = simple_evaluate  # its decorator hides its parameters
    found = evaluate(
        model=harness_model(model, options.mode == "causal", options.word_l2r), tasks=options.tasks, task_manager=tasks
    )
    print(make_table(found))
    write_results(options, {"mode": options.mode, "results": found["results"], "samples": found["samples"]})


def harness_model(model: ScoringModel, causal: bool, word_l2r: bool = False) -> Any:
    """`model` as the harness's class of language models (lm_eval.api.model.LM)."""
    from lm_eval.api.model import LM

    def scored(texts: Sequence[str], contexts: Sequence[int] | None = None) -> list[tuple[float, bool]]:
        """Of each text behind so many characters: its log-probability, and whether no token is more probable."""
        sentences = encode_sentences(model.loaded.tokenizer, texts, model.special, contexts)
        model.say_of_positions(sentences)
        objective = "causal" if causal else "masked"
        scores = model.score({objective: sentences}, word_l2r=word_l2r, best=True)[objective]
        sums, best = sentence_sums(sentences, scores)
        return [(float(total), bool(greedy)) for total, greedy in zip(sums, best == sentences.counts, strict=True)]

    class Scorer(LM):
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            pairs = [request.args for request in requests]
            return scored(["".join(pair) for pair in pairs], [len(context) for context, _ in pairs])

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return [total for total, _ in scored([request.args[0] for request in requests])]

        def generate_until(self, requests: list[Any]) -> list[str]:
            raise UsageError(
                "--tasks: tasks that generate text go through `lm_eval --model hf` on the exported folder."
            )

    return Scorer()


if __name__ == "__main__":
    sys.exit(main())
