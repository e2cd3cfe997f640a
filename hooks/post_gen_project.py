"""Removes what belongs to workers that were not chosen, then says what to do next.

Directory names are never conditional: with `-f`, cookiecutter would take an empty one for the file system's root.
Running this again changes nothing; cruft does so on update.
"""

import os
import shlex
import shutil
from pathlib import Path

SLUG = {{ cookiecutter.project_slug | quoted }}
DISTRIBUTION = {{ cookiecutter.__distribution | quoted }}
CHOSEN = {{ cookiecutter.workers | worker_names | quoted }}

ONLY_WITH = {
    "poller": [
        "workers/poller",
        f"src/{SLUG}/task.py",
        f"src/{SLUG}/schema/0003_task.sql",
        f"workers/reconciler/src/{SLUG}_reconciler/rules/task.py",
    ],
    "scheduler": ["workers/scheduler"],
    "reconciler": ["workers/reconciler"],
}

for worker, paths in ONLY_WITH.items():
    if worker not in CHOSEN:
        for path in map(Path, paths):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

# The hook runs inside the project; PWD is still the directory of the person's shell.
project, shell = Path.cwd(), Path(os.environ.get("PWD", "/")).resolve()
destination = project.relative_to(shell) if project.is_relative_to(shell) else project
print(f"""
Next:
    cd {shlex.quote(str(destination))}
    uv sync --all-extras
    uv run {DISTRIBUTION} dev
""")
