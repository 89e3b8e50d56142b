"""The command line. Each command is a small module; what is heavy is imported when a command runs."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fedquilt.cli import advise, catalogue, compare, data, demo, export, onboard, predict, report, run
from fedquilt.cli.deploy import deploy_app
from fedquilt.cli.interrupt import patient_ctrl_c
from fedquilt.cli.output import complain, out, say_warnings
from fedquilt.cli.settings import spread, with_port

# Of click, or of the copy of it that newer versions of typer carry: the base of all that a command line does wrong.
ClickException: Any = typer.BadParameter.__mro__[2]
_TWICE = re.compile(r"( Did you mean [^?]*\?)\1")  # newer versions of click and typer both suggest

app = typer.Typer(
    name="fedquilt",
    help="Personalised federated learning among clients that differ. Start with: fedquilt demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("demo")(demo.demo)
app.command("advise")(advise.advise)
app.command("run")(run.run)
app.command("resume")(run.resume)
app.command("extend")(run.extend)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.command("onboard")(onboard.onboard)
app.command("predict")(predict.predict)
app.command("export")(export.export)
app.command("list")(catalogue.list_)
app.add_typer(data.app, name="data")
app.add_typer(deploy_app, name="deploy")


def _version(asked: bool) -> None:
    if asked:
        from fedquilt import __version__

        out.print(f"fedquilt {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version and end.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from. Works anywhere.")] = False,
) -> None:
    """Options before the command."""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; what goes wrong is one red sentence and the exit code 2, with --debug also a traceback."""
    words = list(sys.argv[1:] if words is None else words)
    debug = "--debug" in words
    say_warnings()
    try:
        rest = spread(with_port([word for word in words if word != "--debug"]))
        with patient_ctrl_c():
            return int(
                typer.main.get_command(app).main(args=rest, prog_name="fedquilt", standalone_mode=False, obj=rest) or 0
            )
    except (KeyboardInterrupt, typer.Abort):
        complain("stopped")
        return 130
    except BrokenPipeError:  # the reader of our output went away, as in `fedquilt list methods | head`
        sys.stderr.close()
        return 0
    except Exception as error:
        if debug:
            traceback.print_exc()
        complain(_sentence(error))
        return 2 if _is_expected(error) else 1


def _is_expected(error: Exception) -> bool:
    """Whether an error says what the user can do about it."""
    return isinstance(error, (ClickException, ValueError, LookupError, OSError, ModuleNotFoundError))


def _sentence(error: Exception) -> str:
    if isinstance(error, ClickException):
        return _TWICE.sub(r"\1", error.format_message())
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if _is_expected(error):
        return text or type(error).__name__
    return f"unexpected {type(error).__name__}: {text} (--debug shows where)"
