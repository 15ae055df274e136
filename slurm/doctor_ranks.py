"""A check-up on all ranks, for slurm/doctor.py: its table, and checks that go on whatever fails on one rank."""

from __future__ import annotations

import textwrap
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from slurm.doctor_table import FAIL, OK, SKIP, WARN, Row
from training.distributed import CollectiveError
from training.errors import is_explained, out_of_memory
from training.rank_store import OtherRankFailed, RankMissing, RankStore
from training.wording import ranks_text, time_text

COLUMNS = 120  # of a line of the table
_CHECK, _RESULT = 14, 6


class Report:
    """The table, printed by rank 0 row by row."""

    def __init__(self, shown: bool):
        self.rows: list[Row] = []
        self._shown = shown
        if shown:
            print(f"{'check':<{_CHECK}}  {'result':<{_RESULT}}  detail\n{'-' * COLUMNS}", flush=True)

    def add(self, *rows: Row) -> None:
        """Take rows, and print them."""
        self.rows += rows
        for row in rows if self._shown else ():
            print(_table_line(row), flush=True)

    @property
    def counts(self) -> Counter[str]:
        """Rows by result."""
        return Counter(row.result for row in self.rows)

    def summary(self) -> str:
        """The last line."""
        wanted = [OK, WARN, FAIL] + [SKIP] * (SKIP in self.counts)
        return "doctor: " + ", ".join(f"{self.counts[result]} {result}" for result in wanted)


def _table_line(row: Row) -> str:
    indent = " " * (_CHECK + _RESULT + 4)
    lines = row.detail.splitlines() + ([f"-> {row.remedy}"] if row.remedy else [])
    options = {"width": COLUMNS - len(indent), "break_long_words": False, "break_on_hyphens": False}
    wrapped = [part for line in lines for part in textwrap.wrap(line, subsequent_indent="  ", **options) or [""]]
    head = f"{row.check:<{_CHECK}}  {row.result:<{_RESULT}}  "
    return head + f"\n{indent}".join(wrapped)


class Doctor:
    """Runs checks on all ranks in the same order, whatever fails on one of them."""

    def __init__(self, store: RankStore, report: Report, verbose: bool):
        self.store, self.report, self._verbose = store, report, verbose

    def check(
        self,
        name: str,
        measure: Callable[[], Any],
        judge: Callable[[dict[int, Any]], Row | list[Row] | None] = lambda facts: None,
        patience: float | None = None,
        remedy: str = "--verbose shows where this came from",
    ) -> dict[int, Any] | None:
        """measure() on every rank, then judge(its values by rank) to rows on rank 0.

        remedy: for errors that are no sentences with a remedy themselves. Returns the values, or None where a rank
        failed or got lost: the same on all ranks.
        """
        known = set(self.store.missing)
        answers = self.store.all_gather(self._attempt(measure), patience)
        lost, problems = self.store.missing - known, _problems(answers)
        if self.store.rank == 0:
            seconds = time_text(patience or self.store.timeout)
            if lost:
                detail = f"rank{'s' * (len(lost) > 1)} {ranks_text(lost)} did not answer within {seconds}"
                self.report.add(
                    Row(name, FAIL, detail, "look for their errors in the job's output; --timeout waits longer")
                )
            elif problems:
                explained = all(answer.get("explained", True) for answer in answers.values())
                self.report.add(Row(name, FAIL, problems, "" if explained else remedy))
            else:
                rows = self._attempt(lambda: judge({rank: answer["value"] for rank, answer in answers.items()}))
                found = Row(name, FAIL, rows["error"], remedy) if "error" in rows else rows["value"]
                self.report.add(*(found if isinstance(found, list) else [found] if found else []))
        return None if lost or problems else {rank: answer["value"] for rank, answer in answers.items()}

    def _attempt(self, function: Callable[[], Any]) -> dict[str, Any]:
        """The function's value, or its error as a sentence; an error is no end."""
        try:
            return {"value": function()}
        except Exception as error:
            if self._verbose:
                traceback.print_exc()
            explained = is_explained(error)
            follows = isinstance(error, OtherRankFailed | CollectiveError)
            return {"error": sentence(error), "explained": explained, "follows": follows}

    def together(
        self,
        name: str,
        measure: Callable[[], Any],
        judge: Callable[[dict[int, Any]], Row | list[Row]],
        seconds: float,
        device: torch.device,
        remedy: str,
    ) -> dict[int, Any] | None:
        """`check` for a measurement in which ranks wait for each other, for at most `seconds`."""
        store = self.store
        patience = seconds + store.timeout  # the slowest rank may begin and give up that much later
        found = self.check(name, lambda: store.run_with_timeout(measure, seconds, device), judge, patience, remedy)
        store.failed |= found is None
        return found

    def skip(self, reason: str, *names: str) -> None:
        """Rows for checks that cannot apply."""
        self.report.add(*(Row(name, SKIP, reason) for name in names))


def sentence(error: BaseException) -> str:
    """What the table says of an error."""
    if isinstance(error, torch.OutOfMemoryError):
        return out_of_memory(error)
    text = " ".join(str(error).split())[:500]
    if is_explained(error) or isinstance(error, OtherRankFailed | RankMissing | TimeoutError):
        return text
    return f"{type(error).__name__}: {text}"


def _problems(answers: Mapping[int, dict[str, Any]]) -> str:
    """What went wrong on which ranks; ranks that only waited for a failed one are left out."""
    failed = {rank: answer for rank, answer in answers.items() if "error" in answer}
    first = {rank: answer for rank, answer in failed.items() if not answer["follows"]} or failed
    found: dict[str, list[int]] = {}
    for rank, answer in first.items():
        found.setdefault(answer["error"], []).append(rank)
    if len(found) == 1 and len(first) == len(answers):
        return next(iter(found))
    return "\n".join(f"ranks {ranks_text(ranks)}: {error}" for error, ranks in found.items())
