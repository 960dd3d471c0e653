"""The JSON requests of the protocol. A field that is not here, or has the type None, is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hone.service.protocol.refusals import BadRequest

M = TypeVar("M", bound="Message")
HOUR_S, TEN_YEARS_S = 3600, 315_576_000
Ttl = Annotated[int, Field(ge=HOUR_S, le=TEN_YEARS_S)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Metadata = dict[str, Any]


class Message(BaseModel):
    """One request."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    type: str | None = None  # clients repeat the name of the request


def read(cls: type[M], body: Any) -> M:
    """Parse a request. Raises BadRequest naming the field, what was found and what was expected."""
    if not isinstance(body, dict):
        raise BadRequest(f"the body should be a JSON object, found {body!r:.60}")
    try:
        return cls.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the request"
        if first["type"] in ("extra_forbidden", "none_required"):
            raise BadRequest(f"{where} = {first['input']!r:.80} is not served here; leave it out") from error
        raise BadRequest(f"{where} = {first['input']!r:.80}: {first['msg']}") from error


class CreateSession(Message):
    tags: list[str] = Field(default_factory=list, max_length=100)
    user_metadata: Metadata | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionOf(Message):
    session_id: str


class Lora(Message):
    rank: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Message):
    type: Literal["adamw"] | None = None
    version: int | None = None


class CreateModel(Message):
    session_id: str
    model_seq_id: Annotated[int, Field(ge=0)]
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer | None = None


class ModelOf(Message):
    model_id: str


class Command(Message):
    """A request that runs in its turn among those of its model."""

    model_id: str
    seq_id: Annotated[int, Field(ge=1)]


class AdamParams(Message):
    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=1e-30)] = 1e-12  # with 0, weights without a gradient become NaN
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class OptimStep(Command):
    adam_params: AdamParams | None = None
    optimizer_params: None = None  # of other optimizers


class SaveWeights(Command):
    path: Name | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampling(Command):
    path: Name | None = None
    sampling_session_seq_id: Annotated[int, Field(ge=0)] | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl | None = None
    user_metadata: dict[str, str] | None = None

    @model_validator(mode="after")
    def _one_target(self) -> SaveForSampling:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("exactly one of path and sampling_session_seq_id should be set")
        if self.ttl_seconds is not None and self.path is None:
            raise ValueError("ttl_seconds is of a checkpoint with a path; a snapshot without one ends with its session")
        if self.kind == "inflight" and self.path is not None:
            raise ValueError("kind = inflight is for clients that sample while training goes on; leave path out")
        return self


class SaveExternal(Command):
    path: Name
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: None = None


class LoadWeights(Message):
    model_id: str | None = None
    seq_id: Annotated[int, Field(ge=1)] | None = None
    session_id: str | None = None
    model_seq_id: Annotated[int, Field(ge=0)] | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    path: str
    optimizer: bool = False
    optimizer_config: Optimizer | None = None
    weights_access_token: None = None  # to another tenant's checkpoint

    @model_validator(mode="after")
    def _one_address(self) -> LoadWeights:
        here, new = (self.model_id, self.seq_id), (self.session_id, self.model_seq_id)
        if (None in here) == (None in new):
            raise ValueError("set model_id and seq_id to load into it, or session_id and model_seq_id for a new model")
        return self


class CreateSamplingSession(Message):
    session_id: str
    sampling_session_seq_id: Annotated[int, Field(ge=0)]
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Message):
    tokens: list[int] | None = None

    @model_validator(mode="before")
    @classmethod
    def _served(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in (None, "encoded_text"):
            raise ValueError(f"a chunk of type {kind} is not served here: only encoded_text is")
        return value


class Prompt(Message):
    chunks: list[Chunk]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks for token in chunk.tokens or ())


class SamplingParameters(Message):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class TensorData(Message):
    data: list[int] | list[float]
    dtype: Literal["int64", "float32"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Sample(Message):
    num_samples: Annotated[int, Field(ge=1)] = 1
    prompt: Prompt
    sampling_params: SamplingParameters
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0)] = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: bool | None = None

    @model_validator(mode="after")
    def _served(self) -> Sample:
        if self.record_stability_info:
            raise ValueError(
                "record_stability_info is not served here, as the loss stable_reinforce is not: choose another loss"
            )
        if (self.sampling_session_id is None) == (self.base_model is None and self.model_path is None):
            raise ValueError("set sampling_session_id, or base_model or model_path")
        if self.sampling_session_id is not None and self.seq_id is None:
            raise ValueError("a request with sampling_session_id needs seq_id")
        return self


class RetrieveFuture(Message):
    request_id: str
    allow_metadata_only: bool = False


class WeightsInfo(Message):
    tinker_path: str


class SetTtl(Message):
    ttl_seconds: Ttl | None = None


class Finish(Message):
    reason: Metadata | None = None
    detail: str | None = None
