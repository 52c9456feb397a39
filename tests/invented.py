"""Invented results, as `cosformer compare` writes them: a demo of one seed, and a full run of three. Numbers mean nothing."""

import math
import random

SIZE = "tiny (4 layers, width 128, 4 heads)"
RUN = {
    "kind": "run", "command": "cosformer compare --demo --out runs/demo", "started": "2026-11-15T23:00:00Z", "minutes": 8.2,
    "cpu": "AMD EPYC", "threads": 2, "isa": "avx2", "torch": "2.13.0", "cosformer": "0.1.0", "transformers": "5.22.2",
    "python": "3.11.2", "memory_gib": 24, "seeds": [0],
}  # fmt: skip
# How fast a mixer trains (tokens/s) and how well it does (the factor by which its loss is above the best).
MIXERS = {
    "softmax": (9_400, 1.03), "softmax+rope": (8_900, 1.0), "cosformer-paper": (17_600, 1.12), "cosformer": (15_300, 1.012),
    "cosformer-ladder": (14_900, 1.05), "cosformer-no-cosine": (16_900, 1.02), "elu": (18_400, 1.16), "relu": (18_800, 1.15),
    "identity": (19_000, 1.45), "leaky_relu": (18_100, 1.3), "performer": (13_000, 1.18),
}  # fmt: skip


def quality(
    task="lm", mixer="cosformer", value=7.9, *, group="lm", seed=0, metric="perplexity", greater=False, **more
) -> dict:
    row = {
        "kind": "quality", "group": group, "task": task, "title": task, "mixer": mixer, "seed": seed, "status": "done",
        "reason": None, "metric": metric, "greater_is_better": greater, "value": value, "metrics": {metric: value},
        "start": {"loss": 5.7}, "curve": [],
        "steps": 400, "tokens": 1_638_400, "seconds": 95.2, "tokens_per_second": 17_200, "parameters": 1_843_200,
        "length": 1024, "batch": 4, "size": SIZE, "data": "Python standard library source", "settings": {"lr": 1e-3},
        "command": f"cosformer train {task} --mixer {mixer} --seed {seed}",
    }  # fmt: skip
    return {**row, **more}


def refused(task="lm", mixer="softmax", reason="it has no causal form", **more) -> dict:
    nothing = dict.fromkeys(
        (
            "metric",
            "value",
            "metrics",
            "start",
            "curve",
            "steps",
            "tokens",
            "seconds",
            "tokens_per_second",
            "parameters",
        )
    )
    return quality(task, mixer, **{**nothing, "value": None, "status": "refused", "reason": reason, **more})


def cost(
    mixer="cosformer", length=4096, ms=12.3, *, work="training", what="model", causal=True, **more
) -> dict:
    row = {
        "kind": "cost",
        "mixer": mixer,
        "work": work,
        "what": what,
        "causal": causal,
        "length": length,
        "ms": ms,
    }
    return {
        **row,
        "ms_low": 0.97 * ms,
        "ms_high": 1.04 * ms,
        "memory_mib": None,
        "heads": 8,
        "size": 64,
        **more,
    }


def trained(
    task, title, mixer, seed, *, group, steps, length, data, chance=None, metric="perplexity"
) -> dict:
    """A training with a curve: loss falls from the start towards what the mixer can reach."""
    draw = random.Random(f"{task} {mixer} {seed}")
    rate, factor = MIXERS[mixer]
    start, end = (5.7, 2.05) if chance is None else (2.3, 1.2)
    end *= factor * (1 + 0.006 * draw.uniform(-1, 1))
    tokens = 4096
    curve = []
    for step in range(0, steps + 1, steps // 16):
        loss = end + (start - end) * math.exp(-4.5 * (step / steps) ** 0.6) + 0.01
        point = {
            "step": step,
            "tokens": step * tokens,
            "seconds": step * tokens / rate,
            "loss": loss * draw.uniform(0.99, 1.01),
        }
        if step % (steps // 8) == 0:
            point |= {"eval_loss": loss, "value": math.exp(loss) if chance is None else None}
        curve.append({k: v for k, v in point.items() if v is not None})
    loss = curve[-1]["eval_loss"]
    noise = draw.uniform(-0.02, 0.02)
    accuracy = None if chance is None else chance + (0.9 - chance) * math.exp(-4.4 * (factor - 0.93)) + noise
    value = accuracy if metric == "accuracy" else math.exp(loss)
    metrics = (
        {"test_loss": loss, "perplexity": value, "bits_per_byte": loss / math.log(2)}
        if chance is None
        else {"accuracy": value, "test_loss": loss}
    )
    return quality(
        task, mixer, value, group=group, seed=seed, metric=metric, greater=metric == "accuracy", title=title, metrics=metrics,
        start={"loss": start}, curve=curve, steps=steps, tokens=steps * tokens, seconds=steps * tokens / rate,
        tokens_per_second=rate, parameters=1_843_200 + 512 * len(mixer), length=length, data=data,
        settings={"lr": 1e-3, "warmup": 40},
    )  # fmt: skip


def costs(mixers, lengths, causal=True, what="model") -> list[dict]:
    rows = []
    for mixer in mixers:
        slow = "softmax" in mixer
        for n in lengths:
            factor = 1 + list(MIXERS).index(mixer) / 40
            ms = factor * (0.004 * n + 3e-6 * n * n + 1 if slow else 0.0075 * n + 2)
            memory = factor * (8 + n / 60 + (n / 900 if slow else 0))
            rows.append(cost(mixer, n, ms, causal=causal, what=what, memory_mib=memory))
    return rows


def decodings(mixers, contexts) -> list[dict]:
    rows = []
    for mixer in mixers:
        slow = "softmax" in mixer
        for n in contexts:
            cache = 8192 * n if slow else 524_288
            rows.append(
                cost(mixer, n, 1.4 + 0.00019 * n if slow else 1.9, work="decoding", cache_bytes=cache)
            )
    return rows


def exactness() -> list[dict]:
    rows = []
    for backend in ("native", "torch"):
        for mode in ("bidirectional", "causal", "cross", "stream"):
            for what, difference in (("output", 1.2e-7), ("gradient", 8.4e-7)):
                row = {
                    "kind": "exactness",
                    "backend": backend,
                    "dtype": "float32",
                    "mode": mode,
                    "what": what,
                }
                rows.append({**row, "difference": difference, "allowed": 1e-5})
    return rows


def pictures(mixers, figure="trained", n=64) -> list[dict]:
    rows = []
    for k, mixer in enumerate(mixers):
        draw = random.Random(mixer)
        columns = [draw.uniform(0.2, 1) for _ in range(n)]
        matrix = []
        for i in range(n):
            weights = [columns[j] * math.exp(-(i - j) / (3 + 9 * k)) if j <= i else None for j in range(n)]
            total = sum(w for w in weights if w)
            matrix.append([w and round(w / total, 5) for w in weights])
        tokens = list("def rotate(x, angle):\n    return x * cos(angle) + flip(x) * sin(angle)")[:n]
        row = {
            "kind": "picture",
            "figure": figure,
            "task": "lm",
            "mixer": mixer,
            "title": mixer,
            "layer": 1,
            "head": 0,
        }
        rows.append({**row, "matrix": matrix, "tokens": tokens})
    return rows


def demo() -> list[dict]:
    """What the demo measures in ten minutes: three tasks, three mixers, one seed."""
    mixers = ["softmax+rope", "cosformer-paper", "cosformer"]
    rows: list[dict] = [RUN]
    for m in mixers:
        title, data = "Language model, Python standard library", "Python standard library source"
        rows.append(trained("lm", title, m, 0, group="lm", steps=400, length=1024, data=data))
        rows.append(
            trained(
                "listops",
                "ListOps",
                m,
                0,
                group="lra",
                steps=320,
                length=512,
                data="generated",
                chance=0.1,
                metric="accuracy",
            )
        )
        title = "Associative recall"
        rows.append(
            trained(
                "recall",
                title,
                m,
                0,
                group="toy",
                steps=320,
                length=256,
                data="generated",
                chance=0.05,
                metric="accuracy",
            )
        )
    return (
        rows
        + costs(mixers, [256, 512, 1024, 2048, 4096])
        + decodings(mixers, [512, 4096, 16384])
        + exactness()
        + pictures(mixers)
    )


def full() -> list[dict]:
    """What a full run measures: the paper's tables, three seeds, a refused mixer and a failed one."""
    study = ["identity", "leaky_relu", "relu", "cosformer-no-cosine", "cosformer-ladder"]
    main = ["softmax", "softmax+rope", "cosformer-paper", "cosformer", "elu", "performer"]
    run = {**RUN, "command": "cosformer compare --full --out runs/full", "minutes": 611.5, "seeds": [0, 1, 2]}
    rows: list[dict] = [run]
    for seed in (0, 1, 2):
        for m in main + study:
            rows.append(
                trained(
                    "lm",
                    "WikiText-2 language model",
                    m,
                    seed,
                    group="lm",
                    steps=1600,
                    length=1024,
                    data="WikiText-2, BPE 8000",
                )
            )
        for m in main:
            options = {"steps": 800, "data": "WikiText-2, BPE 8000"}
            rows.append(
                trained("mlm", "Masked language model", m, seed, group="finetune", length=512, **options)
            )
            fine = {"steps": 400, "data": "SST-2", "chance": 0.5, "metric": "accuracy"}
            rows.append(
                trained(
                    "classify", "SST-2 fine-tuned from mlm", m, seed, group="finetune", length=128, **fine
                )
            )
            for task, title, length, chance in (
                ("listops", "ListOps", 1024, 0.1),
                ("text", "Text, IMDB bytes", 2048, 0.5),
                ("image", "Image, CIFAR-10", 1024, 0.1),
            ):
                if (m, task) != ("performer", "image"):
                    rows.append(
                        trained(
                            task,
                            title,
                            m,
                            seed,
                            group="lra",
                            steps=800,
                            length=length,
                            data=title,
                            chance=chance,
                            metric="accuracy",
                        )
                    )
    rows.append(
        refused(
            "image",
            "performer",
            "its features need a power of two",
            group="lra",
            title="Image, CIFAR-10",
            size=None,
            data=None,
            length=None,
        )
    )
    lengths = [256, 512, 1024, 2048, 4096, 8192, 16384]
    rows += (
        costs(main, lengths)
        + costs(main, lengths, causal=False, what="operator")
        + decodings(main, [512, 2048, 8192, 32768])
    )
    return (
        rows + exactness() + pictures(main) + pictures(["softmax", "cosformer-paper", "relu"], figure="paper")
    )


if __name__ == "__main__":
    import json
    import sys

    for row in {"demo": demo, "full": full}[sys.argv[1]]():
        print(json.dumps(row))
