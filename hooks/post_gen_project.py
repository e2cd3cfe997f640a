"""Removes what belongs to workers that were not chosen, adds those that are not the template's, says what to do next.

Directory names are never conditional: with `-f`, cookiecutter would take an empty one for the file system's root.
Running this again changes nothing; cruft does so on update.
"""

import os
import runpy
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
        f"src/{SLUG}/cli/tasks.py",
        f"src/{SLUG}/operate/tasks.py",
        "tests/test_tasks.py",
        f"src/{SLUG}/schema/0003_task.sql",
        f"workers/reconciler/src/{SLUG}_reconciler/rules/task.py",
        "deploy/prometheus/queue.yaml",
        "deploy/prometheus/queue_test.yaml",
    ],
    "scheduler": [
        "workers/scheduler",
        f"src/{SLUG}/cli/job_run.py",
        "deploy/kubernetes/cronjob.yaml",
        f"deploy/systemd/{DISTRIBUTION}-job@.service",
        f"deploy/systemd/{DISTRIBUTION}-job@.timer",
    ],
    "reconciler": ["workers/reconciler", f"src/{SLUG}/cli/sweep.py"],
}

for worker, paths in ONLY_WITH.items():
    if worker not in CHOSEN:
        for path in map(Path, paths):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

# The project's own code of `new-worker`. What is there already stays: it is somebody's work by now.
skeleton = runpy.run_path(f"src/{SLUG}/dev/new_worker/skeleton.py")
for worker in CHOSEN:
    if worker not in ONLY_WITH and not Path("workers", worker).exists():
        for name, content in skeleton["files"](worker, SLUG, DISTRIBUTION).items():
            path = Path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

# The hook runs inside the project; PWD is still the directory of the person's shell.
project, shell = Path.cwd(), Path(os.environ.get("PWD", "/")).resolve()
destination = project.relative_to(shell) if project.is_relative_to(shell) else project
print(f"""
Next:
    cd {shlex.quote(str(destination))}
    uv sync --all-extras
    uv run {DISTRIBUTION} dev
""")
