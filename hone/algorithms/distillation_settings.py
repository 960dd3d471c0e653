"""Settings of on-policy distillation. No torch in here."""

from __future__ import annotations

from hone.algorithms.settings import KlKind
from hone.config import Choice, setting


class SampledKlSettings(Choice):
    """Reverse KL from the teacher's log-probs of the student's own tokens."""

    name: str = "reverse_kl"
    kind: KlKind = setting("k3+", "estimator per token; with +: its value, but the gradient of k2")


class ForwardTopKSettings(Choice):
    """KL(teacher, student) over the teacher's most likely tokens."""

    name: str = "forward_top_k"


class ReverseTopKSettings(Choice):
    """KL(student, teacher) over the teacher's most likely tokens."""

    name: str = "reverse_top_k"
