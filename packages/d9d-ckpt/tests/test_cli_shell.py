"""What the command line says to the shell and to a terminal: exit codes, one line for an error, tables."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from d9d.ckpt._cli._output import printable
from d9d.ckpt._describe_bytes import describe_bytes


def test_what_cannot_be_read_is_one_line(tmp_path, call):
    (tmp_path / "w.safetensors").write_bytes(b"")
    for command in (["ls"], ["show"], ["diff"], ["plan"], ["convert"]):
        more = {"show": ["x"], "diff": [tmp_path], "convert": [tmp_path / "out"]}.get(command[0], [])
        code, out, err = call(*command, tmp_path, *more)
        assert (code, out) == (2, "")
        assert "truncated: it has 0 bytes, too few for the length of a header" in err
        assert call(*command, tmp_path / "none", *more)[0] == 2
    assert call("verify", tmp_path)[0] == 1
    assert call("verify", tmp_path / "none")[0] == 2


def test_unknown_names_come_with_the_nearest(checkpoint, call):
    code, _, err = call("show", checkpoint, "norm.weigth", "norm.weight")
    assert (code, err) == (2, "d9d-ckpt: no tensor is called 'norm.weigth' (nearest: 'norm.weight')\n")


@pytest.mark.parametrize("arguments", [[], ["list"], ["ls"], ["diff", "a"], ["ls", "a", "--xyz"]])
def test_wrong_usage(call, arguments):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert "usage: d9d-ckpt" in err


def test_help_says_what_exit_codes_mean(call):
    code, out, _ = call("--help")
    assert code == 0
    assert "exit codes: 0 all is well; 1 differences or problems were found; 2" in out


def test_interrupt(checkpoint, call, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("d9d.ckpt._cli._verify.verify", interrupted)
    assert call("verify", checkpoint) == (130, "", "")


def test_names_cannot_move_the_cursor(tmp_path, call):
    save_file({"a\x1b[2J\nb": torch.ones(1), "": torch.ones(1), "é": torch.ones(1)}, tmp_path / "w.safetensors")
    out = call("ls", tmp_path)[1]
    assert "\x1b" not in out
    assert len(out.splitlines()) == 5
    assert [printable(name) for name in ("a", "é", "", " a", "a\n")] == ["a", "é", "''", "' a'", r"'a\n'"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_500, "1 MB"), (5 * 10**9, "5 GB")],
)
def test_sizes(nbytes, text):
    assert describe_bytes(nbytes) == text


class Terminal:
    """A stream that says that it is a terminal."""

    def __init__(self, stream):
        self._stream = stream

    def isatty(self):
        return True

    def __getattr__(self, name):
        return getattr(self._stream, name)


def test_tables_on_a_terminal(tmp_path, call, monkeypatch):
    save_file({"[bold]a[/bold]": torch.ones(2, 3)}, tmp_path / "w.safetensors")
    plain = call("ls", tmp_path)[1]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.stdout", Terminal(sys.stdout))
    fancy = call("ls", tmp_path)[1]
    assert "\x1b[1m" in fancy  # a bold title
    assert "[bold]a[/bold]" in fancy  # names are no markup
    assert "[2, 3]" in fancy
    assert call("--plain", "ls", tmp_path)[1] == plain
    code, out, _ = call("diff", tmp_path, tmp_path)
    assert (code, out) == (0, "1 tensors are equal, 0 differ\n")
    monkeypatch.setitem(sys.modules, "rich", None)  # without the extra
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert call("ls", tmp_path)[1] == plain


def test_a_reader_that_leaves_and_the_module(checkpoint):
    """In a process, as what happens at exit counts: `d9d-ckpt ls | head`, by `python -m`."""
    many = {f"layers.{number}.weight": torch.ones(1) for number in range(5000)}
    save_file(many, checkpoint.parent / "many.safetensors")
    command = [sys.executable, "-m", "d9d.ckpt", "ls", str(checkpoint.parent / "many.safetensors")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b"name")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
