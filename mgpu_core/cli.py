"""The command `mgpu`: finds the module that does the work, imports it, and hands over the remaining arguments.

A command's function takes its arguments as a list of strings and returns an exit code. Nothing is imported before it
is asked for: benchmarks and recipes are found by reading their text.
"""

import difflib
import importlib
import importlib.util
import os
import re
import sys
from pathlib import Path

COMMANDS = {
    "run": ("collectives.launch:main", "start a script in several ranks: mgpu run -n 4 script.py ..."),
    "doctor": ("collectives.doctor:main", "what is there, what will be chosen, and what to do about it"),
    "verify": ("collectives.inspect:verify_main", "prove a program: mgpu verify all_reduce ring -n 8"),
    "transcribe": ("mgpu_core.transcribe:main", "read spoken digits: mgpu transcribe file.wav"),
    "timeline": ("collectives.trace:main", "what a run's timeline says: mgpu timeline trace.json"),
    "tune": ("collectives.tune:main", "measure this machine, for choosing and predicting: mgpu tune -n 2"),
    "predict": ("collectives.inspect:predict_main", "predict how long it takes: mgpu predict all_reduce ring -n 8"),
}
GROUPS = {  # the modules of a package that define `main`
    "bench": ("bench", "measure a collective: mgpu bench all_reduce -n 2"),
    "train": ("mgpu_core.recipes", "train a network: mgpu train image-classification -n 2"),
}
OURS = ("kernels", "collectives", "mgpu_core", "bench")


def main(argv: list[str] | None = None) -> int:
    """Run one command; its exit code, or 1 for an error that explains itself, 2 for wrong usage, 130 for Ctrl-C,
    141 if nobody reads on."""
    open_standard_streams()
    try:
        code = dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `mgpu ... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is flushed at the end
        return 141
    except Exception as error:
        if os.environ.get("MGPU_DEBUG") == "1" or not explains_itself(error):
            raise
        print(f"mgpu: {told(error)}", file=sys.stderr)
        return 1


def open_standard_streams() -> None:
    """Let those that this process was started without (`>&-`) be /dev/null, lest the next file that is opened gets a
    number of theirs, and what ranks print."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def dispatch(argv: list[str]) -> int:
    """Find what `argv` names, and run it."""
    command, *rest = argv or ["--help"]
    if command in ("-h", "--help"):
        print(overview())
        return 0
    if command == "--version":
        print(f"mgpu {importlib.import_module('mgpu_core').__version__}")
        return 0
    if command in COMMANDS:
        return call(COMMANDS[command][0], rest)
    if command in GROUPS:
        return dispatch_group(command, rest)
    return unknown("command", command, [*COMMANDS, *GROUPS])


def dispatch_group(group: str, argv: list[str]) -> int:
    """Run a benchmark or a recipe; its name may be written with dashes or underscores."""
    package, description = GROUPS[group]
    runnable = members(package)
    collectives: list[str] = []
    if package == "bench":
        importlib.import_module("collectives.installation").check_ours("bench")
        collectives = sorted(importlib.import_module("collectives.contract").COLLECTIVES)
        runnable = {name: text for name, text in runnable.items() if name not in collectives}
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help"):
        listing = [f"  {name.replace('_', '-'):20} {text}" for name, text in runnable.items()]
        if collectives:
            listing.insert(0, f"  {', '.join(collectives)}\n  {'':20} time and bandwidth against size")
        print("\n".join([description, "", *listing, "", f"mgpu {group} NAME --help says more"]))
        return 0
    module = name.replace("-", "_")
    if module not in runnable and module not in collectives:
        return unknown(group, name, [*collectives, *(known.replace("_", "-") for known in runnable)])
    if module in collectives:
        return int(importlib.import_module("bench.collective").run(module, rest))
    return call(f"{package}.{module}:main", rest)


def call(target: str, argv: list[str]) -> int:
    """Import "module:function" and call it with `argv`."""
    module, function = target.split(":")
    return int(getattr(importlib.import_module(module), function)(argv))


def members(package: str) -> dict[str, str]:
    """The modules of a package that define `main`, by name, with what the first line of their text says of them."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations or [] if spec else []
    modules = [path for folder in folders for path in Path(folder).glob("*.py") if not path.name.startswith("_")]
    texts = {path.stem: path.read_text() for path in sorted(modules)}
    return {name: summary(text) for name, text in texts.items() if re.search(r"^def main\(", text, re.MULTILINE)}


def summary(text: str) -> str:
    """The first line of a module's docstring, without the command's own name before or behind it."""
    line = text.partition("\n")[0].strip('"')
    line = re.sub(r"^`mgpu [^`]*`: |: `mgpu [^`]*`.*$", "", line).rstrip(".")
    return line[:1].lower() + line[1:]


def explains_itself(error: Exception) -> bool:
    """Ours, or a missing file or library: the message is enough. Anything else is a bug and keeps its traceback."""
    return type(error).__module__.partition(".")[0] in OURS or isinstance(error, OSError | ImportError)


def told(error: Exception) -> str:
    """What an error says, without the number that an OSError begins with."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def unknown(kind: str, name: str, known: list[str]) -> int:
    """Say that there is no such name, and which one comes close."""
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"there are: {', '.join(known)}"
    print(f"mgpu: no {kind} '{name}'; {hint}", file=sys.stderr)
    return 2


def overview() -> str:
    """The text of `mgpu --help`."""
    listing = "\n".join(f"  {name:10} {text}" for name, (_, text) in {**COMMANDS, **GROUPS}.items())
    more = "mgpu COMMAND --help says more; MGPU_DEBUG=1 shows an error's traceback"
    return f"usage: mgpu COMMAND ...\n\n{listing}\n\n{more}"
