"""Adds the recipe of `hone quickstart` to the wheel; everything else about the package is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

RECIPE = Path("recipes/quickstart")


class BuildWithRecipe(build_py):
    """Copies the recipe into the package, as hone/recipes/quickstart."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable installation finds it in the repository
            shutil.copytree(RECIPE, Path(self.build_lib) / "hone" / RECIPE, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithRecipe})
