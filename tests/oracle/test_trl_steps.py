"""Whole optimizer steps beside TRL's trainers: the same tiny model, the same answers, the weights after three steps.

Both sides get the same completions, so what is compared is everything after them: advantages, log-probs, the loss
and its denominator, clipping of the gradient, AdamW.
"""

import random
import shutil

import pytest
import torch
import trl
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hone.algorithms.aggregation import loss_weights
from hone.algorithms.algorithm import Algorithm
from hone.algorithms.preference.losses import (
    KTO_BASELINE,
    MARGIN,
    PreferenceObjective,
    RewardModelObjective,
    kto_baseline,
)
from hone.algorithms.preference.settings import (
    BradleyTerrySettings,
    DpoSettings,
    HingeSettings,
    IpoSettings,
    KtoSettings,
    RobustSettings,
)
from hone.algorithms.segments import sequence_sum
from hone.algorithms.settings import AggregationSettings, AlgorithmConfig
from hone.config import build
from hone.data.packing import pack
from hone.engines.settings import EngineConfig, OptimizerConfig, ScheduleConfig
from hone.models.loading import load_language_model
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.models.value_head import SCORE, VALUE_HEAD_FILE
from hone.types import Prompt, Status, StopReason, Trajectory, TrajectoryGroup
from hone.workers.train import TrainSpec, TrainWorker

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's and transformers' own; hone's fail its other tests

LR, STEPS, GROUP = 1e-3, 3, 4
TOLERANCE = 1e-5
EPSILON = 1e-6  # of AdamW: at 1e-8 the float32 noise of a gradient near 0 becomes a whole step
SHAPE = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 64, "max_positions": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Qwen3 with its tokenizer, in float32."""
    model = ModelConfig(build=BuildConfig(**SHAPE))
    path = tmp_path_factory.mktemp("model")
    torch.set_num_threads(1)
    load_language_model(model).save_pretrained(path)
    load_tokenizer(model).save_pretrained(path)
    return path


def worker(folder, model_type="language_model"):
    """hone's engine on that model, with TRL's defaults: AdamW, gradients clipped to norm 1, constant rate."""
    engine = EngineConfig(
        compute_dtype="float32",
        max_tokens_per_microbatch=64,  # several micro-batches, where TRL has one
        optimizer=OptimizerConfig(lr=LR, options={"eps": EPSILON}),
        schedule=ScheduleConfig(),
        max_grad_norm=1.0,
    )
    found = TrainWorker(TrainSpec(ModelConfig(path=str(folder)), engine, model_type, total_steps=STEPS))
    found.initialize()
    return found


def arguments(cls, tmp_path, **options):
    return cls(
        output_dir=str(tmp_path),
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_steps=STEPS,
        max_grad_norm=1.0,
        weight_decay=0.0,
        adam_epsilon=EPSILON,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        disable_dropout=True,
        **options,
    )


def same_weights(ours, theirs, named=str):
    """`named` gives hone's name of a weight."""
    found = dict(ours.weights(torch.float32))
    moved = 0.0
    for name, tensor in theirs.state_dict().items():
        mine = found[named(name)]
        torch.testing.assert_close(mine, tensor, atol=TOLERANCE, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
        moved = max(moved, float(tensor.abs().max()))
    assert moved > 0


def completions(step):
    """Ragged token ids for `GROUP` answers to each of two prompts, the same for both sides."""
    draw = random.Random(step)
    return [[draw.randrange(8, 60) for _ in range(draw.randint(2, 7))] for _ in range(2 * GROUP)]


def reward(ids):
    """A number that is a function of the tokens; large, since TRL adds 1e-4 to the deviation where hone adds 1e-6."""
    return 1000.0 * (sum(ids) % 17)


GRPO = {
    "grpo": ({"loss_type": "grpo", "beta": 0.0}, {"aggregation": {"mode": "seq_mean_token_mean"}}),
    "bnpo": ({"loss_type": "bnpo", "beta": 0.0}, {"aggregation": {"mode": "token_mean"}}),
    "dapo": (
        {"loss_type": "dapo", "beta": 0.0, "epsilon": 0.2, "epsilon_high": 0.28},
        {"aggregation": {"mode": "token_mean"}, "loss": {"name": "ppo", "clip_low": 0.2, "clip_high": 0.28}},
    ),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "beta": 0.0, "scale_rewards": "none"},
        {
            "advantage": {"name": "grpo", "scale_by": "none"},
            "aggregation": {"mode": "seq_mean_token_sum_norm", "norm_tokens": 8},
        },
    ),
    "gspo": (
        {"loss_type": "grpo", "beta": 0.0, "importance_sampling_level": "sequence"},
        {"loss": {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2}},
    ),
    "kl": (
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
        {"aggregation": {"mode": "seq_mean_token_mean"}, "kl": {"kind": "k3", "where": "in_loss", "coef": 0.1}},
    ),
}


@pytest.mark.parametrize("case", sorted(GRPO))
def test_grpo_steps(case, folder, tmp_path):
    their_options, our_options = GRPO[case]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = ["12+34=", "56-7="]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
    step = iter(range(STEPS))

    def given(texts, trainer):
        made = completions(next(step))
        return {
            "prompt_ids": [ids[prompts.index(text)] for text in texts],
            "completion_ids": made,
            "logprobs": None,
            "score": [reward(one) for one in made],
        }

    options = arguments(
        trl.GRPOConfig,
        tmp_path,
        per_device_train_batch_size=2 * GROUP,
        num_generations=GROUP,
        max_completion_length=8,
        temperature=1.0,
        shuffle_dataset=False,
        **their_options,
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=lambda completions, score, **_: score,
        args=options,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        rollout_func=given,
    )
    trainer.train()

    algorithm = Algorithm(build(AlgorithmConfig, {"advantage": "grpo", "loss": "ppo", **our_options}, "test"), 1, 8)
    actor, reference = worker(folder), worker(folder)
    for number in range(STEPS):
        batch = pack(groups(prompts, ids, completions(number)))
        if algorithm.needs_reference:
            batch = batch.with_(ref_logprobs=reference.infer_batch(batch).logprobs)
        actor.train_batch(algorithm.weigh(algorithm.advantages(batch)), algorithm.policy_objective())
    same_weights(actor, trainer.model)


def groups(prompts, ids, answers):
    """The answers as hone's groups."""
    made = []
    for number, text in enumerate(prompts):
        prompt = Prompt(
            prompt_id=text,
            token_ids=tuple(ids[number]),
            messages=(),
            ground_truth="",
            data_source="",
            row={},
            draw=number,
        )
        mine = answers[number * GROUP : (number + 1) * GROUP]
        made.append(TrajectoryGroup(prompt, tuple(trajectory(prompt, i, one) for i, one in enumerate(mine))))
    return made


def trajectory(prompt, sample, answer):
    start = len(prompt.token_ids)
    return Trajectory(
        prompt_id=prompt.prompt_id,
        sample=sample,
        token_ids=(*prompt.token_ids, *answer),
        prompt_length=start,
        loss_mask=(0,) * start + (1,) * len(answer),
        rollout_logprobs=(0.0,) * (start + len(answer)),
        weight_versions=(-1,) * start + (0,) * len(answer),
        response="",
        stop_reason=StopReason.STOP,
        status=Status.OK,
        error="",
        episode=sample,
        turns=1,
    ).with_(reward=reward(answer))


PAIRS = [("2+2=", "4 is it", "five"), ("9-1=", "8", "no idea at all"), ("3*3=", "nine", "6"), ("7-7=", "0.", "seven")]

DPO = {
    "dpo": ("sigmoid", DpoSettings(beta=0.3)),
    "ipo": ("ipo", IpoSettings(beta=0.3)),
    "hinge": ("hinge", HingeSettings(beta=0.3)),
    "robust": ("robust", RobustSettings(beta=0.3, label_smoothing=0.1)),
}


@pytest.mark.parametrize("case", sorted(DPO))
def test_dpo_steps(case, folder, tmp_path):
    loss_type, settings = DPO[case]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    smoothing = {"label_smoothing": settings.label_smoothing} if case == "robust" else {}
    trainer = trl.DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=tokenizer,
        args=arguments(
            trl.DPOConfig,
            tmp_path,
            per_device_train_batch_size=len(PAIRS),
            beta=0.3,
            loss_type=[loss_type],
            **smoothing,
        ),
        train_dataset=Dataset.from_list([{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS]),
    )
    rows = list(trainer.train_dataset)  # as TRL tokenized them
    trainer.train()

    objective = PreferenceObjective(settings)
    actor = worker(folder)
    batch = pack([pair(number, row) for number, row in enumerate(rows)])
    batch = batch.with_(ref_logprobs=actor.infer_batch(batch).logprobs)
    mean = AggregationSettings(mode="seq_mean_token_sum")  # a preference loss has one value per answer
    batch = batch.with_(loss_weights=loss_weights(batch.loss_mask, batch.cu_seqlens, mean))
    for _ in range(STEPS):
        actor.train_batch(batch, objective)
    same_weights(actor, trainer.model)


ANSWERS = [("2+2=", "4 is it", True), ("9-1=", "five, no less", False), ("3*3=", "nine", True), ("7-7=", "0.", True)]


@pytest.mark.parametrize(("desirable", "undesirable"), [(1.0, 1.0), (1.3, 0.8)])
def test_kto_steps(desirable, undesirable, folder, tmp_path):
    """hone is given TRL's mismatched answers, and measures the reference point of each step from them itself."""
    settings = KtoSettings(beta=0.3, desirable=desirable, undesirable=undesirable)
    trainer = trl.KTOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder),
        args=arguments(
            trl.KTOConfig,
            tmp_path,
            per_device_train_batch_size=len(ANSWERS),
            beta=0.3,
            desirable_weight=desirable,
            undesirable_weight=undesirable,
        ),
        train_dataset=Dataset.from_list([{"prompt": p, "completion": c, "label": good} for p, c, good in ANSWERS]),
    )
    rows = list(trainer.train_dataset)  # as TRL tokenized them
    trainer.train()

    objective = PreferenceObjective(settings)
    actor, reference = worker(folder), worker(folder)
    batch = judged(rows, "completion_ids").with_(rewards=torch.tensor([float(row["label"]) for row in rows]))
    mismatched = judged(rows, "KL_completion_ids")
    ref = reference.infer_batch(mismatched).logprobs
    batch = batch.with_(ref_logprobs=reference.infer_batch(batch).logprobs)
    mean = AggregationSettings(mode="seq_mean_token_sum")
    batch = batch.with_(loss_weights=loss_weights(batch.loss_mask, batch.cu_seqlens, mean))
    points = []
    for _ in range(STEPS):
        gaps = torch.where(mismatched.loss_mask, actor.infer_batch(mismatched).logprobs - ref, 0)
        points.append(float(kto_baseline(sequence_sum(gaps, mismatched.cu_seqlens))))
        baseline = torch.full((batch.num_sequences,), points[-1])
        actor.train_batch(KTO_BASELINE.on(batch, baseline), objective)
    assert max(points) > 0, "the reference point was never above 0: nothing of it was compared"
    same_weights(actor, trainer.model)


def judged(rows, field):
    """One answer under each prompt, a group of its own."""
    prompts = [(str(number), row) for number, row in enumerate(rows)]
    made = [asked(name, row["prompt_ids"]) for name, row in prompts]
    return pack(
        [TrajectoryGroup(one, (trajectory(one, 0, row[field]),)) for one, (_, row) in zip(made, prompts, strict=True)]
    )


@pytest.mark.parametrize(("centring", "margins"), [(0.0, False), (0.05, True)])
def test_bradley_terry_steps(centring, margins, folder, tmp_path):
    """TRL scores an answer at its last token; hone's value of the token that follows it is the same state's."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    begin = tmp_path / "begin"
    shutil.copytree(folder, begin)
    save_file({SCORE: model.score.weight.detach().clone()}, begin / VALUE_HEAD_FILE)
    made = [{"chosen": p + c, "rejected": p + r} for p, c, r in PAIRS]
    if margins:
        made = [{**row, "margin": 0.2 * number} for number, row in enumerate(made)]
    options = {"center_rewards_coefficient": centring} if centring else {}
    trainer = trl.RewardTrainer(
        model=model,
        processing_class=tokenizer,
        args=arguments(trl.RewardConfig, tmp_path, per_device_train_batch_size=len(PAIRS), **options),
        train_dataset=Dataset.from_list(made),
    )
    rows = list(trainer.train_dataset)
    trainer.train()

    actor = worker(begin, "value_model")
    groups = [pair(number, {**row, "prompt_ids": []}) for number, row in enumerate(rows)]
    batch = pack([marked(group) for group in groups])
    mean = AggregationSettings(mode="seq_mean_token_sum")
    batch = batch.with_(loss_weights=loss_weights(batch.loss_mask, batch.cu_seqlens, mean))
    if margins:
        batch = batch.with_(components={MARGIN: torch.tensor([row["margin"] for row in rows for _ in range(2)])})
    for _ in range(STEPS):
        actor.train_batch(batch, RewardModelObjective(BradleyTerrySettings(centring=centring)))
    same_weights(actor, trainer.model, lambda name: SCORE if name == "score.weight" else f"body.{name[6:]}")


def marked(group):
    """The group with a token after each answer, which alone counts: its value is that of all that was said."""

    def mark(one):
        ids = (*one.token_ids, 0)
        return one.with_(
            token_ids=ids,
            prompt_length=len(ids) - 1,
            loss_mask=(0,) * (len(ids) - 1) + (1,),
            rollout_logprobs=(0.0,) * len(ids),
            weight_versions=(0,) * len(ids),
        )

    return TrajectoryGroup(group.prompt, tuple(mark(one) for one in group.trajectories))


def asked(name, prompt_ids):
    return Prompt(
        prompt_id=name,
        token_ids=tuple(prompt_ids),
        messages=(),
        ground_truth="",
        data_source="",
        row={},
        draw=int(name),
    )


def pair(number, row):
    prompt = asked(str(number), row["prompt_ids"])
    both = [trajectory(prompt, sample, row[name]) for sample, name in enumerate(("chosen_ids", "rejected_ids"))]
    return TrajectoryGroup(prompt, tuple(one.with_(reward=float(1 - i)) for i, one in enumerate(both)))
