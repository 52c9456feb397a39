"""The Trainer under FSDP2: on CPUs, too, and with one process's checkpoints, so that any number can go on."""

from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict as dcp
from transformers import Seq2SeqTrainer

WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"  # as transformers names them


class Sharded(Seq2SeqTrainer):
    """Without FSDP this is transformers' own. Its FSDP checkpoints cannot be read by a single process, so
    saving and loading here use the format of a single process."""

    def create_accelerator_and_postprocess(self) -> None:
        """Without a GPU accelerate leaves out the FSDP plugin, and would silently replicate."""
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and self.accelerator.distributed_type == DistributedType.MULTI_CPU:
            for shared in (AcceleratorState._shared_state, PartialState._shared_state):
                shared["distributed_type"] = DistributedType.FSDP
            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            AcceleratorState._shared_state["fsdp_plugin"] = plugin
            self.is_fsdp_enabled = True

    def _prepare_for_training(self, *args: Any):
        """accelerate shards the embeddings as a group of their own, but torch wants tied parameters in one
        group. Where more is tied than the two embeddings (the bias of BERT's head), all stay in one."""
        model, names = self.model, ("get_input_embeddings", "get_output_embeddings")
        if not self.is_fsdp_enabled or len(model._tied_weights_keys or ()) < 2:
            return super()._prepare_for_training(*args)
        for name in names:
            setattr(model, name, lambda: None)
        try:
            return super()._prepare_for_training(*args)
        finally:
            for name in names:
                delattr(model, name)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
            return
        weights = dcp.get_model_state_dict(self.model, options=WHOLE)  # collective; rank 0 gets them
        if self.args.should_save:
            tied = self.model.all_tied_weights_keys  # saved once, as a single process does
            kept = {name: tensor for name, tensor in weights.items() if name not in tied}
            self._save(output_dir, state_dict=kept)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        named: dict[str, Any] = dcp.get_optimizer_state_dict(self.model, self.optimizer, options=WHOLE)
        if self.args.should_save:
            names = [name for group in named["param_groups"] for name in group["params"]]
            numbered = renamed(named, {name: number for number, name in enumerate(names)})
            torch.save(numbered, Path(output_dir) / OPTIMIZER)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        weights = load_file(Path(resume_from_checkpoint) / "model.safetensors")
        options = dcp.StateDictOptions(full_state_dict=True, strict=False)  # tied weights are saved once
        dcp.set_model_state_dict(model or self.model, weights, options=options)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint, self.model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.is_fsdp_enabled:
            if self.args.device.type == "cpu":  # older transformers load to cpu:0, which torch refuses
                self.args.__dict__["_setup_devices"] = torch.device("cpu")  # what `device` has cached
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        numbered = torch.load(Path(checkpoint) / OPTIMIZER, map_location="cpu", weights_only=True)
        name = {id(parameter): name for name, parameter in self.model.named_parameters()}
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        named = renamed(numbered, {i: name[id(parameter)] for i, parameter in enumerate(parameters)})
        options = dcp.StateDictOptions(full_state_dict=True)
        dcp.set_optimizer_state_dict(self.model, self.optimizer, named, options=options)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))


def renamed(optimizer: dict[str, Any], name: dict[Any, Any]) -> dict[str, Any]:
    """An optimizer's state with its parameters renamed: to numbers, as torch saves them, or to names."""
    groups = [{**group, "params": [name[p] for p in group["params"]]} for group in optimizer["param_groups"]]
    return {"state": {name[p]: state for p, state in optimizer["state"].items()}, "param_groups": groups}
