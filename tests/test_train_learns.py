"""What must be learned is learned: cosFormer solves the toys, softmax tasks on which others may fail."""

import pytest

from cosformer.train import Run, train

OPTIMISER = {
    "per_device_train_batch_size": 64,
    "per_device_eval_batch_size": 100,
    "eval_strategy": "no",
    "save_strategy": "no",
}
OPTIMISER |= {"load_best_model_at_end": False, "report_to": [], "adam_beta2": 0.95, "logging_steps": 100}


def score(tmp_path, task, mixer, *, steps, rate, metric="accuracy", heads=2, **settings):
    training = {**OPTIMISER, "max_steps": steps, "learning_rate": rate, "warmup_steps": 30}
    fields = {"num_attention_heads": heads} if heads != 2 else {}
    run = Run(
        task=task,
        mixer=mixer,
        size="toy",
        out=str(tmp_path),
        task_settings=settings,
        model_fields=fields,
        training=training,
    )
    return train(run)["test"][metric]


def test_cosformer_copies(tmp_path):
    assert (
        score(
            tmp_path,
            "copy",
            "cosformer",
            steps=300,
            rate=6e-3,
            heads=1,
            length=16,
            examples=[20_000, 100, 300],
        )
        > 0.99
    )


def test_cosformer_reverses_through_cross_attention(tmp_path):
    reached = score(
        tmp_path,
        "reverse",
        "cosformer",
        steps=200,
        rate=3e-3,
        metric="sequence_accuracy",
        length=8,
        examples=[20_000, 100, 300],
    )
    assert reached > 0.98


@pytest.mark.parametrize("mixer", ["cosformer", "cosformer-hybrid", "softmax+rope"])
def test_recall(tmp_path, mixer):
    sizes = {"length": 32, "pairs": 8, "vocabulary": 32, "examples": [50_000, 100, 500]}
    reached = score(tmp_path, "recall", mixer, steps=400, rate=3e-3, **sizes)
    assert reached > 0.95  # a model that stalls stays near 0.2


def test_softmax_learns_short_listops(tmp_path):
    sizes = {"length": 32, "depth": 3, "args": 4, "least": 6, "examples": [50_000, 100, 1000]}
    reached = score(tmp_path, "listops", "softmax", steps=400, rate=3e-3, **sizes)
    assert reached > 0.41  # counts of tokens alone give 0.41
