"""Checks on all ranks for slurm/doctor.py: the table, and checks that continue whatever fails on one rank."""

from __future__ import annotations

import textwrap
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from data.wording import ranks_text, time_text
from slurm.doctor_table import FAIL, OK, SKIP, WARN, Measurements, Row
from training.distributed import CollectiveError
from training.errors import OtherRankFailed, is_explained, out_of_memory
from training.watchdog import RankMissing, RankStore

COLUMNS = 120  # of a line of the table
_CHECK, _RESULT = 17, 6  # columns of a check's name and result
_VERBOSE = "--verbose shows where this came from"

_Made = TypeVar("_Made")
_Rows = Row | list[Row] | None


class Report:
    """The table, printed by rank 0 row by row."""

    def __init__(self, shown: bool):
        self.rows: list[Row] = []
        self._shown = shown
        if shown:
            print(f"{'check':<{_CHECK}}  {'result':<{_RESULT}}  detail\n{'-' * COLUMNS}", flush=True)

    def add(self, *rows: Row) -> None:
        """Take rows and print them."""
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

    def create(
        self,
        name: str,
        make: Callable[[], _Made],
        describe: Callable[[_Made], Any],
        assess: Callable[[Measurements], _Rows] | None = None,
        timeout: float | None = None,
        collective_on: torch.device | None = None,
        remedy: str = _VERBOSE,
    ) -> tuple[_Made, Measurements] | None:
        """make() on every rank, then rows on rank 0 by `assess` from what `describe` says of each rank's object.

        timeout: seconds for the slowest rank. collective_on: the device of a `make` that calls collectives, in which it
        may hang. remedy: for errors that do not explain themselves. Returns this rank's object and all descriptions, by
        rank; on all ranks None where one failed or is missing.
        """
        store, known = self.store, set(self.store.missing)
        timeout = timeout or store.timeout
        waits = timeout if collective_on is None else timeout + store.timeout  # ranks may begin that much later
        made: list[_Made] = []

        def measure() -> Any:
            made.append(make() if collective_on is None else store.run_with_timeout(make, timeout, collective_on))
            return describe(made[0])

        answers = store.all_gather(self._attempt(measure), waits)
        missing, problems = store.missing - known, _problems(answers)
        store.failed |= collective_on is not None and bool(missing or problems)
        values = {rank: answer.get("value") for rank, answer in answers.items()}
        if missing:
            detail = f"rank{'s' * (len(missing) > 1)} {ranks_text(missing)} did not answer within {time_text(waits)}"
            more = "look for their errors in the job's output; --timeout waits longer"
            self.assess(name, lambda: Row(name, FAIL, detail, more))
        elif problems:
            explained = all(answer.get("explained", True) for answer in answers.values())
            self.assess(name, lambda: Row(name, FAIL, problems, "" if explained else remedy))
        elif assess is not None:
            self.assess(name, lambda: assess(values), remedy)
        return None if missing or problems else (made[0], values)

    def check(
        self,
        name: str,
        measure: Callable[[], Any],
        assess: Callable[[Measurements], _Rows] | None = None,
        timeout: float | None = None,
        collective_on: torch.device | None = None,
        remedy: str = _VERBOSE,
    ) -> Measurements | None:
        """`create` for a `measure` that returns what ranks exchange: values that JSON can hold."""
        made = self.create(name, measure, lambda value: value, assess, timeout, collective_on, remedy)
        return None if made is None else made[1]

    def assess(self, name: str, assess: Callable[[], _Rows], remedy: str = _VERBOSE) -> None:
        """Rows on rank 0 from measurements that it has; an error is a row too."""
        if self.store.rank == 0:
            answer = self._attempt(assess)
            rows = Row(name, FAIL, answer["error"], remedy) if "error" in answer else answer["value"]
            self.report.add(*(rows if isinstance(rows, list) else [rows] if rows else []))

    def _attempt(self, function: Callable[[], Any]) -> dict[str, Any]:
        """The function's value, or its error as a sentence; other checks continue after an error."""
        try:
            return {"value": function()}
        except Exception as error:
            if self._verbose:
                traceback.print_exc()
            explained = is_explained(error)
            follows = isinstance(error, OtherRankFailed | CollectiveError)
            return {"error": sentence(error), "explained": explained, "follows": follows}

    def skip(self, reason: str, *names: str) -> None:
        """Rows for checks that cannot apply."""
        self.report.add(*(Row(name, SKIP, reason) for name in names))


def sentence(error: BaseException) -> str:
    """An error in the table."""
    if isinstance(error, torch.OutOfMemoryError):
        return out_of_memory(error)
    text = " ".join(str(error).split())[:500]
    if is_explained(error) or isinstance(error, OtherRankFailed | RankMissing | TimeoutError):
        return text
    return f"{type(error).__name__}: {text}"


def _problems(answers: Mapping[int, dict[str, Any]]) -> str:
    """Errors with their ranks; ranks that only waited for a failed one are left out."""
    failed = {rank: answer for rank, answer in answers.items() if "error" in answer}
    first = {rank: answer for rank, answer in failed.items() if not answer["follows"]} or failed
    found: dict[str, list[int]] = {}
    for rank, answer in first.items():
        found.setdefault(answer["error"], []).append(rank)
    if len(found) == 1 and len(first) == len(answers):
        return next(iter(found))
    return "\n".join(f"ranks {ranks_text(ranks)}: {error}" for error, ranks in found.items())
