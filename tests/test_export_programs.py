"""An exported model in programs of others, offline: the EleutherAI evaluation harness and `transformers serve`."""

from __future__ import annotations

import importlib.metadata
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.tiny_exports import BOS, EOS, MASK, ROOT, environment, make_exported, tokenizer_text
from tokenizers import Tokenizer

from model import LTGBert

pytestmark = pytest.mark.slow

PAIRS = [
    ("The list holds the words", "list The holds words the"),
    ("The function returns the list.", "The function the list returns."),
    ("naïve", "東京 holds the length"),
]
PROMPTS = ["The list", "The function returns the length of"]
NEW = 6


def needs(*packages: str) -> None:
    for name in packages:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"needs {name} (requirements.lock has it)")  # a GPU machine tests with the packages it has


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[LTGBert, Path]:
    needs("transformers")
    return make_exported(tmp_path_factory.mktemp("exported"), "gpt-bert")


def logits(model: LTGBert, row: list[int]) -> torch.Tensor:
    ids = torch.tensor([row])
    with torch.no_grad():
        return model.predict(model.encode(ids, torch.zeros_like(ids), True))[0]


def score(model: LTGBert, text: str) -> float:
    """Log-probability of a text after <s>, without </s>."""
    ids = Tokenizer.from_str(tokenizer_text()).encode(text).ids
    found = logits(model, [BOS, *ids]).log_softmax(-1)
    return float(found[torch.arange(len(ids)), ids].sum())


def continuation(model: LTGBert, prompt: str) -> str:
    """The most probable NEW tokens, none of them special."""
    tokenizer = Tokenizer.from_str(tokenizer_text())
    row = [BOS, *tokenizer.encode(prompt).ids]
    start = len(row)
    while len(row) < start + NEW:
        scores = logits(model, row)[-1]
        scores[[*range(EOS), *range(EOS + 1, 16)]] = -torch.inf
        row.append(int(scores.argmax()))
        assert row[-1] != EOS, "choose another seed: this test wants texts of full length"
    return tokenizer.decode(row[start:])


HARNESS = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager

folder, out = sys.argv[1:]
found = lm_eval.simple_evaluate(
    model="hf", model_args={"pretrained": folder, "trust_remote_code": True}, device="cpu", batch_size=2,
    tasks=["our_pairs", "our_continuations"], bootstrap_iters=0,
    task_manager=TaskManager(include_path=".", include_defaults=False),  # the thousands of others take half a minute
)
json.dump({name: found[name] for name in ("results", "samples")}, open(out, "w"), default=str)
"""
# The form of the harness's own BLiMP task, and one that generates.
PAIR_TASK = """
task: our_pairs
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/pairs.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: ""
target_delimiter: ""
doc_to_choice: "{{{{[sentence_good, sentence_bad]}}}}"
doc_to_target: 0
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
CONTINUATION_TASK = """
task: our_continuations
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/prompts.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["</s>"], max_gen_toks: %d, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def test_evaluation_harness(exported, tmp_path):
    needs("lm-eval")
    model, folder = exported
    pairs = [{"sentence_good": good, "sentence_bad": bad} for good, bad in PAIRS]
    prompts = [{"prompt": prompt, "answer": continuation(model, prompt)} for prompt in PROMPTS]
    for name, lines in (("pairs", pairs), ("prompts", prompts)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "pairs.yaml").write_text(PAIR_TASK.format(folder=tmp_path))
    (tmp_path / "continuations.yaml").write_text((CONTINUATION_TASK % NEW).format(folder=tmp_path))
    command = [sys.executable, "-c", HARNESS, str(folder), "out.json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    right = 0
    for (good, bad), sample in zip(PAIRS, found["samples"]["our_pairs"], strict=True):
        theirs = [float(answer[0]) for answer in sample["filtered_resps"]]
        assert theirs == pytest.approx([score(model, good), score(model, bad)], abs=1e-4)
        right += theirs[0] > theirs[1]
    assert found["results"]["our_pairs"]["acc,none"] == pytest.approx(right / len(PAIRS))
    for prompt, sample in zip(PROMPTS, found["samples"]["our_continuations"], strict=True):
        assert sample["filtered_resps"] == [continuation(model, prompt)]
    assert float(found["results"]["our_continuations"]["exact_match,none"]) == 1.0


def masked_score(model: LTGBert, context: str, text: str) -> float:
    """Pseudo-log-likelihood of a text behind a context: each token hidden in turn, read from the state before it."""
    tokenizer = Tokenizer.from_str(tokenizer_text())
    read = len(tokenizer.encode(context).ids)
    row, total = [BOS, *tokenizer.encode(context + text).ids], 0.0
    for place in range(1 + read, len(row)):
        ids = torch.tensor([[*row[:place], MASK, *row[place + 1 :]]])
        with torch.no_grad():
            hidden = model.encode(ids, torch.zeros_like(ids), False)[0, place - 1]
            total += float(model.predict(hidden).log_softmax(-1)[row[place]])
    return total


def test_evaluation_harness_with_masked_scores(exported, tmp_path):
    """Pairs of whole texts, and endings behind a context, by evaluation/harness.py against brute force."""
    needs("lm-eval")
    model, folder = exported
    pairs = [{"sentence_good": good, "sentence_bad": bad} for good, bad in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in pairs))
    (tmp_path / "pairs.yaml").write_text(PAIR_TASK.format(folder=tmp_path))
    ends = PAIR_TASK.replace("our_pairs", "our_ends").replace('doc_to_text: ""', 'doc_to_text: "The list"')
    (tmp_path / "ends.yaml").write_text(
        ends.replace('target_delimiter: ""', 'target_delimiter: " "').format(folder=tmp_path)
    )
    command = [
        sys.executable, str(ROOT / "evaluation" / "harness.py"), str(folder), "--tasks", "our_pairs", "our_ends",
        "--include_path", str(tmp_path), "--output", "out.json", "--device", "cpu",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    for task, context, space in (("our_pairs", "", ""), ("our_ends", "The list", " ")):
        for pair, sample in zip(PAIRS, found["samples"][task], strict=True):
            theirs = [float(answer[0]) for answer in sample["filtered_resps"]]
            assert theirs == pytest.approx([masked_score(model, context, space + text) for text in pair], abs=1e-4)
            assert sample["acc"] == (theirs[0] > theirs[1])


@pytest.fixture
def server(exported, tmp_path) -> Iterator[str]:
    """Address of a running `transformers serve` with the exported model."""
    needs("fastapi", "uvicorn", "openai")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    program = str(Path(sys.executable).with_name("transformers"))
    options = ["--trust-remote-code", "--device", "cpu", "--port", str(port)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [program, "serve", str(exported[1]), *options],
            cwd=tmp_path, env=environment(tmp_path), stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            address, end = f"http://localhost:{port}", time.monotonic() + 200
            while True:
                try:
                    with urllib.request.urlopen(f"{address}/health", timeout=5):
                        break
                except (urllib.error.URLError, OSError):
                    assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                    assert time.monotonic() < end, "the server did not start"
                    time.sleep(0.3)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def completion(address: str, folder: Path, prompt: str, **options) -> bytes:
    """The answer of the OpenAI-compatible endpoint."""
    body = {"model": str(folder), "prompt": prompt, "max_tokens": NEW, "temperature": 0, **options}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=100) as answer:
        return answer.read()


def test_transformers_serve(exported, server):
    model, folder = exported
    for prompt in PROMPTS:
        expected = continuation(model, prompt)
        answer = json.loads(completion(server, folder, prompt))
        assert answer["choices"][0]["text"] == expected
        assert answer["usage"]["completion_tokens"] == NEW
        assert answer["usage"]["prompt_tokens"] == 1 + len(Tokenizer.from_str(tokenizer_text()).encode(prompt).ids)
        lines = completion(server, folder, prompt, stream=True).decode().split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        streamed = "".join(event["choices"][0]["text"] for event in events)
        assert streamed == expected.rstrip("\ufffd")  # the stream leaves out a character that was cut off
        assert len(events) > 2
