"""Callbacks that act on modules: ``ModuleSaverCallback``, ``UnfreezeCallback`` and ``ValueSetterCallback``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cadenza.compat.neural.action import ActionCallback
from cadenza.compat.neural.arguments import frequency
from cadenza.compat.neural.logs import logging
from cadenza.compat.neural.tensors import NeuralModule


class ModuleSaverCallback(ActionCallback):
    """Write the weights of modules every `step_freq` steps, and at the end of the training, on the main process.

    The files are ``<Class>_<id>-STEP-<n>.pt``, each with a state dict, which ``module.restore_from`` reads.

    Args:
        save_modules_list: The modules.
        step_freq: The number of steps between two saves; -1 saves only at the end.
        folder: The folder, created if it does not exist; None for the current one.
        checkpoints_to_keep: The number of saves to keep besides that of the end; 0 keeps all.
    """

    def __init__(
        self,
        save_modules_list: Sequence[NeuralModule],
        step_freq: int = 1000,
        folder: str | None = None,
        checkpoints_to_keep: int = 4,
    ) -> None:
        super().__init__()
        if checkpoints_to_keep < 0:
            raise ValueError(f"checkpoints_to_keep must be at least 1, or 0 to keep all; got {checkpoints_to_keep!r}")
        for module in save_modules_list:
            if not isinstance(module, NeuralModule):
                raise TypeError(f"save_modules_list must hold neural modules; got {module!r}")
        self.modules: list[NeuralModule] = list(save_modules_list)
        self.folder: Path = Path(folder or ".")
        self.step_freq: int = frequency("step_freq", step_freq)
        self.checkpoints_to_keep: int = checkpoints_to_keep
        self._saved: list[list[Path]] = []

    def on_action_start(self) -> None:
        self._saved = []

    def on_iteration_end(self) -> None:
        if self.step_freq > 0 and self.step > 0 and self.step % self.step_freq == 0 and self.global_rank in (None, 0):
            self._saved.append(self._save())
            if self.checkpoints_to_keep:
                old, self._saved = self._saved[: -self.checkpoints_to_keep], self._saved[-self.checkpoints_to_keep :]
                for file in (file for files in old for file in files):
                    file.unlink(missing_ok=True)

    def on_action_end(self) -> None:
        if self.global_rank in (None, 0):
            self._save()

    def _save(self) -> list[Path]:
        self.folder.mkdir(parents=True, exist_ok=True)
        files = [self.folder / f"{module}_{module.unique_instance_id}-STEP-{self.step}.pt" for module in self.modules]
        for module, file in zip(self.modules, files, strict=True):
            module.save_to(str(file))
            logging.info("Saved module %s in %s", module, file)
        return files


class UnfreezeCallback(ActionCallback):
    """Unfreeze modules when an epoch starts. A training that resumes in a later epoch unfreezes them at its start.

    Args:
        modules: The modules.
        start_epoch: The index of the epoch, from 0.
    """

    def __init__(self, modules: Sequence[NeuralModule], start_epoch: int = 0) -> None:
        super().__init__()
        self.modules: list[NeuralModule] = list(modules)
        self.start_epoch: int = start_epoch
        self._first = True

    def on_action_start(self) -> None:
        self._first = True

    def on_iteration_start(self) -> None:
        if self.epoch_num == self.start_epoch or (self._first and self.epoch_num > self.start_epoch):
            before = [module.num_weights for module in self.modules]
            for module in self.modules:
                module.unfreeze()
            if before != [module.num_weights for module in self.modules]:
                self.action.run.driver.renew(self.action.run.model)  # several processes exchange these gradients from now on
        self._first = False


class StepPolicy(NamedTuple):
    """The value in some of the steps."""

    method: Callable[[int, int], Any]
    """Called with the index of the step among these steps, and their number."""
    start: float
    """The first step; a float is a fraction of all steps."""
    end: float
    """The step after the last one; a float is a fraction of all steps."""


class _Const:
    """A constant value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, step: int, total_steps: int) -> Any:
        return self.value


class _Linear:
    """A line from a at the first step to b at the last one."""

    def __init__(self, a: float, b: float) -> None:
        self.a: float = a
        self.b: float = b

    def __call__(self, step: int, total_steps: int) -> float:
        return self.a + step / max(total_steps - 1, 1) * (self.b - self.a)


class Method:
    """The methods of policies. Any function of the step and the number of steps is one, too."""

    Const: type[_Const] = _Const
    Linear: type[_Linear] = _Linear


class ValueSetterCallback(ActionCallback):
    """Set an attribute of a module before each step, such as the probability of a dropout.

    Args:
        module: The module, or any other object.
        arg_name: The name of the attribute.
        policies: Its value for each range of steps, without gaps; None keeps its value. It is constant after the last step.
        total_steps: The number of steps of the training.
        tb_writer: A SummaryWriter, which gets the scalar ``param/<Class>.<arg_name>`` for each step.

    Raises:
        ValueError: The policies do not cover all steps.
    """

    Policy: type[StepPolicy] = StepPolicy
    Method: type[Method] = Method

    def __init__(
        self,
        module: Any,
        arg_name: str,
        policies: Sequence[StepPolicy] | None = None,
        total_steps: int | None = None,
        tb_writer: Any = None,
    ) -> None:
        super().__init__()
        if total_steps is None or total_steps < 1:
            raise ValueError(f"total_steps must be the number of steps of the training; got {total_steps!r}")
        value = getattr(module, arg_name)  # an error now if there is none
        self.policies: list[StepPolicy] = [
            _whole(policy, total_steps) for policy in policies or [StepPolicy(_Const(value), 0.0, 1.0)]
        ]
        starts = [policy.start for policy in self.policies]
        if starts != [0, *(policy.end for policy in self.policies[:-1])] or self.policies[-1].end != total_steps:
            covered = ", ".join(f"{policy.start} to {policy.end}" for policy in self.policies)
            raise ValueError(f"the policies must cover the steps 0 to {total_steps} without gaps; they cover {covered}")
        self.module: Any = module
        self.arg_name: str = arg_name
        self.total_steps: int = total_steps
        self.tb_writer: Any = tb_writer

    def on_iteration_start(self) -> None:
        policy = next((policy for policy in self.policies if self.step < policy.end), None)
        if policy is None:
            return
        value = policy.method(self.step - int(policy.start), int(policy.end - policy.start))
        setattr(self.module, self.arg_name, value)
        if self.tb_writer is not None:
            self.tb_writer.add_scalar(f"param/{type(self.module).__name__}.{self.arg_name}", value, self.step)


def _whole(policy: StepPolicy, total_steps: int) -> StepPolicy:
    """Return a policy with whole steps instead of fractions."""
    start, end = (int(at * total_steps) if isinstance(at, float) else at for at in (policy.start, policy.end))
    return StepPolicy(policy.method, start, end)
