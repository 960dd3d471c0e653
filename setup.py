"""Adds the recipes of `hone quickstart` to the wheel; everything else about the package is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

RECIPES = (Path("recipes/quickstart"), Path("recipes/smollm2"))


class BuildWithRecipes(build_py):
    """Copies the recipes into the package, as hone/recipes/quickstart and hone/recipes/smollm2."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable installation finds them in the repository
            for recipe in RECIPES:
                shutil.copytree(recipe, Path(self.build_lib) / "hone" / recipe, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithRecipes})
