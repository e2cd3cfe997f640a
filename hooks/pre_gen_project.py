"""Checks all answers once more: those of a replay have passed no prompt.

The check runs in cookiecutter, while it renders this line, so that a bad answer ends in one sentence and no directory.
When this file runs as a script, all is well.

{{ cookiecutter | check }}
"""
