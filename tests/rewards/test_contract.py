"""The built-in rewards, by the contract: in worker processes, with answers as policies write them."""

import pytest

from hone.testing import RewardContract
from tests.sandboxes.available import skip_without

SQUARES = [{"stdin": "2\n", "stdout": "4\n"}, {"stdin": "3\n", "stdout": "9\n"}]


class TestExactMatch(RewardContract):
    cases = (("4", "4", 1.0), (" 4\n", "4", 1.0), ("44", "4", 0.0), ("", "4", 0.0))

    def make(self):
        return "exact_match"


class TestGsm8k(RewardContract):
    cases = (("so\n#### 1,234", "#### 1234", 1.0), ("#### 5\n#### 6", "#### 6", 1.0), ("#### 5", "#### 6", 0.0))

    def make(self):
        return "gsm8k"


class TestMath(RewardContract):
    cases = ((r"\boxed{\frac{1}{2}}", "1/2", 1.0), (r"\boxed{0.5}", "1/2", 1.0), (r"\boxed{2}", "1/2", 0.0))

    def make(self):
        pytest.importorskip("math_verify", reason="comes with hone-rl[tasks]")
        return "math"


class TestCode(RewardContract):
    options = {"credit": "share"}  # noqa: RUF012
    timeout_s = 60.0
    cases = (
        ("```python\nprint(int(input()) ** 2)\n```", SQUARES, 1.0),
        ("```python\nprint(int(input()) * 2)\n```", SQUARES, 0.5),
        ("```python\nraise SystemExit\n```", SQUARES, 0.0),
    )

    def make(self):
        skip_without("landlock")
        return "code"


class TestReasoningGym(RewardContract):
    row = {"task": "spell_backward", "entry": {"question": "Juan?", "answer": "nauJ", "metadata": {}}}  # noqa: RUF012
    cases = (("nauJ", "nauJ", 1.0),)

    def make(self):
        pytest.importorskip("reasoning_gym", reason="comes with hone-rl[tasks]")
        return "reasoning_gym"
