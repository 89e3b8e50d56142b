"""Finding a method: by its name, among those of installed packages, or where a user wrote it down.

A package registers its methods under the entry point group `fedquilt.methods`; a method of the user's own is named by
its address, `path/to/file.py:Class` or `package.module:Class`.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

from fedquilt._util.addresses import home_of, inside, load_file
from fedquilt._util.checksums import digest
from fedquilt._util.suggest import did_you_mean
from fedquilt._util.trust import Untrusted, check_file, module_of
from fedquilt.methods import METHODS, Method
from fedquilt.methods.composed import ADDITIONS, PLUS, composed

GROUP = "fedquilt.methods"
_SOURCES: dict[type[Method], str] = {}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")  # it becomes a part of folders' names and of settings' keys
# Methods that somebody may ask for by the name of their paper; those that are in METHODS are found there first.
OF_THE_FIELD = (
    "afl", "apple", "ccvr", "cobo", "dbe", "fedas", "fedasync", "fedbuff", "fedcm", "fedcollab", "fedcp", "feddar",
    "feddbe", "feddc", "feddistill", "fedgen", "fedgh", "fedgkt", "fedkd", "fedlc", "fedma", "fedmd", "fednh",
    "fedntd", "fedpcl", "fedrolex", "fedsam", "fedspeed", "fedtgp", "fedtp", "fesem", "fjord", "flis", "gpfl",
    "heterofl", "kt-pfl", "l2gd", "mime", "moon", "pacfl", "perada", "pfedgraph", "pfedla", "pfedsim", "q-ffl",
    "splitfed", "superfed",
)  # fmt: skip
# Those that are here, but not as a method of that name.
HERE_AS = {
    "cfl": "the method 'clustered'",
    "fedalt": "the method 'fedrep'",
    "fedopt": "the methods 'fedadam', 'fedadagrad' and 'fedyogi'",
    "hypcluster": "the method 'ifca'",
    "knn-per": "the read-out 'knn', of 'fedavg' for example: --readouts knn",
}


def find(name: str) -> type[Method]:
    """The method of a name or at an address; what is wrong with either is said in a sentence.

    >>> find("fedper").name
    'fedper'
    >>> find("modfl+fedadam").name
    'modfl+fedadam'
    >>> find("fedpr")
    Traceback (most recent call last):
    ...
    ValueError: there is no method 'fedpr'; did you mean 'fedper'?
    """
    core, *added = name.split(PLUS)
    if added and (core in METHODS or set(added) & set(ADDITIONS)):  # there may be a plus in an address
        return composed(find(core), *added)
    if name in METHODS:
        return METHODS[name]
    others = registered()  # which reads a file of every installed package
    if name in others:
        return others[name].load()
    if name.endswith(".py") or ":" in name:
        kind = class_at(name)
        _check_own(kind, name)
        return kind
    known = [*METHODS, *others]
    for other, here in HERE_AS.items():
        if _letters(name) == _letters(other) and _letters(name) not in map(_letters, known):
            raise ValueError(f"'{name}' is here as {here}")
    if _letters(name) in map(_letters, OF_THE_FIELD) and _letters(name) not in map(_letters, known):
        raise ValueError(
            f"the method '{name}' is known but not here; `fedquilt list methods` has those that are, and one of your "
            "own is a class in a file: path/to/file.py:Class"
        )
    raise ValueError(did_you_mean(name, known, "method"))


def in_library(name: str) -> type[Method] | None:
    """The library's own method of a name, or several of them as one; None where it is somebody else's.

    >>> in_library("modfl+ditto").__name__, in_library("mine")
    ('ModFLDitto', None)
    """
    core, *added = name.split(PLUS)
    return composed(METHODS[core], *added) if core in METHODS and set(added) <= set(ADDITIONS) else None


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


# --- methods of installed packages ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Registered:
    """A method that an installed package brings along."""

    package: str
    entry: EntryPoint

    def load(self) -> type[Method]:
        """Its class; a package that does not keep its word is refused."""
        name, package = self.entry.name, self.package
        try:
            kind = self.entry.load()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise ValueError(f"the method '{name}' of the package '{package}' cannot be loaded ({said})") from error
        if not _is_method(kind):
            raise ValueError(f"the package '{package}' registers '{name}', but {self.entry.value} is no method")
        if not _NAME.fullmatch(name):
            raise ValueError(f"the package '{package}' registers '{name}'; names are of letters, digits, '-' and '_'")
        if kind.name != name:
            raise ValueError(
                f"the package '{package}' registers '{name}', but {self.entry.value} calls itself '{kind.name}'; make "
                "the two the same"
            )
        return kind


def registered() -> dict[str, Registered]:
    """The methods of installed packages by name; one whose name there is already is left out, with a warning."""
    found: dict[str, Registered] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, _package(entry))):
        holder = "fedquilt" if entry.name in METHODS else found[entry.name].package if entry.name in found else ""
        if holder:
            warnings.warn(
                f"the package '{_package(entry)}' registers a method '{entry.name}', but {holder} has one of that name "
                f"already; it is left out: use it by its address, {entry.value}, or give it another name",
                stacklevel=2,
            )
        else:
            found[entry.name] = Registered(_package(entry), entry)
    return found


def _package(entry: EntryPoint) -> str:
    return "" if entry.dist is None else entry.dist.name


# --- methods of the user's own ----------------------------------------------------------------------------------------


def class_at(address: str, trust: bool = True) -> type[Method]:
    """The method at an address; without `trust`, code is run only as `fedquilt._util.trust` allows.

    A file with a single method needs no class in its address.

    >>> class_at("fedquilt.methods:FedPer").name
    'fedper'
    >>> class_at("fedquilt.methods:FedPr")
    Traceback (most recent call last):
    ...
    ValueError: fedquilt.methods: there is no method 'FedPr'; did you mean 'FedPer'?
    """
    source, _, name = (address, "", "") if address.endswith(".py") else address.rpartition(":")
    if not source.endswith(".py") and not (name and all(part.isidentifier() for part in source.split("."))):
        raise ValueError(f"'{address}' is no method: write path/to/file.py:Class or package.module:Class")
    module = _file(Path(source), trust) if source.endswith(".py") else _module(source, trust)
    here = [key for key, value in vars(module).items() if _is_method(value) and value is not Method]
    if not name:
        own = [key for key in here if vars(module)[key].__module__ == module.__name__]
        if len(own) != 1:
            raise ValueError(f"{address} holds {len(own)} methods ({', '.join(own)}); write {address}:Class")
        (name,) = own
    found = inside(module, name)
    if _is_method(found):
        return found
    if module.__name__ == "__main__":
        raise ValueError(
            f"the method '{name}' was written in a notebook or a session, and is not there in this one; run the lines "
            "that define it first, or put it into a file"
        )
    if found is not None:
        raise ValueError(f"'{address}' is no method: it is no subclass of fedquilt.Method")
    raise ValueError(f"{source}: {did_you_mean(name, here, 'method')}")


def address_of(kind: type[Method]) -> str:
    """Where a method's class is: `/path/to/file.py:Class` for a file of the user's own, else `package.module:Class`.

    >>> from fedquilt.methods import FedPer
    >>> address_of(FedPer)
    'fedquilt.methods.fedper:FedPer'
    """
    name, home = kind.__qualname__, home_of(kind)
    if home is None:
        why = "it is made inside of a function" if "<locals>" in name else "it is not where its name says"
        raise ValueError(
            f"the method {name} cannot be found again from text, as a run on disk must: {why}; put the class on the "
            "outermost level of a file or module, or run without `out`"
        )
    module, file = home
    return f"{module if file is None else file}:{name}"


def source_of(kind: type[Method]) -> str:
    """A checksum of the files that a method and those of its bases that are not the library's are in.

    It is of the files as they are when it is first asked for: what is changed later is not the code that runs.
    """
    if kind in _SOURCES:
        return _SOURCES[kind]
    parts = []
    for each in own_bases(kind):
        file = Path(getattr(sys.modules.get(each.__module__), "__file__", None) or "nowhere")
        if not file.is_file():
            raise ValueError(f"the method {kind.__qualname__}: the source of {each.__qualname__} is in no file")
        parts.append(digest(file.read_bytes().replace(b"\r\n", b"\n")))
    _SOURCES[kind] = digest("\n".join(dict.fromkeys(parts)).encode())
    return _SOURCES[kind]


def own_bases(kind: type) -> Iterator[type]:
    """A class and those of its bases that are neither the library's nor Python's."""
    for each in kind.__mro__:
        package = each.__module__.partition(".")[0]
        if each is kind or package not in {"fedquilt", *sys.stdlib_module_names} - {"__main__"}:
            yield each


def _is_method(value: object) -> TypeGuard[type[Method]]:
    return isinstance(value, type) and issubclass(value, Method)


def _file(path: Path, trust: bool) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; give a method's name, or path/to/file.py:Class")
    check_file(path, trust)
    return load_file(path)


def _module(name: str, trust: bool) -> ModuleType:
    try:
        return module_of(name, trust)
    except Untrusted:
        raise
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the module '{error.name}' cannot be imported, so there is no method in '{name}'; install it, or put its "
            "folder on PYTHONPATH"
        ) from error
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"the module '{name}' failed with {said} (--debug shows where)") from error


def _check_own(kind: type[Method], address: str) -> None:
    """Refuse a class that would not be told from another method, or whose settings nobody could set."""
    if METHODS.get(kind.name) is kind:
        return
    if kind.name in METHODS or not _NAME.fullmatch(kind.name):
        why = f"'{kind.name}' is the library's" if kind.name in METHODS else f"'{kind.name}' is none"
        raise ValueError(
            f"{address} needs a name of its own, of letters, digits, '-' and '_' ({why}); give it one, as in name: "
            f'ClassVar[str] = "{kind.__name__.lower()}"'
        )
    notes = inspect.get_annotations(kind)
    settings = [key for key, note in notes.items() if "ClassVar" not in str(note)]
    if settings and "__dataclass_fields__" not in vars(kind):
        raise ValueError(
            f"{address} has the setting '{settings[0]}' but is no dataclass; put @dataclass(frozen=True) before it"
        )
