"""The nouns of hone: what one layer hands to the next.

This file imports nothing heavy: tensors are named in annotations only, so that `hone --help`, `hone config` and the
reward worker processes can import it without torch. Operations on a `Batch` (packing, selecting, splitting) live in
`hone.data.packing`.

    Prompt --envs--> Trajectory x n = TrajectoryGroup --packing--> Batch --algorithms--> Batch with advantages
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


class Status(StrEnum):
    """How a trajectory ended for us: only `ok` and `truncated` are ever trained on."""

    OK = "ok"
    TRUNCATED = "truncated"  # cut by a length limit: the tokens are the policy's own, so they are trainable
    ENV_FAILED = "env_failed"  # a tool, sandbox or environment broke: says nothing about the policy
    REWARD_FAILED = "reward_failed"  # the reward raised, timed out or was not finite
    ENGINE_FAILED = "engine_failed"  # the rollout engine lost the request
    FILTERED = "filtered"  # removed on purpose (dynamic sampling, length filter)

    @property
    def trainable(self) -> bool:
        return self in (Status.OK, Status.TRUNCATED)


class StopReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"  # end-of-sequence token, stop id or stop string
    LENGTH = "length"  # max_tokens or the context window
    ABORTED = "aborted"  # abort_all(): the tokens so far are kept


class Reducer(StrEnum):
    """How a metric's values from several tokens, micro-batches, ranks or steps become one."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that knows how it is combined with others of its name.

    A mean carries its weight (`count`), so means of unequal parts merge exactly.

    >>> Metric.mean(2.0, count=1).merge(Metric.mean(5.0, count=3)).value
    4.25
    """

    total: float
    count: float
    reducer: Reducer

    @classmethod
    def mean(cls, value: float, count: float = 1.0) -> Metric:
        return cls(value * count, count, Reducer.MEAN)

    @classmethod
    def sum(cls, value: float) -> Metric:
        return cls(value, 1.0, Reducer.SUM)

    @classmethod
    def max(cls, value: float) -> Metric:
        return cls(value, 1.0, Reducer.MAX)

    @classmethod
    def min(cls, value: float) -> Metric:
        return cls(value, 1.0, Reducer.MIN)

    @property
    def value(self) -> float:
        if self.reducer is Reducer.MEAN:
            return self.total / self.count if self.count else float("nan")
        return self.total

    def merge(self, other: Metric) -> Metric:
        if self.reducer is not other.reducer:
            raise ValueError(f"cannot merge a {self.reducer} metric with a {other.reducer} metric")
        if self.reducer is Reducer.MAX:
            return replace(self, total=max(self.total, other.total))
        if self.reducer is Reducer.MIN:
            return replace(self, total=min(self.total, other.total))
        return Metric(self.total + other.total, self.count + other.count, self.reducer)


Metrics = dict[str, Metric]


def merge_metrics(*parts: Metrics) -> Metrics:
    """Combine metrics by name, each by its own reducer."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


class Message(TypedDict, total=False):
    """One chat message; `content` is text (or a list of parts for multimodal models)."""

    role: str
    content: Any
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Image:
    """An image that a prompt shows: as it was encoded in its file, and the place it takes among the tokens.

    Image(data=b"\\x89PNG...", grid=(1, 4, 6), tokens=6, token_id=9, read=...) stands for six tokens of number 9.
    """

    data: bytes = field(repr=False)  # PNG, JPEG ... as it came; two images are equal if these bytes are
    grid: tuple[int, int, int]  # patches that the model's processor makes of it: frames (1), rows, columns
    tokens: int  # placeholder tokens in the prompt
    token_id: int  # the placeholder
    read: Callable[[bytes], Any] = field(repr=False, compare=False)  # data -> array [patches, values] float32

    def patches(self) -> Any:
        """What the model sees, a numpy array [frames * rows * columns, values of a patch] float32; made when asked."""
        return self.read(self.data)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data set, rendered: what is asked, and what is needed to judge the answer.

    Prompt(prompt_id="gsm8k/00017", token_ids=(1, 53, ...), messages=({"role": "user", "content": "2+2?"},),
           ground_truth="4", data_source="gsm8k", row={"level": 1}, draw=17)
    """

    prompt_id: str  # stable name of the row: "<data set>/<row number>"; the same row drawn in two epochs shares it
    token_ids: tuple[int, ...]  # rendered with the chat template, generation prompt included
    messages: tuple[Message, ...]
    ground_truth: Any  # None when the reward needs none
    data_source: str
    row: Mapping[str, Any] = field(default_factory=dict)  # every other column, untouched
    draw: int = 0  # position in the prompt stream: unique within a run, the ledger's key
    images: tuple[Image, ...] = ()  # in the order of their placeholders in `token_ids`


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled. `temperature=0` is greedy.

    `logprobs` of a completion are those of the distribution that was sampled from: after temperature, top-k, top-p
    and min-p. Greedy completions have the model's own, at temperature 1.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()  # stop strings: generation ends with the token that completes one (it is kept)
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end-of-sequence ids
    ignore_eos: bool = False
    seed: int = 0  # of this request: hash(run seed, step, prompt, sample, turn)
    adapter: str = ""  # who answers: an adapter that is served beside the policy, by its name; empty: the policy
    routed_experts: bool = False  # whether the completion is to say which experts each token went to


@dataclass(frozen=True, slots=True)
class Completion:
    """What a rollout engine returns for one request. All tuples have the length of `token_ids`."""

    request_id: str
    token_ids: tuple[int, ...]  # generated tokens; the stop token is included
    logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    stop_reason: StopReason
    # The experts that each token went to in each mixture layer, [n, layers, top_k]: row i is that of token i of prompt
    # and completion together. The last token has none: nothing was computed of it. None: not asked for.
    routed_experts: NDArray[np.int16] | None = field(default=None, repr=False, compare=False)


class PromptTooLong(ValueError):
    """A prompt that leaves no room for an answer: a conversation outgrew the rollout engine, and nothing is wrong."""


class GenerateFn(Protocol):
    """`generate(request_id, token_ids, sampling) -> Completion`: the one door between an environment and a model.

    The images that `token_ids` has placeholders for are given as a fourth argument; where there are none, there are
    three.
    """

    def __call__(
        self, request_id: str, token_ids: tuple[int, ...], sampling: SamplingParams, images: tuple[Image, ...] = ()
    ) -> Awaitable[Completion]: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange inside a trajectory: the completion, then what the environment answered."""

    completion: Completion
    observation_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished interaction. `token_ids` is append-only and never re-encoded from text.

    Trajectory(prompt_id="sort/3", sample=0, token_ids=(7, 8, 4, 2), prompt_length=2, loss_mask=(0, 0, 1, 1),
               rollout_logprobs=(0.0, 0.0, -0.1, -0.7), weight_versions=(-1, -1, 5, 5), response="42",
               reward=1.0, components={"exact_match": 1.0}, stop_reason=StopReason.STOP, status=Status.OK)
    """

    prompt_id: str
    sample: int  # 0 .. samples_per_prompt - 1
    token_ids: tuple[int, ...]  # prompt, then every generated and observed token
    prompt_length: int
    loss_mask: tuple[int, ...]  # 1 = sampled by the policy; same length as token_ids, as are the next two
    rollout_logprobs: tuple[float, ...]  # 0.0 where loss_mask is 0
    weight_versions: tuple[int, ...]  # -1 where loss_mask is 0
    response: str  # decoded generated text, for rewards and people; never encoded again
    stop_reason: StopReason
    status: Status = Status.OK
    reward: float = 0.0  # meaningful only if status.trainable
    components: Mapping[str, float] = field(default_factory=dict)
    error: str = ""  # why status is a failure
    episode: int = 0  # several trajectories of one episode share it; unique within the group
    turns: int = 1
    images: tuple[Image, ...] = ()  # of its prompt
    # As `Completion` has them: [n, layers, top_k] of its first n tokens; the last answer's last token and what comes
    # after it have none.
    routed_experts: NDArray[np.int16] | None = field(default=None, repr=False, compare=False)

    @property
    def response_length(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(self.loss_mask)

    def with_(self, **changes: Any) -> Trajectory:
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """The trajectories of one prompt: the unit of advantage, of filtering and of the ledger."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None = None  # the greedy answer, for estimators that compare with it; never trained on

    @property
    def trainable(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if t.status.trainable)


@dataclass(frozen=True, slots=True)
class BatchImages:
    """The images of a batch: I different ones, each held once, shown M times in all.

    Two answers to one prompt with one image of 2 x 4 patches (2 tokens), then a sequence without:
    patches [8, D], grids [[1, 2, 4]], index [0, 0], starts [3, 3], counts [1, 1, 0].
    """

    patches: torch.Tensor  # [P, D] float32, of all images end to end
    grids: torch.Tensor  # [I, 3] int64: frames, rows, columns of patches
    tokens: torch.Tensor  # [I] int64: placeholder tokens of each
    index: torch.Tensor  # [M] int64: which image, in the order of sequences and of their tokens
    starts: torch.Tensor  # [M] int64: its first placeholder, counted from the beginning of the sequence
    counts: torch.Tensor  # [N] int64: how many the sequence shows


OF_THIS_PROCESS = {"of_this_process": True}
"""Metadata of a field that no other process is told: it says nothing that the other fields do not."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Where a batch came from, so that what a runtime has already sent of the whole need not travel again."""

    whole: Batch
    indices: tuple[int, ...]  # its sequences, in order
    part: Batch  # the batch as it was selected: fields that are still these tensors are those of the whole


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences packed end to end: T tokens of N sequences, no padding anywhere.

    Alignment: every per-token value at index t speaks of token t given the tokens before it in its own sequence.
    `logprobs[t]` = log p(token_ids[t] | earlier tokens), so the first token of a sequence never has one (its
    `loss_mask` is 0); `values[t]` = V(state before token t).

    A batch of two sequences of 3 and 2 tokens:
    token_ids [5, 6, 7, 5, 9], position_ids [0, 1, 2, 0, 1], cu_seqlens [0, 3, 5], loss_mask [0, 1, 1, 0, 1].
    """

    token_ids: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64, restarts at 0 in each sequence
    loss_mask: torch.Tensor  # [T] bool
    cu_seqlens: torch.Tensor  # [N+1] int64, sequence i is [cu_seqlens[i], cu_seqlens[i+1])
    group_index: torch.Tensor  # [N] int64, which prompt
    episode_index: torch.Tensor  # [N] int64, which episode; unique over the batch
    rewards: torch.Tensor | None = None  # [N] float32
    components: Mapping[str, torch.Tensor] = field(default_factory=dict)  # name -> [N] float32
    rollout_logprobs: torch.Tensor | None = None  # [T] float32, as are all that follow
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    token_rewards: torch.Tensor | None = None  # rewards placed on tokens, KL penalty included
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    loss_weights: torch.Tensor | None = None  # what a per-token loss is multiplied with before the sum (aggregation)
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)  # other per-token tensors, [T] or [T, ...]
    images: BatchImages | None = None  # None: no sequence shows any
    origin: Selection | None = field(default=None, repr=False, metadata=OF_THIS_PROCESS)  # what it was selected from

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_sequences(self) -> int:
        return int(self.cu_seqlens.shape[0]) - 1

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens per sequence, [N] int64."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    def with_(self, **fields: Any) -> Batch:
        """A new batch with more fields: data only grows."""
        return replace(self, **fields)


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What an engine's forward gives for one micro-batch of T tokens; a model type fills what it has.

    Alignment as in `Batch`. Values where `loss_mask` is 0 are 0 and carry no gradient.
    """

    logprobs: torch.Tensor | None = None  # [T] float32, language_model
    entropy: torch.Tensor | None = None  # [T] float32, language_model, when asked for
    values: torch.Tensor | None = None  # [T] float32, value_model
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)  # [T] or [T, ...], e.g. sum_pi_squared


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Per-token loss and per-token metrics; never a scalar: one reducer makes the scalar (see aggregation)."""

    values: torch.Tensor  # [T]; entries where the mask is 0 are ignored
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each [T] detached, mean over masked tokens
    counted: Mapping[str, torch.Tensor] = field(default_factory=dict)  # metric -> [T] bool: means over these instead
    largest: Mapping[str, torch.Tensor] = field(default_factory=dict)  # more metrics, each [T]: max over masked tokens


LossFn = Callable[[ModelOutput, Batch], LossOutput]
"""What an engine's `forward_backward` is given. It may carry an attribute `needs: frozenset[str]` naming the
`ModelOutput` fields it reads beyond the model type's plain one ("entropy", "sum_pi_squared"). It may carry
`whole_groups = True`: it compares the sequences of a group, which therefore have to be in one micro-batch."""
