"""The paper's tables as data: Qin et al., cosFormer: Rethinking Softmax in Attention, ICLR 2022 (arXiv 2202.08791).

They are shown beside measured results and marked as the paper's: other data, models and machines. A None is a blank or a run
out of memory. `UNCONFIRMED` names the tables whose figures could not be checked against the paper itself.
"""

from typing import NamedTuple


class PaperTable(NamedTuple):
    number: int
    title: str
    setting: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[float | None, ...]]
    note: str = ""


LM = PaperTable(
    2,
    "WikiText-103, autoregressive, perplexity",
    "8 A100, length 512, 150 K updates",
    ("validation", "test"),
    {
        "Transformer": (24.5, 26.2),
        "Linear Transformer": (28.7, 30.2),
        "RFA-Gaussian": (25.8, 27.5),
        "RFA-arccos": (26.4, 28.1),
        "RFA-Gate-arccos": (24.8, 26.3),
        "RFA-Gate-Gaussian": (23.2, 25.0),
        "cosFormer": (23.5, 23.1),
    },
    "All rows but cosFormer's equal those of the RFA paper. No reproduction of 23.1 is known to us; later work finds cosFormer"
    " worse than softmax here.",
)
FINETUNE = PaperTable(
    3,
    "Fine-tuning after masked pre-training, accuracy in %",
    "RoBERTa architecture",
    ("QQP", "SST-2", "MNLI", "IMDB", "AMAZON", "average"),
    {
        "Transformer": (88.41, 92.31, 79.15, 92.86, 75.79, 85.70),
        "Performer": (69.92, 50.91, 35.37, 60.36, 64.84, 56.28),
        "Reformer": (63.18, 50.92, 35.47, 50.01, 64.28, 52.77),
        "Linear Transformer": (74.85, 84.63, 66.56, 91.48, 72.50, 78.00),
        "Longformer": (85.51, 88.65, 77.22, 91.14, 73.34, 83.17),
        "RFA": (75.28, 76.49, 57.6, 78.98, 68.15, 71.30),
        "cosFormer": (89.26, 91.05, 76.70, 92.95, 76.30, 85.25),
    },
    "Performer and Reformer are at chance on several tasks: their training failed.",
)
LRA = PaperTable(
    4,
    "Long-Range Arena, accuracy in %",
    "JAX code of the benchmark",
    ("ListOps", "Text", "Retrieval", "Image", "Pathfinder", "average"),
    {
        "local attention": (15.82, 52.98, 53.39, 41.46, 66.63, 46.06),
        "Linear Transformer": (16.13, 65.90, 53.09, 42.34, 75.30, 50.55),
        "Reformer": (37.27, 56.10, 53.40, 38.07, 68.50, 50.67),
        "Sparse Transformer": (17.07, 63.58, 59.59, 44.24, 71.71, 51.24),
        "Sinkhorn": (33.67, 61.20, 53.83, 41.23, 67.45, 51.29),
        "Linformer": (35.70, 53.94, 52.27, 38.56, 76.34, 51.36),
        "Performer": (18.01, 65.40, 53.82, 42.77, 77.05, 51.41),
        "Synthesizer": (36.99, 61.68, 54.67, 41.61, 69.45, 52.88),
        "Longformer": (35.63, 62.85, 56.89, 42.22, 69.71, 53.46),
        "Transformer": (36.37, 64.27, 57.46, 42.44, 71.40, 54.39),
        "BigBird": (36.05, 64.02, 59.29, 40.83, 74.87, 55.01),
        "cosFormer": (37.90, 63.41, 61.36, 43.17, 70.33, 55.23),
    },
    "ListOps figures of 16 to 18 come from a version of the benchmark whose brackets were lost.",
)
SPEED = PaperTable(
    5,
    "Speed, steps per second",
    "byte classification, not causal, one A6000; blank: out of memory",
    tuple(f"{work}, {n}K" for work in ("inference", "training") for n in (1, 2, 3, 4)),
    {
        "Transformer": (25.37, 7.83, None, None, 6.95, 2.23, None, None),
        "local attention": (57.73, 33.19, 23.36, 17.79, 13.45, 6.71, 4.32, 3.09),
        "Linformer": (70.09, 39.10, 27.05, 20.62, 14.75, 7.09, 4.52, 3.21),
        "Reformer": (44.21, 21.58, 12.74, 8.37, 11.58, 4.98, 2.94, 1.95),
        "Sinkhorn": (43.29, 23.58, 16.53, 12.70, 11.09, 5.57, 3.68, 2.68),
        "Synthesizer": (20.89, 6.24, None, None, 6.36, 2.01, None, None),
        "BigBird": (20.96, 11.50, 8.12, 6.15, 6.46, 3.20, 2.13, 1.53),
        "Linear Transformer": (67.85, 38.24, 26.28, 19.98, 11.86, 5.54, 3.53, 2.56),
        "Performer": (74.15, 42.31, 29.50, 22.44, 14.00, 6.49, 4.10, 2.94),
        "Longformer": (22.99, 6.72, None, None, 4.40, 1.30, None, None),
        "Sparse Transformer": (24.87, 7.50, None, None, 6.77, 2.20, None, None),
        "cosFormer": (58.82, 33.45, 22.77, 17.42, 12.27, 5.72, 3.62, 2.64),
    },
    "The paper reports no causal speed.",
)
STUDY = PaperTable(
    1,
    "What softmax does: the similarity alone",
    "RoBERTa architecture, WikiText-103, validation loss, then fine-tuned, accuracy in %",
    ("loss", "QQP", "SST-2", "MNLI"),
    {
        "identity": (2.343, 84.23, 76.26, 58.27),
        "LeakyReLU": (2.246, 84.46, 78.21, 74.26),
        "ReLU": (1.993, 88.86, 89.90, 77.86),
        "Transformer": (1.915, 88.41, 92.31, 79.15),
    },
)
ABLATION = PaperTable(
    6,
    "The cosine re-weighting",
    "averages of tables 3 and 4, accuracy in %",
    ("fine-tuning", "Long-Range Arena"),
    {"ReLU": (85.12, 54.20), "cosFormer": (85.25, 55.23)},
)
UNCONFIRMED = {STUDY.number, ABLATION.number}

# Our mixers under the paper's names. softmax + RoPE stands for the Transformer where plain softmax was not run.
NAMES = {
    "softmax": "Transformer",
    "cosformer-paper": "cosFormer",
    "relu": "ReLU",
    "leaky_relu": "LeakyReLU",
    "identity": "identity",
    "elu": "Linear Transformer",
    "performer": "Performer",
    "rfa": "RFA",
    "linformer": "Linformer",
    "reformer": "Reformer",
    "bigbird": "BigBird",
    "sparse": "Sparse Transformer",
    "local": "local attention",
}
# Our tasks under the paper's names; a fine-tuning task is known by its title.
COLUMNS = {
    "listops": "ListOps",
    "text": "Text",
    "retrieval": "Retrieval",
    "image": "Image",
    "pathfinder": "Pathfinder",
}


def shown(table: PaperTable, column: str, value: float) -> str:
    """A figure with the digits the paper gives it."""
    return f"{value:.{1 if table is LM else 3 if column == 'loss' else 2}f}"


def figure(table: PaperTable, mixer: str, column: str, mixers: list[str]) -> float | None:
    """The paper's figure for one of our mixers, or None."""
    name = NAMES.get(mixer) or ("Transformer" if mixer == "softmax+rope" and "softmax" not in mixers else "")
    row = table.rows.get(name)
    return row[table.columns.index(column)] if row and column in table.columns else None
