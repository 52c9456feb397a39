"""A run carried out: its folder checked, its parts built, trained or trained on, scored and saved."""

import dataclasses
import json
import platform
import time
from contextlib import nullcontext
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel, TrainerCallback

from .. import tasks
from ..seal import damage, files, is_sealed, seal, unseal, write
from . import models
from .alive import Lost, signalled, watched
from .build import build_model, build_task, build_trainer, final_examples, refused, scores
from .checkpoints import newest_whole, put_aside
from .progress import Bar, Interrupt, Metrics, said_if_long, say
from .settings import DEFAULTS, Run, SettingsError
from .trainer import UNWRITABLE, Interrupted, Stopped, Trainer

PACKAGES = ("cosformer", "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors")
# How batches are spread over processes; may change when a run is resumed.
SPREAD = ("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size", "fsdp",
          "fsdp_config", "sequence_parallel", "ddp_timeout")  # fmt: skip
LENGTH = ("max_steps", "num_train_epochs")  # may grow when a run is resumed


def train(run: Run, *, resume: bool = False, watch: TrainerCallback | None = None) -> dict[str, Any]:
    """Carry out a run and return its result; a finished one is not repeated, unless for more steps.

    `resume` continues from the newest whole checkpoint in `run.out`, or begins if there is none. `watch` is
    shown the progress in place of a bar. Raises `SettingsError` if a setting is invalid and `Stopped`, or its
    subclass `Interrupted`, if training cannot go on.
    """
    out = Path(run.out)
    longer = check_folder(run, resume=resume)
    if not longer and (result := finished(out)) is not None:
        return result
    patience = timedelta(seconds=run.training.get("ddp_timeout", 1800))
    processes = PartialState(cpu=not torch.cuda.is_available(), timeout=patience)
    told = f"preparing {run.task_settings.get('data', 'the data')}: the first time takes longest"
    said = said_if_long(told) if watch is None else nullcontext()  # who watches says it in its own way
    with processes.main_process_first(), said:  # it prepares the data for the others
        task = build_task(run)
    new = processes.is_main_process and not (out / "run.json").exists()
    if new or (longer and processes.is_main_process):
        with refused(OSError, "out"):
            out.mkdir(parents=True, exist_ok=True)
            unseal(out)  # it is no longer finished
            run.save(out / "run.json")
    try:
        start = run.start if run.pretrain is None else pretrain(run, task, watch=watch)
        return stage(run, task, start=start, watch=watch)
    except SettingsError:
        if new and not is_sealed(out / "pretrain"):  # it never became a run: free the folder
            for name in ("run.json", "resolved.json", "metrics.jsonl"):
                (out / name).unlink(missing_ok=True)
        raise


def check_folder(run: Run, *, resume: bool) -> bool:
    """Refuse a folder that holds another run, or this one unless resumed; returns whether it gets longer."""
    out = Path(run.out)
    if not (out / "run.json").exists():
        if any(out.glob("checkpoint-*")):
            told = f"{out} holds checkpoints of something else (there is no run.json)"
            raise SettingsError(f"{told}; choose another --out")
        return False
    if not resume:
        raise SettingsError(f"{out} already holds a run; go on with --resume, or choose another --out")
    saved, given, longer = comparable(Run.load(out / "run.json")), comparable(run), False
    for key in LENGTH:
        if 0 < saved.get(key, 0) < given.get(key, 0):
            longer, saved[key] = True, given[key]
    for name in saved | given:
        if saved.get(name) != given.get(name):
            told = f"{out} holds another run: its {name} is {saved.get(name)!r}, not {given.get(name)!r}"
            way = f"a larger --max_steps, or --start {out} and another --out"
            raise SettingsError(f"{told}; to train it further: {way}")
    return longer


def comparable(run: Run) -> dict[str, Any]:
    """The settings that must not change when a run is resumed, tables flattened."""
    found = {"max_steps": DEFAULTS["max_steps"]}
    for name, value in run.plain().items():
        found |= value if isinstance(value, dict) and name != "pretrain" else {name: value}
    return {name: value for name, value in found.items() if name not in (*SPREAD, "out")}


def finished(out: Path) -> dict[str, Any] | None:
    """The result of a finished run; None if it is unfinished, or damaged since: then it is made again."""
    if not is_sealed(out):
        return None
    if (fault := damage(out)) is not None:
        say(f"{out} was finished, but {fault}: the model is made again from the run's checkpoints")
        return None
    return json.loads((out / "result.json").read_text())


def pretrain(run: Run, task: tasks.Task, *, watch: TrainerCallback | None) -> str:
    """Masked pre-training on the task's own inputs; returns the model's folder."""
    out = Path(run.out) / "pretrain"
    training, about = run.training | (run.pretrain or {}), f"pre-training of: {run.about}"
    first = dataclasses.replace(run, out=str(out), training=training, pretrain=None, about=about)
    with refused(ValueError, "pretrain"):
        before = tasks.pretraining(task, seed=first.seed)
    if finished(out) is None:
        out.mkdir(parents=True, exist_ok=True)
        stage(first, before, start=run.start, watch=watch)
    else:
        check_data(out, before)
    return str(out)


def stage(run: Run, task: tasks.Task, *, start: str | None, watch: TrainerCallback | None) -> dict[str, Any]:
    """Train from `start`, or from the last checkpoint, to the end; score, save, and return the result."""
    out, began = Path(run.out), time.perf_counter()
    interrupt = Interrupt()
    with signalled(interrupt.ask):
        model = build_model(run, task, start=start)
        metrics = Metrics(out / "metrics.jsonl")
        trainer = build_trainer(run, task, model, [interrupt, metrics])
        check_batch_norm(model, trainer)
        examples = run.test_examples or final_examples(trainer)
        scored = sum(min(examples, len(rows)) for rows in (task.validation, task.test))
        batch = trainer.get_total_train_batch_size(trainer.args)
        trainer.add_callback(watch or Bar(metrics, final_rows=scored, batch=batch))
        first = trainer.is_world_process_zero()
        if first and watch is None:
            print(description(run, task, model), flush=True)
        last = resume_point(out, task, trainer)
        trainer.args.eval_on_start &= last is None  # a resumed run is past its start
        try:
            if first:
                facts = resolved(run, task, trainer) | {"resumed_from": last and last.name}
                write(out / "resolved.json", json.dumps(facts, indent=1, default=str) + "\n")
            with watched():
                try:
                    trainer.train(resume_from_checkpoint=last and str(last))
                except (ValueError, TypeError, ImportError) as error:  # a refusal comes in the first step
                    if trainer.state.global_step or isinstance(error, (SettingsError, tasks.DataError)):
                        raise
                    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
                    raise SettingsError(kind + " ".join(str(error).split())) from error
                if interrupt.asked is not None and trainer.state.global_step < trainer.state.max_steps:
                    at = f"interrupted by {interrupt.asked} at step {trainer.state.global_step}"
                    raise Interrupted(f"{at}; {trainer.what_is_left()}")
                before = files(out) if first else {}
                trainer.save_model(str(out))
                result = result_of(run, task, trainer, examples=examples)
            result["seconds"] = round(metrics.seconds + time.perf_counter() - began, 1)
            if first:
                write(out / "result.json", json.dumps(result, indent=1) + "\n")
                seal(out, [name for name, written in files(out).items() if before.get(name) != written])
            if interrupt.asked is not None:  # while scoring: what would come next must not begin
                told = f"interrupted by {interrupt.asked} after the last step"
                raise Interrupted(f"{told}; the run in {out} is complete")
        except (Lost, *UNWRITABLE) as error:
            if isinstance(error, Lost) and error.first:  # a process may have died while writing one
                put_aside({path: why for path, why in newest_whole(out)[1].items() if not is_sealed(path)})
            raise Stopped(f"{error}; {trainer.what_is_left()}") from error
    return result


def resume_point(out: Path, task: tasks.Task, trainer: Trainer) -> Path | None:
    """The newest whole checkpoint, the same for all processes; newer ones are put aside, a line about each.

    Refuses other batches, other data, and to go on without the best checkpoint if that is damaged.
    """
    answer: list[Any] = [None, None]  # checkpoint and error: the first process tells the others
    if trainer.is_world_process_zero():
        try:
            last, wrong = newest_whole(out)
            if last is not None:
                check_batch(out, trainer)
                check_data(out, task)
            elif whole := [path for path in wrong if is_sealed(path) and damage(path) is None]:
                way = "delete that one to go on without it, or begin again with another --out"
                raise Stopped(f"{whole[0]} is whole, but {wrong[whole[0]]}; {way}")
            for line in put_aside(wrong):
                say(line)
            if wrong:
                say(f"going on from {last}" if last else "no whole checkpoint is left: beginning again")
            answer[0] = last
        except (SettingsError, Stopped) as error:
            answer[1] = error
        except OSError as error:
            answer[1] = Stopped(f"{error}; nothing was changed")
    broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def check_batch_norm(model: PreTrainedModel, trainer: Trainer) -> None:
    normed = getattr(model.config, "pooling", None) == "normed-mean"
    if normed and trainer.args.train_batch_size * trainer.args.world_size == 1:
        told = "model.pooling=normed-mean normalises over a batch"
        raise SettingsError(f"{told}; --per_device_train_batch_size must be 2 or more")


def check_batch(out: Path, trainer: Trainer) -> None:
    """A run may be resumed with another number of processes, but not with another batch size."""
    before, now = saved_fact(out, "batch"), trainer.get_total_train_batch_size(trainer.args)
    if before != now:
        told = f"{out} was trained with {before} examples a step, now it would be {now}"
        factors = "per_device_train_batch_size x gradient_accumulation_steps x "
        raise SettingsError(f"{told}; {factors}{trainer.args.world_size} process(es) must be {before}")


def check_data(out: Path, task: tasks.Task) -> None:
    """Refuse to resume with other data: what that holds out may have been trained on."""
    if saved_fact(out, "data") != task.fingerprint:
        told = f"{out} was trained on other data: what --data names has changed since"
        raise SettingsError(f"{told}. Put it back to go on, or train on the new with another --out")


def saved_fact(out: Path, name: str) -> Any:
    """What resolved.json says about a run to be resumed."""
    try:
        return json.loads((out / "resolved.json").read_text())[name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = f"{out / 'resolved.json'} cannot be read ({type(error).__name__}: {error})"
        way = "so nobody knows which batches and data to go on with; --start and another --out begin anew"
        raise SettingsError(f"{told}, {way}") from None


def resolved(run: Run, task: tasks.Task, trainer: Trainer) -> dict[str, Any]:
    """Everything a run depends on, defaults included, for people to read (and `saved_fact`)."""
    return {
        "run": run.plain(),
        "task": dict(task.settings),
        "data": task.fingerprint,
        "model": trainer.model.config.to_dict(),
        "training": trainer.args.to_dict(),
        "processes": trainer.args.world_size,
        "batch": trainer.get_total_train_batch_size(trainer.args),
        "device": str(trainer.args.device),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "machine": platform.platform(),
    }


def result_of(run: Run, task: tasks.Task, trainer: Trainer, *, examples: int) -> dict[str, Any]:
    return {
        "task": task.name,
        "mixer": run.mixer,
        "metric": task.metric,
        "greater_is_better": task.greater_is_better,
        "validation": scores(trainer, task, "validation", examples=examples),
        "test": scores(trainer, task, "test", examples=examples),
        "examples": min(examples, len(task.test)),
        "of": len(task.test),
        "most_frequent": task.majority,
        "left_out": list(task.left_out),
        "best_step": trainer.state.best_global_step,
        "steps": trainer.state.global_step,
        "tokens": trainer.state.num_input_tokens_seen,
        "parameters": models.parameters(trainer.model),
    }


def description(run: Run, task: tasks.Task, model: PreTrainedModel) -> str:
    """What is about to be trained."""
    sets = ", ".join(f"{len(getattr(task, split)):,} {split}" for split in tasks.SPLITS)
    said = f"{task.name}, {run.mixer}: {models.parameters(model):,} parameters; "
    said += f"{sets} examples of up to {task.max_length:,} tokens, in batches of {run.batch(task)}"
    return "\n".join([said, *task.left_out, *task.notes])
