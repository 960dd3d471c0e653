"""The data types of hone: what one layer passes to the next.

This file imports torch for annotations only, so that `hone --help`, `hone config` and the reward workers start without
it. Operations on a `Batch` (packing, selecting, splitting) are in `hone.data.packing`.

    Prompt --envs--> Trajectory x n = TrajectoryGroup --packing--> Batch --algorithms--> Batch with advantages
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


class Status(StrEnum):
    """End of a trajectory. Only `ok` and `truncated` are ever trained on."""

    OK = "ok"
    TRUNCATED = "truncated"  # stopped by a length limit; the policy sampled its tokens, so they are trainable
    ENV_FAILED = "env_failed"  # a tool, sandbox or environment failed, not the policy
    REWARD_FAILED = "reward_failed"  # the reward raised, timed out or was not finite
    ENGINE_FAILED = "engine_failed"  # the rollout engine lost the request
    FILTERED = "filtered"  # removed on purpose (dynamic sampling, length filter)

    @property
    def trainable(self) -> bool:
        return self in (Status.OK, Status.TRUNCATED)


FAILED = (Status.REWARD_FAILED, Status.ENV_FAILED, Status.ENGINE_FAILED)
"""Something other than the policy failed."""


class StopReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"  # end-of-sequence token, stop id or stop string
    LENGTH = "length"  # max_tokens or the context window
    ABORTED = "aborted"  # abort_all(); the tokens so far are kept


PauseMode = Literal["abort", "wait", "keep"]
"""What happens to running requests when an engine pauses. `abort`: they end now with the tokens they have; `wait`:
`pause` returns when they are done; `keep`: they stand still until `resume`. New requests always wait for `resume`."""


class Reducer(StrEnum):
    """Combination of several values of a metric (tokens, micro-batches, ranks, steps) into one."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number and the rule for merging it with others of the same name.

    A mean keeps its weight (`count`), so means over parts of different size merge exactly.

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
    """Merge metrics by name, each with its own reducer."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


class Message(TypedDict, total=False):
    """One chat message. `content` is text, or a list of parts for multimodal models."""

    role: str
    content: Any
    reasoning_content: str  # the thought before an answer, where it is not in the content
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str
    trainable: bool  # false: an answer that is not learnt; absent: it is


@dataclass(frozen=True, slots=True)
class Image:
    """An image in a prompt: its encoded file, and the placeholder tokens that stand for it.

    Image(data=b"\\x89PNG...", grid=(1, 4, 6), tokens=6, token_id=9, read=...) has six placeholder tokens with id 9.
    """

    data: bytes = field(repr=False)  # the bytes of the PNG, JPEG ... file; equal bytes are equal images
    grid: tuple[int, int, int]  # patches that the model's processor cuts it into: frames (1), rows, columns
    tokens: int  # placeholder tokens in the prompt
    token_id: int  # the placeholder
    read: Callable[[bytes], Any] = field(repr=False, compare=False)  # data -> array [patches, values] float32

    def patches(self) -> Any:
        """Decode the image to patches: a numpy array [frames * rows * columns, values per patch] float32."""
        return self.read(self.data)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data set, rendered to tokens, with what a reward needs to judge the answer.

    Prompt(prompt_id="gsm8k/00017", token_ids=(1, 53, ...), messages=({"role": "user", "content": "2+2?"},),
           ground_truth="4", data_source="gsm8k", row={"level": 1}, draw=17)
    """

    prompt_id: str  # stable name of the row: "<data set>/<row number>"; the same row drawn in two epochs shares it
    token_ids: tuple[int, ...]  # rendered with the chat template and its generation prompt
    messages: tuple[Message, ...]
    ground_truth: Any  # None if the reward does not need it
    data_source: str
    row: Mapping[str, Any] = field(default_factory=dict)  # all other columns, unchanged
    draw: int = 0  # position in the prompt stream; unique within a run, and the key of the ledger
    images: tuple[Image, ...] = ()  # in the order of their placeholders in `token_ids`
    tools: tuple[Mapping[str, Any], ...] = ()  # JSON schemas of the functions that the row offers


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one completion. `temperature=0` is greedy.

    The log-probs of a completion belong to the distribution that was sampled: after temperature, top-k, top-p and
    min-p. Greedy completions have the model's log-probs at temperature 1.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()  # stop strings; generation ends with the token that completes one, which is kept
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's end-of-sequence ids
    ignore_eos: bool = False
    seed: int = 0  # of this request: hash(run seed, step, prompt, sample, turn)
    adapter: str = ""  # name of a served LoRA adapter that answers instead of the policy; empty: the policy
    routed_experts: bool = False  # whether the completion records the experts of each token
    keep_kv: bool = False  # one turn of several: the built-in engine keeps the KV of its prompt for the next
    cache_owner: str = ""  # requests of another owner find none of its kept KV, nor are they faster for it
    json_schema: str = ""  # as JSON text: the answer follows it, and log-probs are over the tokens that it allows
    # likeliest tokens to return at each place of the prompt, with its log-probs (`max_tokens` may be 0); None: none
    prompt_logprobs: int | None = None
    max_sequence_tokens: int | None = None  # of prompt and answer together, where the policy answers; None: no limit


Versions = tuple[int, int]
"""Least and greatest weight version that an answer may be sampled from."""

VersionSpans = tuple[tuple[int, int], ...]
"""(version, tokens) of each run of sampled tokens from one version, in order."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one answer, the same from the episode that makes it to the engine that samples.

    GenerationRequest(id="1/17/0/0", tokens=(1, 53, 9), sampling=SamplingParams(max_tokens=8), versions=(4, 4))
    """

    id: str  # unique among the open requests; of a turn: "<step>/<draw>/<sample>/<turn>"
    tokens: tuple[int, ...]  # the prompt, which the answer continues
    sampling: SamplingParams
    images: tuple[Image, ...] = ()  # fill the placeholders in `tokens`, in order
    versions: Versions | None = None  # of the weights that may sample it; None: whichever are served. Routers heed it
    spans: VersionSpans = ()  # of a replay: how many tokens each version samples. Routers heed it

    def fitted(self) -> GenerationRequest:
        """The same request, whose answer ends within `sampling.max_sequence_tokens`. Raises PromptTooLong."""
        sampling, prompt = self.sampling, len(self.tokens)
        limit, most = sampling.max_sequence_tokens, sampling.max_tokens
        if limit is None:
            return self
        if most and not sampling.adapter:  # only answers of the policy are trained on
            if prompt >= limit:
                raise PromptTooLong(
                    f"request {self.id!r} has a prompt of {prompt} tokens, which leaves no room in sequences of at "
                    f"most {limit}: the smallest max_tokens_per_microbatch, or limit of a teacher, of the models that "
                    "read them"
                )
            most = min(most, limit - prompt)
        return replace(self, sampling=replace(sampling, max_tokens=most, max_sequence_tokens=None))


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-prob of each token of a sequence given the earlier ones, at temperature 1.

    All tuples have the length of the sequence; the first entry is 0.0 or empty, as nothing precedes the first token.
    """

    logprobs: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...] = ()  # the most likely tokens of each place, most likely first, if asked for
    top_logprobs: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one request to a rollout engine. All tuples have the length of `token_ids`."""

    request_id: str
    token_ids: tuple[int, ...]  # generated tokens; the stop token is included
    logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    stop_reason: StopReason
    # The experts of each token in each mixture layer, [n, layers, top_k]; row i is token i of prompt and completion
    # together. The last token has no row, because it was never fed to the model. None: not requested.
    routed_experts: NDArray[np.int16] | None = field(default=None, repr=False, compare=False)
    prompt_scores: Scored | None = None  # of the prompt, if `SamplingParams.prompt_logprobs` asks for them


class PromptTooLong(ValueError):
    """A prompt leaves no room for an answer in the engine's context: how a long conversation ends, not a fault."""


class GenerateFn(Protocol):
    """`generate(request) -> Completion`: how an environment asks the model for an answer."""

    def __call__(self, request: GenerationRequest, /) -> Coroutine[Any, Any, Completion]: ...


@dataclass(frozen=True, slots=True)
class Called:
    """One tool call of the policy and what came of it.

    Called("add", '{"a": 1, "b": 2}', "3", seconds=0.01)
    """

    tool: str  # empty if the call names none
    arguments: str  # as the policy wrote them
    result: str  # what the policy read
    seconds: float = 0.0
    fault: Literal["", "broken", "unknown", "arguments", "error", "timeout", "refused"] = ""  # empty: it worked


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """One turn of the policy: the tokens `token_ids[start:end]` that it sampled.

    TurnSpan(start=12, end=40, reward=0.5, anchor="room 3", calls=(Called("look", "{}", "a door"),))
    """

    start: int
    end: int
    reward: float | None = None  # from the environment; None: it gives none for this turn
    anchor: str = ""  # the state in which the turn began: equal texts are equal states; empty: unknown
    calls: tuple[Called, ...] = ()


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished interaction. `token_ids` is append-only and never re-encoded from text.

    Trajectory(prompt_id="sort/3", sample=0, token_ids=(7, 8, 4, 2), prompt_length=2, loss_mask=(0, 0, 1, 1),
               rollout_logprobs=(0.0, 0.0, -0.1, -0.7), weight_versions=(-1, -1, 5, 5), response="42",
               reward=1.0, components={"exact_match": 1.0}, stop_reason=StopReason.STOP, status=Status.OK)
    """

    prompt_id: str
    sample: int  # 0 .. samples_per_prompt - 1
    token_ids: tuple[int, ...]  # the prompt, then all generated and observed tokens
    prompt_length: int
    loss_mask: tuple[int, ...]  # 1: sampled by the policy; as long as token_ids, like the next two
    rollout_logprobs: tuple[float, ...]  # 0.0 where loss_mask is 0
    weight_versions: tuple[int, ...]  # -1 where loss_mask is 0
    response: str  # the generated text, for rewards and people; never re-encoded
    stop_reason: StopReason
    status: Status = Status.OK
    reward: float = 0.0  # meaningful only if status.trainable
    components: Mapping[str, float] = field(default_factory=dict)
    printed: Mapping[str, str] = field(default_factory=dict)  # component -> what its function printed, shortened
    error: str = ""  # the reason, if status is a failure
    unfinished_tokens: int = 0  # of an answer that was cancelled: sampled and lost, as far as its engine knows
    episode: int = 0  # unique within the group; trajectories of one episode share it
    spans: tuple[TurnSpan, ...] = ()  # the turns of the policy, in order
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # from the environment
    images: tuple[Image, ...] = ()  # of its prompt
    masked: bool = False  # its tokens get no loss, but its reward counts in the baseline of its group
    role: str = ""  # that the policy played, in episodes with several roles
    # As in `Completion`: [n, layers, top_k] for the first n tokens. The last answer's last token, and those after it,
    # have no row.
    routed_experts: NDArray[np.int16] | None = field(default=None, repr=False, compare=False)

    @property
    def response_length(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(self.loss_mask)

    @property
    def loss_tokens(self) -> int:
        """Number of tokens with a loss: all that the policy sampled, or none of a masked trajectory."""
        return 0 if self.masked else self.response_length

    @property
    def turns(self) -> int:
        """Number of completions."""
        return len(self.spans)

    @property
    def credited(self) -> bool:
        """Return whether its environment gave rewards for turns, or names for the states in which they began."""
        return any(span.reward is not None or span.anchor for span in self.spans)

    @property
    def turn_reward(self) -> float:
        """Sum of the rewards that the environment gave for turns."""
        return sum(span.reward for span in self.spans if span.reward is not None)

    def with_(self, **changes: Any) -> Trajectory:
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """The trajectories of one prompt. Advantages, filters and the ledger work on groups."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    greedy: Trajectory | None = None  # the greedy answer, for estimators that compare with it; never trained on

    @property
    def trainable(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if t.status.trainable)

    @property
    def compared(self) -> dict[str, tuple[Trajectory, ...]]:
        """The trainable trajectories by role: rewards are compared within a role."""
        found: dict[str, tuple[Trajectory, ...]] = {}
        for one in self.trainable:
            found[one.role] = (*found.get(one.role, ()), one)
        return found


@dataclass(frozen=True, slots=True)
class BatchImages:
    """The images of a batch: I distinct ones, stored once each, used M times in total.

    Example: two answers to a prompt with one image of 2 x 4 patches (2 tokens), then a sequence without images:
    patches [8, D], grids [[1, 2, 4]], index [0, 0], starts [3, 3], counts [1, 1, 0].
    """

    patches: torch.Tensor  # [P, D] float32, all images concatenated
    grids: torch.Tensor  # [I, 3] int64: frames, rows, columns of patches
    tokens: torch.Tensor  # [I] int64: placeholder tokens per image
    index: torch.Tensor  # [M] int64: which image, in the order of sequences and tokens
    starts: torch.Tensor  # [M] int64: position of its first placeholder in the sequence
    counts: torch.Tensor  # [N] int64: images per sequence


@dataclass(frozen=True, slots=True)
class Selection:
    """The batch that a part was selected from: a runtime sends indices for tensors that it already sent."""

    whole: Batch
    indices: tuple[int, ...]  # the selected sequences, in order
    part: Batch  # the part as it was selected; fields that still hold these tensors need not be sent


class Axis(StrEnum):
    """First dimension of a tensor in a `Batch`."""

    TOKEN = "T"
    SEQUENCE = "N"
    ENDS = "N+1"


@dataclass(frozen=True, slots=True)
class Column:
    """Axis and dtype of a field of `Batch`: all that lists, cuts, sends or checks fields reads these."""

    axis: Axis
    dtype: str  # torch's name; "": the model's or the algorithm's choice
    sampled: bool = False  # comes from the rollout: the journal's digest of a batch covers it
    named: bool = False  # a mapping from names to such tensors


def _column(axis: Axis, dtype: str, *, sampled: bool = False, named: bool = False) -> dict[str, Column]:
    return {"column": Column(axis, dtype, sampled, named)}


per_token, per_sequence = partial(_column, Axis.TOKEN), partial(_column, Axis.SEQUENCE)


@dataclass(frozen=True, slots=True)
class Batch:
    """N sequences packed into one axis of T tokens, without padding.

    Alignment: a per-token value at index t belongs to token t, given the tokens before it in its sequence.
    `logprobs[t]` = log p(token_ids[t] | earlier tokens), so the first token of a sequence has none (its
    `loss_mask` is 0); `values[t]` = V(state before token t).

    A batch of two sequences of 3 and 2 tokens:
    token_ids [5, 6, 7, 5, 9], position_ids [0, 1, 2, 0, 1], cu_seqlens [0, 3, 5], loss_mask [0, 1, 1, 0, 1].
    """

    token_ids: torch.Tensor = field(metadata=per_token("int64", sampled=True))
    position_ids: torch.Tensor = field(metadata=per_token("int64"))  # restarts at 0 in each sequence
    loss_mask: torch.Tensor = field(metadata=per_token("bool", sampled=True))  # tokens with a loss
    # [N+1]: sequence i is [cu_seqlens[i], cu_seqlens[i+1])
    cu_seqlens: torch.Tensor = field(metadata=_column(Axis.ENDS, "int64", sampled=True))
    group_index: torch.Tensor = field(metadata=per_sequence("int64", sampled=True))  # which prompt
    # which role of which episode; unique over the batch
    episode_index: torch.Tensor = field(metadata=per_sequence("int64"))
    rewards: torch.Tensor | None = field(default=None, metadata=per_sequence("float32", sampled=True))
    # reward component -> its values
    components: Mapping[str, torch.Tensor] = field(default_factory=dict, metadata=per_sequence("float32", named=True))
    # tokens of the policy; None: those with a loss. Read `sampled_mask`
    sampled: torch.Tensor | None = field(default=None, metadata=per_token("bool"))
    # version that sampled the token, -1 for other tokens
    weight_versions: torch.Tensor | None = field(default=None, metadata=per_token("int32", sampled=True))
    rollout_logprobs: torch.Tensor | None = field(default=None, metadata=per_token("float32", sampled=True))
    old_logprobs: torch.Tensor | None = field(default=None, metadata=per_token("float32"))
    ref_logprobs: torch.Tensor | None = field(default=None, metadata=per_token("float32"))
    values: torch.Tensor | None = field(default=None, metadata=per_token("float32"))
    # rewards placed on tokens: of turns, of the sequence, KL penalty
    token_rewards: torch.Tensor | None = field(default=None, metadata=per_token(""))
    # number of the state in which the token's turn began, as the environment names it; -1: unknown
    anchors: torch.Tensor | None = field(default=None, metadata=per_token("int64"))
    advantages: torch.Tensor | None = field(default=None, metadata=per_token("float32"))
    returns: torch.Tensor | None = field(default=None, metadata=per_token("float32"))
    # factor of each token's loss in the sum (see aggregation)
    loss_weights: torch.Tensor | None = field(default=None, metadata=per_token("float32"))
    # role that the policy played; None: all played the same
    role_index: torch.Tensor | None = field(default=None, metadata=per_sequence("int64"))
    # of the policy before the update, as is the next: sum over the vocabulary of p^2
    entropy: torch.Tensor | None = field(default=None, metadata=per_token("float32"))
    sum_pi_squared: torch.Tensor | None = field(default=None, metadata=per_token("float32"))
    # [T, layers, K]: experts that the rollout or actor chose
    routed_experts: torch.Tensor | None = field(default=None, metadata=per_token("int16"))
    # [T, K]: tokens whose log-probs a forward returns for the need "logprobs_at"
    ids_at: torch.Tensor | None = field(default=None, metadata=per_token("int64"))
    # [T, H]: the reference's last hidden states, for the need "full_kl"
    reference_states: torch.Tensor | None = field(default=None, metadata=per_token(""))
    # tensors of one algorithm alone, [T] or [T, ...] and [N] or [N, ...]: see `Extra`
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict, metadata=per_token("", named=True))
    sequence_extras: Mapping[str, torch.Tensor] = field(default_factory=dict, metadata=per_sequence("", named=True))
    images: BatchImages | None = None  # None: no sequence has images
    origin: Selection | None = field(default=None, repr=False)  # the batch that it was selected from

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

    @property
    def sampled_mask(self) -> torch.Tensor:
        """The tokens that the policy sampled, [T] bool: what a baseline counts, also where a token gets no loss."""
        return self.loss_mask if self.sampled is None else self.sampled

    def with_(self, **fields: Any) -> Batch:
        """A copy with some fields replaced. Fields are added, never removed."""
        return replace(self, **fields)


COLUMNS: Mapping[str, Column] = {one.name: one.metadata["column"] for one in fields(Batch) if "column" in one.metadata}
"""The tensors of a `Batch` by field, in the order in which they are declared."""


@dataclass(frozen=True, slots=True)
class Extra:
    """A tensor that one algorithm puts into a batch for itself; the module of the algorithm declares it.

    OUTCOMES = Extra("outcomes", Axis.SEQUENCE); OUTCOMES.on(batch, tensor); OUTCOMES.of(batch)
    """

    name: str
    axis: Axis = Axis.TOKEN
    filled_by: str = ""  # the call that puts it in, for errors

    def on(self, batch: Batch, value: torch.Tensor) -> Batch:
        """The batch with this tensor, [T, ...] or [N, ...]."""
        if self.axis is Axis.TOKEN:
            return batch.with_(extras={**batch.extras, self.name: value})
        return batch.with_(sequence_extras={**batch.sequence_extras, self.name: value})

    def of(self, batch: Batch) -> torch.Tensor | None:
        return (batch.extras if self.axis is Axis.TOKEN else batch.sequence_extras).get(self.name)

    def needed(self, batch: Batch) -> torch.Tensor:
        """The tensor of a batch that must have it. Raises ValueError with the name."""
        value = self.of(batch)
        if value is None:
            where = "extras" if self.axis is Axis.TOKEN else "sequence_extras"
            remedy = f"pass the batch through {self.filled_by} first" if self.filled_by else "this algorithm needs it"
            raise ValueError(f"Batch.{where}[{self.name!r}] is missing: {remedy}")
        return value


@dataclass(frozen=True, slots=True)
class TopK:
    """The need of a forward for the `count` most likely tokens at each place, and their log-probs."""

    count: int


Need = str | TopK
"""An output that a forward computes on request: a name, such as "entropy", or `TopK`."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The result of an engine's forward for one micro-batch of T tokens; each model type fills its own fields.

    Aligned like `Batch`. Values where `loss_mask` is 0 are 0 and have no gradient.
    """

    logprobs: torch.Tensor | None = None  # [T] float32, language_model
    entropy: torch.Tensor | None = None  # [T] float32, language_model, on request
    values: torch.Tensor | None = None  # [T] float32, value_model
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)  # [T] or [T, ...], e.g. sum_pi_squared


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Per-token loss and metrics. A loss never returns a scalar; `algorithms.aggregation` makes the scalar."""

    values: torch.Tensor  # [T]; entries where the mask is 0 are ignored
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each [T] detached, mean over masked tokens
    counted: Mapping[str, torch.Tensor] = field(
        default_factory=dict
    )  # metric -> [T] bool: take the mean over these tokens instead
    largest: Mapping[str, torch.Tensor] = field(default_factory=dict)  # more metrics, each [T]: max over masked tokens


LossFn = Callable[[ModelOutput, Batch], LossOutput]
"""A loss for an engine's `forward_backward`. Two attributes are optional: `needs: frozenset[str]` names the
`ModelOutput` fields that it reads besides the standard one ("entropy", "sum_pi_squared"), and `whole_groups = True`
keeps the sequences of a group in one micro-batch, for losses that compare them."""
