"""The command-line parser of all scripts: errors, suggestions, help."""

import pytest

from data.cli import Parser, closest


@pytest.fixture
def parser() -> Parser:
    parser = Parser("A command.\n\n    python command.py FILE\n\nWhich reads\na file.", prog="command.py")
    parser.add_argument("file", help="what is read (100 %% of it)")
    parser.add_argument("--batch_size", type=int, default=0, help="rows of a batch")
    parser.add_argument("--names", nargs="*", default=[], help="names")
    parser.add_argument("--rates", default=(0.5, 1), help="rates")
    parser.add_argument("--device", default="auto", help="device (default: the GPU)")
    parser.add_argument("--quiet", action="store_true", help="say nothing")
    return parser


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["x", "--batch_size", "many"], "argument --batch_size: invalid int value: 'many'"),
        (["x", "--batchsize=3"], "unknown flag or value '--batchsize=3'; did you mean --batch_size?"),
        (["x", "--batch", "3"], "unknown flag or value '--batch'; did you mean --batch_size?"),
        (["x", "--zzz"], "unknown flag or value '--zzz'"),
        ([], "the following arguments are required: file"),
    ],
)
def test_errors_are_one_sentence(
    parser: Parser, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
):
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"error: {sentence} (see --help)\n"


def test_help_gives_defaults_and_keeps_paragraphs(parser: Parser, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = parser.format_help()
    assert "A command.\n\n    python command.py FILE\n\nWhich reads a file.\n" in text
    words = " ".join(text.split())
    assert "--batch_size BATCH_SIZE rows of a batch (default: 0) --names" in words
    assert "--names [NAMES ...] names --rates RATES rates (default: 0.5,1) --device" in words
    assert "--device DEVICE device (default: the GPU) --quiet say nothing" in words
    assert "file what is read (100 % of it) options:" in words


def test_closest_name():
    assert closest("learning_rat", ["seed", "learning_rate"]) == "learning_rate"
    assert closest("zzz", ["seed", "learning_rate"]) == ""
